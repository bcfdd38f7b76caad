"""A service with its mirror, and its archive as another process sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from django_amqp_events.models import ArchivedEvent

from .conftest import Make
from .harness import (
    Eyes,
    Service,
    Worker,
    until,
)

#: The mirror as it is, but that it looks for old claims more often.
_MIRROR = """
import testproject, django
django.setup()
from django.core.management import call_command
from django_amqp_events import conf
from django_amqp_events.archive import mirror, replay
replay.LEASE = {lease} - 3 * conf.get_settings().confirm_timeout
mirror.SWEEP = (0.2, 0.2)
call_command("events_mirror")
"""

_REPLAY = """
import json, os, signal
from django_amqp_events.archive import replay, states
from django_amqp_events.publish import publisher
from django_amqp_events.models import ArchivedEvent

def die(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)

{before}
seen = dict(ArchivedEvent.objects.filter(**{wanted}).values_list("pk", "version"))
report = replay.replay(seen, by="ada", **{options})
print("REPORT", json.dumps({{
    "published": len(report.published),
    "returned": [str(each.why) for each in report.returned],
    "skipped": [str(each.why) for each in report.skipped],
    "stopped": str(report.stopped or ""),
}}))
"""

#: Columns and properties that tests look at.
_EVENT = (
    "event_id", "handler", "state", "reason", "attempts", "replays", "error", "unconfirmed",
    "exception", "task_id",
)  # fmt: skip
_REPLAY_COLUMNS = ("number", "state", "publishes", "handler", "task_id")


def make(service: Make, eyes: Eyes, **options: Any) -> Service:
    """Make the service, declared, with the tables of its archive."""
    made: Service = service(eyes, "replays", **{"handlers": "replays", **options})
    made.declare()
    if "environ" not in options:
        made.migrate()
    return made


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


def mirror(service: Service, lease: float = 60) -> Worker:
    """Start the mirror of a service; it takes a claim over after *lease* seconds."""
    return service.start("-c", _MIRROR.format(lease=lease), program=(), name="mirror")


def mirror_once(service: Service) -> str:
    """Mirror the waiting archive messages."""
    return service.python(
        "from django.core.management import call_command as c\nc('events_mirror', until_empty=True)"
    )


def replay(service: Service, before: str = "", **wanted: Any) -> dict[str, Any] | None:
    """Replay in a process of its own; ``None`` where that was killed.

    Args:
        before: what is done in the process first.
        wanted: which rows, as Django's filter has it.
    """
    options = wanted.pop("options", {})
    wanted = wanted or {"state": "archived"}
    code = _REPLAY.format(before=before, wanted=repr(wanted), options=repr(options))
    printed = service.python(code, check=False)
    if "REPORT " not in printed:
        assert "Traceback" not in printed, printed
        return None
    report: dict[str, Any] = _document(printed, "REPORT")
    return report


def _document(printed: str, word: str) -> Any:
    """Read what was printed behind a word; what was logged comes after it."""
    return json.JSONDecoder().raw_decode(printed.partition(f"{word} ")[2])[0]


def resume(service: Service, lease: float = 0) -> int:
    printed = service.python(
        "from django_amqp_events.archive import replay\n"
        f"print('RESUMED', replay.resume(lease={lease}))"
    )
    return int(_document(printed, "RESUMED"))


def rows(service: Service, **wanted: Any) -> list[dict[str, Any]]:
    """The archive, as another process reads it."""
    if "TESTPROJECT_DATABASE" in service.environ:
        found = archive()  # the test's own
    else:
        here = Path(__file__).resolve().parents[2]
        printed = service.python(
            f"import json, sys\nsys.path += [{str(here)!r}, {str(here / 'scripts')!r}]\n"
            "from tests.acceptance.replaying import archive\n"
            "print('ROWS', json.dumps(archive()))"
        )
        found = _document(printed, "ROWS")
    return [row for row in found if all(row[key] == value for key, value in wanted.items())]


def row(service: Service, **wanted: Any) -> dict[str, Any]:
    (found,) = rows(service, **wanted)
    return found


def wait_for(service: Service, number: int = 1, seconds: float = 60, **wanted: Any) -> list[Any]:
    """Wait until so many rows are like that."""

    def fit() -> list[Any]:
        found = rows(service, **wanted)
        return found if len(found) == number else []

    return until(fit, seconds, f"{number} rows with {wanted}")


def mirrored(service: Service, number: int = 1, seconds: float = 60, **wanted: Any) -> list[Any]:
    """Mirror what comes until so many rows are like that."""

    def fit() -> list[Any]:
        mirror_once(service)
        found = rows(service, **wanted)
        return found if len(found) == number else []

    return until(fit, seconds, f"{number} rows with {wanted}")


def fix(service: Service, name: str = "fixed") -> None:
    """Release the fix that the handlers wait for."""
    (service.where / name).touch()
