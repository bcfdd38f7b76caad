"""System checks: errors and risks, found before a worker or a publish finds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as CheckWarning

from .. import conf
from ..declare import declarations, registry
from ..options import Problem
from .broker import check_accounts, check_transport
from .celery_options import check_celery_queues, check_eager, check_worker
from .database import (
    check_archive_database,
    check_autocommit,
    check_database,
    check_once,
    check_outbox,
)
from .handlers import check_contracts, check_handlers
from .project import Check, read_project
from .settings import (
    check_alerts,
    check_backend,
    check_discovery,
    check_limits,
    check_redaction,
    check_renamed,
)


def check(**_kwargs: Any) -> list[CheckMessage]:
    """Check settings, declarations and the Celery app; for every ``manage.py check``."""
    return _run(CHECKS, with_problems=True)


def check_deployment(**_kwargs: Any) -> list[CheckMessage]:
    """Check what matters in production only; for ``manage.py check --deploy``."""
    return _run(DEPLOYMENT_CHECKS, with_problems=False)


def _run(checks: Sequence[Check], *, with_problems: bool) -> list[CheckMessage]:
    settings, found = conf.load()
    raw = getattr(django_settings, conf.SETTING, None)
    if not raw or not isinstance(raw, Mapping):
        return [_message(problem) for problem in found if with_problems]
    declared = registry.build(settings, *declarations.declarations.snapshot())
    project = read_project(settings, declared)
    problems = [*found, *declared.problems, *project.problems] if with_problems else []
    for function in checks:
        problems.extend(function(project))
    return [_message(problem) for problem in problems]


def _message(problem: Problem) -> CheckMessage:
    kind = Error if problem.is_error else CheckWarning
    return kind(problem.message, hint=problem.hint, id=f"django_amqp_events.{problem.code}")


CHECKS: Final[tuple[Check, ...]] = (
    check_discovery,
    check_contracts,
    check_handlers,
    check_database,
    check_renamed,
    check_redaction,
    check_archive_database,
    check_once,
    check_autocommit,
    check_outbox,
    check_limits,
    check_alerts,
    check_transport,
    check_worker,
    check_eager,
    check_celery_queues,
)


DEPLOYMENT_CHECKS: Final[tuple[Check, ...]] = (check_accounts, check_backend)
