"""Installing the step in a Celery worker, by Celery's own signals.

Nothing is patched: the tasks are registered in the worker's app, the step is added to the
worker's blueprint, and ``-Q`` is read before Celery would declare our queues as its own.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable
from typing import Any

from celery import Celery, bootsteps
from celery.concurrency.prefork import TaskPool as PreforkPool
from celery.utils import text

from ..broker.connection import celery_app
from ..conf import get_settings, load
from ..declare.registry import get_registry
from ..exceptions import AmqpEventsError
from . import cold_shutdown
from .bootstep import EventStep
from .connection_errors import Login
from .fast import chunks
from .hang_detector import Watch
from .request import keep_handed_over
from .task import register

logger = logging.getLogger(__name__)

UNSUPPORTED_POOLS = ("gevent", "eventlet")


class Handover(bootsteps.StartStopStep):
    """Is there before the pool has processes, and closes before the worker's consumer stops."""

    label = "AMQP events handover"

    def create(self, parent: Any) -> None:
        if not issubclass(parent.pool_cls, PreforkPool):
            return
        if "chunks" in get_settings().fast_paths:
            # By autoscale, too, where that is used.
            chunks.open_pipes(max(parent.concurrency, getattr(parent, "max_concurrency", 0) or 0))
        # What is loaded stays: a collection that looked at it would write to each of its pages,
        # and each process of the pool would come to have a copy of its own.
        # https://docs.python.org/3/library/gc.html#gc.freeze
        gc.freeze()

    def close(self, parent: Any) -> None:
        keep_handed_over()


#: The step that workers of this process get.
_step: type[EventStep] = EventStep


def become(step: type[EventStep]) -> None:
    """Make the worker that this process is about to be another kind: the reaper."""
    global _step  # noqa: PLW0603 - one process is one worker, and Celery's signals carry nothing
    _step = step


def step_class(
    selected: frozenset[str] | None, excluded: frozenset[str], *, unsupported: str = ""
) -> type[EventStep]:
    """Return the step with a choice of queues, and why this worker's pool can handle none."""
    choice = {"selected": selected, "excluded": excluded, "unsupported": unsupported}
    return type(_step.__name__, (_step,), choice)


def _concerns(app: Celery) -> bool:
    """Say whether *app* is the one whose workers handle this service's events."""
    settings, problems = load()
    if not settings.service and not any(problem.is_error for problem in problems):
        return False  # dormant
    if settings.celery_app:
        return celery_app(settings) is app
    return True


def _refuse(exc: Exception) -> SystemExit:
    # Celery's signals swallow Exception: a worker that silently handles nothing is worse than
    # one that does not start.
    if not isinstance(exc, AmqpEventsError):
        logger.critical("handlers cannot be made tasks; run manage.py check", exc_info=exc)
        exc = AmqpEventsError(f"{type(exc).__name__}: {exc}")
    return SystemExit(f"django_amqp_events: this worker does not start: {exc}")


def read_queue_options(instance: Any) -> None:
    """Take our queues out of ``-Q`` and ``-X`` before Celery reads them."""
    if not _concerns(instance.app):
        return
    try:
        known = frozenset(_step.known(get_settings(), get_registry()))
    except Exception as exc:
        raise _refuse(exc) from exc
    original = instance.setup_queues

    def setup_queues(include: Any, exclude: Any = None) -> None:
        chosen, dropped = _names(include), _names(exclude)
        theirs = [name for name in chosen if name not in known]
        original(theirs, [name for name in dropped if name not in known])
        queues = instance.app.amqp.queues
        if chosen and not theirs:
            queues.deselect(list(queues.consume_from))
        instance.amqp_events_selected = known.intersection(chosen) if chosen else None
        instance.amqp_events_excluded = known.intersection(dropped)

    instance.setup_queues = setup_queues


def _names(value: Any) -> list[str]:
    return list(text.str_to_list(value) or ())


def install(worker: Any) -> None:
    """Register the handlers' tasks and add the step; before the worker builds its blueprint."""
    app = worker.app
    if not _concerns(app):
        return
    try:
        registry = get_registry()
        selected = getattr(worker, "amqp_events_selected", None)
        excluded: frozenset[str] = getattr(worker, "amqp_events_excluded", frozenset())
        if not registry.handlers:
            return
        unsupported = pool_problem(worker.pool_cls)
        if selected != frozenset():
            if unsupported:
                raise AmqpEventsError(unsupported)
            _check_queues(app, registry.by_queue())
        register(app, registry.handlers)
    except Exception as exc:
        raise _refuse(exc) from exc
    steps = app.steps["consumer"]
    for step in [step for step in steps if issubclass(step, EventStep)]:
        steps.discard(step)
    # Without any queue too: remote control may ask for one of ours, and Celery would declare it
    # with arguments of its own, again and again after each lost connection.
    steps.add(step_class(selected, excluded, unsupported=unsupported))
    steps.add(Watch)
    steps.add(Login)
    cold_shutdown.connect()
    app.steps["worker"].add(Handover)


def pool_problem(pool: Any) -> str:
    """Say why events cannot be handled in a pool (a class or its path); empty where they can."""
    module = pool if isinstance(pool, str) else pool.__module__
    for name in UNSUPPORTED_POOLS:
        if name in module:
            return (
                f"the {name} pool is not supported: settlement publishes from a thread and is "
                f"not proven under monkey-patching, and such a worker has no event loop; use "
                f"--pool prefork, threads or solo, or -Q to keep this worker off the handlers' "
                f"queues"
            )
    return ""


def _check_queues(app: Celery, ours: Iterable[str]) -> None:
    both = sorted(set(app.amqp.queues) & set(ours))
    if both:
        raise AmqpEventsError(
            f"task_queues of the Celery app names {', '.join(both)}, which Celery would declare "
            f"with other arguments; take the handlers' queues out of it"
        )
