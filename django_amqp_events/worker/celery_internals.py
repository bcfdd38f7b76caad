"""Every private or undocumented name of Celery, kombu and billiard that a worker uses.

A worker does not start without them (:func:`check`). The probes check existence and parameters;
tests on real workers check behaviour.
"""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any, Final

from billiard.common import TERM_SIGNAME as TERM_SIGNAME
from billiard.pool import SIG_SOFT_TIMEOUT, soft_timeout_sighandler
from celery._state import pop_current_task as pop_current_task
from celery._state import push_current_task as push_current_task
from celery.app import trace
from celery.signals import task_prerun
from celery.worker import state as state
from celery.worker.control import control_command as control_command

from ..broker.private_names import PrivateName, require
from ..callables import nothing

_CONSUMER: Final = "celery.worker.consumer.consumer:Consumer"
_STATE: Final = "celery.worker.state"

_CONNECT: Final = "react to a refusal by RabbitMQ"
_QUEUES: Final = "keep Celery from declaring the handlers' queues"
_KEEP: Final = "keep the result of a job that a process has received"
_SEEN: Final = "show events to remote control, autoscaling and shutdowns"

REQUIRED: Final = (
    PrivateName(f"{_STATE}:task_reserved", _SEEN, ("request",)),
    PrivateName(f"{_STATE}:task_accepted", _SEEN, ("request",)),
    PrivateName(f"{_STATE}:task_ready", _SEEN, ("request", "successful")),
    PrivateName(f"{_STATE}:should_stop", "know that the worker is asked to stop"),
    PrivateName(f"{_STATE}:should_terminate", "know that the worker is asked to stop"),
    PrivateName(f"{_STATE}:maybe_shutdown", _CONNECT, ()),
    PrivateName(f"{_CONSUMER}.on_task_message", _SEEN),
    PrivateName(f"{_CONSUMER}.ensure_connected", _CONNECT, ("self", "conn"), overridden=True),
    PrivateName(f"{_CONSUMER}.on_connection_error_before_connected", _CONNECT, ("self", "exc"),
                overridden=True),
    PrivateName(f"{_CONSUMER}.on_connection_error_after_connected", _CONNECT, ("self", "exc"),
                overridden=True),
    PrivateName(f"{_CONSUMER}.add_task_queue", _QUEUES,
                ("self", "queue", "exchange", "exchange_type", "routing_key")),
    PrivateName(f"{_CONSUMER}.cancel_task_queue", _QUEUES, ("self", "queue"), overridden=True),
    PrivateName("celery.worker.worker:WorkController.setup_queues", _QUEUES,
                ("self", "include", "exclude"), overridden=True),
    PrivateName("celery.app.amqp:Queues.deselect", _QUEUES, ("self", "exclude")),
    PrivateName("celery.app.trace:build_tracer", "run a handler",
                ("name", "task", "loader", "hostname", "store_errors", "Info", "eager",
                 "propagate", "app")),
    PrivateName("celery._state:push_current_task", "tell async handlers their task"),
    PrivateName("celery._state:pop_current_task", "tell async handlers their task"),
    PrivateName("kombu.asynchronous.semaphore:LaxBoundedSemaphore.acquire",
                "share pool processes with ordinary tasks",
                ("self", "callback", "partial_args", "partial_kwargs")),
    PrivateName("kombu.asynchronous.semaphore:LaxBoundedSemaphore.release",
                "share pool processes with ordinary tasks", ("self",)),
    PrivateName("billiard.pool:ApplyResult._write_to", _KEEP),
    PrivateName("billiard.pool:ApplyResult.discard", _KEEP, ("self",), overridden=True),
    PrivateName("billiard.common:TERM_SIGNAME", "end a run whose connection was lost"),
    PrivateName("billiard.common:_shutdown_cleanup", "recognize that a signal ends a pool process",
                ("signum", "frame")),
)  # fmt: skip


def check() -> None:
    """Check the names on which a worker depends.

    Raises:
        ConfigurationError: a library has changed one; the worker must not start.
    """
    require("celery", REQUIRED)


def shutdown_requested() -> bool:
    """Return True if a signal or remote control has asked the worker to stop."""
    return state.should_stop is not None or state.should_terminate is not None


def terminated_by_signal(exc: BaseException) -> bool:
    """Return True if billiard's signal handler (``_shutdown_cleanup``) ends this pool process.

    It exits with ``-(256 - signum)``.
    """
    return isinstance(exc, SystemExit) and isinstance(exc.code, int) and exc.code < -128


def hear_soft_limit(**_: Any) -> None:
    """Restore the handler of the soft time limit's signal, for the next run or task."""
    global _ignored  # noqa: PLW0603 - of this pool process
    if _ignored:
        signal.signal(SIG_SOFT_TIMEOUT, soft_timeout_sighandler)
        _ignored = False


def ignore_soft_limit() -> None:
    """Ignore a soft time limit in a pool process whose handler has returned."""
    global _ignored  # noqa: PLW0603 - of this pool process
    if signal.getsignal(SIG_SOFT_TIMEOUT) is soft_timeout_sighandler:
        signal.signal(SIG_SOFT_TIMEOUT, signal.SIG_IGN)
        _ignored = True


_ignored = False
task_prerun.connect(hear_soft_limit)


def keep_result(result: Any) -> None:
    """Keep the result of a job that a process has received but not accepted yet.

    A stopping pool drops such jobs (``AsynPool.flush``), although the process runs them to the end;
    their events would run again.
    """
    if getattr(result, "_write_to", None) is not None:
        result.discard = nothing


def build_tracer(app: Any, task: Any, hostname: str | None = None, *, eager: bool = False) -> Any:
    """Return a tracer for a task.

    It is called with the task's id, arguments, keyword arguments and request, and returns a tuple:
    the outcome, and in a failed run information on that.
    """
    # Looked up at each call, since error trackers replace it.
    return trace.build_tracer(
        task.name, task, app.loader, hostname, eager=eager, app=_WithoutDeduplication(app)
    )


class _WithoutDeduplication:
    """A Celery app for which ``worker_deduplicate_successful_tasks`` has no effect.

    The tracer would ack a redelivered event without running its handler if a result says so.
    """

    backend = SimpleNamespace(persistent=False)

    def __init__(self, app: Any) -> None:
        self._app = app

    def __getattr__(self, name: str) -> Any:
        return getattr(self._app, name)
