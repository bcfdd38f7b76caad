"""Install the event steps in a Celery worker, on Celery's own signals.

Celery's modules and classes stay as they are. What is replaced on the instances of a worker:

- ``WorkController.setup_queues`` (here): takes the handlers' queues out of ``-Q`` and ``-X``, since
  Celery would declare them with arguments of its own.
- ``Consumer.add_task_queue`` and ``Consumer.cancel_task_queue`` (``remote_control``): the same for
  remote control.
- ``Consumer.ensure_connected`` (``connection_errors``): limits how long an answer may take.
- ``Consumer.on_connection_error_before_connected`` (``connection_errors``) and
  ``Consumer.on_connection_error_after_connected`` (``connection_errors``, ``step``): wait longer
  after a refusal, and record the refused queue. Both call Celery's own first.
- The handlers of signals that end a worker (``stop_signals``): they wait for the event loop.
- ``Task.__trace__`` of a handler's task (``tracing``).
- ``ApplyResult.discard`` of a job that a pool process has received, while the worker stops
  (``celery_internals``): keeps its result.

``events_worker`` and ``events_reaper`` also set options of the Celery app (``prepare``).
"""

from __future__ import annotations

import gc
from typing import Any, ClassVar

from celery import Celery, bootsteps
from celery.concurrency.prefork import TaskPool as PreforkPool
from celery.utils import text

from ..broker import amqp_internals
from ..broker.connection import celery_app, handler_app
from ..broker.topology import Topology, build
from ..conf import get_settings, load
from ..declare.registry import get_registry
from ..exceptions import AmqpEventsError
from ..logs import get_logger
from . import celery_internals
from .binding import validator
from .connection_errors import Login
from .hang_detector import Watch
from .jobs import all_jobs
from .pools import pool_problem
from .step import EventStep
from .task import register

logger = get_logger(__name__)


class Handover(bootsteps.StartStopStep):
    """A bootstep that runs before the pool starts and before the worker's consumer stops."""

    label = "AMQP events handover"
    #: The app that was current before the worker of ``CELERY_APP``.
    project_app: ClassVar[Celery | None] = None

    def create(self, parent: Any) -> None:
        _make_current(self.project_app)
        if issubclass(parent.pool_cls, PreforkPool):
            # A garbage collection in a pool process would copy the memory that it shares with this
            # one: https://docs.python.org/3/library/gc.html#gc.freeze
            gc.freeze()

    def close(self, parent: Any) -> None:
        for jobs in all_jobs:
            jobs.keep_results()


def prepare_process(project_app: Celery | None) -> None:
    """Prepare a pool process, which has nothing of the worker's if the pool spawns it.

    Args:
        project_app: the app that was current before the worker.
    """
    settings, _ = load()
    if settings.service:
        register(handler_app(settings), get_registry().handlers)
        if settings.celery_app:
            _make_current(project_app)


def _make_current(app: Celery | None) -> None:
    """Let shared tasks that handlers start use the project's app instead of the worker's.

    Celery makes the worker's app the current one in the worker and in each pool process.
    """
    if app is not None:
        app.set_current()
        app.set_default()


_step: type[EventStep] = EventStep


def become(step: type[EventStep]) -> None:
    """Set the step for the worker of this process."""
    global _step  # noqa: PLW0603 - one process is one worker; Celery's signals have no argument
    _step = step


def _concerns(app: Celery) -> bool:
    """Return True if workers of *app* handle this service's events."""
    settings, problems = load()
    if not settings.service and not any(problem.is_error for problem in problems):
        return False  # dormant
    if settings.backend != "amqp":
        return False  # handlers run in the process that publishes
    if settings.celery_app:
        return celery_app(settings) is app
    return True


def _refuse(exc: Exception) -> SystemExit:
    # Celery's signals swallow Exception, and the worker would start without handlers.
    if not isinstance(exc, AmqpEventsError):
        logger.critical("the worker cannot be set up; run `manage.py check`", exc_info=exc)
        exc = AmqpEventsError(f"{type(exc).__name__}: {exc}")
    return SystemExit(f"django_amqp_events: this worker does not start: {exc}")


def read_queue_options(instance: Any) -> None:
    """Take the handlers' queues out of ``-Q`` and ``-X`` before Celery reads them."""
    try:
        if not _concerns(instance.app):
            return
        check_libraries()
        known = frozenset(_step.known(get_settings(), get_registry()))
        original = instance.setup_queues
    except Exception as exc:
        raise _refuse(exc) from exc

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


def check_libraries() -> None:
    """Check the private names of libraries.

    Raises:
        ConfigurationError: a library has changed one; the worker must not start.
    """
    amqp_internals.check()
    celery_internals.check()


def _names(value: Any) -> list[str]:
    return list(text.str_to_list(value) or ())


def install(worker: Any, project_app: Celery | None = None) -> None:
    """Register the handlers' tasks and add the steps, before the worker builds its blueprint.

    Args:
        project_app: the app that was current before the worker.
    """
    app = worker.app
    try:
        if not _concerns(app):
            return
        registry = get_registry()
        selected = getattr(worker, "amqp_events_selected", None)
        excluded: frozenset[str] = getattr(worker, "amqp_events_excluded", frozenset())
        if not registry.handlers:
            return
        check_libraries()
        unsupported = pool_problem(worker.pool_cls, worker.options.get("autoscale"))
        if selected != frozenset():
            if unsupported:
                raise AmqpEventsError(unsupported)
            check_queues(app, build(get_settings(), registry))
        for handler in registry.handlers.values():
            if handler.validate:
                validator(handler)  # pool processes share it
        register(app, registry.handlers)
    except Exception as exc:
        raise _refuse(exc) from exc
    steps = app.steps["consumer"]
    for step in [step for step in steps if issubclass(step, EventStep)]:
        steps.discard(step)
    # Without a queue too, since remote control may add one of ours.
    choice = {"selected": selected, "excluded": excluded, "unsupported": unsupported}
    steps.add(type(_step.__name__, (_step,), choice))
    steps.add(Watch)
    steps.add(Login)
    Handover.project_app = project_app if get_settings().celery_app else None
    app.steps["worker"].add(Handover)


def check_queues(app: Celery, topology: Topology) -> None:
    """Check that Celery declares no queue or exchange of ours.

    Raises:
        AmqpEventsError: it would, with other arguments.
    """
    queues = app.amqp.queues
    types = {exchange.name: exchange.type for exchange in topology.exchanges}
    both = set(queues).intersection(queue.name for queue in topology.queues)
    for exchange in (queue.exchange for queue in queues.values()):
        if exchange is not None and types.get(exchange.name, exchange.type) != exchange.type:
            both.add(exchange.name)
    if both:
        raise AmqpEventsError(
            f"Celery's task_queues, task_default_queue or task_default_exchange names queues or "
            f"exchanges of this service ({', '.join(sorted(both))}), which Celery would declare "
            f"with other arguments. Choose other names; remove handlers' queues, since workers "
            f"consume them anyway"
        )
