"""System checks: errors and risks, found before a worker or a publish finds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as CheckWarning

from .. import conf
from ..declare import registry
from ..declare.declarations import declarations
from ..options import Problem
from . import celery_options, database, handlers, settings
from .project import Check, Project, read_project

CHECKS: Final[tuple[Check, ...]] = (
    settings.check_discovery,
    handlers.check_handlers,
    handlers.check_validation,
    settings.check_renamed,
    database.check_archive_database,
    database.check_once,
    database.check_outbox,
    settings.check_limits,
    settings.check_alerts,
    settings.check_metrics,
    celery_options.check_transport,
    celery_options.check_worker,
    celery_options.check_start,
    celery_options.check_consumer_timeout,
    celery_options.check_current_app,
)
_LEVELS: Final = {"E": Error, "W": CheckWarning}


def check(**_kwargs: Any) -> list[CheckMessage]:
    """Check settings, declarations and the Celery app; for every ``manage.py check``."""
    _, problems = conf.load()
    if project := _project():
        problems = (*problems, *project.registry.problems, *project.problems)
        for function in CHECKS:
            problems = (*problems, *function(project))
    return _messages(problems)


def check_deployment(**_kwargs: Any) -> list[CheckMessage]:
    """Check what matters in production only; for ``manage.py check --deploy``."""
    project = _project()
    return _messages(settings.check_backend(project)) if project else []


def check_databases(databases: Iterable[str] | None = None, **_kwargs: Any) -> list[CheckMessage]:
    """Check database servers; for ``manage.py migrate`` and ``check --database``."""
    project = _project()
    return _messages(database.check_servers(project, databases or ())) if project else []


def _project() -> Project | None:
    raw = getattr(django_settings, conf.SETTING, None)
    if not raw or not isinstance(raw, Mapping):
        return None
    parsed, _ = conf.load()
    return read_project(parsed, registry.build(parsed, *declarations.snapshot()))


def _messages(problems: Iterable[Problem]) -> list[CheckMessage]:
    return [
        _LEVELS[problem.code[0]](
            problem.message, hint=problem.hint, id=f"django_amqp_events.{problem.code}"
        )
        for problem in problems
    ]
