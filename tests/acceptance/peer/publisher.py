"""Publishes with celery-amqp-events 0.1.0.

A program of its own: in one that has handlers too, its publish declares the shared exchange as
direct, which RabbitMQ refuses (with Celery 5.7).
"""

import os
import sys

from amqp_events.celery import events_app  # type: ignore[import-not-found]

app = events_app("peer", broker_url=os.environ["PEER_BROKER"])


@app.event("peer.number.seen")
def number_seen(number: int) -> None: ...


if __name__ == "__main__":
    print(number_seen(int(sys.argv[1])))
    print(number_seen(number=int(sys.argv[2])))
