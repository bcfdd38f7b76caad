"""The project as the checks see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import urlsplit

from celery import Celery
from kombu.transport import supports_librabbitmq

from ..broker import connection
from ..conf import Settings
from ..declare.registry import Registry
from ..exceptions import ConfigurationError
from ..options import Problem

CELERY_OPTIONS: Final = (
    "accept_content",
    "broker_channel_error_retry",
    "broker_heartbeat",
    "task_always_eager",
    "task_default_queue",
    "task_default_rate_limit",
    "task_queues",
    "task_routes",
    "task_soft_time_limit",
    "task_time_limit",
    "worker_cancel_long_running_tasks_on_connection_loss",
    "worker_pool",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A broker as the Celery app reaches it."""

    transport: str
    user: str
    login_method: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """The subject of the checks; without a Celery app, ``celery`` and ``servers`` are empty."""

    settings: Settings
    registry: Registry
    celery: Mapping[str, Any] = field(default_factory=dict)
    servers: frozenset[Server] = frozenset()
    problems: tuple[Problem, ...] = ()


Check = Callable[[Project], Iterable[Problem]]


def read_project(settings: Settings, declared: Registry) -> Project:
    """Read what the checks need; the Celery app that cannot be read is a problem itself."""
    project = Project(settings=settings, registry=declared)
    if settings.backend != "amqp":
        return project

    def failed(code: str, message: str, hint: str) -> Project:
        return replace(project, problems=(Problem(code, message, hint),))

    if not settings.celery_app and connection.is_default_app(connection.current_celery_app()):
        return failed(
            "E015",
            "The project has no Celery app, so events have no broker and no worker.",
            "Create one in the project's celery.py and import it in its __init__.py, "
            "or set AMQP_EVENTS['CELERY_APP'] = 'project.celery.app'.",
        )
    try:
        app = connection.celery_app(settings)
    except ConfigurationError as exc:
        hint = "Correct CELERY_APP, or remove it to use the current app."
        return failed("E016", f"{exc}.", hint)
    except Exception as exc:  # noqa: BLE001 - the user's module may raise anything
        return failed(
            "E016",
            f"AMQP_EVENTS['CELERY_APP'] is {settings.celery_app!r}, which cannot be imported: "
            f"{type(exc).__name__}: {exc}.",
            "Fix the module.",
        )
    try:
        celery = {name: getattr(app.conf, name) for name in CELERY_OPTIONS}
        return replace(project, celery=celery, servers=frozenset(_servers(app)))
    except Exception as exc:  # noqa: BLE001 - configuration is read from the user's modules
        return failed(
            "E017",
            f"The configuration of the Celery app {app.main!r} cannot be read: "
            f"{type(exc).__name__}: {exc}.",
            "Correct it. `celery -A … inspect ping` shows the same error.",
        )


def _servers(app: Celery) -> Iterator[Server]:
    """Yield every broker that the app may connect to.

    Without a kombu connection, which would import the transport's client library.
    """
    options = app.conf
    for option in (options.broker_read_url, options.broker_write_url):
        for url in connection.broker_urls(option):
            scheme, separator, _ = str(url).partition("://")
            # As in kombu: broker_transport wins, and a scheme may be in capitals.
            given = options.get("broker_transport") or (scheme.lower() if separator else "amqp")
            transport = str(given)
            if transport == "amqp" and supports_librabbitmq():
                transport = "librabbitmq"
            # py-amqp's default user is guest (amqp.Connection).
            user = _url_user(str(url)) or options.get("broker_user") or "guest"
            yield Server(
                transport=transport,
                user=str(user),
                login_method=str(options.get("broker_login_method") or ""),
            )


def _url_user(url: str) -> str:
    try:
        return urlsplit(url).username or ""
    except ValueError:
        return ""
