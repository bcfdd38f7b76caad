"""The project as the checks see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from celery import Celery

from ..broker import connection
from ..conf import Settings
from ..declare.registry import Registry
from ..exceptions import ConfigurationError
from ..options import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """The subject of the checks; ``app`` is ``None`` if there is no Celery app or it is broken."""

    settings: Settings
    registry: Registry
    app: Celery | None = None
    problems: tuple[Problem, ...] = ()


Check = Callable[[Project], Iterable[Problem]]


def read_project(settings: Settings, declared: Registry) -> Project:
    """Read what the checks need; the Celery app that cannot be read is a problem itself."""
    project = Project(settings=settings, registry=declared)
    if settings.backend != "amqp":
        return project
    try:
        app = connection.celery_app(settings)
        app.conf.get("broker_heartbeat")  # reads the configuration
        return replace(project, app=app)
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
