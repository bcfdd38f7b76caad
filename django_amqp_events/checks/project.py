"""The project as the checks see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from celery import Celery
from kombu.transport import supports_librabbitmq

from ..broker import connection
from ..conf import Settings
from ..declare.registry import Registry
from ..exceptions import ConfigurationError
from ..options import Problem

CELERY_OPTIONS: Final = (
    "broker_channel_error_retry",
    "broker_heartbeat",
    "task_default_queue",
    "task_queues",
    "task_soft_time_limit",
    "task_time_limit",
    "worker_cancel_long_running_tasks_on_connection_loss",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """The subject of the checks.

    Attributes:
        celery: options of the Celery app, empty without one.
        transports: of the brokers that it may connect to, as kombu names them.
    """

    settings: Settings
    registry: Registry
    celery: Mapping[str, Any] = field(default_factory=dict)
    transports: frozenset[str] = frozenset()
    problems: tuple[Problem, ...] = ()


Check = Callable[[Project], Iterable[Problem]]


def read_project(settings: Settings, declared: Registry) -> Project:
    """Read what the checks need; the Celery app that cannot be read is a problem itself."""
    project = Project(settings=settings, registry=declared)
    if settings.backend != "amqp":
        return project

    if not settings.celery_app and connection.is_default_app(connection.current_celery_app()):
        problem = Problem(
            "E015",
            "The project has no Celery app, so events have no broker and no worker.",
            "Create one in the project's celery.py and import it in its __init__.py, "
            "or set AMQP_EVENTS['CELERY_APP'] = 'project.celery.app'.",
        )
        return replace(project, problems=(problem,))
    try:
        app = connection.celery_app(settings)
        celery = {name: getattr(app.conf, name) for name in CELERY_OPTIONS}
        return replace(project, celery=celery, transports=frozenset(_transports(app)))
    except ConfigurationError as exc:
        what = f"{exc}."
    except Exception as exc:  # noqa: BLE001 - the user's modules may raise anything
        app_name = settings.celery_app or "of this project"
        what = f"The Celery app {app_name} cannot be read: {type(exc).__name__}: {exc}."
    hint = "Correct CELERY_APP or the module that the error comes from."
    return replace(project, problems=(Problem("E016", what, hint),))


def _transports(app: Celery) -> Iterator[str]:
    """Yield the transport of every broker that the app may connect to.

    Without a kombu connection, which would import the transport's client library.
    """
    options = app.conf
    for option in (options.broker_read_url, options.broker_write_url):
        for url in connection.broker_urls(option):
            scheme, separator, _ = str(url).partition("://")
            # As in kombu: broker_transport wins, and a scheme may be in capitals.
            given = options.get("broker_transport") or (scheme.lower() if separator else "amqp")
            uses_c = given == "amqp" and supports_librabbitmq()
            yield "librabbitmq" if uses_c else str(given)
