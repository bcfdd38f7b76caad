"""Export archived events with all their rows, one JSON document per line.

Bodies and headers are base64, byte for byte. With a redaction hook, a document has the redacted
payload instead of them. What is derived from an event, its group and search values, is not
exported.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from django.db import models
from django.db.models import Prefetch, QuerySet

from ..models import ArchiveAction, ArchivedEvent, ArchivedFailure, Replay, Revision
from ..reasons import Reason
from . import redaction, tables

#: Version of a document.
FORMAT: Final = 1
KIND: Final = "archived-event"
#: The rows of an event, by their related name, in their order.
_PARTS: Final[Mapping[str, tuple[str, QuerySet[Any]]]] = {
    "revisions": ("revision_set", Revision.objects.order_by("number")),
    "replays": ("replay_set", Replay.objects.exclude(number=None).order_by("number")),
    "failures": ("failure_set", ArchivedFailure.objects.order_by("failed_at", "pk")),
    "actions": ("action_set", ArchiveAction.objects.order_by("at", "pk")),
}
#: Columns that contain the payload.
_SECRET: Final = frozenset({"body", "headers_raw"})
#: Columns that refer to other rows of the database, or are derived. An action's group is exported:
#: it is the group at that time.
_FOREIGN: Final = frozenset(
    {(ArchiveAction, "id"), (ArchivedEvent, "group"), (Replay, "batch"), (Replay, "position")}
)


def export(
    rows: QuerySet[ArchivedEvent], *, sight: Callable[[ArchivedEvent], redaction.Sight]
) -> Iterator[str]:
    """Yield a line for each event, in the order of their ids, in bounded memory.

    Args:
        rows: read in pieces, so an event that changes meanwhile may be left out.
        sight: what of an event's payload is exported; "none" leaves the event out.
    """
    for ids in tables.in_chunks(rows):
        for document in _documents(rows.db, ids, sight):
            yield json.dumps(document, allow_nan=False) + "\n"


def _documents(
    using: str, ids: list[UUID], sight: Callable[[ArchivedEvent], redaction.Sight]
) -> Iterator[dict[str, Any]]:
    children = [Prefetch(related, rows.using(using)) for related, rows in _PARTS.values()]
    events = ArchivedEvent.objects.using(using).filter(pk__in=ids).prefetch_related(*children)
    for event in events.order_by("pk"):
        if (seen := sight(event)) == "none":
            continue
        hidden = seen == "redacted"
        document: dict[str, Any] = {"version": FORMAT, "kind": KIND, "redacted": hidden}
        document["event"] = _columns(event, hidden=hidden)
        if hidden:
            document["payload"], document["problem"] = _redacted(event.name, event.payload)
        for name, (related, _) in _PARTS.items():
            document[name] = [
                _child(child, event, hidden=hidden) for child in getattr(event, related).all()
            ]
        yield document


def _columns(row: models.Model, *, hidden: bool) -> dict[str, Any]:
    """Return the columns of a row that mean the same in every database, as JSON types."""
    written: dict[str, Any] = {}
    for column in row._meta.concrete_fields:  # noqa: SLF001 - Django's public _meta
        if column.name == "event" or (type(row), column.name) in _FOREIGN:
            continue
        if hidden and column.name in _SECRET:
            continue
        value = getattr(row, column.attname)
        if isinstance(value, Reason):
            value = value.as_json()
        elif isinstance(value, (bytes, bytearray, memoryview)):
            value = b64encode(bytes(value)).decode()
        elif isinstance(value, datetime):
            value = value.astimezone(UTC).isoformat()
        elif isinstance(value, UUID):
            value = str(value)
        written[column.name] = value
    return written


def _child(row: models.Model, event: ArchivedEvent, *, hidden: bool) -> dict[str, Any]:
    written = _columns(row, hidden=hidden)
    if hidden and isinstance(row, Revision):
        written["payload"], written["problem"] = _redacted(event.name, row.payload)
    return written


def _redacted(name: str, payload: Mapping[str, Any] | None) -> tuple[Any, str]:
    if payload is None:
        return None, "it cannot be decoded, so it cannot be redacted"
    redacted = redaction.redact_json(name, payload)
    return (None, str(redacted)) if isinstance(redacted, Reason) else (redacted, "")
