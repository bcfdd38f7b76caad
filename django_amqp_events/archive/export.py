"""Export and import archived events with all their rows, one JSON document per line.

Bodies and headers are base64, byte for byte. With a redaction hook, a document has the redacted
payload instead of them and cannot be imported. An import only inserts rows: it changes and
publishes nothing. What is derived from an event, its group and search values, is not exported: an
import makes it again.
"""

from __future__ import annotations

import binascii
import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, TypeVar
from uuid import UUID

from django.core.exceptions import ValidationError
from django.db import Error, connections, models, transaction
from django.db.models import QuerySet

from ..callables import nothing
from ..databases import check_commits, error_line, is_refusal, pieces
from ..message.text import has_surrogates, printable
from ..models import (
    ArchiveAction,
    ArchivedEvent,
    ArchivedFailure,
    Replay,
    Revision,
    SearchValue,
    State,
    clean,
)
from ..models.reason_field import ReasonField
from ..reasons import Reason
from . import redaction, search_values, tables
from .entries import YEARS, valid_moment
from .groups import failure_groups, group_counts

M = TypeVar("M", bound=models.Model)

#: Version of a document.
FORMAT: Final = 1
KIND: Final = "archived-event"
#: Most events, and most bytes of their bodies, that are read together.
CHUNK: Final = 200
CHUNK_BYTES: Final = 8 * 1024 * 1024

