"""Checks of the Celery app and the libraries below it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from celery import Celery
from celery.app import backends, default_app
from celery.utils.time import rate as per_second

from ..broker.connection import build_connection, current_celery_app, is_default_app
from ..broker.topology import build
from ..declare.registry import Handler
from ..exceptions import ConfigurationError
from ..options import Problem
from ..worker.bootstrap import check_libraries, check_queues
from ..worker.pools import pool_problem
from ..worker.prefetch import RUNNING, WAITING, events_per_second, lowest_rate, run_limit
from ..worker.task import HandlerTask, new_task
from .project import Project


def check_transport(project: Project) -> Iterator[Problem]:
    """A broker that is not RabbitMQ through py-amqp (E027)."""
    if project.app is None:
        return
    try:
        build_connection(project.app)
    except ConfigurationError as exc:
        yield Problem(
            "E027",
            f"Nothing is published, and no worker starts: {exc}.",
            "Use amqp:// or pyamqp://, or a second Celery app for events (CELERY_APP). Celery "
            "prefers CELERY_BROKER_URL of the environment to the settings of every app. See "
            "docs/redis.md.",
        )


def check_worker(project: Project) -> Iterator[Problem]:
    """Celery options with which a worker exits, or events are repeated (E018, W003, W025, W075)."""
    if project.app is None or not project.registry.handlers:
        return
    celery = project.app.conf
    if celery.broker_channel_error_retry is not True:
        yield Problem(
            "E018",
            "Celery's broker_channel_error_retry is not True: the worker exits when RabbitMQ "
            "closes a channel (after a consumer timeout, or when a queue is deleted).",
            "Set it to True. `manage.py events_worker` does so itself; silence this check if no "
            "other worker runs the handlers.",
        )
    if celery.worker_cancel_long_running_tasks_on_connection_loss is not True:
        yield Problem(
            "W003",
            "Celery's worker_cancel_long_running_tasks_on_connection_loss is not True: after a "
            "lost connection a handler keeps running while its event is delivered again.",
            "Set it to True. `manage.py events_worker` does so itself.",
        )
    if not celery.broker_heartbeat:
        yield Problem(
            "W025",
            f"Celery's broker_heartbeat is {celery.broker_heartbeat!r}: RabbitMQ keeps a dead "
            f"connection, with the events delivered there, for hours, and a worker behind a load "
            f"balancer may not notice it.",
            "Set it to 60, or remove it: the default is 120.",
        )
    if problem := pool_problem(celery.worker_pool):
        yield Problem(
            "W075",
            f"Celery's worker_pool is {celery.worker_pool!r}, so a worker with handlers does not "
            f"start: {problem}",
            "Remove worker_pool, or start workers with --pool prefork, threads or solo. See "
            "docs/pools.md.",
        )


def check_start(project: Project) -> Iterator[Problem]:
    """What a worker does with the handlers when it starts (E013).

    Nothing is imported or registered here: workers run the checks while they import the tasks. So
    of tasks with the name of a handler, only those are found whose module is imported.
    """
    app, handlers = project.app, project.registry.handlers
    if app is None or not handlers:
        return
    try:
        check_libraries()
        check_queues(app, build(project.settings, project.registry))
        # Its class only: an instance may connect.
        backends.by_url(app.backend_cls or app.conf.result_backend, app.loader)
        for handler in handlers.values():
            task = _bound(app, handler)
            try:
                per_second(task.rate_limit)
            except (KeyError, ValueError):
                raise ConfigurationError(
                    f"Celery's rate limit of handler {handler.name!r} is {task.rate_limit!r}, not "
                    f"a number per second, or a string such as '10/s', '100/m' or '1000/h'"
                ) from None
    except Exception as exc:  # noqa: BLE001 - it runs the project's modules and classes
        yield Problem(
            "E013",
            f"No worker starts: {type(exc).__name__}: {exc}.",
            "Correct the setting, the handler or the module that the message names.",
        )


def _bound(app: Celery, handler: Handler) -> HandlerTask:
    """Return the task of a handler as a worker has it, with Celery's settings for it."""
    task = new_task(app, handler)
    task.bind(app)
    return task


def check_consumer_timeout(project: Project) -> Iterator[Problem]:
    """Limits of handlers that do not fit into the consumer timeout or queue (W026, E042, W074)."""
    timeout = project.settings.consumer_timeout
    longest, wait, lowest = RUNNING * timeout, WAITING * timeout, lowest_rate(timeout)
    hint = "or set AMQP_EVENTS['CONSUMER_TIMEOUT'] to RabbitMQ's, if it is longer."
    hard = soft = None
    if project.app is not None:
        celery = project.app.conf
        hard, soft = celery.task_time_limit, celery.task_soft_time_limit
    for handler in project.registry.handlers.values():
        limited: Handler | HandlerTask = handler
        if project.app is not None:
            with suppress(Exception):  # reported by check_start
                limited = _bound(project.app, handler)
        limit = run_limit(limited, hard, soft)
        if limit is not None and limit > longest:
            yield Problem(
                "W026",
                f"Handler {handler.name!r} has a time limit of {limit:g} s, but RabbitMQ closes "
                f"the channel {timeout:g} s after the delivery, and the event may wait {wait:g} s "
                f"of that for its run.",
                f"Set the limit to at most {longest:g} s, {hint}",
            )
        pace = limited.rate_limit
        if 0 < events_per_second(pace) < lowest:
            yield Problem(
                "E042",
                f"Handler {handler.name!r} has the rate limit {pace}, but a worker cannot keep "
                f"its events that long: it would let {3600 * lowest:g} an hour begin.",
                f"Set the limit to at least {3600 * lowest:g}/h, {hint}",
            )
        elif events_per_second(pace) and len(project.registry.by_queue()[handler.queue]) > 1:
            yield Problem(
                "W074",
                f"Handler {handler.name!r} has a rate limit in the queue {handler.queue!r} of "
                f"several handlers: those wait with it, since a worker holds few of its events.",
                "Give the handler a queue of its own.",
            )


def check_current_app(project: Project) -> Iterator[Problem]:
    """An app for events that is also the current one for tasks (W016)."""
    app = project.app
    if app is None or not project.settings.celery_app:
        return
    current = current_celery_app()
    # In other threads, the default app is the current one.
    if current is app and default_app != app and not is_default_app(default_app):
        yield Problem(
            "W016",
            f"The Celery app of the events, {app.main!r}, is also the current app of the main "
            f"thread, so @shared_task publishes to its broker there.",
            "Create it with Celery(…, set_as_current=False), after the project's own app.",
        )
