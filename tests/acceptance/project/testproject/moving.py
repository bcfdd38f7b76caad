"""Handlers that have moved here from another package; ``TESTPROJECT_MOVED`` names their events."""

from __future__ import annotations

import os
import time
from typing import Any

from django_amqp_events import event, handler

from . import ledger

#: Of these, the handler has `once`.
ONCE = ("moving.created", "moving.shipped")


def perform(self: Any, failures: int) -> None:
    """Fail in the first attempt, unless it is one of those that the old service gave up."""
    ledger.write("start", handler=self.name)
    time.sleep(0.01)
    if failures == 1 and self.event.attempt == 1:
        raise ValueError("not yet")
    ledger.write("end", handler=self.name)


for _event in os.environ.get("TESTPROJECT_MOVED", "").split():
    _name = f"testproject.{_event.removeprefix('moving.')}"
    _options: Any = {"name": _name, "bind": True, "retry_backoff": 1, "once": _event in ONCE}
    handler(_event, **_options)(perform)


@event("moving.created")
def created(failures: int) -> None: ...
