"""The project as the checks see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from celery import Celery

from ..broker import connection
from ..conf import Settings
from ..declare.registry import Registry
from ..exceptions import ConfigurationError
from ..options import Problem

CELERY_OPTIONS: Final = (
    "broker_channel_error_retry",
    "broker_heartbeat",
    "task_default_queue",
    "task_default_rate_limit",
    "task_queues",
    "task_soft_time_limit",
    "task_time_limit",
    "worker_cancel_long_running_tasks_on_connection_loss",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """The subject of the checks; without a Celery app that can be read, ``celery`` is empty."""

    settings: Settings
    registry: Registry
    app: Celery | None = None
    celery: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


Check = Callable[[Project], Iterable[Problem]]


def read_project(settings: Settings, declared: Registry) -> Project:
    """Read what the checks need; the Celery app that cannot be read is a problem itself."""
    project = Project(settings=settings, registry=declared)
    if settings.backend != "amqp":
        return project
    try:
        app = connection.celery_app(settings)
        celery = {name: getattr(app.conf, name) for name in CELERY_OPTIONS}
        return replace(project, app=app, celery=celery)
    except ConfigurationError as exc:
        why = str(exc)
    except Exception as exc:  # noqa: BLE001 - the user's modules may raise anything
        why = f"{settings.celery_app or 'the Celery app'}: {type(exc).__name__}: {exc}"
    problem = Problem(
        "E015",
        f"There is no Celery app, so events have no broker and no worker: {why}.",
        "Create one in the project's celery.py and import it in its __init__.py, or correct "
        "AMQP_EVENTS['CELERY_APP'] or the module that the error comes from.",
    )
    return replace(project, problems=(problem,))
