"""Every private or undocumented name of billiard, and of Celery's pool on it, that a worker uses.

Required and optional names are separated as in ``celery_internals``.
"""

from __future__ import annotations

from inspect import GEN_SUSPENDED, getgeneratorstate
from time import monotonic
from typing import Any, Final

from billiard import get_start_method
from billiard.common import TERM_SIGNAME as TERM_SIGNAME
from billiard.einfo import ExceptionInfo as ExceptionInfo
from billiard.einfo import ExceptionWithTraceback as ExceptionWithTraceback
from celery.concurrency import asynpool
from celery.utils.functional import noop

from ..broker.private_names import PrivateName, require, unavailable

_FAILURES: Final = "return a failure from a pool process"

REQUIRED: Final = (
    PrivateName("billiard.einfo:ExceptionInfo.exception", _FAILURES),
    PrivateName("billiard.einfo:ExceptionInfo.traceback", _FAILURES),
    PrivateName("billiard.einfo:ExceptionWithTraceback.__init__", _FAILURES,
                ("self", "exc", "tb")),
    PrivateName("billiard.einfo:ExceptionWithTraceback.exc", _FAILURES),
    PrivateName("billiard.common:TERM_SIGNAME", "end a run whose connection was lost"),
    PrivateName("billiard.common:_shutdown_cleanup", "recognize that a signal ends a pool process",
                ("signum", "frame")),
)  # fmt: skip
KEEP_RESULTS: Final = (
    PrivateName("billiard.pool:ApplyResult._write_to", "recognize a run that has begun"),
    PrivateName("billiard.pool:ApplyResult.accepted", "recognize a run that has begun", ("self",)),
    PrivateName("billiard.pool:ApplyResult.discard", "keep the result of a run", ("self",),
                overridden=True),
)  # fmt: skip
TIME_LIMITS: Final = tuple(
    PrivateName(f"billiard.pool:ApplyResult.{name}", "limit a run that outlives its connection")
    for name in (
        "_on_timeout_cancel", "_on_timeout_set", "_soft_timeout", "_time_accepted", "_timeout")
)  # fmt: skip
FINISH_WRITES: Final = (
    PrivateName("celery.concurrency.prefork:TaskPool._pool", "finish a job's write"),
    PrivateName("billiard.pool:Pool._cache", "finish a job's write"),
    PrivateName("billiard.pool:ApplyResult._write_to", "finish a job's write"),
    PrivateName("celery.concurrency.asynpool:_get_job_writer", "finish a job's write", ("job",)),
    PrivateName("celery.concurrency.asynpool:AsynPool._flush_writer", "finish a job's write",
                ("self", "proc", "writer")),
)  # fmt: skip


def check() -> None:
    """Check what correctness depends on.

    Raises:
        ConfigurationError: billiard has changed a name; the worker must not start.
    """
    require("billiard", REQUIRED)


def forks(worker: Any) -> bool:
    """Return True if the pool's processes are forked from the worker.

    billiard's default depends on the platform, and Celery 5.7 can be told to spawn.
    """
    return bool(getattr(worker, "pool_start_method", "fork") == get_start_method() == "fork")


def unwrapped(exc: Any) -> Any:
    """Return the exception itself if *exc* carries it together with its traceback."""
    return exc.exc if isinstance(exc, ExceptionWithTraceback) else exc


def terminated_by_signal(exc: BaseException) -> bool:
    """Return True if billiard's signal handler (``_shutdown_cleanup``) ends this pool process.

    It exits with ``-(256 - signum)``.
    """
    return isinstance(exc, SystemExit) and isinstance(exc.code, int) and exc.code < -128


def keep_result(result: Any) -> None:
    """Keep the result of a job that a process has received but not begun.

    A stopping pool drops each job that is not accepted (``AsynPool.flush``), although a process
    that has received it runs it to the end. Without these names such an event runs again.
    """
    if (
        getattr(result, "_write_to", None) is not None
        and not result.accepted()
        and not unavailable("billiard", "keeping the results of submitted events", KEEP_RESULTS)
    ):
        result.discard = noop


def restart_time_limit(result: Any) -> None:
    """Limit the rest of a run; Celery before 5.7 forgets the limit when a connection is lost."""
    limits = (result._soft_timeout, result._timeout)  # noqa: SLF001
    if (
        not any(limits)
        or result._time_accepted is None  # noqa: SLF001
        or unavailable("billiard", "time limits after a lost connection", TIME_LIMITS)
    ):
        return
    spent = monotonic() - result._time_accepted  # noqa: SLF001
    # 0 is no limit: of a soft one that has passed, and not of a hard one.
    soft, hard = (
        limit and max(limit - spent, least) for limit, least in zip(limits, (0, 0.01), strict=True)
    )
    result._on_timeout_cancel(result)  # noqa: SLF001
    result._on_timeout_set(result, soft, hard)  # noqa: SLF001


def finish_writes(pool: Any) -> None:
    """Write the rest of jobs of which pool processes have received a part.

    A process that waits for the rest of a job never ends, so a cold shutdown would hang. Jobs that
    are not begun are dropped.

    Args:
        pool: Celery's prefork ``TaskPool``.
    """
    if unavailable("celery", "finishing writes before a cold shutdown", FINISH_WRITES):
        return
    processes = pool._pool  # noqa: SLF001
    for job in tuple(processes._cache.values()):  # noqa: SLF001
        write = asynpool._get_job_writer(job)  # noqa: SLF001
        if write is not None and getgeneratorstate(write) == GEN_SUSPENDED:
            processes._flush_writer(job._write_to, write)  # noqa: SLF001
