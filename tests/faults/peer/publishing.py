"""Publish events with celery-amqp-events as testproject's ``publishing`` does with ours.

An event's id is in its payload: the package makes up its own when it has published. What a call
refused is published again. A program of its own: see tests/acceptance/peer/publisher.py.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any
from uuid import UUID

from amqp_events.celery import events_app  # type: ignore[import-not-found]
from points import WHERE, write  # type: ignore[import-not-found]

app = events_app("shop", broker_url=os.environ["TESTPROJECT_BROKER"])


@app.event("faults.happened")
def happened(event: str, plan: str, work: float) -> None: ...


def main(
    *, count: int, seed: str, pause: float = 0.0, passing: float = 0.1, lasting: float = 0.05,
    work: float = 0.0, patience: float = 120.0, hold: bool = False, **_: Any,
) -> None:  # fmt: skip
    """Publish *count* events; shares of them fail once, or for good.

    Args:
        hold: declare what an app of the package does, and wait for a file ``go``.
    """
    if hold:
        app.finalize(auto=True)
        (WHERE / "holding").touch()
        while not (WHERE / "go").exists():
            time.sleep(0.05)
    chance = random.Random(seed)
    for _number in range(count):
        drawn = chance.random()
        plan = "passing" if drawn < passing else "lasting" if drawn < passing + lasting else "fine"
        event_id = str(UUID(int=chance.getrandbits(128), version=4))
        write("intent", events=[event_id])
        deadline = time.monotonic() + patience
        while True:
            try:
                happened(event=event_id, plan=plan, work=work)
            except Exception as exc:
                # It does not say what a publish may raise.
                write("refused", events=[event_id], why=str(exc))
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
            else:
                break
        write("accepted", events=[event_id])
        time.sleep(pause)
    write("published everything")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
