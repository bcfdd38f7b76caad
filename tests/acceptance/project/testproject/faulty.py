"""The handlers of the fault table: every event has two, one of them with ``once``."""

from __future__ import annotations

import os
import signal
import time
from types import TracebackType
from typing import Any

from django.db import connection
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import DatabaseErrorWrapper

from django_amqp_events import current_event, handler

from . import ledger
from .points import point

TABLE = "CREATE TABLE effects (event varchar(64), attempt integer)"
EVENT = "faults.happened"
#: Seconds between two attempts.
DELAY = int(os.environ.get("TESTPROJECT_DELAY", "1"))
#: Seconds; of ``call`` in a prefork pool.
LIMIT = float(os.environ.get("TESTPROJECT_TIME_LIMIT", "0")) or None
RELEASE = os.environ.get("TESTPROJECT_RELEASE", "")
POLICY: dict[str, Any] = {
    "bind": True, "max_retries": 2, "retry_backoff": DELAY, "retry_backoff_max": DELAY,
    "retry_jitter": False,
    # Where there is a result backend, every run stores something.
    "ignore_result": "TESTPROJECT_RESULTS" not in os.environ,
}  # fmt: skip


class Recorder(DatabaseErrorWrapper):
    """Writes down that the database fails an attempt: before its handler runs, in it or after."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        driver = self.wrapper.Database  # type: ignore[attr-defined]
        failed = isinstance(error, (driver.OperationalError, driver.InterfaceError))
        if failed and current_event() is not None:
            ledger.write("failed", handler="effect")
        super().__exit__(kind, error, traceback)


BaseDatabaseWrapper.wrap_database_errors = property(Recorder)  # type: ignore[assignment]


class Passing(Exception):
    """Fail in the first attempt only."""


class Lasting(Exception):
    """Is not, until a fix is released."""


@handler(EVENT, **POLICY, time_limit=LIMIT)
def call(
    self: Any, number: int, plan: str, work: float = 0.0, padding: str = "", edit: str = ""
) -> None:
    """Whose calls are counted."""
    _run("call", plan, work, edit, content_of(number, plan, work, padding))


def effect(
    self: Any, number: int, plan: str, work: float = 0.0, padding: str = "", edit: str = ""
) -> None:
    """Whose effects in the database are counted."""
    event = current_event()
    assert event is not None
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO effects VALUES (%s, %s)", [event.id, event.attempt])
    _run("effect", plan, work, edit, content_of(number, plan, work, padding))


#: A later release may have no such handler, or call it by another name.
if RELEASE != "removed":
    name = "testproject.outcome" if RELEASE == "renamed" else ""
    handler(EVENT, **POLICY, once=True, name=name)(effect)


def content_of(number: int, plan: str, work: float = 0.0, padding: str = "") -> str:
    """Return a payload in short, for a ledger."""
    return f"{number} {plan} {work} {len(padding)}"


def _run(handler: str, plan: str, work: float, edit: str, content: str) -> None:
    event = current_event()
    assert event is not None
    ledger.write("start", handler=handler, edit=edit, content=content)
    time.sleep(work / 2)
    point("within", event.id)
    time.sleep(work / 2)
    if plan == "passing" and event.attempt == 1:
        ledger.write("raised", handler=handler)
        raise Passing("the first attempt fails")
    hangs = plan == "hanging" and handler == "call"
    if (hangs or plan in ("lasting", "deadly")) and not (ledger.where() / "fixed").exists():
        if hangs and LIMIT:
            time.sleep(2 * LIMIT)  # only a prefork pool ends it earlier
        if plan == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        ledger.write("raised", handler=handler)
        raise Lasting("until the fix is released")
    ledger.write("done", handler=handler)
