"""A service written with celery-amqp-events 0.1.0, as its own documentation shows it."""

import json
import os
import time

from amqp_events.celery import events_app  # type: ignore[import-not-found]

app = events_app("peer", broker_url=os.environ["PEER_BROKER"], worker_enable_remote_control=False)


@app.handler("mixed.chained")
def chained(number: int) -> None:
    """Handle an event of ours."""
    write("chained", number)


@app.handler("mixed.one", bind=True)
def one(self, plan: list[str]) -> None:
    """Fail once, so that its retry can be watched."""
    write("one", self.request.retries)
    if self.request.retries == 0:
        raise ValueError("no")


def write(*what: object) -> None:
    line = (json.dumps([time.time(), *what]) + "\n").encode()
    out = os.open(os.environ["PEER_LEDGER"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(out, line)
    os.close(out)
