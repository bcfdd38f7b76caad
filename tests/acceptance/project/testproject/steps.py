"""Steps of a handler: an event's payload has a plan with one step per attempt."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

from django_amqp_events import current_event

from . import ledger

WHERE = Path(os.environ["TESTPROJECT_DIR"])


class Unspeakable(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text for you")


class Unpicklable(Exception):
    """Cannot travel between processes."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")
        self.hook = lambda: one


@dataclass(frozen=True)
class OutOfStock(Exception):
    """Nothing can be set on it, a traceback neither."""

    sku: str = "S-1"


class LookedUp(Exception):
    """Its attributes are looked up somewhere."""

    def __getattr__(self, name: str) -> object:
        raise KeyError(name)


class Never(Exception):
    """In `dont_autoretry_for` of some handlers."""


def perform(task: Any, plan: list[str], **more: Any) -> str:
    """Do this attempt's step: the last one is for all attempts after it."""
    event = current_event()
    assert event is not None
    redelivered = task.request.delivery_info.get("redelivered") if task is not None else None
    handler = task.name if task is not None else more.pop("handler", None)
    ledger.write("start", handler=handler, redelivered=redelivered, **more)
    step = plan[min(event.attempt, len(plan)) - 1]
    word, _, argument = step.partition(":")
    STEPS[word](task, argument)
    ledger.write("end", handler=handler, redelivered=redelivered, **more)
    return f"did {step}"


def wait_for_file(name: str, seconds: float = 60) -> None:
    """Hold the handler until the test makes a file of that name."""
    deadline = time.monotonic() + seconds
    while not (WHERE / name).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody made {name}")
        time.sleep(0.02)


def _fail(task: Any, argument: str) -> None:
    raise ValueError(argument or "no")


def _deep(task: Any, argument: str, depth: int = 40) -> None:
    """Raise an error with a long text and a long traceback."""
    if not depth:
        raise RuntimeError("x" * 3_000)
    _deep(task, argument, depth - 1)


def _raiser(exc: Any) -> Any:
    def run(task: Any, argument: str) -> None:
        raise exc() if callable(exc) else exc

    return run


def _eta(task: Any, argument: str) -> None:
    task.retry(eta=datetime.now(UTC) + timedelta(seconds=float(argument)))


def _retry_exc(task: Any, argument: str) -> None:
    try:
        raise KeyError("the cause")
    except KeyError as exc:
        task.retry(exc=exc, countdown=1)


def _retry_new_exc(task: Any, argument: str) -> None:
    task.retry(exc=KeyError("never raised"), countdown=1)


def _deaf(task: Any, argument: str) -> None:
    """Take no notice of the soft limit, so that the hard one has to come."""
    until = time.monotonic() + float(argument)
    while time.monotonic() < until:
        with suppress(SoftTimeLimitExceeded):
            time.sleep(0.05)


def _unless(task: Any, argument: str) -> None:
    """Fail until the test has "released a fix"."""
    if not (WHERE / argument).exists():
        raise ValueError(f"{argument} is not there")


def _segfault(task: Any, argument: str) -> None:
    faulthandler.disable()
    ctypes.string_at(0)


def _kill_crowd(task: Any, argument: str) -> None:
    """Kill the worker and its pool, as when its machine fails; or only this process."""
    if "events_reaper" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _once(word: str) -> Any:
    """Do the step of this word at the first run with an argument, and nothing later."""

    def run(task: Any, argument: str) -> None:
        mark = WHERE / f"{word}-{argument}"
        if not mark.exists():
            mark.touch()
            STEPS[word](task, "")

    return run


STEPS: dict[str, Any] = {
    "ok": lambda task, argument: None,
    "fail": _fail,
    "deep": _deep,
    "big": _raiser(lambda: ValueError("x" * 1_000_000)),
    "unspeakable": _raiser(Unspeakable),
    "frozen_dataclass": _raiser(OutOfStock),
    "looked_up": _raiser(LookedUp),
    "unpicklable": _raiser(lambda: Unpicklable("one", "two")),
    "never": _raiser(lambda: Never("never again")),
    "memory": _raiser(lambda: MemoryError("no more")),
    "interrupt": _raiser(KeyboardInterrupt),
    "sysexit": lambda task, argument: sys.exit(int(argument or 3)),
    "ignore": _raiser(Ignore),
    "reject": _raiser(lambda: Reject(ValueError("rejected"), requeue=False)),
    "requeue_once": _once("requeue"),
    "requeue": _raiser(lambda: Reject("not ever", requeue=True)),
    "countdown": lambda task, argument: task.retry(countdown=float(argument)),
    "eta": _eta,
    "retry_exc": _retry_exc,
    "retry_new_exc": _retry_new_exc,
    "retry_limit": lambda task, argument: task.retry(max_retries=int(argument), countdown=1),
    "retry_args": lambda task, argument: task.retry(args=(1,)),
    "replace": lambda task, argument: task.replace(None),
    "chord": lambda task, argument: task.add_to_chord(None),
    "sleep": lambda task, argument: time.sleep(float(argument)),
    "frozen": lambda task, argument: ledger.write("frozen", objects=gc.get_freeze_count()),
    "deaf": _deaf,
    "file": lambda task, argument: wait_for_file(argument),
    "unless": _unless,
    "kill": lambda task, argument: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda task, argument: os._exit(3),
    "segfault": _segfault,
    "kill_crowd": _kill_crowd,
    "kill_once": _once("kill"),
    "exit_once": _once("exit"),
}
