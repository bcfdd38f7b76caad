"""Celery's request for an event: acked on an explicit verdict only; anything else is requeued."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING, Any
from weakref import ref

from billiard.common import TERM_SIGNAME
from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from celery import signals
from celery.exceptions import TaskRevokedError, Terminated, TimeLimitExceeded, WorkerLostError
from celery.platforms import signals as signal_names
from celery.worker import state
from celery.worker.request import Request
from kombu.message import Message

from ..message.headers import CONTENT_ENCODING, CONTENT_TYPE
from ..message.text import shown
from .dispatch import Reading
from .task import trace_event
from .verdict import (
    REQUEUE,
    Verdict,
    decide,
    describe,
)

#: Arguments of :func:`trace_event`.
Job = tuple[str, str, dict[str, Any], Any, bool]

if TYPE_CHECKING:
    from .fast.chunks import Chunks
    from .settlement import Settler

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Delivery(Reading):
    """A delivery in hand: what came, who it is, and how it is settled.

    Attributes:
        message: kombu's message; acked and rejected in the main thread only.
        chunks: where it goes with others to a process of the pool, if it may.
        since: monotonic time of receipt; the broker's consumer timeout runs from there.
    """

    message: Any
    settler: Settler
    chunks: Chunks | None = None
    since: float = field(default_factory=monotonic)
    settled: bool = False

    @property
    def lost(self) -> bool:
        """The channel is gone, so the broker delivers it again: settling is out of reach."""
        channel = self.message.channel
        return channel is None or channel.connection is None


def _nothing() -> None:
    """Stand in for the pool's way to forget a job."""


class EventMessage(Message):
    """The rebuilt message that Celery sees; nothing of the publisher's headers is in it."""

    delivery: Delivery

    @classmethod
    def rebuilt(
        cls,
        delivery: Delivery,
        *,
        headers: dict[str, Any],
        delivery_info: dict[str, Any],
    ) -> EventMessage:
        """Build it for *delivery*; the payload travels beside it, decoded once."""
        message = cls(
            channel=delivery.message.channel,
            delivery_tag=delivery.message.delivery_tag,
            content_type=CONTENT_TYPE,
            content_encoding=CONTENT_ENCODING,
            delivery_info=delivery_info,
            headers=headers,
        )
        message.delivery = delivery
        return message


