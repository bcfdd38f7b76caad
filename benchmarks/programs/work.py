"""The work of handlers and tasks, the same for all participants.

Imports only the standard library at first, since the peers' virtual environment imports it too.
"""

from __future__ import annotations

import os
import struct
import time
from typing import Any

from .given import GIVEN
from .tally import Tally

WORK: str = GIVEN.get("work", "nothing")
TALLY = Tally(GIVEN.get("tally", os.devnull))
#: Seconds until a retry.
COUNTDOWN: int = GIVEN.get("countdown", 1)
#: How long a handler of each number takes, in seconds.
SECONDS: list[float] = GIVEN.get("seconds", [])
hit = TALLY.hit
_times: list[int] = []


class Fails(Exception):
    """The exception of a failing handler."""


def nothing() -> None:
    """Count the call."""
    hit()


def row(order_id: int, note: str) -> None:
    """Write one row with Django's ORM."""
    from .store.models import Order

    Order(number=order_id, note=note).save(force_insert=True)
    hit()


def since(sent: float) -> None:
    """Note the seconds since the event was published; both processes share the clock."""
    _note("@d", time.monotonic() - sent)
    hit()


def _note(format_: str, *values: float) -> None:
    if not _times:
        _times.append(os.open(GIVEN["times"], os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    os.write(_times[0], struct.pack(format_, *values))


def lasting(number: int) -> None:
    """Take as long as handlers of this number do, and note when it began."""
    began = time.monotonic()
    time.sleep(SECONDS[number])
    _note("@qdd", number, began, time.monotonic())
    hit()


def fail_once(task: Any, attempt: int) -> None:
    """Fail and ask for a retry, the first time."""
    hit()
    if attempt == 1:
        try:
            raise Fails("the first attempt fails")
        except Fails as exc:
            # It always raises.
            task.retry(exc=exc, countdown=COUNTDOWN)
