"""A service whose events fail until a fix, and its archive as another process sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django_amqp_events.models import ArchivedEvent

from .harness import Service, until

#: Columns and properties that tests look at.
_EVENT = (
    "event_id", "handler", "state", "reason", "attempts", "replays", "error", "unconfirmed",
    "exception", "task_id",
)  # fmt: skip
_REPLAY_COLUMNS = ("number", "state", "publishes", "handler", "task_id")


def archive() -> list[dict[str, Any]]:
    """Return the archive that this process is connected to, as plain data."""
    events = ArchivedEvent.objects.order_by("event_id", "handler")
    return [
        {
            "id": str(event.pk),
            **{name: getattr(event, name) for name in _EVENT},
            "failures": len(event.failure_set.all()),
            "replay_set": [
                {"id": str(each.pk), **{name: getattr(each, name) for name in _REPLAY_COLUMNS}}
                for each in event.replay_set.all()
            ],
        }
        for event in events.prefetch_related("failure_set", "replay_set__event")
    ]


def replay(service: Service, **wanted: Any) -> dict[str, Any]:
    """Replay rows, by Django's filter, in a process of its own; return the report in short."""
    report: dict[str, Any] = service.value(
        "{'published': len(report.published), 'stopped': report.stopped}",
        "from django_amqp_events.archive import replay\n"
        "from django_amqp_events.models import ArchivedEvent\n"
        f"rows = ArchivedEvent.objects.filter(**{wanted or {'state': 'archived'}!r})\n"
        "report = replay.replay(dict(rows.values_list('pk', 'version')), by='ada')",
    )
    return report


def rows(service: Service, **wanted: Any) -> list[dict[str, Any]]:
    """The archive, as another process reads it."""
    here = Path(__file__).resolve().parents[2]
    found = service.value(
        "archive()",
        f"import sys\nsys.path += [{str(here)!r}, {str(here / 'scripts')!r}]\n"
        "from tests.acceptance.replaying import archive",
    )
    return [row for row in found if all(row[key] == value for key, value in wanted.items())]


def mirrored(service: Service, number: int = 1, seconds: float = 60, **wanted: Any) -> list[Any]:
    """Mirror what comes until so many rows are like that."""

    def fit() -> list[Any]:
        service.command("events_mirror", "--until-empty")
        found = rows(service, **wanted)
        return found if len(found) == number else []

    return until(fit, seconds, f"{number} rows with {wanted}")


def fix(service: Service, name: str = "fixed") -> None:
    """Release the fix that the handlers wait for."""
    (service.where / name).touch()
