"""The Celery task of a handler."""

from __future__ import annotations

import inspect
import random
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
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
from ..options import LONGEST_TTL
from . import inbox
from .binding import bind, upcast, version_of
from .celery_internals import pop_current_task, push_current_task, terminated_by_signal
from .result_store import ResultStore
from .verdict import HANDLED, Unsupported, Verdict, decide

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
    """

    now: Callable[[], datetime] = utc_now
    error: BaseException | None = None
    stores_failure: bool = True
    passes: tuple[type[BaseException], ...] = ()
    verdict: Verdict | None = None

    def decide(self, exc: BaseException, policy: RetryPolicy, attempt: int) -> Verdict:
        """Return the verdict for an exception that this run raised."""
        return decide(
            exc,
            policy,
            attempt=attempt,
            now=self.now(),
            random=random.random(),
        )


class _Default:
    """A property that an attribute of the same name, set by the user's code, replaces."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read
        self.__doc__ = read.__doc__

    def __get__(self, task: Task | None, owner: object) -> Any:
        return self if task is None else self._read(task)


class HandlerTask(Task):
    """What the task of a handler has unless its own class, which is derived from, has it.

    Attributes:
        amqp_events: the handler.
        amqp_tracer: the tracer that ``trace_event`` has built; Celery may have replaced it in
            ``__trace__``.
    """

    abstract = True
    amqp_events: ClassVar[Handler]
    amqp_tracer: Callable[..., Any] | None = None

    @_Default
    def event(self) -> ReceivedEvent | None:
        """The event that the handler runs for; ``None`` in a direct call."""
        return event_of(self)

    # `self` is positional only, here and below, since a payload may have a key "self".
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        # Celery's would add a request without the event.
        return self.run(*args, **kwargs)

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        handler = self.amqp_events
        if handler.bind:
            return handler.target(self, *args, **kwargs)
        return handler.target(*args, **kwargs)

    def retry(
        self,
        args: Any = None,
        kwargs: Any = None,
        exc: BaseException | None = None,
        eta: datetime | None = None,
        countdown: float | None = None,
        max_retries: int | None = None,
        **options: Any,
    ) -> Retry:
        """Request another attempt; RabbitMQ holds the event until it is due.

        Args:
            exc: the cause, for the history and the archive.
            countdown: seconds, from 1 to ten years; the policy's backoff by default.
            eta: aware datetime instead of *countdown*.
            max_retries: limit for this event, instead of the policy's.

        Raises:
            Retry: always.
            ValueError: the delay is below a second or above ten years, or *eta* has no time zone.
        """
        if args is not None or kwargs is not None or options:
            raise Unsupported(
                f"handler {self.name!r} called retry() with arguments or options "
                f"({', '.join(options) or 'args, kwargs'}). A retry delivers the same event to "
                f"the same handler. Remove them."
            )
        run = run_of(self)
        if eta is not None:
            if eta.tzinfo is None:
                raise ValueError(f"retry(eta={eta!r}) has no time zone; pass an aware datetime")
            countdown = (eta - (run.now() if run else utc_now())).total_seconds()
        if countdown is not None and not MINIMUM_DELAY <= countdown <= LONGEST_TTL:
            raise ValueError(
                f"handler {self.name!r} requested a retry in {countdown:g} s; a delay is at least "
                f"{MINIMUM_DELAY} s, and at most ten years"
            )
        cause = exc or sys.exc_info()[1]
        if run is None:
            raise cause or Retry("a handler that was called directly cannot be retried")
        retry = Retry(exc=cause, when=countdown)
        retry.max_retries = max_retries
        raise retry from cause

    def replace(self, sig: Any) -> Any:
        raise Unsupported(
            f"handler {self.name!r} called replace(), but another task cannot replace a handler. "
            f"Start that task with delay()."
        )

    def add_to_chord(self, sig: Any, lazy: bool = False) -> Any:
        raise Unsupported(f"handler {self.name!r} called add_to_chord(), but events have no chords")

    def apply_async(self, *args: Any, **kwargs: Any) -> Any:
        raise DirectCallError.of(self.name)


class _EventTask(Task):
    """What comes before a handler's own class: a worker runs it for deliveries.

    A direct call runs the function. All other names are Celery's or begin with ``amqp_``.
    """

    abstract = True
    amqp_events: ClassVar[Handler]
    # The result backend that was read last, and its guard.
    amqp_stored: tuple[Any, ResultStore | None] = None, None

    @classmethod
    def annotate(cls) -> None:
        super().annotate()
        for name, value in pinned(cls.amqp_events).items():
            setattr(cls, name, value)

    @property
    def backend(self) -> ResultStore:
        """The result backend, whose errors are logged."""
        backend = super().backend
        known, store = self.amqp_stored
        if store is None or known is not backend:  # each thread has its own
            store = ResultStore(self, backend)
            self.amqp_stored = backend, store
        return store

    @backend.setter
    def backend(self, value: Any) -> None:
        self._backend = value

    @_Default
    def store_errors_even_if_ignored(self) -> bool:
        """Whether a failure is stored although successes are ignored.

        Not for a retry: no ignored success would replace the state RETRY.
        """
        run = run_of(self)
        return run.stores_failure if run is not None else True

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        call = partial(_call, self, super().__call__)
        run, event, handler = run_of(self), event_of(self), self.amqp_events
        if run is None or event is None:
            return call(*args, **kwargs)
        result = None
        try:
            if run.error is not None:
                raise run.error
            with (
                handling(event),
                _span(self, event),
            ):
                payload = upcast(handler, event.name, args, kwargs)
                args, kwargs = bind(handler, args, payload)
                handle = partial(call, *args, **kwargs)
                if handler.once:
                    result = inbox.once(handler, event, handle, version_of(handler, payload))
                else:
                    result = handle()
                run.verdict = HANDLED
        except (*PROCESS_EXITS, *run.passes):
            raise
        except BaseException as exc:
            if terminated_by_signal(exc):
                raise
            if run.verdict is HANDLED:
                return result  # such as a soft time limit, too late
            traced = _failed(run, handler, event, exc)
            if traced is exc:
                raise
            raise traced from exc
        return result


