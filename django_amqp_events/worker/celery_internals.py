"""Every private or undocumented name of Celery, and of kombu's event loop, that a worker uses.

Correctness depends on the names in :data:`REQUIRED`: a worker does not start without them
(:func:`check`). Each optional feature has a tuple of its own, and is disabled with one log line.
The probes check existence and parameters; tests on real workers check behaviour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from types import FrameType, SimpleNamespace
from typing import Any, Final
from weakref import ref

from celery import states
from celery.app import trace
from celery.app.trace import TraceInfo as TraceInfo
from celery.worker import state as state
from celery.worker.consumer.control import Control
from celery.worker.request import Request
from kombu import Queue
from kombu.asynchronous.hub import Hub
from kombu.asynchronous.semaphore import LaxBoundedSemaphore
from kombu.utils import eventio

from ..broker.private_names import PrivateName, require, unavailable

_REQUEST: Final = "celery.worker.request:Request"
_CONSUMER: Final = "celery.worker.consumer.consumer:Consumer"

#: Celery's own ways to settle would call our ``acknowledge()``, which does nothing, and hold the
#: delivery until the consumer timeout.
_SETTLE: Final = "settle an event by its verdict only"
_REVOKE: Final = "archive an event that remote control revokes"
_CANCEL: Final = "end a run whose connection was lost"
_CONNECT: Final = "react to a refusal by RabbitMQ"
_QUEUES: Final = "keep Celery from declaring the handlers' queues"
_TRACE: Final = "run a handler"

REQUIRED: Final = (
    PrivateName(f"{_REQUEST}.__init__", _SETTLE, (
        "self", "message", "on_ack", "hostname", "eventer", "app", "connection_errors",
        "request_dict", "task", "on_reject", "body", "headers", "decoded", "utc")),
    PrivateName(f"{_REQUEST}.acknowledge", _SETTLE, ("self",), overridden=True),
    PrivateName(f"{_REQUEST}.reject", _SETTLE, ("self", "requeue"), overridden=True),
    PrivateName(f"{_REQUEST}.execute_using_pool", _SETTLE, ("self", "pool", "kwargs"),
                overridden=True),
    PrivateName(f"{_REQUEST}.on_accepted", _SETTLE, ("self", "pid", "time_accepted")),
    PrivateName(f"{_REQUEST}.on_success", _SETTLE, ("self", "failed__retval__runtime", "kwargs"),
                overridden=True),
    PrivateName(f"{_REQUEST}.on_failure", _SETTLE,
                ("self", "exc_info", "send_failed_event", "return_ok"), overridden=True),
    PrivateName(f"{_REQUEST}.on_timeout", _SETTLE, ("self", "soft", "timeout"), overridden=True),
    PrivateName(f"{_REQUEST}._announce_revoked", _REVOKE,
                ("self", "reason", "terminated", "signum", "expired"), overridden=True),
    PrivateName(f"{_REQUEST}._already_revoked", _REVOKE),
    PrivateName(f"{_REQUEST}.terminate", _REVOKE, ("self", "pool", "signal"), overridden=True),
    PrivateName(f"{_REQUEST}._terminate_on_ack", _REVOKE),
    PrivateName(f"{_REQUEST}._context", _REVOKE),
    PrivateName(f"{_REQUEST}._announce_cancelled", _CANCEL, ("self",),
                overridden=True, newer=("emit_retry",)),
    PrivateName(f"{_REQUEST}._already_cancelled", _CANCEL),
    PrivateName(f"{_REQUEST}._apply_result", _CANCEL),
    PrivateName(f"{_REQUEST}.cancel", _CANCEL, ("self", "pool", "signal"),
                overridden=True, newer=("emit_retry",)),
    PrivateName("celery.worker.state:task_reserved", _SETTLE, ("request",)),
    PrivateName("celery.worker.state:task_ready", _SETTLE, ("request", "successful")),
    PrivateName("celery.worker.state:reserved_requests", _SETTLE),
    PrivateName("celery.worker.state:active_requests", _SETTLE),
    PrivateName("celery.worker.state:all_total_count", "know when a process becomes free"),
    PrivateName("celery.worker.state:revoked", _REVOKE),
    PrivateName("celery.worker.state:should_stop", _SETTLE),
    PrivateName("celery.worker.state:should_terminate", _SETTLE),
    PrivateName("celery.worker.state:maybe_shutdown", _CONNECT, ()),
    PrivateName(f"{_CONSUMER}.call_soon", _SETTLE, ("self", "p")),
    PrivateName(f"{_CONSUMER}.connect", _CONNECT, ("self",), overridden=True),
    PrivateName(f"{_CONSUMER}.ensure_connected", _CONNECT, ("self", "conn"), overridden=True),
    PrivateName(f"{_CONSUMER}._limit_task", "apply a handler's rate limit",
                ("self", "request", "bucket", "tokens")),
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
    PrivateName("celery.app.trace:TraceInfo", _TRACE),
    PrivateName("celery.app.trace:build_tracer", _TRACE,
                ("name", "task", "loader", "hostname", "store_errors", "Info", "eager",
                 "propagate", "app")),
)  # fmt: skip

ONE_ERROR: Final = (
    PrivateName("celery.app.trace:TraceInfo._log_error", "log a failed event once",
                ("self", "task", "req", "einfo"), overridden=True),
)  # fmt: skip
WAKING: Final = (
    PrivateName("kombu.asynchronous.hub:Hub._create_waker", "wake the event loop from a thread",
                ("self",)),
)  # fmt: skip
COLD_SHUTDOWN: Final = (
    PrivateName("kombu.asynchronous.hub:Hub.create_loop.__code__", "recognize the event loop"),
    PrivateName("kombu.asynchronous.hub:Hub.on_tick", "run something at its next turn"),
)


def check() -> None:
    """Check what correctness depends on, and log what a worker does without.

    Raises:
        ConfigurationError: Celery has changed a name; the worker must not start.
    """
    require("celery", REQUIRED)
    unavailable("celery", "logging an archived event once", ONE_ERROR)


class SettledRequest(Request):
    """Celery's request for a task, with its private members under public names."""

    acknowledged: bool
    _already_revoked: bool
    _already_cancelled: bool
    _terminate_on_ack: tuple[Any, Any] | None

    @property
    def ended_by_celery(self) -> bool:
        """Whether remote control or a lost connection has ended the run already."""
        return self._already_cancelled or self._already_revoked

    @property
    def context(self) -> Any:
        """The request as result backends and signals take it."""
        return self._context

    @property
    def pool_result(self) -> Any:
        """The pool's job, ``None`` before it exists and after the pool has dropped it."""
        return self._apply_result() if self._apply_result is not None else None

    @pool_result.setter
    def pool_result(self, result: Any) -> None:
        self._apply_result = ref(result) if result is not None else None

    @property
    def terminates_when_accepted(self) -> bool:
        """Whether the run's process is to be ended as soon as it begins."""
        return self._terminate_on_ack is not None

    def terminate_when_accepted(self, pool: Any, signum: Any) -> None:
        """End the run's process as soon as it begins."""
        self._terminate_on_ack = pool, signum

    def keep_running(self) -> None:
        """Withdraw :meth:`terminate_when_accepted`."""
        self._terminate_on_ack = None

    def on_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        """Settle an event that remote control has revoked or terminated; called once."""
        raise NotImplementedError

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        if not self._already_revoked:
            self._already_revoked = True
            self.on_revoked(reason, terminated, signum, expired)

    def _announce_cancelled(self, emit_retry: bool = True) -> None:
        """Report a run that was ended because its connection was lost.

        Unlike Celery, store no retry: RabbitMQ delivers the event again.
        """
        state.task_ready(self)
        self._already_cancelled = True
        self.send_event("task-cancelled")


