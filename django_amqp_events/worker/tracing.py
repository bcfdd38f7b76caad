"""Run one handler under Celery's tracer and return its verdict.

Celery's tracer sends signals, stores results, logs, and closes Django's database connections. Its
own outcome is ignored: the verdict is recorded before a result is stored.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any

from celery import current_task
from celery.exceptions import Retry

from .celery_internals import (
    build_tracer,
    ignore_soft_limit,
    terminated_by_signal,
)
from .task import PROCESS_EXITS, HandlerRun, HandlerTask
from .verdict import HANDLED, REQUEUE, Verdict


def trace(
    task: HandlerTask,
    request: dict[str, Any],
    *,
    now: Callable[[], datetime],
    error: BaseException | None = None,
    observed: bool = False,
    eager: bool = False,
) -> Verdict:
    """Run a handler and return its verdict.

    Args:
        request: fields of the task's request.
        now: returns the time, so that a test's clock decides when a retry is due.
        error: raise this in place of the handler, which has ended without a process to report it.
        observed: whether Celery's task events are sent, for which the verdict of a handled event
            has result and runtime.
        eager: not in a worker; store nothing in a result backend, and let KeyboardInterrupt pass.
    """
    run = HandlerRun(now=now, error=error)
    if eager:
        request["ignore_result"] = True
        run.stores_failure = False
        run.passes = (KeyboardInterrupt,)
        tracer = build_tracer(task.app, task, eager=True)
    else:
        tracer = task.__trace__
        if tracer is None or tracer is not task.amqp_tracer:
            # Celery builds one in each pool process and for each connection.
            tracer = build_tracer(task.app, task, request["hostname"])
            task.amqp_tracer = task.__trace__ = tracer
    request["amqp_run"] = run
    raised: BaseException | None = None
    try:
        outcome, info, runtime, result = tracer(
            request["id"], request["args"], request["kwargs"], request
        )
        if info is not None:  # the run has failed
            # An exception that cannot be pickled comes with its traceback.
            raised = getattr(outcome, "exception", None)
            raised = getattr(raised, "exc", raised)
        elif observed and run.verdict is HANDLED:
            run.verdict = replace(HANDLED, result=result, runtime=runtime)
        if not eager:
            # Inside the try: a limit that arrives now counts as the handler's. A later one would
            # lose the verdict.
            ignore_soft_limit()
    except run.passes:
        raise
    except PROCESS_EXITS:
        # Raised by the handler. A pool of threads would drop it.
        return REQUEUE
    except BaseException as exc:
        if run.verdict is None and terminated_by_signal(exc):
            raise
        raised = exc
    finally:
        request.pop("amqp_run", None)
    verdict = run.verdict
    if verdict is None:
        # The handler was not reached: before_start or the tracer itself raised.
        raised = raised or RuntimeError("Celery's tracer did not run the handler")
        verdict = run.decide(raised, task.amqp_events.policy, request["amqp_event"].attempt)
    _release_frames(raised)
    return verdict


def _is_wanted(record: logging.LogRecord) -> bool:
    """Return False for the failure of a handler, which Celery's tracer logs as an error.

    An archived event is logged with its traceback when RabbitMQ has confirmed the archive message;
    a retry is no error.
    """
    return record.levelno < logging.ERROR or not isinstance(current_task, HandlerTask)


logging.getLogger("celery.app.trace").addFilter(_is_wanted)


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
