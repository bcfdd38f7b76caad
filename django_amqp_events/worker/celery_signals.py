"""Connect Celery's worker signals, without importing what only a worker needs.

Every process of a project imports this module, web servers and management commands included. The
rest of the package is imported when Celery signals that the process is a worker.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from celery import Celery
from celery.app import app_or_default, default_app
from celery.signals import celeryd_init, worker_init, worker_process_init

_project_app: Celery | None = None


def connect() -> None:
    """Connect the signals, when Django is ready; they have no effect outside workers."""
    global _project_app  # noqa: PLW0603 - a worker replaces it before its first signal
    # Without a default app, Celery would create one.
    _project_app = app_or_default() if default_app else None
    celeryd_init.connect(_read_queue_options, dispatch_uid="django_amqp_events.queues", weak=False)
    worker_init.connect(_install, dispatch_uid="django_amqp_events.install", weak=False)
    worker_process_init.connect(_prepare, dispatch_uid="django_amqp_events.prepare", weak=False)


def _read_queue_options(instance: Any, **_: Any) -> None:
    _bootstrap().read_queue_options(instance)


def _install(sender: Any, **_: Any) -> None:
    _bootstrap().install(sender, _project_app)


def _prepare(**_: Any) -> None:
    _bootstrap().prepare_process(_project_app)


def _bootstrap() -> ModuleType:
    try:
        from . import bootstrap
    except Exception as exc:
        # Celery's signals swallow Exception, and the worker would start without handlers.
        raise SystemExit(f"django_amqp_events: this worker does not start: {exc!r}") from exc
    return bootstrap
