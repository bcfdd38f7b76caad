"""Celery's request for an event: settled by a verdict; without one, the event is requeued."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from celery import signals, states
from celery.concurrency.solo import TaskPool as SoloPool
from celery.concurrency.thread import TaskPool as ThreadPool
from celery.exceptions import (
    InvalidTaskError,
    Retry,
    TaskRevokedError,
    Terminated,
    TimeLimitExceeded,
    WorkerLostError,
)
from celery.platforms import signals as signal_names
from kombu.message import Message

from ..exceptions import DirectCallError
from ..message.headers import CONTENT_ENCODING, CONTENT_TYPE
from ..message.text import printable
from ..message.types import Payload
from .billiard_internals import (
    TERM_SIGNAME,
    ExceptionInfo,
    keep_result,
    restart_time_limit,
    unwrapped,
)
from .celery_internals import SettledRequest, apply_rate_limit, shutdown_requested, state
from .dispatch import Delivery, celery_headers, delivery_info
from .settlement import QUICK, Settler
from .task import PROCESS_EXITS, HandlerRun
from .tracing import trace_event
from .verdict import REQUEUE, Verdict, describe

#: Arguments of :func:`trace_event`.
Job = tuple[dict[str, Any], bool]

logger = logging.getLogger(__name__)


class Chunking(Protocol):
    """Hands several events to a pool process at once; see ``fast/chunks.py``."""

    submitted: dict[str, int]

    def begin(self) -> None: ...
    def stop(self) -> None: ...
    def read_reports(self) -> None: ...
    def add(self, request: EventRequest) -> None: ...
    def is_running(self, request: EventRequest) -> bool: ...


class EventMessage(Message):
    """The message that Celery receives; it has none of the publisher's headers and no body.

    Attributes:
        chunks: what hands the event to the pool together with others, ``None`` if it goes alone.
    """

    def __init__(
        self, delivery: Delivery, payload: Payload, settler: Settler, chunks: Chunking | None
    ) -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            channel=delivery.message.channel,
            delivery_tag=delivery.message.delivery_tag,
            content_type=CONTENT_TYPE,
            content_encoding=CONTENT_ENCODING,
            delivery_info=delivery_info(delivery.received),
            headers=celery_headers(settler.settings.service, delivery, payload),
        )
        self.delivery = delivery
        self.settler = settler
        self.chunks = chunks


class EventRequest(SettledRequest):
    """One run of a handler; its verdict settles the delivery."""

    #: Monotonic time of the begin of its run.
    began: float | None = None

    def __init__(self, message: EventMessage, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.delivery = message.delivery
        self.settler = message.settler
        self.chunks = message.chunks

    @property
    def observed(self) -> bool:
        """Whether Celery's task events are sent; remote control changes it."""
        eventer = self.eventer
        if eventer is None or not eventer.enabled or not self.task.send_events:
            return False
        return not eventer.groups or "task" in eventer.groups  # others: heartbeats only

    # -- to the pool ----------------------------------------------------------------------

    @property
    def job(self) -> Job:
        """The arguments of :func:`trace_event`."""
        return self.request_dict, self.observed

    def execute_using_pool(self, pool: Any, **kwargs: Any) -> Any:
        # In a thread pool it still has to wait for a thread.
        in_thread = isinstance(pool, ThreadPool)
        if self.revoked() or not (in_thread or self.delivery.begin()):
            raise TaskRevokedError(self.id)  # Celery releases the process
        self.settler.catch_up(self.delivery)
        run: Callable[..., Any] = trace_event
        if in_thread:
            run = self._run_in_thread
        elif isinstance(pool, SoloPool):
            run = self._run_inline
        self.pool_result = result = pool.apply_async(
            run,
            args=self.job,
            accept_callback=None if in_thread else self.on_accepted,
            timeout_callback=self.on_timeout,
            callback=self.on_success,
            error_callback=self.on_failure,
            soft_timeout=self.task.soft_time_limit,
            timeout=self.task.time_limit,
            correlation_id=self.id,
        )
        return result

    def _run_inline(self, *job: Any) -> Verdict | ExceptionInfo:
        with self.settler.running():
            return trace_event(*job)

    def _run_in_thread(self, *job: Any) -> Verdict | ExceptionInfo:
        """Run the event when a thread is free, unless its connection is lost or the worker stops.

        Celery 5.7 cancels what waits for a thread when the pool stops; older ones run it.
        """
        if shutdown_requested() or not self.delivery.begin():
            return REQUEUE
        self.settler.catch_up(self.delivery)
        self.on_accepted(os.getpid(), time.monotonic())
        try:
            return trace_event(*job)
        except PROCESS_EXITS:
            # Celery's pool drops them, so the delivery would never be settled.
            return REQUEUE

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """End the run by remote control, but not that of another event in the same process."""
        if self.chunks is not None and not self.chunks.is_running(self):
            self.terminate_when_accepted(pool, signal_names.signum(signal or TERM_SIGNAME))
            return
        super().terminate(pool, signal)

    def cancel(self, pool: Any, signal: Any = None, **newer: Any) -> None:
        """End the run if the pool can; otherwise it continues and its verdict counts.

        In a solo worker Celery calls this in a signal handler, where the pool's
        NotImplementedError would interrupt the running handler and count as its failure.
        """
        try:
            super().cancel(pool, signal, **newer)
        except NotImplementedError:
            logger.info(
                "%s[%s] continues, since this pool cannot end it",
                self.name,
                self.id,
                extra=self.delivery.log_fields,
            )

    # -- from the pool --------------------------------------------------------------------

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        self.began = time_accepted
        super().on_accepted(pid, time_accepted)

    def on_success(self, verdict: Verdict | ExceptionInfo, **kwargs: Any) -> None:
        """Settle the event by the verdict that the pool returned, or by our error."""
        if isinstance(verdict, ExceptionInfo):
            self.on_failure(verdict)
            return
        state.task_ready(self, successful=verdict.kind == "handled")
        self._settle(verdict)
        if verdict.runtime is not None:
            self.send_event("task-succeeded", result=verdict.result, runtime=verdict.runtime)
        self._send_failure(verdict)

    def _send_failure(self, verdict: Verdict) -> None:
        if verdict.kind in ("retry", "archive") and verdict.failure is not None:
            self.send_event(
                "task-retried" if verdict.kind == "retry" else "task-failed",
                exception=verdict.failure.representation,
                traceback=verdict.failure.traceback,
            )

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> None:
        """Settle an event whose run ended without a verdict."""
        state.task_ready(self)
        exc = unwrapped(exc_info.exception)
        if isinstance(exc, Terminated) and self.ended_by_celery:
            return
        if isinstance(exc, TimeLimitExceeded):
            self._end_without_process(exc, self._out_of_time(exc))
            return
        about = self.delivery.log_fields
        # billiard reports Terminated for any process that was ever signalled, however it ends. If
        # the signal was meant for another run, this one has lost its process as by any other death.
        if isinstance(exc, (WorkerLostError, Terminated, SystemExit, KeyboardInterrupt)):
            what = self.delivery.title
            logger.error("the pool process that handled %s ended: %s", what, exc, extra=about)
        else:
            logger.error(
                "the run of %s[%s] failed without a verdict: %r",
                self.name,
                self.id,
                exc,
                extra=about,
            )
        self._end_without_process(exc, self.settler.unanswered(self.delivery, exc))

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """Log a soft time limit; settle the event after a hard one, when the pool kills the run."""
        limit = "Soft" if soft else "Hard"
        about = self.delivery.log_fields
        # Not an error: the event is retried, or archived with an error of its own.
        logger.warning(
            "%s time limit (%ss) exceeded for %s[%s]",
            limit,
            timeout,
            self.name,
            self.id,
            extra=about,
        )
        if soft:
            return
        state.task_ready(self)
        if state.should_terminate:
            self._settle(REQUEUE)
            return
        exc = TimeLimitExceeded(timeout)
        self._end_without_process(exc, self._out_of_time(exc))

    def _out_of_time(self, exc: BaseException) -> Verdict:
        delivery = self.delivery
        _, handler = delivery.known
        return self.settler.timed_out(delivery, exc) or HandlerRun(observed=True).decide(
            exc, handler.policy, delivery.progress.attempt
        )

    def _end_without_process(self, exc: BaseException, verdict: Verdict) -> None:
        """Settle an event whose process has ended, and report what the process could not."""
        if self.delivery.settled:
            return  # the pool has reported the end twice, as a time limit and as a failure
        self._settle(verdict)
        if verdict.kind not in ("retry", "archive"):
            return
        try:
            raise exc
        except type(exc):
            einfo = ExceptionInfo()
        with self._reporting():
            report = self._report_retry if verdict.kind == "retry" else self._report_failure
            report(exc, einfo, verdict)
        self._send_failure(verdict)

    def _report_retry(self, exc: BaseException, einfo: ExceptionInfo, verdict: Verdict) -> None:
        if not self.ignore_result:
            self.task.backend.mark_as_retry(self.id, exc, einfo.traceback, request=self.context)
        self.task.on_retry(exc, self.id, self.args, self.kwargs, einfo)
        reason = Retry(exc=exc, when=verdict.due_at)
        signals.task_retry.send(sender=self.task, request=self.context, reason=reason, einfo=einfo)

    def _report_failure(self, exc: BaseException, einfo: ExceptionInfo, verdict: Verdict) -> None:
        task = self.task
        task.backend.mark_as_failure(
            self.id, exc, request=self.context, store_result=self.store_errors
        )
        task.on_failure(exc, self.id, self.args, self.kwargs, einfo)
        task.after_return(states.FAILURE, exc, self.id, self.args, self.kwargs, None)
        signals.task_failure.send(
            sender=task,
            task_id=self.id,
            exception=exc,
            args=self.args,
            kwargs=self.kwargs,
            traceback=exc.__traceback__,
            einfo=einfo,
        )

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Make this the task's current request, as in the pool, and log an error of a hook."""
        self.task.request_stack.push(self.context)
        try:
            yield
        except Exception:
            logger.exception(
                "a hook of %s[%s] failed; its event is settled anyway",
                self.name,
                self.id,
                extra=self.delivery.log_fields,
            )
        finally:
            self.task.request_stack.pop()

    # -- settlement -----------------------------------------------------------------------

    def release(self) -> bool:
        """Requeue the event, unless its run has begun; return True if it had not."""
        if not self.delivery.begin():
            return False
        state.task_ready(self)
        self.acknowledged = True
        self.send_event("task-rejected", requeue=True)
        self.settler.settle(self.delivery, REQUEUE)
        return True

    def _settle(self, verdict: Verdict) -> None:
        seconds = time.monotonic() - self.began if self.began is not None else 0.0
        if self.began is not None and self.settler.on_ended is not None:
            self.settler.on_ended(self.name, seconds)
        if verdict.kind == "requeue" and not self.acknowledged:
            self.send_event("task-rejected", requeue=True)
        self.acknowledged = True
        acks_only = self.settler.settle(self.delivery, verdict)
        self.settler.wait_for(self.delivery, quick=acks_only and seconds < QUICK)

    def acknowledge(self) -> None:
        """Do nothing: Celery's own ack is not a verdict."""

    def reject(self, requeue: bool = False) -> None:
        """Requeue what Celery rejects."""
        self._settle(REQUEUE)

    def on_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        """Archive the event and report it as Celery does, which would ack it."""
        state.task_ready(self)
        error = TaskRevokedError(f"{reason} by remote control")
        self._settle(
            Verdict(
                kind="archive",
                reason="revoked",
                detail=f"the task {self.id} was {reason} by remote control",
                failure=describe(error),
            )
        )
        details = {"terminated": terminated, "signum": signum, "expired": expired}
        self.send_event("task-revoked", **details)
        with self._reporting():
            self.task.backend.mark_as_revoked(
                self.id, reason, request=self.context, store_result=self.store_errors
            )
            signals.task_revoked.send(sender=self.task, request=self.context, **details)