class EventRequest(Request):
    """A handler's run, whose delivery is settled by verdicts and by nothing else."""

    _already_revoked: bool
    _already_cancelled: bool
    _terminate_on_ack: tuple[Any, Any] | None

    def __init__(self, message: EventMessage, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.delivery = message.delivery

    # -- to the pool ----------------------------------------------------------------------

    @property
    def job(self) -> Job:
        """What :func:`trace_event` takes."""
        watched = bool(self._eventer and self._eventer.enabled)
        return self._type, self.id, self._request_dict, self._body, watched

    def execute_using_pool(self, pool: Any, **kwargs: Any) -> Any:
        if self.revoked():
            raise TaskRevokedError(self.id)
        task = self._task
        settler = self.delivery.settler
        settler.catch_up()
        result = pool.apply_async(
            trace_event,
            args=self.job,
            accept_callback=self.on_accepted,
            timeout_callback=self.on_timeout,
            callback=self.on_success,
            error_callback=self.on_failure,
            soft_timeout=task.soft_time_limit,
            timeout=task.time_limit,
            correlation_id=self.id,
        )
        self._apply_result = ref(result) if result is not None else None
        settler.catch_up()
        return result

    def keep(self) -> None:
        """Stay with a run that a pool child has got, while the worker shuts down.

        Celery's pool forgets a job whose child has not said yet that it began
        (``AsynPool.flush``), and with it the result; the child has got the job and runs it to
        its end all the same. So the pool is not let forget what it has written to a child.
        """
        result: Any = self._apply_result() if self._apply_result is not None else None
        if getattr(result, "_write_to", None) is not None and not result.accepted():
            result.discard = _nothing

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """End the run; not that of another event, where several are in one process."""
        chunks = self.delivery.chunks
        if chunks is not None and not chunks.runs(self):
            self._terminate_on_ack = pool, signal_names.signum(signal or TERM_SIGNAME)
            return
        super().terminate(pool, signal)

    def cancel(self, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:
        """End the run, where the pool can; in the others it goes on, and its verdict counts.

        Celery lets the pool's NotImplementedError through, out of a signal handler: in a solo
        worker that is in the middle of the handler, which would take it for a failure.
        """
        try:
            super().cancel(pool, signal, emit_retry)
        except NotImplementedError:
            logger.info("%s[%s] cannot be ended in this pool and goes on", self.name, self.id)

    # -- from the pool --------------------------------------------------------------------

    def on_success(self, verdict: Verdict | ExceptionInfo, **kwargs: Any) -> None:
        """The pool returned a verdict, or solo and threads what a handler has left with."""
        if isinstance(verdict, ExceptionInfo):
            self.on_failure(verdict)
            return
        state.task_ready(self, successful=verdict.kind == "handled")
        self._settle(verdict)
        failure = verdict.failure
        if verdict.kind == "handled":
            self.send_event("task-succeeded", result="None", runtime=None)
        elif verdict.kind == "retry" and failure is not None:
            self.send_event(
                "task-retried", exception=failure.first_line, traceback=failure.traceback
            )
        elif verdict.kind == "archive" and failure is not None:
            self.send_event(
                "task-failed", exception=failure.first_line, traceback=failure.traceback
            )

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> None:
        """The pool lost the run: no verdict came back."""
        state.task_ready(self)
        exc = exc_info.exception
        if isinstance(exc, ExceptionWithTraceback):
            exc = exc.exc
        if isinstance(exc, Terminated):
            if self._already_cancelled or self._already_revoked:
                return
            if self.delivery.chunks is not None:
                # It was meant for the event before it, in the same process.
                self._settle(REQUEUE)
            else:
                self._announce_revoked("terminated", True, str(exc), False)
            return
        if isinstance(exc, TimeLimitExceeded):
            self._settle(self._out_of_time(exc))
            return
        if isinstance(exc, (WorkerLostError, SystemExit, KeyboardInterrupt)):
            logger.error("worker process lost with %s in hand: %s", self.delivery.title, exc)
        else:
            logger.error("no verdict for %s[%s]: %r", self.name, self.id, exc)
        self._settle(self.delivery.settler.unanswered(self.delivery, exc))

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """A time limit passed; past the hard one the pool kills the child."""
        if soft:
            logger.warning("Soft time limit (%ss) exceeded for %s[%s]", timeout, self.name, self.id)
            return
        state.task_ready(self)
        if state.should_terminate:
            self._settle(REQUEUE)
            return
        logger.error("Hard time limit (%ss) exceeded for %s[%s]", timeout, self.name, self.id)
        exc = TimeLimitExceeded(timeout)
        verdict = self._out_of_time(exc)
        self._settle(verdict)
        if verdict.kind == "archive":
            self._announce_failure(exc)

    def _out_of_time(self, exc: BaseException) -> Verdict:
        return self.delivery.settler.timed_out(self.delivery, exc) or self._decide(exc)

    def _decide(self, exc: BaseException) -> Verdict:
        delivery = self.delivery
        _, handler = delivery.known
        return decide(
            exc,
            handler.policy,
            attempt=delivery.progress.attempt,
            now=datetime.now(UTC),
            random=random.random(),
        )

    def _announce_failure(self, exc: BaseException) -> None:
        """Do what Celery's tracer would have done in the child; a failure here changes nothing."""
        try:
            raise exc
        except type(exc):
            einfo = ExceptionInfo()
        try:
            self.task.backend.mark_as_failure(
                self.id, exc, request=self._context, store_result=self.store_errors
            )
            self.task.on_failure(exc, self.id, self.args, self.kwargs, einfo)
            signals.task_failure.send(
                sender=self.task,
                task_id=self.id,
                exception=exc,
                args=self.args,
                kwargs=self.kwargs,
                traceback=einfo.traceback,
                einfo=einfo,
            )
        except Exception:
            logger.exception("result of %s[%s] not stored; its verdict stands", self.name, self.id)

    # -- settlement -----------------------------------------------------------------------

    def _settle(self, verdict: Verdict) -> None:
        self.acknowledged = True
        settler = self.delivery.settler
        settler.settle(self.delivery, verdict)
        settler.wait_for(self.delivery)

    def acknowledge(self) -> None:
        """Celery's own ack is never a verdict, so nothing happens here."""

    def reject(self, requeue: bool = False) -> None:
        """Whatever Celery rejects by itself goes back to the broker."""
        self._settle(REQUEUE)

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        """Revoked or terminated by remote control: archived; Celery alone would ack it away."""
        if self._already_revoked:
            return
        self._already_revoked = True
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
        self.send_event("task-revoked", terminated=terminated, signum=signum, expired=expired)
        try:
            self.task.backend.mark_as_revoked(
                self.id, reason, request=self._context, store_result=self.store_errors
            )
        except Exception:
            logger.exception("result of %s[%s] not stored; its verdict stands", self.name, self.id)
        signals.task_revoked.send(
            sender=self.task,
            request=self._context,
            terminated=terminated,
            signum=signum,
            expired=expired,
        )

    def _announce_cancelled(self, emit_retry: bool = True) -> None:
        """The connection was lost and the run is killed; the broker delivers the event again."""
        state.task_ready(self)
        self._already_cancelled = True
        self.send_event("task-cancelled")


def strategy(task: Any, app: Any, consumer: Any) -> Callable[..., None]:
    """Celery's execution strategy for handlers (``Task.Strategy``).

    As :func:`celery.worker.strategy.default`, without what an event cannot have (ETA,
    expiry, protocol 1), and with our request as it is: Celery's own would generate a
    subclass of it whose ``on_success`` acks.
    """
    hostname = consumer.hostname
    eventer = consumer.event_dispatcher
    handle = consumer.on_task_request
    connection_errors = consumer.connection_errors
    get_bucket = consumer.task_buckets.__getitem__

    def handle_message(message: EventMessage, body: Any, ack: Any, reject: Any, callbacks: Any,
                       **_: Any) -> None:  # fmt: skip
        request = EventRequest(
            message,
            on_ack=ack,
            on_reject=reject,
            app=app,
            hostname=hostname,
            eventer=eventer,
            task=task,
            connection_errors=connection_errors,
            body=body,
            headers=message.headers,
            decoded=True,
            utc=True,
        )
        event, handler = message.delivery.known
        if logger.isEnabledFor(logging.INFO):
            logger.info(
                "Event %s (%s) for %s[%s] received, attempt %d%s",
                shown(event.name),
                shown(event.id),
                handler.name,
                request.id,
                event.attempt,
                ", replayed" if event.replay_id else "",
            )
        if request.id in state.revoked and request.revoked():
            return
        signals.task_received.send(sender=consumer, request=request)
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
        bucket = None if consumer.disable_rate_limits else get_bucket(task.name)
        chunks = message.delivery.chunks
        if chunks is not None and (bucket or not chunks.takes(request)):
            chunks = message.delivery.chunks = None
        if bucket:
            consumer._limit_task(request, bucket, 1)  # noqa: SLF001 - as Celery's strategy does
            return
        state.task_reserved(request)
        for callback in callbacks or ():
            callback(request)
        if chunks is not None:
            chunks.add(request)
        else:
            handle(request)

    return handle_message


def keep_handed_over() -> None:
    """Let the pool forget no run of ours that a child has got; before it shuts down."""
    for request in tuple(state.reserved_requests):
        if isinstance(request, EventRequest):
            request.keep()
