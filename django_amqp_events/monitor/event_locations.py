"""Find where events are: their rows, and the handlers that may still get them.

Queues are not read: RabbitMQ counts each delivery from a quorum queue, and dead-letters a message
that was delivered too often. Search values exist for archived events only; a row of the outbox or
the inbox is found by its event's id.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Any, Final, Literal
from uuid import UUID

from django.db.models import Model, Q, QuerySet
from django.utils.translation import gettext as _

from ..archive import eligibility, inbox_retention, tables
from ..archive.history import PastSelection, Scan
from ..archive.selection import SearchTerm, matching, parse_uuid, sort_few
from ..callables import nothing
from ..conf import Settings
from ..databases import Now
from ..declare.registry import Handler, Registry
from ..models import (
    ArchivedEvent,
    InboxEntry,
    OutboxEvent,
    Replay,
    ReplayBatch,
    State,
    clean,
)
from ..publish import outbox, outbox_rows
from ..reasons import Reason, translated
from .state_texts import ROW_STATES, about_state

RecordKind = Literal["outbox", "archive", "replay", "batch", "inbox"]
KINDS: Final[tuple[RecordKind, ...]] = ("outbox", "archive", "replay", "batch", "inbox")

#: Most past events that are read.
PAST: Final = 50_000
#: Most rows of each kind.
ROWS: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A row of an event.

    Attributes:
        event: the id and the name of the event.
        handler: ``""`` for a row of the outbox, and for an event that no handler matched.
        title, label: the kind and the state for people.
        at: since when it is in this state, or when that happened.
        about: its meaning, and the next step; ``""`` if there is none.
    """

    event: tuple[str, str]
    kind: RecordKind
    title: str
    service: str
    handler: str
    state: str
    label: str
    at: datetime
    about: str
    row: Model

    @property
    def id(self) -> UUID:
        """The id of the row, or of the batch that it is in."""
        row: Any = self.row
        pk: UUID = row.batch_id if self.kind == "batch" else row.pk
        return pk


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """A handler of this service that an event is bound for.

    Attributes:
        waiting: no row shows that it handled the event or failed.
    """

    handler: str
    queue: str
    waiting: bool


@dataclass(slots=True, kw_only=True)
class LocatedEvent:
    """An event, by its id and name."""

    id: str
    name: str
    records: list[Record] = field(default_factory=list)
    in_history: bool = False
    #: When it was published, if the history has it with a time.
    past: datetime | None = None
    destinations: list[Destination] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Locations:
    """The events that a value finds; *more* archived ones may be left out."""

    events: tuple[LocatedEvent, ...]
    more: bool = False
    scanned: int | None = None


def locate(
    value: str,
    settings: Settings,
    registry: Registry,
    *,
    kinds: Collection[RecordKind] = KINDS,
    events: QuerySet[ArchivedEvent] | None = None,
    by_value: bool = True,
    waiting: Callable[[str], QuerySet[OutboxEvent]] = outbox.rows,
    since: datetime | None = None,
) -> Locations:
    """Find events by the id of an event, replay or archived row, or by a search value.

    Args:
        value: an id, or a search value: ``17``, ``order_id=17`` or ``customer.email=ann@*``.
        kinds: the tables to read.
        events: the archived events that may be found, by default all of them.
        by_value: find by search values, which are part of the payload.
        waiting: returns the outbox rows of a database that may be found.
        since: search the history too, from then on.

    Raises:
        DatabaseError: a database is unreachable.
    """
    value = clean(value)
    archived = tables.rows() if events is None else events
    archived = archived.defer(*ArchivedEvent.LARGE)
    archived = archived.order_by(*sort_few(["-last_failed_at", "-pk"]))
    condition = _matching(value, archived.db, by_value=by_value)
    first = list(archived.filter(condition)[: ROWS + 1]) if "archive" in kinds else []
    more = len(first) > ROWS
    ids = {value, *(row.event_id for row in first)}
    if (uuid := parse_uuid(value)) is not None:
        ids.add(str(uuid))
    # The same events at other handlers.
    rows = list(archived.filter(event_id__in=ids)[:ROWS]) if first else []
    by_key: dict[tuple[str, str], LocatedEvent] = {}
    records: list[Record] = []
    if "outbox" in kinds:
        records += _in_outbox(ids, settings, waiting)
    records += (_of_archived(row, settings) for row in rows)
    records += (record for record in _replays(rows) if record.kind in kinds)
    if "inbox" in kinds:
        records += _in_inbox(ids)
    for record in records:
        event_id, name = record.event
        located = by_key.setdefault(record.event, LocatedEvent(id=event_id, name=name))
        located.records.append(record)
    scanned = None
    if since is not None:
        scanned = _add_past(by_key, value, ids, settings, since, by_value=by_value)
    for located in by_key.values():
        located.destinations = [
            Destination(
                handler=handler.name,
                queue=handler.queue,
                waiting=_is_waiting(handler, located.records, settings),
            )
            for handler in registry.receivers(located.name)
        ]
    return Locations(events=tuple(by_key.values()), more=more, scanned=scanned)


