"""Run one handler under Celery's tracer and return its verdict.

Celery's tracer sends signals, stores results, logs, and closes Django's database connections. Its
own outcome is ignored: the verdict is recorded before a result is stored.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any

from celery.exceptions import Retry

from ..broker.connection import handler_app
from ..conf import get_settings
from .billiard_internals import ExceptionInfo, terminated_by_signal, unwrapped
from .celery_internals import build_tracer
from .task import PROCESS_EXITS, HandlerRun, HandlerTask
from .verdict import HANDLED, Verdict


def trace_event(request: dict[str, Any], observed: bool = False) -> Verdict | ExceptionInfo:
    """Run a handler in the pool and return its verdict; the pool calls this function.

    Args:
        request: fields of the task's request.
        observed: whether Celery's task events are sent, for which a verdict has result and
            runtime, and the failure of a retry its traceback.

    Returns:
        the verdict, or an error of ours: a thread pool would drop an exception, and the delivery
        would never be settled.
    """
    try:
        app = handler_app(get_settings())
        task: HandlerTask = app.tasks[request["task"]]
        tracer: Callable[..., Any] | None = task.__trace__
        if tracer is None or tracer is not task.amqp_tracer:
            # Celery builds one in each pool process and for each connection.
            tracer = build_tracer(app, task, request.get("hostname"))
            task.amqp_tracer = task.__trace__ = tracer
        return _verdict(task, tracer, request, HandlerRun(observed=observed))
    except Exception:  # noqa: BLE001 - it is returned
        return ExceptionInfo()


def trace_here(
    task: HandlerTask, request: dict[str, Any], *, now: Callable[[], datetime]
) -> Verdict:
    """Run a handler in this process, without a worker, and return its verdict.

    Unlike :func:`trace_event`, store nothing in a result backend, and let KeyboardInterrupt pass.

    Args:
        now: returns the time, so that a test's clock decides when a retry is due.
    """
    request["ignore_result"] = True
    run = HandlerRun(now=now, stores_failure=False, exits=(*PROCESS_EXITS, KeyboardInterrupt))
    return _verdict(task, build_tracer(task.app, task, eager=True), request, run)


def _verdict(
    task: HandlerTask, tracer: Callable[..., Any], request: dict[str, Any], run: HandlerRun
) -> Verdict:
    request["amqp_run"] = run
    error: BaseException | None = None
    try:
        outcome, info, runtime, result = tracer(
            request["id"], request["args"], request["kwargs"], request
        )
        if info is not None:  # the run has failed
            error = unwrapped(getattr(outcome, "exception", None))
        elif run.observed and run.verdict is HANDLED:
            run.verdict = replace(HANDLED, result=result, runtime=runtime)
    except run.exits:
        raise
    except BaseException as exc:
        if run.verdict is None and terminated_by_signal(exc):
            raise
        error = exc
    finally:
        request.pop("amqp_run", None)
    verdict = run.verdict
    if verdict is None:
        # The handler was not reached: before_start or the tracer itself raised.
        error = error or RuntimeError("Celery's tracer did not run the handler")
        verdict = run.decide(error, task.handler.policy, request["amqp_event"].attempt)
    _release_frames(error)
    return verdict


_TRACEBACK, _CAUSE, _CONTEXT = (
    vars(BaseException)[name].__get__ for name in ("__traceback__", "__cause__", "__context__")
)


def _release_frames(error: BaseException | None) -> None:
    """Detach an exception from the frames it passed through, the tracer's among them.

    They form a reference cycle of 2,600 objects for each failure, which would stay until Python's
    next full collection, some 80 MB later. The verdict keeps text only.
    """
    seen: set[int] = set()
    remaining = [error]
    while remaining:
        exc = remaining.pop()
        if isinstance(exc, BaseException) and id(exc) not in seen:
            seen.add(id(exc))
            # By BaseException's own descriptors: an exception that is a frozen dataclass refuses
            # to set its traceback, and a __getattr__ may do anything.
            traceback.clear_frames(_TRACEBACK(exc))
            BaseException.with_traceback(exc, None)
            # A Retry has the original exception in an attribute.
            remaining += [_CAUSE(exc), _CONTEXT(exc), exc.exc if isinstance(exc, Retry) else None]