def strategy(task: Any, app: Any, consumer: Any) -> Callable[..., None]:
    """Return Celery's execution strategy for a handler (``Task.Strategy``).

    Like :func:`celery.worker.strategy.default`, without what an event cannot have (ETA, expiry,
    protocol 1). Celery's own would give our request an ``on_success`` that acks.
    """
    hostname = consumer.hostname
    eventer = consumer.event_dispatcher
    handle = consumer.on_task_request
    connection_errors = consumer.connection_errors
    get_bucket = consumer.task_buckets.__getitem__

    def handle_message(message: Message, body: Any, _ack: Any, _reject: Any, callbacks: Any,
                       **_: Any) -> None:  # fmt: skip
        if not isinstance(message, EventMessage):
            # A task message on one of Celery's queues, as by send_task(); Celery rejects it.
            raise InvalidTaskError(str(DirectCallError.of(task.name)))
        request = EventRequest(
            message,
            app=app,
            hostname=hostname,
            eventer=eventer,
            task=task,
            connection_errors=connection_errors,
            body=body,
            decoded=True,
        )
        if logger.isEnabledFor(logging.INFO):
            _log_received(request)
        if request.id in state.revoked and request.revoked():
            return
        signals.task_received.send(sender=consumer, request=request)
        _send_received(request)
        bucket = None if consumer.disable_rate_limits else get_bucket(task.name)
        chunks = request.chunks
        # The pool enforces a time limit on a job, not on one of its events. Only the answer to a
        # job has a result for the task event.
        limited = task.time_limit is not None or task.soft_time_limit is not None
        if bucket or limited or request.observed:
            chunks = request.chunks = None
        if bucket:
            apply_rate_limit(consumer, request, bucket)
            return
        state.task_reserved(request)
        for callback in callbacks or ():
            callback(request)
        if chunks is not None:
            chunks.add(request)
        else:
            handle(request)

    return handle_message


def _log_received(request: EventRequest) -> None:
    event, handler = request.delivery.known
    logger.info(
        "Event %s (%s) for %s[%s] received, attempt %d%s",
        printable(event.name),
        printable(event.id),
        handler.name,
        request.id,
        event.attempt,
        ", replayed" if event.replay_id else "",
        extra=request.delivery.log_fields,
    )


def _send_received(request: EventRequest) -> None:
    request.send_event(
        "task-received",
        name=request.name,
        args=request.argsrepr,
        kwargs=request.kwargsrepr,
        root_id=request.root_id,
        parent_id=request.parent_id,
        retries=request.request_dict.get("retries", 0),
        eta=None,
        expires=None,
    )


def continue_runs() -> None:
    """Keep track of the runs in pool processes, on a new connection."""
    for request in tuple(state.active_requests):
        if isinstance(request, EventRequest):
            if (result := request.pool_result) is None:
                # Celery 5.5 drops each job when a connection is lost, so its end is not reported.
                state.task_ready(request)
            else:
                restart_time_limit(result)


def keep_results() -> None:
    """Keep the results of runs that pool processes have received; call it before the pool stops."""
    for request in tuple(state.reserved_requests):
        if isinstance(request, EventRequest):
            keep_result(request.pool_result)
