"""Decide what is done with a delivery whose handler raised an exception. Pure.

It depends on policy, attempt, exception and time. ``reading.py`` decides what cannot be handled,
and ``reaper.py`` what is poison.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import TracebackType
from typing import Final, Literal

from billiard.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded
from celery.exceptions import Ignore, Reject, Retry
from kombu.utils.encoding import safe_repr

from ..declare.retry_policy import RetryPolicy
from ..exceptions import ControlFlow
from ..message.archive_message import MAX_TRACEBACK
from ..message.text import cut_middle
from ..message.types import Failure

MAX_FRAMES: Final = 30
MAX_MESSAGE: Final = 4_000

Kind = Literal["handled", "retry", "archive", "requeue", "postpone"]


class Superseded(Ignore):
    """The handler was not called, since it has handled a newer event of the same thing."""


class InvalidArguments(ControlFlow):
    """The payload cannot be bound to the handler; a retry would fail again."""

    reason = "arguments"


class ContractViolated(InvalidArguments):
    """The payload violates the handler's type hints, or cannot be upcast."""

    reason = "contract"


class Unsupported(ControlFlow):
    """The handler used a feature of Celery's that events do not have."""

    reason = "unsupported"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is done with a delivery; plain data, which a pool process can always return.

    Attributes:
        kind: ``handled`` and ``requeue`` settle the delivery at once; ``retry``, ``archive`` and
            ``postpone`` (it came before it is due) publish a message first.
        due_at: when the next attempt is due (``retry``).
        reason, detail: a word and a sentence for the archive (``archive``); ``superseded`` if the
            handler was not called (``handled``).
        result, runtime: the result as text and the seconds of the run, for Celery's task events
            (``handled``); ``None`` if these are not sent, and after ``Ignore``.
    """

    kind: Kind
    due_at: datetime | None = None
    reason: str = ""
    detail: str = ""
    failure: Failure | None = None
    result: str | None = None
    runtime: float | None = None


HANDLED: Final = Verdict(kind="handled")
SUPERSEDED: Final = Verdict(kind="handled", reason="superseded")
REQUEUE: Final = Verdict(kind="requeue")
POSTPONE: Final = Verdict(kind="postpone")


def decide(
    exc: BaseException,
    policy: RetryPolicy,
    *,
    attempt: int,
    now: datetime,
    random: float,
) -> Verdict:
    """Return the verdict for a delivery whose handler raised *exc*.

    Args:
        attempt: the attempt that raised; the first is 1.
        now: aware; the retry is due from here.
        random: a number in [0, 1] for jitter.
    """
    if isinstance(exc, Reject) and exc.requeue:
        return REQUEUE
    if isinstance(exc, Superseded):
        return SUPERSEDED
    if isinstance(exc, Ignore):
        return HANDLED
    if isinstance(exc, (InvalidArguments, Unsupported)):
        return Verdict(kind="archive", reason=exc.reason, detail=str(exc), failure=describe(exc))
    cause, limit, delay = exc, None, None
    if isinstance(exc, Reject):
        cause = exc.reason if isinstance(exc.reason, BaseException) else exc
    elif isinstance(exc, Retry):
        cause = exc.__cause__ or exc
        limit = getattr(exc, "max_retries", None)
        if isinstance(exc.when, datetime):
            delay = (exc.when - now).total_seconds()
        elif exc.when is not None:
            delay = float(exc.when)
    elif not (isinstance(exc, (SoftTimeLimitExceeded, TimeLimitExceeded)) or policy.retries(exc)):
        return Verdict(
            kind="archive",
            reason="failed",
            detail=f"{type(exc).__name__} is not retried by this handler's policy",
            failure=describe(exc),
        )
    exhausted = policy.exhausted(attempt, limit)
    # retry(exc=ValueError()) and Reject(ValueError()) carry an exception that was never raised, so
    # its place is where the handler raised the Retry or Reject. A retry's message has no traceback.
    failure = describe(cause, cause.__traceback__ or exc.__traceback__, traced=exhausted)
    if exhausted:
        return Verdict(
            kind="archive",
            reason="exhausted",
            detail=f"attempt {attempt} failed, and it was the last one",
            failure=failure,
        )
    if delay is None:
        delay = policy.delay(attempt, random)
    return Verdict(kind="retry", due_at=now + timedelta(seconds=delay), failure=failure)


def describe(
    exc: BaseException, tb: TracebackType | None = None, *, traced: bool = True
) -> Failure:
    """Describe an exception as text of limited length, whatever its ``__str__`` does.

    Args:
        traced: with its traceback and frames.
    """
    tb = (tb or exc.__traceback__) if traced else None
    cls = type(exc)
    name = cls.__qualname__ if cls.__module__ == "builtins" else (
        f"{cls.__module__}.{cls.__qualname__}"
    )  # fmt: skip
    frames = [
        {
            "file": frame.f_code.co_filename[-300:],
            "line": line,
            "function": frame.f_code.co_name[:200],
            "module": str(frame.f_globals.get("__name__", ""))[:200],
        }
        for frame, line in list(traceback.walk_tb(tb))[-MAX_FRAMES:]
    ]
    text = ""
    try:
        if traced:
            parts = traceback.format_exception(cls, exc, tb, limit=-2 * MAX_FRAMES)
            text = "".join(parts)
    except Exception as error:  # noqa: BLE001 - whatever the user's exception does
        text = f"{name}: no traceback, because formatting it raised {type(error).__name__}"
    return Failure(
        exception=name,
        message=_say(exc)[:MAX_MESSAGE],
        representation=safe_repr(exc)[:MAX_MESSAGE],
        traceback=cut_middle(text, MAX_TRACEBACK),
        frames=tuple(frames),
    )


def _say(exc: BaseException) -> str:
    try:
        return str(exc)
    except Exception as error:  # noqa: BLE001 - whatever the user's exception does
        return f"<no text: str() raised {type(error).__name__}>"
