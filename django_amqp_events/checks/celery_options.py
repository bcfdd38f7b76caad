"""Checks of the Celery app."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from celery.app import default_app

from ..broker import topology
from ..broker.connection import celery_app, current_celery_app, is_default_app
from ..declare.registry import Handler
from ..options import Problem
from ..worker.pools import pool_problem
from ..worker.prefetch import RUNNING, WAITING, events_per_second, lowest_rate, run_limit
from .handlers import listed
from .project import Project

_DANGEROUS_CONTENT: Final = {
    "pickle": "pickle",
    "application/x-python-serialize": "pickle",
    "yaml": "yaml",
    "application/x-yaml": "yaml",
}


def check_worker(project: Project) -> Iterator[Problem]:
    """Celery options with which a worker loses, repeats or endangers events."""
    celery, handlers = project.celery, project.registry.handlers
    if not celery or not handlers:
        return
    if celery["broker_channel_error_retry"] is not True:
        yield Problem(
            "E018",
            "Celery's broker_channel_error_retry is not True: the worker exits when RabbitMQ "
            "closes a channel (after a consumer timeout, or when a queue is deleted).",
            "Set it to True. `manage.py events_worker` does so itself; silence this check if no "
            "other worker runs the handlers.",
        )
    if celery["worker_cancel_long_running_tasks_on_connection_loss"] is not True:
        yield Problem(
            "W003",
            "Celery's worker_cancel_long_running_tasks_on_connection_loss is not True: after a "
            "lost connection a handler keeps running while its event is delivered again.",
            "Set it to True. `manage.py events_worker` does so itself.",
        )
    if not celery["broker_heartbeat"]:
        yield Problem(
            "W025",
            f"Celery's broker_heartbeat is {celery['broker_heartbeat']!r}: RabbitMQ keeps a dead "
            f"connection, with the events delivered there, for hours, and a worker behind a load "
            f"balancer may not notice it.",
            "Set it to 60, or remove it: the default is 120.",
        )
    accepted = celery["accept_content"]
    if isinstance(accepted, Iterable):
        dangerous = {_DANGEROUS_CONTENT[c] for c in map(str, accepted) if c in _DANGEROUS_CONTENT}
        if dangerous:
            yield Problem(
                "W005",
                f"Celery's accept_content includes {listed(sorted(dangerous))}. Events are always "
                f"JSON, but in the worker's other queues such a message can run code (pickle) or "
                f"exhaust the memory (yaml).",
                "Set accept_content to ['json'], or run the handlers in a worker of their own.",
            )
    yield from _check_pool(str(celery["worker_pool"]), handlers.values())


def _check_pool(pool: str, handlers: Iterable[Handler]) -> Iterator[Problem]:
    if problem := pool_problem(pool):
        yield Problem(
            "E019",
            f"Celery's worker_pool cannot run handlers: {problem}",
            "Use prefork or threads.",
        )
        return
    if "solo" in pool:
        yield Problem(
            "W006",
            f"Celery's worker_pool is {pool!r}: the worker sends no heartbeats while a handler "
            f"runs, so RabbitMQ closes the connection and delivers the event again.",
            "Use prefork or threads, or keep handlers far shorter than the heartbeat.",
        )
    limited = [h.name for h in handlers if h.time_limit or h.soft_time_limit]
    if limited and ("solo" in pool or "thread" in pool):
        yield Problem(
            "W007",
            f"Handlers {listed(limited)} have a time limit, which Celery's worker_pool {pool!r} "
            f"does not enforce.",
            "Use prefork, or set time-outs inside the handlers.",
        )


def check_consumer_timeout(project: Project) -> Iterator[Problem]:
    """Limits of handlers that do not fit into RabbitMQ's consumer timeout (W026, E042)."""
    timeout = project.settings.consumer_timeout
    longest, wait = RUNNING * timeout, WAITING * timeout
    hint = "or set AMQP_EVENTS['CONSUMER_TIMEOUT'] to RabbitMQ's, if it is longer."
    hard, soft, general = map(
        project.celery.get, ("task_time_limit", "task_soft_time_limit", "task_default_rate_limit")
    )
    lowest = lowest_rate(timeout)
    for handlers in project.registry.by_queue().values():
        for handler in handlers:
            limit = run_limit(handler, hard, soft)
            if limit is not None and limit > longest:
                yield Problem(
                    "W026",
                    f"Handler {handler.name!r} has a time limit of {limit:g} s, but RabbitMQ "
                    f"closes the channel {timeout:g} s after the delivery, and the event may wait "
                    f"{wait:g} s of that for its run.",
                    f"Set the limit to at most {longest:g} s, {hint}",
                )
            pace = handler.rate_limit or general
            rate = events_per_second(pace)
            if 0 < rate < lowest:
                yield Problem(
                    "E042",
                    f"Handler {handler.name!r} has the rate limit {pace}, but a worker cannot keep "
                    f"its events that long: it would let {3600 * lowest:g} an hour begin.",
                    f"Set the limit to at least {3600 * lowest:g}/h, {hint}",
                )


def check_eager(project: Project) -> Iterator[Problem]:
    """task_always_eager, which has no effect on events (W004)."""
    if project.celery.get("task_always_eager"):
        yield Problem(
            "W004",
            "Celery's task_always_eager is on, but it applies to ordinary tasks only: events are "
            "published to the broker and handled by workers.",
            "For development and tests, set AMQP_EVENTS['BACKEND'] to 'inline' or 'memory'.",
        )


def check_current_app(project: Project) -> Iterator[Problem]:
    """An app for events that is also the current one for tasks (W016)."""
    if not (project.settings.celery_app and project.celery):
        return
    app = celery_app(project.settings)
    current = current_celery_app()
    # In other threads, the default app is the current one.
    if current is app and default_app != app and not is_default_app(default_app):
        yield Problem(
            "W016",
            f"The Celery app of the events, {app.main!r}, is also the current app of the main "
            f"thread, so @shared_task publishes to its broker there.",
            "Create it with Celery(…, set_as_current=False), after the project's own app.",
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
                    "Remove it. Workers consume that queue without it, and Celery would declare it "
                    "with other arguments, which RabbitMQ refuses (406).",
                )
            elif declared.owns(name):
                yield Problem(
                    "W011",
                    f"Celery's {option} names {name!r}, which begins like this service's queues.",
                    "Choose another name, because `events_declare --delete-stale` takes it for the "
                    "queue of a removed handler.",
                )


def _queue_names(value: Any) -> set[str]:
    """Return names from ``task_queues``: a mapping, or queues, or names."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return set()
    names = (getattr(item, "name", item) for item in value)
    return {name for name in names if isinstance(name, str)}


def _routed(value: Any) -> set[str]:
    """Return the queues that ``task_routes`` names, except those of functions."""
    if isinstance(value, (list, tuple)):
        return set().union(*(_routed(item) for item in value))
    if not isinstance(value, Mapping):
        return set()
    routes = (
        route.get("queue") if isinstance(route, Mapping) else route for route in value.values()
    )
    return _queue_names(list(routes))
