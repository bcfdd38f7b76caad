"""Publishes events with celery-amqp-events 0.1.0, one after the other, until it is stopped.

A program of its own: see publisher.py.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from itertools import count, cycle
from pathlib import Path
from typing import Any

from amqp_events.celery import events_app  # type: ignore[import-not-found]

app = events_app("shop", broker_url=os.environ["PEER_BROKER"])
#: Failed attempts of an event, in turn; 9 is more than the old service tries.
FAILURES = (0, 0, 1, 0, 0, 0, 0, 9, 0, 0)


def main(names: list[str]) -> None:
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))

    def declare(name: str) -> Any:
        @app.event(name)
        def event(failures: int) -> None: ...

        return event

    events = cycle([(name, declare(name)) for name in names])
    with Path(os.environ["PEER_DIR"], "accepted.jsonl").open("a") as accepted:
        for number in count():
            if stopped:
                break
            name, event = next(events)
            id_ = event(failures=FAILURES[number // len(names) % len(FAILURES)])
            accepted.write(json.dumps([time.time(), name, id_]) + "\n")
            accepted.flush()
            time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1:])
