"""A service of celery-amqp-events 0.1.0 whose handlers move away one by one.

``PEER_HANDLERS`` names those that it still has. An event's plan says how many attempts fail.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from amqp_events.celery import events_app  # type: ignore[import-not-found]

POLICY = {"max_retries": 2, "retry_backoff": 1, "retry_backoff_max": 1, "retry_jitter": False}
NAMES = os.environ["PEER_HANDLERS"].split()

app = events_app(
    "billing",
    broker_url=os.environ["PEER_BROKER"],
    task_annotations=dict.fromkeys(NAMES, POLICY),
    worker_enable_remote_control=False,
)


def write(what: str, **more: Any) -> None:
    """Add a line as testproject's ledger does."""
    line = json.dumps({"at": time.time(), "what": what, "by": "0.1.0", **more}) + "\n"
    path = f"{os.environ['PEER_DIR']}/ledger.{os.getpid()}.jsonl"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(file, line.encode())
    os.fsync(file)
    os.close(file)


def handle(self: Any, failures: int) -> None:
    write("start", event=self.request.id, name=self.name)
    time.sleep(0.01)
    if self.request.retries < failures:
        raise ValueError("not yet")
    write("end", event=self.request.id, name=self.name)


for _name in NAMES:
    app.handler(_name, bind=True)(handle)
