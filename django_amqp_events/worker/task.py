"""Handlers as Celery tasks, and how one run of a handler becomes a verdict."""

from __future__ import annotations

import inspect
import random
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar, Final

from asgiref.sync import async_to_sync
from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from celery import Celery, Task, signals
from celery.app import trace
from celery.exceptions import Ignore, Reject, Retry, WorkerShutdown, WorkerTerminate

from ..broker.connection import current_celery_app
from ..context import ReceivedEvent, handling
from ..declare.registry import Handler, get_registry
from ..declare.retry_policy import MINIMUM_DELAY
from ..exceptions import ConfigurationError, DirectCallError
from . import once
from .verdict import (
    HANDLED,
    InvalidArguments,
    Unsupported,
    Verdict,
    decide,
)

#: Attributes that configuration and ``task_annotations`` must not change: each would let
#: Celery settle a delivery behind our back. Our Request asks none of them, but Celery's
#: consumer does (connection loss), and a person who inspects the task should see the truth.
PINNED: Final[Mapping[str, Any]] = {
    "acks_late": True,
    "acks_on_failure_or_timeout": False,
    "acks_on_failure": False,
    "acks_on_timeout": False,
    "reject_on_worker_lost": True,
    "retry_on_worker_lost": False,
    "Request": "django_amqp_events.worker.request:EventRequest",
    "Strategy": "django_amqp_events.worker.request:strategy",
    "typing": False,
    # Retries are decided by our policy; Celery's wrapper would republish to the exchange.
    "autoretry_for": (),
}


def utc_now() -> datetime:
    """Return the time of the wall clock."""
    return datetime.now(UTC)


#: Not about the event: they end the process that runs it, and the broker delivers it again.
ENDINGS: Final = (WorkerShutdown, WorkerTerminate)


class Run:
    """One run of a handler; what it came to is filled in while Celery traces the task.

    Args:
        now: the time; retries are due from there.
        storing: failures go to the result store although successes are ignored.
        endings: exceptions that are no verdict and go through.
        watched: somebody follows Celery's events, where a retry has a traceback.
    """

    __slots__ = ("endings", "now", "storing", "verdict", "watched")

    def __init__(
        self,
        now: Callable[[], datetime] = utc_now,
        *,
        storing: bool = True,
        endings: tuple[type[BaseException], ...] = ENDINGS,
        watched: bool = False,
    ) -> None:
        self.now = now
        self.storing = storing
        self.endings = endings
        self.watched = watched
        self.verdict: Verdict | None = None