def event_of(task: Task) -> ReceivedEvent | None:
    """Return the event that a handler's task runs for now, if any."""
    event: ReceivedEvent | None = getattr(task.request, "amqp_event", None)
    return event


def run_of(task: Task) -> HandlerRun | None:
    """Return the present run of a handler's task, if any."""
    run: HandlerRun | None = getattr(task.request, "amqp_run", None)
    return run


def _span(task: _EventTask, event: ReceivedEvent) -> AbstractContextManager[object]:
    if not telemetry.active():
        return nullcontext()
    from .. import spans

    handler = task.amqp_events
    return spans.processing(event, handler.name, handler.queue, task.request.delivery_info)


def _failed(
    run: HandlerRun, handler: Handler, event: ReceivedEvent, exc: BaseException
) -> Exception:
    """Record the verdict and return the exception that Celery's tracer handles."""
    run.verdict = verdict = run.decide(exc, handler.policy, event.attempt)
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


def _call(task: Task, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call the handler, and await its result if that is awaitable."""
    result = call(*args, **kwargs)
    if inspect.isawaitable(result):
        return wait_for(result, within=_WithRequest(task, task.request_stack.top))
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise Unsupported(
            f"handler {task.name!r} returned a generator, which nothing runs. Return a list or, if "
            f"the handler itself is the generator, remove the yield"
        )
    return result


class _WithRequest:
    """Sets task and request in another thread; Celery keeps those of each thread apart.

    Not by contextlib: see :class:`~..context.handling`.
    """

    def __init__(self, task: Task, request: Any) -> None:
        self._task, self._request = task, request

    def __enter__(self) -> None:
        push_current_task(self._task)
        self._task.request_stack.push(self._request)

    def __exit__(self, *_: object) -> None:
        self._task.request_stack.pop()
        pop_current_task()


class HandlerFailed(Exception):
    """Replaces an exception that Celery's tracer does not store: SystemExit, Reject, Retry."""


def refuse(task: Any, *_: Any) -> Callable[..., None]:
    """Return Celery's execution strategy for a task message that names a handler (``Strategy``)."""

    def reject(*_: Any, **__: Any) -> None:
        raise InvalidTaskError(str(DirectCallError.of(task.name)))

    return reject


def pinned(handler: Handler) -> dict[str, Any]:
    """Return the attributes that configuration and ``task_annotations`` must not change."""
    return {
        # Celery's consumer reads them when a connection is lost.
        "acks_late": True,
        "Strategy": "django_amqp_events.worker.task:refuse",
        "typing": False,
        # Celery's wrapper would publish a retry to the exchange.
        "autoretry_for": (),
        "max_retries": handler.policy.max_retries,
        "default_retry_delay": handler.policy.default_retry_delay,
        "ignore_result": handler.ignore_result,
    }


def task_class(handler: Handler) -> type[HandlerTask]:
    """Return the Celery task class of a handler."""
    user = (handler.target,) if handler.is_task_class else ()
    attributes: dict[str, Any] = {
        **pinned(handler),
        "abstract": False,
        "name": handler.name,
        "amqp_events": handler,
        "__module__": getattr(handler.target, "__module__", __name__),
        "__doc__": getattr(handler.target, "__doc__", None),
        "time_limit": handler.time_limit,
        "soft_time_limit": handler.soft_time_limit,
        "rate_limit": handler.rate_limit,
    }
    name = getattr(handler.target, "__name__", "Handler")
    made: type[HandlerTask] = type(str(name), (_EventTask, *user, HandlerTask), attributes)
    return made


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
                if known.amqp_events is handler:
                    continue
                # Declared again, in a test. Celery warns if a task is registered over another.
                app.tasks.pop(name, None)
            app.register_task(new_task(app, handler))


def new_task(app: Celery, handler: Handler) -> HandlerTask:
    """Return a task of *handler*, not registered yet.

    Raises:
        ConfigurationError: another task of the app has the name of the handler.
        TypeError: its class has no hash.
    """
    known = app.tasks.get(handler.name)
    if known is not None and not isinstance(known, HandlerTask):
        raise ConfigurationError(
            f"handler {handler.name!r} has the name of the Celery task {type(known).__module__}."
            f"{handler.name.rpartition('.')[2]}. Rename one of them."
        )
    task = task_class(handler)()
    hash(task)  # else signals of Celery raise for each event
    return task


def task_for(name: str) -> HandlerTask:
    """Return the task of a handler of this service, registered in its app."""
    app = handler_app(get_settings())
    register(app, {name: get_registry().handlers[name]})
    task: HandlerTask = app.tasks[name]
    return task
