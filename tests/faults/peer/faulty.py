"""The service of the fault table, written with celery-amqp-events as its own README shows it.

Its handler does what ``call`` of testproject's ``faulty`` does.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from amqp_events.celery import events_app  # type: ignore[import-not-found]
from celery.signals import after_task_publish, task_postrun, task_prerun
from points import point, write  # type: ignore[import-not-found]

EVENT = "faults.happened"
#: Seconds between two attempts: a power of two, as its delay queues have them.
DELAY = int(os.environ.get("TESTPROJECT_DELAY", "1"))
POLICY = {
    "max_retries": 2, "retry_backoff": DELAY, "retry_backoff_max": DELAY, "retry_jitter": False,
}  # fmt: skip

app = events_app(
    "shop",
    broker_url=os.environ["TESTPROJECT_BROKER"],
    task_annotations={EVENT: POLICY},
    worker_enable_remote_control=False,
    **json.loads(os.environ["TESTPROJECT_CELERY"]),
)


class Passing(Exception):
    """Fail in the first attempt only."""


class Lasting(Exception):
    """Is not."""


#: A later release may have no such handler.
@app.handler(EVENT if os.environ.get("TESTPROJECT_RELEASE") != "removed" else "faults.other",
             bind=True)  # fmt: skip
def call(self: Any, event: str, plan: str, work: float = 0.0) -> None:
    """Whose calls are counted."""
    here = {"event": event, "handler": "call", "attempt": self.request.retries + 1, "replay": None}
    write("start", **here)
    time.sleep(work / 2)
    point("within", event)
    time.sleep(work / 2)
    if plan == "passing" and self.request.retries == 0:
        write("raised", **here)
        raise Passing("the first attempt fails")
    if plan == "lasting":
        write("raised", **here)
        raise Lasting("every attempt fails")
    write("done", **here)


def before(kwargs: Any = None, **_: Any) -> None:
    point("before", kwargs["event"])


def after(kwargs: Any = None, **_: Any) -> None:
    point("after", kwargs["event"])


def published(body: Any = None, exchange: str = "", **_: Any) -> None:
    """A copy for a delay queue or the archive is confirmed."""
    kind = exchange.partition(":")[2].partition(".")[0]
    if kind in ("retry", "archived"):
        point(f"{kind}-confirmed", body[1]["event"])


after_task_publish.connect(published, weak=False)
task_prerun.connect(before, weak=False)
task_postrun.connect(after, weak=False)


def declare() -> None:
    """Declare what a worker declares when it starts."""
    app.finalize(auto=True)
    with app.connection_for_write() as connection:
        for queue in app.conf.task_queues:
            queue(connection.default_channel).declare()


if __name__ == "__main__":
    declare()
