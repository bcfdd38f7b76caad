"""The Celery task of a handler."""

from __future__ import annotations

import inspect
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any, ClassVar, Final

from celery import Celery, Task
from celery.exceptions import (
    Ignore,
    InvalidTaskError,
    Reject,
    Retry,
    WorkerShutdown,
    WorkerTerminate,
)

from .. import telemetry
from ..broker.connection import handler_app
from ..conf import get_settings
from ..context import ReceivedEvent, handling
from ..coroutines import wait_for
from ..declare.registry import Handler, get_registry
from ..declare.retry_policy import MINIMUM_DELAY, RetryPolicy
from ..exceptions import ConfigurationError, DirectCallError
from . import inbox
from .binding import bind, upcast, version_of
from .celery_internals import terminated_by_signal
from .result_store import ResultStore
from .verdict import HANDLED, Unsupported, Verdict, decide

#: Attributes that configuration and ``task_annotations`` must not change. Celery's consumer reads
#: them when a connection is lost.
PINNED: Final[Mapping[str, Any]] = {
    "acks_late": True,
    "Strategy": "django_amqp_events.worker.task:refuse",
    "typing": False,
    # Celery's wrapper would publish a retry to the exchange.
    "autoretry_for": (),
}

#: Exceptions that end the process without a verdict; RabbitMQ delivers the event again.
PROCESS_EXITS: Final = (WorkerShutdown, WorkerTerminate)


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(slots=True, kw_only=True)
class HandlerRun:
    """One run of a handler and, when it has ended, its verdict.

    Attributes:
        now: returns the time; retries are due from there.
        error: raised in place of the handler.
        stores_failure: whether the result backend stores a failure if it ignores successes.
        passes: exceptions that pass through without a verdict, beside :data:`PROCESS_EXITS`.
        requested: the retry that the handler has requested for its end.
    """

    now: Callable[[], datetime] = utc_now
    error: BaseException | None = None
    stores_failure: bool = True
    passes: tuple[type[BaseException], ...] = ()
    verdict: Verdict | None = None
    requested: Retry | None = None

    def decide(self, exc: BaseException, policy: RetryPolicy, attempt: int) -> Verdict:
        """Return the verdict for an exception that this run raised."""
        return decide(
            exc,
            policy,
            attempt=attempt,
            now=self.now(),
            random=random.random(),
        )


