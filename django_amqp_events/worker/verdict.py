"""Decide what is done with a delivery, from policy, attempt, exception and time. Pure."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Final, Literal

from billiard.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded
from celery.exceptions import Ignore, Reject, Retry

from ..declare.retry_policy import RetryPolicy
from ..exceptions import ControlFlow
from ..message.archive_message import MAX_TRACEBACK
from ..message.types import Failure

MAX_FRAMES: Final = 30
MAX_MESSAGE: Final = 4_000
_CUT: Final = "\n… cut by django_amqp_events …\n"

Kind = Literal["handled", "retry", "archive", "requeue"]


class InvalidArguments(ControlFlow):
    """The payload cannot be bound to the handler; a retry would fail again."""


class Unsupported(ControlFlow):
    """The handler used a feature of Celery's that events do not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is done with a delivery.

    Plain data, so that a pool process can return it whatever the handler raised.

    Attributes:
        kind: ``handled`` and ``requeue`` settle it at once; ``retry`` and ``archive``
            publish a copy first.
        due_at: when the next attempt is due (``retry``).
        reason: the archive's reason (``archive``).
        detail: a sentence for a person.
        failure: what was raised.
    """

    kind: Kind
    due_at: datetime | None = None
    reason: str = ""
    detail: str = ""
    failure: Failure | None = None

    def __reduce__(self) -> str | tuple[Any, ...]:
        # The most frequent one is pickled by its name.
        if self is HANDLED:
            return "HANDLED"
        return _verdict, (self.kind, self.due_at, self.reason, self.detail, self.failure)


def _verdict(
    kind: Kind, due_at: datetime | None, reason: str, detail: str, failure: Failure | None
) -> Verdict:
    """Return a verdict with these fields; unpickling calls it."""
    return Verdict(kind=kind, due_at=due_at, reason=reason, detail=detail, failure=failure)


HANDLED: Final = Verdict(kind="handled")
REQUEUE: Final = Verdict(kind="requeue")


def decide(
    exc: BaseException,
    policy: RetryPolicy,
    *,
    attempt: int,
    now: datetime,
    random: float,
    tracebacks: bool = True,
) -> Verdict:
    """Return the verdict for a delivery whose handler raised *exc*.

    Args:
        attempt: the attempt that raised; the first is 1.
        now: aware; the retry is due from here.
        random: a number in [0, 1] for jitter.
        tracebacks: whether the failure of a retry has one. No message carries it, and formatting
            it takes longer than everything else that is done for a retry.
    """
    if isinstance(exc, Reject):
        if exc.requeue:
            return REQUEUE
        cause = exc.reason if isinstance(exc.reason, BaseException) else exc
        delay = policy.delay(attempt, random)
        return _retry_or_archive(
            cause, policy, attempt, delay, now, tracebacks, at=exc.__traceback__
        )
    if isinstance(exc, Ignore):
        return HANDLED
    if isinstance(exc, Retry):
        return _requested(exc, policy, attempt, now, random, tracebacks)
    if isinstance(exc, InvalidArguments):
        return Verdict(kind="archive", reason="arguments", detail=str(exc), failure=describe(exc))
    if isinstance(exc, Unsupported):
        return Verdict(kind="archive", reason="unsupported", detail=str(exc), failure=describe(exc))
    limits = (SoftTimeLimitExceeded, TimeLimitExceeded)
    if isinstance(exc, limits) or policy.retries(exc):
        delay = policy.delay(attempt, random)
        return _retry_or_archive(exc, policy, attempt, delay, now, tracebacks)
    return Verdict(
        kind="archive",
        reason="failed",
        detail=f"{type(exc).__name__} is not retried by this handler's policy",
        failure=describe(exc),
    )


def _requested(
    exc: Retry,
    policy: RetryPolicy,
    attempt: int,
    now: datetime,
    random: float,
    tracebacks: bool,
) -> Verdict:
    """Return the verdict for a handler that called ``self.retry(…)``."""
    cause = exc.__cause__
    if isinstance(exc.when, datetime):
        delay = (exc.when - now).total_seconds()
    elif exc.when is None:
        delay = policy.delay(attempt, random)
    else:
        delay = float(exc.when)
    limit = getattr(exc, "max_retries", None)
    return _retry_or_archive(
        cause or exc, policy, attempt, delay, now, tracebacks, limit, at=exc.__traceback__
    )


def _retry_or_archive(
    exc: BaseException,
    policy: RetryPolicy,
    attempt: int,
    delay: float,
    now: datetime,
    tracebacks: bool,
    max_retries: int | None = None,
    at: TracebackType | None = None,
) -> Verdict:
    # retry(exc=ValueError()) and Reject(ValueError()) carry an exception that was never raised, so
    # its place is where the handler raised the Retry or Reject.
    exhausted = policy.exhausted(attempt, max_retries)
    failure = describe(exc, exc.__traceback__ or at, traced=exhausted or tracebacks)
    if exhausted:
        return Verdict(
            kind="archive",
            reason="exhausted",
            detail=f"attempt {attempt} failed, and it was the last one",
            failure=failure,
        )
    return Verdict(kind="retry", due_at=now + timedelta(seconds=delay), failure=failure)


def describe(
    exc: BaseException, tb: TracebackType | None = None, *, traced: bool = True
) -> Failure:
    """Describe an exception as text of limited length, whatever its ``__str__`` does.

    Args:
        traced: whether to include the traceback.
    """
    tb = tb or exc.__traceback__
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
        traceback=_ends(text, MAX_TRACEBACK),
        frames=tuple(frames),
    )


def _ends(text: str, limit: int) -> str:
    """Cut out the middle, so that a long message does not displace the frames before it."""
    if len(text) <= limit:
        return text
    half = (limit - len(_CUT)) // 2
    return text[:half] + _CUT + text[-half:]


def _say(exc: BaseException) -> str:
    try:
        return str(exc)
    except Exception as error:  # noqa: BLE001 - whatever the user's exception does
        return f"<no text: str() raised {type(error).__name__}>"