class EventTraceInfo(TraceInfo):
    """Celery's handling of a failed run, without its log of an event that will be archived.

    That event is logged with its traceback when RabbitMQ has confirmed the archive message.
    """

    __slots__ = ()

    def _log_error(self, task: Any, req: Any, einfo: Any) -> None:
        if self.state != states.FAILURE or getattr(req, "amqp_run", None) is None:
            super()._log_error(task, req, einfo)


def shutdown_requested() -> bool:
    """Return True if a signal or remote control has asked the worker to stop."""
    return state.should_stop is not None or state.should_terminate is not None


@cache
def wakes_for_threads() -> bool:
    """Return True if kombu's ``call_soon`` in another thread ends a poll of the event loop."""
    return not any(name.problem() for name in WAKING)


def apply_rate_limit(consumer: Any, request: Request, bucket: Any) -> None:
    """Hand a request to the pool when its task's rate limit allows."""
    consumer._limit_task(request, bucket, 1)  # noqa: SLF001


def _mailbox(consumer: Any) -> Any:
    """Return the node of remote control, ``None`` if it is off."""
    box = getattr(consumer.blueprint[Control.name], "box", None)
    return getattr(box, "node", None)


def list_queues(consumer: Any, queues: Callable[[], Iterable[Queue]]) -> None:
    """Let ``inspect active_queues`` of a worker list further queues."""
    node = _mailbox(consumer)
    if node is None or (celerys := node.handlers.get("active_queues")) is None:
        return

    def active_queues(state: Any) -> list[dict[str, Any]]:
        return [*celerys(state), *(queue.as_dict(recurse=True) for queue in queues())]

    # A copy: Celery's is one for all workers of a process.
    node.handlers = {**node.handlers, "active_queues": active_queues}