class HandlerTask(Task):
    """The task of a handler. A worker runs it for deliveries; a direct call runs the function."""

    abstract = True
    handler: ClassVar[Handler]
    #: The tracer that ``trace_event`` has built; Celery may have replaced it in ``__trace__``.
    amqp_tracer: Callable[..., Any] | None = None
    # The result backend that was read last, and its guard.
    _stored: tuple[Any, ResultStore | None] = None, None

    @classmethod
    def annotate(cls) -> None:
        super().annotate()
        for name, value in PINNED.items():
            setattr(cls, name, value)

    @property
    def event(self) -> ReceivedEvent | None:
        """The event that the handler runs for; ``None`` in a direct call."""
        event: ReceivedEvent | None = getattr(self.request, "amqp_event", None)
        return event

    @property
    def backend(self) -> ResultStore:
        """The result backend, whose errors are logged."""
        backend = super().backend
        known, store = self._stored
        if store is None or known is not backend:  # each thread has its own
            store = ResultStore(self, backend)
            self._stored = backend, store
        return store

    @backend.setter
    def backend(self, value: Any) -> None:
        self._backend = value

    @property
    def store_errors_even_if_ignored(self) -> bool:
        """Whether a failure is stored although successes are ignored.

        Not for a retry: no ignored success would replace the state RETRY.
        """
        run = self._current_run
        return run.stores_failure if run is not None else True

    @property
    def _current_run(self) -> HandlerRun | None:
        run: HandlerRun | None = getattr(self.request, "amqp_run", None)
        return run

    def _span(
        self, event: ReceivedEvent, delivery: Mapping[str, Any] | None
    ) -> AbstractContextManager[object]:
        if not telemetry.active():
            return nullcontext()
        from .. import spans

        return spans.processing(event, self.name, self.handler.queue, delivery)

    # `self` is positional only, here and below, since a payload may have a key "self".
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        request = self.request
        run: HandlerRun | None = getattr(request, "amqp_run", None)
        event: ReceivedEvent | None = getattr(request, "amqp_event", None)
        if run is None or event is None:
            return self._call(*args, **kwargs)
        try:
            if run.error is not None:
                raise run.error
            with (
                handling(event),
                self._span(event, request.delivery_info),
            ):
                payload = upcast(self.handler, event.name, args, kwargs)
                args, kwargs = bind(self.handler, args, payload)
                if self.handler.once:
                    version = version_of(self.handler, payload)
                    handle = partial(self._handle, run, *args, **kwargs)
                    result = inbox.once(self.handler, event, handle, version)
                else:
                    result = self._handle(run, *args, **kwargs)
        except (*PROCESS_EXITS, *run.passes):
            raise
        except BaseException as exc:
            if terminated_by_signal(exc):
                raise
            traced = self._failed(run, event, exc)
            if traced is exc:
                raise
            raise traced from exc
        run.verdict = HANDLED
        return result

    def _handle(self, run: HandlerRun, /, *args: Any, **kwargs: Any) -> Any:
        result = self._call(*args, **kwargs)
        if run.requested is not None:
            raise run.requested
        return result

    def _failed(self, run: HandlerRun, event: ReceivedEvent, exc: BaseException) -> Exception:
        """Record the verdict and return the exception that Celery's tracer handles."""
        run.verdict = verdict = run.decide(exc, self.handler.policy, event.attempt)
        cause = exc.__cause__ or exc if isinstance(exc, Retry) else exc
        traced: Exception
        if verdict.kind == "retry":
            run.stores_failure = False
            traced = Retry(exc=cause, when=verdict.due_at)
        elif verdict.kind == "handled":
            traced = Ignore()
        elif verdict.kind == "requeue":
            traced = exc if isinstance(exc, Reject) else Reject(exc, requeue=True)
        elif isinstance(cause, Exception) and not isinstance(cause, (Retry, Reject, Ignore)):
            traced = cause
        else:
            traced = HandlerFailed(f"{type(cause).__name__}: {cause}")
        return traced

    def _call(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the handler, and await its result if that is awaitable."""
        handler = self.handler
        if handler.is_task_class:
            result = self.run(*args, **kwargs)
        elif handler.bind:
            result = handler.target(self, *args, **kwargs)
        else:
            result = handler.target(*args, **kwargs)
        if inspect.isawaitable(result):
            return wait_for(result, within=self._with_request(self.request_stack.top))
        if inspect.isgenerator(result) or inspect.isasyncgen(result):
            raise Unsupported(
                f"handler {self.name!r} is a generator, so its body does not run. Remove the yield."
            )
        return result

    @contextmanager
    def _with_request(self, request: Any) -> Iterator[None]:
        """Set a request in another thread; Celery keeps those of each thread apart."""
        if request is None:
            yield
            return
        self.request_stack.push(request)
        try:
            yield
        finally:
            self.request_stack.pop()

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def retry(
        self,
        args: Any = None,
        kwargs: Any = None,
        exc: BaseException | None = None,
        throw: bool = True,
        eta: datetime | None = None,
        countdown: float | None = None,
        max_retries: int | None = None,
        **options: Any,
    ) -> Retry:
        """Request another attempt; RabbitMQ holds the event until it is due.

        Args:
            exc: the cause, for the history and the archive.
            countdown: seconds, at least 1; the policy's backoff by default.
            eta: aware datetime instead of *countdown*.
            max_retries: limit for this event, instead of the policy's.
            throw: raise at once; otherwise the attempt fails when the handler returns.

        Raises:
            Retry: always with *throw*.
            ValueError: the delay is below a second, or *eta* has no time zone.
        """
        if args is not None or kwargs is not None or options:
            raise Unsupported(
                f"handler {self.name!r} called retry() with arguments or options "
                f"({', '.join(options) or 'args, kwargs'}). A retry delivers the same event to "
                f"the same handler. Remove them."
            )
        run = self._current_run
        if eta is not None:
            if eta.tzinfo is None:
                raise ValueError(f"retry(eta={eta!r}) has no time zone; pass an aware datetime")
            countdown = (eta - (run.now() if run else utc_now())).total_seconds()
        if countdown is not None and countdown < MINIMUM_DELAY:
            raise ValueError(
                f"handler {self.name!r} requested a retry in {countdown:g} s; delays are at "
                f"least {MINIMUM_DELAY} s"
            )
        cause = exc or sys.exc_info()[1]
        if run is None:
            raise cause or Retry("a handler that was called directly cannot be retried")
        retry = Retry(exc=cause, when=countdown)
        retry.max_retries = max_retries
        if throw:
            raise retry from cause
        retry.__cause__ = cause
        run.requested = retry
        return retry

    def replace(self, sig: Any) -> Any:
        raise Unsupported(
            f"handler {self.name!r} called replace(), but another task cannot replace a handler. "
            f"Start that task with delay()."
        )

    def add_to_chord(self, sig: Any, lazy: bool = False) -> Any:
        raise Unsupported(f"handler {self.name!r} called add_to_chord(), but events have no chords")

    def delay(self, *args: Any, **kwargs: Any) -> Any:
        raise DirectCallError.of(self.name)

    def apply_async(self, *args: Any, **kwargs: Any) -> Any:
        raise DirectCallError.of(self.name)


class HandlerFailed(Exception):
    """Replaces an exception that Celery's tracer does not store: SystemExit, Reject, Retry."""


def refuse(task: Any, *_: Any) -> Callable[..., None]:
    """Return Celery's execution strategy for a task message that names a handler (``Strategy``)."""

    def reject(*_: Any, **__: Any) -> None:
        raise InvalidTaskError(str(DirectCallError.of(task.name)))

    return reject


@cache
def task_class(handler: Handler) -> type[HandlerTask]:
    """Return the Celery task class of a handler."""
    user = (handler.target,) if handler.is_task_class else ()
    attributes: dict[str, Any] = {
        **PINNED,
        "abstract": False,
        "name": handler.name,
        "handler": handler,
        "__module__": getattr(handler.target, "__module__", __name__),
        "__doc__": getattr(handler.target, "__doc__", None),
        "max_retries": handler.policy.max_retries,
        "default_retry_delay": handler.policy.default_retry_delay,
        "ignore_result": handler.ignore_result,
        "time_limit": handler.time_limit,
        "soft_time_limit": handler.soft_time_limit,
        "rate_limit": handler.rate_limit,
    }
    if handler.is_task_class:
        attributes["run"] = handler.target.run  # type: ignore[attr-defined]
    name = getattr(handler.target, "__name__", "Handler")
    return type(str(name), (HandlerTask, *user), attributes)


#: The in-memory broker registers tasks from several threads; Celery's registry has no lock.
_REGISTERING: Final = threading.Lock()


def register(app: Celery, handlers: Mapping[str, Handler]) -> None:
    """Register the tasks of *handlers* in a Celery app, unless they are registered.

    Raises:
        ConfigurationError: another task of the app has the name of a handler.
    """
    with _REGISTERING:
        for name, handler in handlers.items():
            known = app.tasks.get(name)
            if isinstance(known, HandlerTask):
                if known.handler is handler:
                    continue
                # Declared again, in a test. Celery warns if a task is registered over another.
                app.tasks.pop(name, None)
            elif known is not None:
                raise ConfigurationError(
                    f"handler {name!r} has the name of the Celery task {type(known).__module__}."
                    f"{name.rpartition('.')[2]}. Rename one of them."
                )
            app.register_task(task_class(handler)())


def task_for(name: str) -> HandlerTask:
    """Return the task of a handler of this service, registered in its app."""
    app = handler_app(get_settings())
    register(app, {name: get_registry().handlers[name]})
    task: HandlerTask = app.tasks[name]
    return task