class HandlerTask(Task):
    """A handler. It is run by deliveries of its event; calling it runs the function here."""

    abstract = True
    handler: ClassVar[Handler]
    #: What Celery runs it with where it is ours; see :func:`trace_event`.
    amqp_tracer: Callable[..., Any] | None = None

    @classmethod
    def annotate(cls) -> None:
        super().annotate()
        for name, value in PINNED.items():
            setattr(cls, name, value)

    @property
    def event(self) -> ReceivedEvent | None:
        """The event in hand, ``None`` when the handler was called directly."""
        event: ReceivedEvent | None = getattr(self.request, "amqp_event", None)
        return event

    @property
    def store_errors_even_if_ignored(self) -> bool:
        """Store failures although successes are ignored, but no result for a retry.

        Celery would store RETRY, and nothing would ever replace it where the successful
        result is ignored.
        """
        run: Run | None = getattr(self.request, "amqp_run", None)
        return run.storing if run is not None else True

    # By position only, here and below: an event may have a "self" in its payload.
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        run: Run | None = getattr(self.request, "amqp_run", None)
        event = self.event
        if run is None or event is None:
            return self._call(*args, **kwargs)
        try:
            args, kwargs = bind(self.handler, args, kwargs)
            with handling(event):
                if self.handler.once:
                    result = once.once(self.handler, event, lambda: self._handle(*args, **kwargs))
                else:
                    result = self._handle(*args, **kwargs)
        except run.endings:
            raise
        except BaseException as exc:
            if terminated_by_signal(exc):
                raise
            shown = self._failed(run, event, exc)
            if shown is exc:
                raise
            raise shown from exc
        run.verdict = HANDLED
        return result

    def _handle(self, /, *args: Any, **kwargs: Any) -> Any:
        result = self._call(*args, **kwargs)
        if isinstance(pending := getattr(self.request, "amqp_retry", None), Retry):
            raise pending
        return result

    def _failed(self, run: Run, event: ReceivedEvent, exc: BaseException) -> Exception:
        """Record the verdict and return what Celery's tracer should see."""
        run.verdict = verdict = decide(
            exc,
            self.handler.policy,
            attempt=event.attempt,
            now=run.now(),
            random=random.random(),
            tracebacks=run.watched,
        )
        cause = exc.__cause__ or exc if isinstance(exc, Retry) else exc
        shown: Exception
        if verdict.kind == "retry":
            run.storing = False
            shown = Retry(exc=cause, when=verdict.due_at)
            return shown
        if verdict.kind == "handled":
            shown = Ignore()
            return shown
        if verdict.kind == "requeue":
            shown = exc if isinstance(exc, Reject) else Reject(exc, requeue=True)
            return shown
        if isinstance(cause, Exception) and not isinstance(cause, (Retry, Reject, Ignore)):
            return cause
        # The tracer would let a SystemExit through, and store nothing for a Reject.
        return HandlerFailed(f"{type(cause).__name__}: {cause}")

    def _call(self, /, *args: Any, **kwargs: Any) -> Any:
        handler = self.handler
        if handler.is_task_class:
            return self._outcome(self.run(*args, **kwargs))
        target: Callable[..., Any] = handler.target
        if handler.is_async:
            target = async_to_sync(target)
        result = target(self, *args, **kwargs) if handler.bind else target(*args, **kwargs)
        return self._outcome(result)

    def _outcome(self, result: Any) -> Any:
        """Run what was only made so far: an event must not count as handled before that.

        A coroutine function does not show where it is a task class's ``run`` or is behind a
        decorator or a ``__call__``.
        """
        if inspect.isawaitable(result):
            return async_to_sync(_wait_for)(result)
        if inspect.isgenerator(result) or inspect.isasyncgen(result):
            raise Unsupported(
                f"handler {self.name!r} is a generator, of which nothing runs; take the yield "
                f"out of it"
            )
        return result

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
        """Ask for another attempt; the broker holds the event until it is due.

        Args:
            exc: what went wrong, for history and archive.
            countdown: seconds, at least 1; the policy's backoff where neither is given.
            eta: aware datetime instead of *countdown*.
            max_retries: limit for this event, instead of the policy's.
            throw: raise at once; otherwise the attempt counts as failed when the handler
                returns.

        Raises:
            Retry: always with *throw*; nothing after the call is run.
            ValueError: the delay is below a second.
        """
        if args is not None or kwargs is not None or options:
            raise Unsupported(
                f"handler {self.name!r} called retry() with arguments or options "
                f"({', '.join(options) or 'args, kwargs'}); a retry is the same event to the "
                f"same handler: leave them out"
            )
        run: Run | None = getattr(self.request, "amqp_run", None)
        if eta is not None:
            if eta.tzinfo is None:
                raise ValueError(f"retry(eta={eta!r}) has no time zone; pass an aware datetime")
            countdown = (eta - (run.now() if run else utc_now())).total_seconds()
        if countdown is not None and countdown < MINIMUM_DELAY:
            raise ValueError(
                f"handler {self.name!r} asked for a retry in {countdown:g} s; delays are at "
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
        self.request.amqp_retry = retry
        return retry

    def replace(self, sig: Any) -> Any:
        raise Unsupported(
            f"handler {self.name!r} called replace(): an event has one handler, not another "
            f"task in its place; start that task with delay()"
        )

    def add_to_chord(self, sig: Any, lazy: bool = False) -> Any:
        raise Unsupported(f"handler {self.name!r} called add_to_chord(): an event is in no chord")

    def delay(self, *args: Any, **kwargs: Any) -> Any:
        raise DirectCallError.of(self.name)

    def apply_async(self, *args: Any, **kwargs: Any) -> Any:
        raise DirectCallError.of(self.name)


#: As Celery made it: some agents put theirs in its place.
_ON_RETRY: Final = Task.on_retry


def unseen(task: HandlerTask) -> bool:
    """Say whether nobody looks at what Celery's tracer says of a retry."""
    return (
        task.handler.ignore_result
        and not signals.task_retry.receivers
        and type(task).on_retry is _ON_RETRY
    )


class Bookkeeping(trace.TraceInfo):
    """What Celery's tracer does about a run that failed; without what nobody sees of a retry.

    The traceback that it would copy and write takes as long as all the rest of the run.
    """

    def handle_retry(self, task: HandlerTask, req: Any, **kwargs: Any) -> Any:
        if not unseen(task):
            return super().handle_retry(task, req, **kwargs)
        told = {
            "id": req.id,
            "name": trace.get_task_name(req, task.name),
            "exc": str(self.retval),
        }
        trace.info(trace.LOG_RETRY, told)
        return SimpleNamespace(exception=ExceptionWithTraceback(self.retval, ""))


async def _wait_for(result: Awaitable[Any]) -> Any:
    return await result


class HandlerFailed(Exception):
    """Stands in for what Celery's tracer cannot store: SystemExit, Reject, Retry."""


def terminated_by_signal(exc: BaseException) -> bool:
    """Say whether billiard's signal handler ends this pool child.

    billiard.common exits with ``-(256 - signum)``; that is no verdict on the event.
    """
    return isinstance(exc, SystemExit) and isinstance(exc.code, int) and exc.code < -128


def bind(
    handler: Handler, args: Any, kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Fit a payload to a handler: surplus keyword arguments are dropped unless it is strict.

    Raises:
        InvalidArguments: a required argument is missing, or a strict handler got too many.
    """
    fit = _fit(handler)
    given = dict(kwargs)
    if fit.drops:
        given = {key: value for key, value in given.items() if key in fit.signature.parameters}
    if not args and fit.required <= given.keys() <= fit.optional:
        return (), given
    try:
        fit.signature.bind(*args, **given)
    except TypeError as exc:
        raise InvalidArguments(
            f"handler {handler.name!r} takes {fit.signature}, which the event does not fit: {exc}"
        ) from None
    return tuple(args), given


@dataclass(frozen=True, slots=True)
class Fit:
    """What a handler takes.

    Attributes:
        drops: whether keyword arguments that it does not name are dropped.
        required, optional: with keyword arguments that have at least the first and nothing but
            the second it can surely be called; with others the signature says.
    """

    signature: inspect.Signature
    drops: bool
    required: frozenset[str]
    optional: frozenset[str]


@cache
def _fit(handler: Handler) -> Fit:
    signature = handler.signature
    parameters = signature.parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return Fit(
        signature=signature,
        drops=not handler.strict and not any(p.kind is p.VAR_KEYWORD for p in parameters),
        required=frozenset(p.name for p in named if p.default is p.empty),
        optional=frozenset(p.name for p in named if p.kind is not p.POSITIONAL_ONLY),
    )


@cache
def task_class(handler: Handler) -> type[HandlerTask]:
    """Build the Celery task class of a handler."""
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


def register(app: Celery, handlers: Mapping[str, Handler]) -> None:
    """Register the tasks of *handlers* in a Celery app; again is harmless.

    Raises:
        ConfigurationError: an ordinary task of the app has the name of a handler.
    """
    for name, handler in handlers.items():
        known = app.tasks.get(name)
        if isinstance(known, HandlerTask):
            if known.handler is handler:
                continue
            # Declared anew, in a test: registering over it would be a warning of Celery's.
            app.tasks.pop(name, None)
        elif known is not None:
            raise ConfigurationError(
                f"handler {name!r} has the name of the Celery task {type(known).__module__}."
                f"{name.rpartition('.')[2]}; give one of them another name"
            )
        app.register_task(task_class(handler)())


def task_for(name: str) -> HandlerTask:
    """Return the task of a handler of this service, registered in the current app."""
    app = current_celery_app()
    register(app, {name: get_registry().handlers[name]})
    task: HandlerTask = app.tasks[name]
    return task


def trace_event(
    name: str, task_id: str, request: dict[str, Any], body: Any, watched: bool = False
) -> Verdict | ExceptionInfo:
    """Run one handler in the pool and return its verdict; what the pool calls.

    An error of ours is returned too: a pool of threads would tell nobody of what is raised, and
    the event would be in hand for ever.

    Celery's own tracer does the run: signals, results, logging, the Django fixup's database
    connections. Its outcome is ignored: the verdict was recorded before a result is stored,
    so a result store that fails changes nothing.
    """
    try:
        app = current_celery_app()
        task: HandlerTask = app.tasks[name]
        if task.__trace__ is None or task.__trace__ is not task.amqp_tracer:
            # Celery made one of its own: in each process of a pool, and for each connection. Asked
            # for where others have put theirs in its place, as error trackers do.
            task.amqp_tracer = task.__trace__ = trace.build_tracer(
                name, task, app.loader, request.get("hostname"), Info=Bookkeeping, app=app
            )
        run = trace.fast_trace_task if app.use_fast_trace_task else trace.trace_task_ret

        def traced() -> Any:
            return run(name, task_id, request, body, None, None)[1]

        return _verdict(task, request, Run(watched=watched), traced)
    except Exception:  # noqa: BLE001 - it is told
        return ExceptionInfo()


def trace_here(
    task: HandlerTask,
    request: dict[str, Any],
    body: Any,
    *,
    now: Callable[[], datetime],
    worker: str,
) -> Verdict:
    """Run one handler in this process, without a worker, and return its verdict.

    As :func:`trace_event`, but nothing is stored in a result backend, and what stops a
    person's own process (KeyboardInterrupt) goes through.

    Args:
        now: the time, so that a test's clock decides when a retry is due.
        worker: name of the worker that the handler sees.
    """
    args, kwargs, _ = body
    request.update(args=args, kwargs=kwargs, hostname=worker, is_eager=False, ignore_result=True)
    run = Run(now, storing=False, endings=(*ENDINGS, KeyboardInterrupt))
    tracer = trace.build_tracer(task.name, task, eager=True, app=task.app)

    def traced() -> Any:
        return tracer(request["id"], args, kwargs, request)[0]

    return _verdict(task, request, run, traced)


_TRACEBACK, _CAUSE, _CONTEXT = (
    vars(BaseException)[name].__get__ for name in ("__traceback__", "__cause__", "__context__")
)


def _let_go(error: BaseException | None) -> None:
    """Part an exception from the frames that it went through, the tracer's among them.

    They refer to the exception and to what Celery and billiard made of it, 2,600 objects for each
    failure: in a circle, so that all of it stayed until Python's next full collection, some 80 MB
    later. Everything that is kept of a failure is text by now.
    """
    seen: set[int] = set()
    left = [error]
    while left:
        exc = left.pop()
        if isinstance(exc, BaseException) and id(exc) not in seen:
            seen.add(id(exc))
            # Past what the exception's own class makes of its attributes: a frozen dataclass
            # refuses the second, and a __getattr__ may do anything.
            traceback.clear_frames(_TRACEBACK(exc))
            BaseException.with_traceback(exc, None)
            # A Retry has what was raised in an attribute of its own.
            left += [_CAUSE(exc), _CONTEXT(exc), exc.exc if isinstance(exc, Retry) else None]


def _verdict(
    task: HandlerTask, request: dict[str, Any], run: Run, traced: Callable[[], Any]
) -> Verdict:
    request["amqp_run"] = run
    error: BaseException | None = None
    try:
        error = getattr(traced(), "exception", None)
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
    except run.endings:
        raise
    except BaseException as exc:
        if run.verdict is None and terminated_by_signal(exc):
            raise
        error = exc
    finally:
        request.pop("amqp_run", None)
    verdict = run.verdict
    if verdict is None:
        if error is None:
            # worker_deduplicate_successful_tasks: the result of this very run says that it
            # succeeded, and its ack was lost.
            return HANDLED
        # The handler itself was not reached: before_start or the tracer's own machinery raised.
        event: ReceivedEvent = request["amqp_event"]
        verdict = decide(
            error,
            task.handler.policy,
            attempt=event.attempt,
            now=run.now(),
            random=random.random(),
            tracebacks=run.watched,
        )
    _let_go(error)
    return verdict
