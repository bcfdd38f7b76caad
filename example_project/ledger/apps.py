"""Keep the ledger: one row per confirmed event, one per attempt of a handler."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from celery.signals import task_postrun, task_prerun
from django.apps import AppConfig

from django_amqp_events.signals import event_published


class LedgerConfig(AppConfig):
    name = "example_project.ledger"

    def ready(self) -> None:
        event_published.connect(_published, dispatch_uid="ledger")
        task_prerun.connect(_began, dispatch_uid="ledger", weak=False)
        task_postrun.connect(_ended, dispatch_uid="ledger", weak=False)


def _published(event_id: str, name: str, **_: Any) -> None:
    from .models import Published

    Published.objects.get_or_create(event_id=event_id, defaults={"name": name})


def _began(task: Any, **_: Any) -> None:
    # Handlers are Celery tasks, so Celery sends its signals; an ordinary task has no event.
    if getattr(task, "event", None) is not None:
        task.request.began_at = datetime.now(UTC)


def _ended(task: Any, state: str | None = None, retval: Any = None, **_: Any) -> None:
    event = getattr(task, "event", None)
    if event is None:
        return
    from .models import Attempt

    Attempt.objects.create(
        handler=task.name,
        event_id=event.id,
        event_name=event.name,
        attempt=event.attempt,
        state=state or "",
        # Celery's Retry contains the exception.
        exception=str(getattr(retval, "exc", None) or retval)[:200] if state != "SUCCESS" else "",
        due_at=event.due_at,
        began_at=getattr(task.request, "began_at", None) or datetime.now(UTC),
        ended_at=datetime.now(UTC),
    )