#: The rows of an event, their order, and their large columns.
_PARTS: Final[tuple[tuple[str, Any, str, tuple[str, ...]], ...]] = (
    ("revisions", Revision, "number", ("body",)),
    ("replays", Replay, "number", ()),
    ("failures", ArchivedFailure, "failed_at", ("document",)),
    ("actions", ArchiveAction, "at", ("reason",)),
)
#: The tables that an import writes.
_TABLES: Final = [
    model._meta.db_table  # noqa: SLF001 - Django's documented name for it
    for model in (ArchivedEvent, SearchValue, *(model for _, model, *_ in _PARTS))
]
#: Columns that contain the payload.
_SECRET: Final = frozenset({"body", "headers_raw"})
#: Columns that refer to other rows of the database, or are derived. An action's group is exported:
#: it is the group at that time.
_FOREIGN: Final = frozenset(
    {(ArchiveAction, "id"), (ArchivedEvent, "group"), (Replay, "batch"), (Replay, "position")}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A line that was not imported, and why."""

    line: int
    event: str
    why: str


@dataclass(slots=True, kw_only=True)
class Imported:
    """The result of an import.

    Attributes:
        events: inserted events.
        known: events that exist with the same content.
        refused: lines that were not imported.
        stopped: it was stopped before the end.
    """

    events: int = 0
    known: int = 0
    refused: list[Refused] = field(default_factory=list)
    stopped: bool = False

    @property
    def done(self) -> int:
        return self.events + self.known + len(self.refused)


class _Wrong(Exception):
    """The reason why a line cannot be imported."""


# -- export -------------------------------------------------------------------------------


def export(
    rows: QuerySet[ArchivedEvent], *, sight: Callable[[ArchivedEvent], redaction.Sight]
) -> Iterator[str]:
    """Yield a line for each event, in the order of their ids, in bounded memory.

    Args:
        rows: read in pieces, so an event that changes meanwhile may be left out.
        sight: what of an event's payload is exported; "none" leaves the event out.
    """
    last: UUID | None = None
    page = rows.order_by("pk")
    while True:
        after = page if last is None else page.filter(pk__gt=last)
        sizes = list(after.values_list("pk", "body_size")[:CHUNK])
        if not sizes:
            return
        for ids in pieces(sizes, count=CHUNK, size=CHUNK_BYTES):
            for document in _documents(rows.db, ids, sight):
                yield json.dumps(document, allow_nan=False) + "\n"
        last = sizes[-1][0]


def _documents(
    using: str, ids: list[UUID], sight: Callable[[ArchivedEvent], redaction.Sight]
) -> Iterator[dict[str, Any]]:
    events = ArchivedEvent.objects.using(using).filter(pk__in=ids).order_by("pk")
    parts: dict[str, dict[UUID, list[Any]]] = {}
    for name, model, order, _ in _PARTS:
        of: dict[UUID, list[Any]] = {}
        children: Any = model.objects.using(using).filter(event_id__in=ids)
        if model is Replay:
            children = (
                children.exclude(number=None).select_related("revision").defer("revision__body")
            )
        for child in children.order_by(order, "pk"):
            of.setdefault(child.event_id, []).append(child)
        parts[name] = of
    for event in events:
        if (seen := sight(event)) == "none":
            continue
        hidden = seen == "redacted"
        document: dict[str, Any] = {"version": FORMAT, "kind": KIND, "redacted": hidden}
        document["event"] = _columns(event, hidden=hidden)
        for revision in parts["revisions"].get(event.pk, ()):
            revision.event = event  # without a query for each
        if hidden:
            document["payload"], document["problem"] = _redacted(event.name, event.payload)
        for name, *_ in _PARTS:
            document[name] = [
                _child(child, event, hidden=hidden) for child in parts[name].get(event.pk, ())
            ]
        yield document


def _columns(row: models.Model, *, hidden: bool) -> dict[str, Any]:
    """Return the columns of a row as JSON types."""
    written: dict[str, Any] = {}
    for column in _fields(type(row)):
        if column.name == "event" or (hidden and column.name in _SECRET):
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


def _fields(model: type[models.Model]) -> list[Any]:
    """Return the columns of a model that mean the same in every database."""
    columns = model._meta.concrete_fields  # noqa: SLF001 - Django's public _meta
    return [column for column in columns if (model, column.name) not in _FOREIGN]


def _child(row: models.Model, event: ArchivedEvent, *, hidden: bool) -> dict[str, Any]:
    written = _columns(row, hidden=hidden)
    if isinstance(row, Replay):
        # For people; the id is a column.
        written["revision_number"] = row.revision.number if row.revision else None
    if hidden and isinstance(row, Revision):
        written["payload"], written["problem"] = _redacted(event.name, row.payload)
    return written


def _redacted(name: str, payload: Mapping[str, Any] | None) -> tuple[Any, str]:
    if payload is None:
        return None, "it cannot be decoded, so it cannot be redacted"
    redacted = redaction.redact(name, payload)
    if isinstance(redacted, Reason):
        return None, str(redacted)
    try:
        json.dumps(redacted, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as exc:
        return None, f"the result of the redaction hook is not valid JSON ({error_line(exc)})"
    return redacted, ""


# -- import -------------------------------------------------------------------------------


def import_events(
    lines: Iterable[str],
    *,
    dry_run: bool = False,
    progress: Callable[[Imported], object] = nothing,
    stop: Callable[[], bool] = nothing,
) -> Imported:
    """Import exported events, each in a transaction with its rows.

    Args:
        lines: as :func:`export` wrote them; empty ones are ignored.
        dry_run: report what would be imported, change nothing.
        progress: called after each line.
        stop: called before each line; True ends.

    Raises:
        DatabaseError: the database is unreachable; imported events stay.
        ConfigurationError: nothing would be committed.
    """
    check_commits(tables.database())
    imported = Imported()
    for number, text in enumerate(lines, 1):
        if stop():
            imported.stopped = True
            break
        if not text.strip():
            continue
        event = ""
        try:
            document = _read(text)
            event = printable(str(document["event"].get("id", ""))[:100])
            if _put(document, dry_run=dry_run):
                imported.events += 1
            else:
                imported.known += 1
        except _Wrong as exc:
            imported.refused.append(Refused(line=number, event=event, why=str(exc)))
        progress(imported)
    return imported


def _read(text: str) -> dict[str, Any]:
    if has_surrogates(text):
        raise _Wrong("it is not valid UTF-8")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise _Wrong(f"it is not valid JSON: {exc}") from exc
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise _Wrong("it is not an archived event that `events_archive export` wrote")
    if document.get("version") != FORMAT:
        raise _Wrong(f"its version is {document.get('version')!r}, but this release reads {FORMAT}")
    if document.get("redacted"):
        raise _Wrong("it was exported without its body, which is redacted; export it with --raw")
    parts = [document.get(name) for name, *_ in _PARTS]
    if not isinstance(document.get("event"), dict) or not all(
        isinstance(part, list) and all(isinstance(child, dict) for child in part) for part in parts
    ):
        raise _Wrong("its event, or a list of rows, is missing")
    return document


@tables.retry_on_conflict
def _put(document: dict[str, Any], *, dry_run: bool) -> bool:
    """Insert an event; return False if it exists."""
    now = datetime.now(UTC)
    event = _row(ArchivedEvent, document["event"])
    if event.state == State.QUEUED:
        raise _Wrong(
            "it was queued when it was exported, so the mirror would publish it again; "
            "export it again after its replay"
        )
    if event.body_size != len(event.body):
        raise _Wrong(f"its body has {len(event.body)} bytes, but body_size is {event.body_size}")
    rows: dict[str, list[Any]] = {
        name: [_row(model, child, event) for child in document[name]] for name, model, *_ in _PARTS
    }
    _check_links(rows)
    try:
        _ = event.headers
    except Exception as exc:
        raise _Wrong(f"its headers cannot be read ({error_line(exc)})") from exc
    # As the mirror counts them.
    failed = {event.pk: [failure.failed_at for failure in rows["failures"] if not failure.late]}
    using = tables.database()
    try:
        with transaction.atomic(using=using):
            if tables.lock([event.pk]):
                return _known(using, event.pk, document)
            failure_groups.assign_groups([event], failed, now=now)
            event.save(using=using, force_insert=True)
            for name, model, _, large in _PARTS:
                for part in tables.statements(rows[name], *large):
                    model.objects.using(using).bulk_create(part)
            search_values.store(search_values.in_event(event, rows["revisions"]), using=using)
            group_counts.record_changes(
                {}, {event.pk: group_counts.counted_event(event)}, failed=failed, now=now,
                using=using,
            )  # fmt: skip
            if dry_run:
                if connections[using].features.can_defer_constraint_checks:
                    # COMMIT would check them.
                    connections[using].check_constraints(_TABLES)
                transaction.set_rollback(True, using=using)
    except (Error, OverflowError) as exc:
        if isinstance(exc, Error) and not is_refusal(exc):
            raise
        raise _Wrong(f"the database refuses it ({error_line(exc)})") from exc
    return True


def _known(using: str, pk: UUID, document: dict[str, Any]) -> bool:
    [there] = _documents(using, [pk], lambda _: "raw")
    differs = [
        name for name in there["event"] if there["event"][name] != document["event"].get(name)
    ]
    differs += [name for name, *_ in _PARTS if there[name] != document[name]]
    if differs:
        raise _Wrong(f"it exists with other content: {', '.join(differs)}")
    return False


def _row(model: type[M], columns: Mapping[str, Any], event: ArchivedEvent | None = None) -> M:
    """Build a row from its columns; refuse missing, unknown and invalid ones."""
    fields: dict[str, Any] = {}
    names = set()
    for column in _fields(model):
        if column.name == "event":
            fields["event"] = event
            continue
        names.add(column.name)
        if column.name not in columns:
            raise _Wrong(f"a {model.__name__} has no {column.name!r}")
        fields[column.attname] = _value(column, columns[column.name], model)
    surplus = set(columns) - names - {"revision_number"}
    if surplus:
        raise _Wrong(f"{min(surplus)!r} is not a column of {model.__name__}")
    return model(**fields)


def _value(column: Any, value: Any, model: type[models.Model]) -> Any:
    try:
        if isinstance(column, models.BinaryField):
            return b64decode(value, validate=True)
        if column.is_relation:
            column = column.target_field
            if value is None:
                return None
        elif value is None and column.null:
            return None
        if isinstance(column, ReasonField):
            if not isinstance(value, (dict, type(None))):
                raise TypeError("it is not a reason")
            return column.to_python(value)
        if value is None or isinstance(value, (dict, list)):
            raise ValueError("the type is wrong")
        if isinstance(column, models.DateTimeField):
            moment = datetime.fromisoformat(value)
            if moment.tzinfo is None:
                raise ValueError("the time zone is missing")
            if valid_moment(moment) is None:
                raise ValueError(f"the year is not from {YEARS[0]} to {YEARS[-1]}")
            return moment
        if isinstance(column, (models.CharField, models.TextField)):
            if not isinstance(value, str):
                raise TypeError("it is not a text")
            if column.max_length and len(value) > column.max_length:
                raise ValueError(f"it has more than {column.max_length} characters")
            if value != clean(value):
                raise ValueError("it has a NUL or a lone surrogate")
            if column.choices and value not in dict(column.flatchoices):
                raise ValueError("it is not one of the choices")
        return column.to_python(value)
    except (ValueError, TypeError, ValidationError, OverflowError, binascii.Error) as exc:
        raise _Wrong(f"{column.name!r} of a {model.__name__} is {value!r:.80}: {exc}") from exc


def _check_links(rows: Mapping[str, list[Any]]) -> None:
    """Refuse a row that refers to rows outside its own document."""
    revisions = {revision.pk for revision in rows["revisions"]}
    replays = {replay.pk for replay in rows["replays"]}
    for name, attribute, known in (
        ("replays", "revision_id", revisions),
        ("failures", "replay_id", replays),
        ("actions", "replay_id", replays),
    ):
        for row in rows[name]:
            if (pk := getattr(row, attribute)) is not None and pk not in known:
                raise _Wrong(f"one of its {name} refers to {pk}, which is not in the line")
