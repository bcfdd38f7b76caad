"""Tasks and handlers that do the same, and a record of the signals that they send."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from celery import shared_task, signals
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from celery.worker.request import Request

from django_amqp_events import handler

from . import ledger

SIGNALS = (
    "task_received", "task_prerun", "task_success", "task_retry", "task_failure", "task_revoked",
    "task_postrun", "task_internal_error",
)  # fmt: skip
#: Options of both, by the name that follows "plain." or "event.".
OPTIONS: dict[str, dict[str, Any]] = {
    "base": {"max_retries": 0},
    "retried": {"max_retries": 1},
    "limited": {"max_retries": 0, "soft_time_limit": 1, "time_limit": 3},
}


def act(task: Any, step: str, case: str) -> dict[str, Any]:
    """Do one thing that a task may do; *case* is the message's own."""
    mark = Path(os.environ["TESTPROJECT_DIR"], case)
    first = not mark.exists()
    mark.touch()
    if step == "fail":
        raise ValueError("no")
    if step == "ignore":
        raise Ignore
    if step == "retry" and first:
        raise task.retry(exc=KeyError("later"), countdown=1)
    if step == "requeue" and first:
        raise Reject("not now", requeue=True)
    if step == "kill" and first:
        os.kill(os.getpid(), signal.SIGKILL)
    while step in ("soft", "terminate", "hold") and not mark.with_suffix(".end").exists():
        time.sleep(0.02)
    while step == "hard":
        with suppress(SoftTimeLimitExceeded):
            time.sleep(0.02)
    return {"did": step}


for name, options in OPTIONS.items():
    handler(f"seen.{name}", name=f"event.{name}", bind=True, ignore_result=False, **options)(act)
    shared_task(
        bind=True, name=f"plain.{name}", acks_late=True, reject_on_worker_lost=True, **options
    )(act)


def _record(name: str) -> None:
    def receive(sender: Any = None, **given: Any) -> None:
        request = given.get("request") or getattr(sender, "request", None)
        kwargs = getattr(request, "kwargs", None) or {}
        if "case" in kwargs:
            values = {key: _described(value) for key, value in given.items() if key != "signal"}
            ledger.write("signal", signal=name, case=kwargs["case"], values=values)

    getattr(signals, name).connect(receive, weak=False)


def _described(value: object) -> str:
    """Return a value that should be the same, or else its type."""
    if isinstance(value, Retry):
        return f"Retry({value.exc!r})"
    if isinstance(value, (str, bool, int, list, tuple, dict, BaseException)):
        return repr(value)
    return "Request" if isinstance(value, Request) else type(value).__name__


for each in SIGNALS:
    _record(each)