def _add_past(
    by_key: dict[tuple[str, str], LocatedEvent],
    value: str,
    ids: Collection[str],
    settings: Settings,
    since: datetime,
    *,
    by_value: bool,
) -> int:
    """Add the events that the history has; return how many were read."""
    selections = [PastSelection(ids=tuple(ids))]
    if by_value:
        # An id may have an equals sign, too.
        with suppress(ValueError):
            selections.append(PastSelection(search=(value,)))
    scan = Scan(settings=settings, selection=PastSelection(since=since), budget=PAST)
    # The scan has compared times and offsets.
    anywhere = range(sys.maxsize)
    matching = (
        record
        for record in scan.records()
        if any(selection.matches(record, anywhere) for selection in selections)
    )
    for record in islice(matching, ROWS):
        key = (record.event.id, record.event.name) if record.event else ("", "")
        event = by_key.setdefault(key, LocatedEvent(id=key[0], name=key[1]))
        event.in_history, event.past = True, record.at
    return scan.read


def _matching(value: str, using: str, *, by_value: bool) -> Q:
    condition = Q(event_id=value)
    if (uuid := parse_uuid(value)) is not None:
        replays = Replay.objects.using(using).filter(pk=uuid)
        condition |= Q(pk__in=[uuid, *replays.values_list("event_id", flat=True)])
        condition |= Q(event_id=str(uuid))
    term = SearchTerm.parse_any(value) if by_value else None
    return condition if term is None else condition | matching([term], using, too_many=nothing)


def _in_outbox(
    ids: set[str], settings: Settings, waiting: Callable[[str], QuerySet[OutboxEvent]]
) -> Iterator[Record]:
    for alias in outbox_rows.tables(settings):
        rows: Any = waiting(alias).filter(event_id__in=ids).defer(*OutboxEvent.LARGE)
        for row in rows.annotate(now=Now())[:ROWS]:
            state = outbox.row_state(row, row.now)
            label, meaning, remedy = ROW_STATES[state]
            yield Record(
                event=(row.event_id, row.name),
                kind="outbox",
                title=_("outbox"),
                service=row.service,
                handler="",
                state=state,
                label=str(label),
                at=row.discarded_at or row.created_at,
                about=f"{meaning} {remedy}",
                row=row,
            )


def _in_inbox(ids: set[str]) -> Iterator[Record]:
    for alias in inbox_retention.databases():
        rows = InboxEntry.objects.using(alias).filter(event_id__in=ids)
        for row in rows.order_by("-handled_at", "-pk")[:ROWS]:
            yield Record(
                event=(row.event_id, row.name),
                kind="inbox",
                title=_("inbox"),
                service=row.service,
                handler=row.handler,
                state="superseded" if row.superseded else "handled",
                label=_("superseded by a newer event") if row.superseded else _("handled"),
                at=row.handled_at,
                about=_("Nothing is left to do: a further delivery is skipped."),
                row=row,
            )


def _of_archived(row: ArchivedEvent, settings: Settings) -> Record:
    meaning, remedy = about_state(row)
    own = row.service == settings.service
    handler = eligibility.handler_for(row) if own else eligibility.other_service(row)
    if isinstance(handler, Reason):
        if row.state == State.ARCHIVED:
            remedy = _("It cannot be replayed: %(why)s") % {"why": translated(handler)}
    elif eligibility.is_overdue(row):
        remedy = _("The outcome is overdue. Check `manage.py events_status` before you force it.")
    elif row.unconfirmed:
        remedy = _("The handler may have run. Check its effect before you replay the event again.")
    return Record(
        event=(row.event_id, row.name),
        kind="archive",
        title=_("archive"),
        service=row.service,
        handler=row.handler,
        state=row.state,
        label=row.get_state_display(),
        at=row.state_since,
        about=f"{meaning} {remedy}".strip(),
        row=row,
    )


def _replays(events: Collection[ArchivedEvent]) -> Iterator[Record]:
    """Yield the replays of events, and the batches that have not published them."""
    by_id = {event.pk: event for event in events}
    rows = Replay.objects.using(tables.database()).filter(event__in=by_id)
    large = [f"batch__{name}" for name in ReplayBatch.LARGE]
    rows = rows.select_related("batch").defer(*large).order_by("-requested_at", "-pk")
    for row in rows[:ROWS]:
        event = by_id[row.event_id]
        kind: RecordKind = "replay"
        title = _("replay %(number)s") % {"number": row.number}
        about = translated(row.error or "")
        if row.number is None:
            if row.batch is None:
                continue
            kind, title = "batch", _("batch %(id)s") % {"id": str(row.batch_id)[:8]}
            if row.state == Replay.State.PENDING:
                about = row.batch.get_state_display()
        yield Record(
            event=(event.event_id, event.name),
            kind=kind,
            title=title,
            service=event.service,
            handler=row.handler or event.handler,
            state=row.state,
            label=row.get_state_display(),
            at=row.finished_at or row.published_at or row.requested_at,
            about=about,
            row=row,
        )


def _is_waiting(handler: Handler, records: Sequence[Record], settings: Settings) -> bool:
    """Return True unless a row shows that a handler has handled an event or failed."""
    kept = {
        record.kind: record
        for record in reversed(records)
        if record.service == settings.service
        and settings.renamed_handlers.get(record.handler, record.handler) == handler.name
    }
    record = kept.get("inbox") or kept.get("archive")
    return record is None or record.state in (State.QUEUED, State.REPLAYING)
