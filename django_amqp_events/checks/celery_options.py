"""Checks of the Celery app."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from ..broker import topology
from ..declare.registry import Handler
from ..options import Problem
from .handlers import listed
from .project import Project

_DANGEROUS_CONTENT: Final = {
    "pickle": "pickle",
    "application/x-python-serialize": "pickle",
    "yaml": "yaml",
    "application/x-yaml": "yaml",
}


def check_worker(project: Project) -> Iterator[Problem]:
    """Celery options with which a worker loses, doubles or endangers events."""
    celery, handlers = project.celery, project.registry.handlers
    if not celery or not handlers:
        return
    if celery["broker_channel_error_retry"] is not True:
        yield Problem(
            "E018",
            "Celery's broker_channel_error_retry is not True: when RabbitMQ closes a channel "
            "(a consumer timeout, a queue that was deleted), the worker exits.",
            "Set it to True. `manage.py events_worker` sets it for its own process; silence this "
            "check if nothing else runs the handlers.",
        )
    if celery["worker_cancel_long_running_tasks_on_connection_loss"] is not True:
        yield Problem(
            "W003",
            "Celery's worker_cancel_long_running_tasks_on_connection_loss is not True: after a "
            "lost connection a handler runs on while its event is delivered and run again.",
            "Set it to True. `manage.py events_worker` sets it for its own process.",
        )
    accepted = celery["accept_content"]
    if isinstance(accepted, Iterable):
        dangerous = {_DANGEROUS_CONTENT[c] for c in map(str, accepted) if c in _DANGEROUS_CONTENT}
        if dangerous:
            yield Problem(
                "W005",
                f"Celery's accept_content has {listed(sorted(dangerous))}. Events are JSON only, "
                f"whatever it says, but the same worker decodes it from its other queues: whoever "
                f"may publish there can run code (pickle) or fill the memory (yaml) where the "
                f"handlers run.",
                'Set accept_content to ["json"], or run the handlers in a worker of their own.',
            )
    yield from _check_pool(str(celery["worker_pool"]), handlers.values())


def _check_pool(pool: str, handlers: Iterable[Handler]) -> Iterator[Problem]:
    if "gevent" in pool or "eventlet" in pool:
        yield Problem(
            "E019",
            f"Celery's worker_pool is {pool!r}, in which handlers are refused.",
            "Use prefork or threads; docs/pools.md has the reason.",
        )
        return
    solo = "solo" in pool
    if solo:
        yield Problem(
            "W006",
            f"Celery's worker_pool is {pool!r}: while a handler runs, the worker answers no "
            f"heartbeats, so the broker cuts the connection and delivers the event again.",
            "Use prefork or threads, or keep handlers far shorter than the heartbeat.",
        )
    limited = [h.name for h in handlers if h.time_limit or h.soft_time_limit]
    if limited and (solo or "thread" in pool):
        yield Problem(
            "W007",
            f"Handlers {listed(limited)} have a time limit, but Celery's worker_pool is "
            f"{pool!r}, which has none.",
            "Use prefork, or limit the work inside the handler (time-outs of its requests).",
        )


def check_eager(project: Project) -> Iterator[Problem]:
    """task_always_eager, which does less than its name says (W004)."""
    if project.celery.get("task_always_eager"):
        yield Problem(
            "W004",
            "Celery's task_always_eager is on. It runs ordinary tasks in the calling process; "
            "events are published to the broker and handled by workers all the same.",
            'For development and tests set AMQP_EVENTS["BACKEND"] to "inline" or "memory".',
        )


def check_celery_queues(project: Project) -> Iterator[Problem]:
    """Celery queues with names of ours (E020) or in our namespace (W011)."""
    if not project.celery:
        return
    declared = topology.build(project.settings, project.registry)
    ours = {queue.name for queue in declared.queues}
    used = {
        "task_queues": _queue_names(project.celery["task_queues"]),
        "task_default_queue": _queue_names([project.celery["task_default_queue"]]),
        "task_routes": _routed(project.celery["task_routes"]),
    }
    for option, names in used.items():
        for name in sorted(names):
            if name in ours:
                yield Problem(
                    "E020",
                    f"Celery's {option} names {name!r}, a queue of this service's events.",
                    "Take it out. Workers consume the events' queues by themselves; Celery would "
                    "declare it with other arguments, which RabbitMQ refuses (406), and put "
                    "ordinary tasks among events.",
                )
            elif declared.owns(name):
                yield Problem(
                    "W011",
                    f"Celery's {option} names {name!r}, which begins like the names of this "
                    f"service's own queues.",
                    "Choose another name: `events_declare --delete-stale` takes it for a queue "
                    "that a removed handler has left.",
                )


def _queue_names(value: Any) -> set[str]:
    """Return names from ``task_queues``: a mapping, or queues, or names."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return set()
    names = (getattr(item, "name", item) for item in value)
    return {name for name in names if isinstance(name, str)}


def _routed(value: Any) -> set[str]:
    """Return the queues that ``task_routes`` names; routers that are functions are not asked."""
    if isinstance(value, (list, tuple)):
        return set().union(*(_routed(item) for item in value))
    if not isinstance(value, Mapping):
        return set()
    routes = (
        route.get("queue") if isinstance(route, Mapping) else route for route in value.values()
    )
    return _queue_names(list(routes))