def rename_mailbox(consumer: Any, name: str) -> None:
    """Let a worker answer remote control by another name, from its next connection on."""
    if (node := _mailbox(consumer)) is not None:
        node.hostname = name


class ProcessSemaphore(LaxBoundedSemaphore):
    """Celery's semaphore of free pool processes, which admits one request for each new process.

    When a pool grows while a request waits, kombu's admits another one too. That waits in the pool,
    where it cannot be requeued before the consumer timeout.
    """

    def grow(self, n: int = 1) -> None:
        self.initial_value += n
        for _ in range(n):
            self.release()

    @classmethod
    def replace(cls, worker: Any) -> None:
        """Give the semaphore of a worker this behaviour."""
        if type(semaphore := getattr(worker, "semaphore", None)) is LaxBoundedSemaphore:
            semaphore.__class__ = cls


def waiting_for_a_process(worker: Any) -> int:
    """Return how many tasks and chunks wait for a free pool process."""
    return len(worker.semaphore._waiting)  # noqa: SLF001


def event_loop_is_busy(frame: FrameType | None) -> bool:
    """Return True if a signal has interrupted the event loop in a callback, not in a poll.

    Only the stack tells: the loop (a generator, ``Hub.create_loop``) keeps no state of whether it
    polls, and a flag that one callback of ours sets would not cover the others. Without the names
    a cold shutdown begins at once, as Celery's own does.
    """
    if unavailable("kombu", "delaying a cold shutdown", COLD_SHUTDOWN):
        return False
    while frame is not None:
        if frame.f_globals.get("__name__") == eventio.__name__:
            return False
        if frame.f_code is Hub.create_loop.__code__:
            return True
        frame = frame.f_back
    return False


def build_tracer(app: Any, task: Any, hostname: str | None = None, *, eager: bool = False) -> Any:
    """Return a tracer for a task.

    It is called with the task's id, arguments, keyword arguments and request, and returns a tuple:
    the outcome, and in a failed run a :class:`TraceInfo`.
    """
    # Looked up at each call, since error trackers replace it.
    return trace.build_tracer(
        task.name,
        task,
        app.loader,
        hostname,
        Info=task.trace_info,
        eager=eager,
        app=_WithoutDeduplication(app),
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


def log_retry(task: Any, request: Any, reason: str) -> None:
    """Log a retry as Celery's tracer does."""
    name = trace.get_task_name(request, task.name)
    trace.info(trace.LOG_RETRY, {"id": request.id, "name": name, "exc": reason})
