"""Give past events to one handler, as a replay batch.

:func:`freeze` fixes the range: offsets of the history, so that later events are not in it. The
runner reads it in chunks. The rows of a chunk, their replays and the offset of the next chunk are
one transaction: after a runner is killed, another one continues at that offset, and the mirror
publishes what was queued under the same replay ids.

Without ``again`` it leaves out what the handler's queue has received since it was bound, what the
inbox knows as handled, and what has a row in the archive.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from time import monotonic
from typing import Any, Final, Self
from uuid import UUID

from celery import Celery
from django.db import Error, IntegrityError, transaction
from django.db.models import F

from ...broker import connection, history
from ...broker.history import Record, StreamReader, digest
from ...broker.provisioning.binding_records import BindingRecord, read_records
from ...conf import Settings, get_settings
from ...databases import check_commits, reason_of, retry_on_conflict
from ...declare.patterns import pattern_matches, patterns_overlap
from ...declare.registry import Handler, get_registry
from ...exceptions import (
    AmqpEventsError,
    BrokerUnavailableError,
    ConfigurationError,
    TopologyError,
)
from ...message import decoding
from ...message.archive_message import Archived
from ...message.headers import is_broker_header
from ...message.types import derived_id
from ...models import ArchivedEvent, InboxEntry, Replay, ReplayBatch, State
from ...options import suggestion
from ...reasons import Reason
from ...worker import inbox
from .. import replay, row_writer, search_values, states, tables
from ..eligibility import BACKFILL
from ..entries import Entry
from ..history import PastSelection, offsets_of
from ..selection import SearchTerm
from . import batch_states

#: Most events that are read in one step of a batch, and for a preview.
READ: Final = 20_000
#: Seconds of a step after which it ends; the lease of a batch is longer.
READ_SECONDS: Final = 20.0
#: States from which an event runs again. What is discarded or resolved, a person has decided.
_RUN_AGAIN: Final = (State.ARCHIVED, State.SUCCEEDED)


class NothingToGiveError(ValueError):
    """The history has no event that a handler may need; the text says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backfill:
    """Which past events a batch gives to its handler; stored as JSON.

    Attributes:
        again: include what the handler has received.
        begin, end: offsets of the first and the last event of the range.
        stored: first offset and end of :attr:`.Offsets.stored`.
        bindings: of the handler's queue.
    """

    handler: str
    selection: PastSelection
    again: bool
    begin: int
    end: int
    stored: tuple[int, int]
    bindings: tuple[BindingRecord, ...] = ()

    @classmethod
    def of(cls, batch: ReplayBatch) -> Self:
        document = dict(batch.backfill or {})
        selection: dict[str, Any] = {
            name: datetime.fromisoformat(value) if isinstance(value, str) else value
            for name, value in document.pop("selection").items()
        }
        bindings = tuple(BindingRecord(**record) for record in document.pop("bindings"))
        return cls(selection=PastSelection(**selection), bindings=bindings, **document)

    @property
    def receiver(self) -> Handler:
        """The handler, by its current name.

        Raises:
            AmqpEventsError: it is gone.
        """
        name = get_settings().renamed_handlers.get(self.handler, self.handler)
        handler = get_registry().handlers.get(name)
        if handler is None:
            raise AmqpEventsError(Reason("handler-missing", name=repr(name)))
        return handler

    def as_json(self) -> dict[str, Any]:
        document = asdict(self)
        for name in ("since", "until"):
            at = document["selection"][name]
            document["selection"][name] = at and at.isoformat()
        return document

    def why_left_out(self, record: Record, handler: Handler) -> str | None:
        """Return why an event of the range is not given, ``""`` if it does not match."""
        key = record.received.routing_key
        if not any(pattern_matches(pattern, key) for pattern in handler.bindings):
            return ""
        stored = range(*self.stored)
        if record.event is None:
            return "unreadable" if record.offset in stored else ""
        if not self.selection.matches(record, stored):
            return ""
        if len(record.received.body) > get_settings().max_body:
            return "unreadable"
        # With `once`, its content would count as its id.
        if handler.once and decoding.is_nameless(record.event):
            return "unreadable"
        return "received" if not self.again and self._received(record.offset, key) else None

    def runs(self, event: ArchivedEvent | None) -> bool:
        """Return True if a past event may run that has this row, or none."""
        if event is None:
            return True
        return self.again and event.state in _RUN_AGAIN and not event.unconfirmed

    def _received(self, offset: int, key: str) -> bool:
        own = [
            binding
            for binding in self.bindings
            if any(pattern_matches(pattern, key) for pattern in binding.patterns)
        ]
        return not own or any(binding.received(offset) for binding in own)


@dataclass(slots=True, kw_only=True)
class Chunk:
    """Past events that are read together.

    Attributes:
        next: the offset after them.
        left: how many of them are left out, by why.
        expired: how many offsets before them RabbitMQ has deleted.
    """

    next: int
    records: list[Record] = field(default_factory=list)
    left: Counter[str] = field(default_factory=Counter)
    expired: int = 0


# -- creating -----------------------------------------------------------------------------


def freeze(
    handler_name: str, selection: PastSelection, *, by: str, again: bool = False
) -> ReplayBatch:
    """Create a draft that gives the matching events of now to a handler of this service.

    Raises:
        NothingToGiveError: the history is empty, or the handler's queue has received all of it.
        ValueError: there is no such handler, or its queue is unknown; the text says what to do.
        ConfigurationError: there is no history, AMQP_EVENTS is wrong, or nothing would be
            committed.
        TopologyError, BrokerUnavailableError: the history cannot be read.
    """
    settings, using = get_settings(), tables.database()
    queue = history.require(settings)
    handler = _handler(handler_name, selection)
    check_commits(using)
    app = connection.broker_app(settings)
    if history.first(app, settings, queue) is None:
        raise NothingToGiveError(
            "the history is empty: it has the events that are published from now on"
        )
    offsets = offsets_of(app, settings, queue, selection)
    plan = Backfill(
        handler=handler.name,
        selection=selection,
        again=again,
        begin=offsets.read.start,
        end=offsets.read.stop - 1,
        stored=(offsets.stored.start, offsets.stored.stop),
        bindings=() if again else _bindings(app, settings, queue, handler),
    )
    title = Reason("batch-backfill", handler=handler.name, filters=_filters(selection))
    return batch_states.draft(by=by, title=title, backfill=plan.as_json(), next_offset=plan.begin)


def _filters(selection: PastSelection) -> list[Reason]:
    """Describe a range, without searched values, which not everyone may see."""
    filters = [Reason("filter-event", value=name) for name in selection.events]
    for name in ("since", "until"):
        if at := getattr(selection, name):
            filters.append(Reason(f"published-{name}", value=f"{at:%Y-%m-%d %H:%M %Z}"))
    paths = (SearchTerm.parse(term).path for term in selection.search)
    filters += [Reason("filter-value", value=path) for path in paths]
    return filters or [Reason("batch-past")]


def _handler(name: str, selection: PastSelection) -> Handler:
    handlers = get_registry().handlers
    handler = handlers.get(name)
    if handler is None:
        hint = suggestion(name, handlers) or "; see `manage.py events_declare`"
        raise ValueError(f"there is no handler {name!r}{hint}")
    for event in selection.events:
        if not any(patterns_overlap(event, pattern) for pattern in handler.bindings):
            events = ", ".join(handler.bindings)
            raise ValueError(f"{name} does not handle {event!r}; its events are {events}")
    if selection.since and selection.since > datetime.now(UTC):
        raise ValueError("the start of the range is in the future")
    return handler


def _bindings(
    app: Celery, settings: Settings, queue: str, handler: Handler
) -> tuple[BindingRecord, ...]:
    """Return the records of a handler's queue.

    Raises:
        NothingToGiveError: the queue has received everything that the history has.
        ValueError: it is not known what it has received.
    """
    own = [record for record in read_records(app, settings) if record.queue == handler.queue]
    if not own:
        raise ValueError(
            f"run `manage.py events_declare`: it binds the queue {handler.queue} and records what "
            f"of the history it has"
        )
    # One whose witness is gone is about events that are gone.
    current = [record for record in own if _is_current(app, settings, queue, record)]
    if not current:
        raise NothingToGiveError(
            f"the queue {handler.queue} has received all events of the history that "
            f"{handler.name} handles; to run them again, choose `again` (--again)"
        )
    others = (replace(record, offset=-1, missed=()) for record in own if record not in current)
    return (*current, *others)


def _is_current(app: Celery, settings: Settings, queue: str, record: BindingRecord) -> bool:
    if record.place is None:
        return False
    witness = history.first(app, settings, queue, record.place)
    return witness is not None and (
        (witness.offset, digest(witness.received)) == (record.place, record.witness)
    )


# -- reading ------------------------------------------------------------------------------


def unread(batch: ReplayBatch) -> bool:
    """Return True if the range of a backfill has not been read to its end."""
    return batch.backfill is not None and batch.next_offset <= batch.backfill["end"]


def read_chunk(batch: ReplayBatch, room: int, most: int = READ) -> Chunk:
    """Read the next *room* events that a batch gives to its handler, of at most *most*.

    Raises:
        TopologyError, BrokerUnavailableError: the history cannot be read, or there is none.
        ConfigurationError: AMQP_EVENTS is wrong.
        AmqpEventsError: the handler is gone.
    """
    settings, plan = get_settings(), Backfill.of(batch)
    handler = plan.receiver
    app = connection.broker_app(settings)
    try:
        queue = history.require(settings)
    except ConfigurationError as exc:
        # This batch waits; the runner continues with others.
        raise TopologyError(str(exc)) from exc
    chunk, size, until = Chunk(next=batch.next_offset), 0, monotonic() + READ_SECONDS
    if not unread(batch):
        return chunk
    # RabbitMQ delivers up to twice as many, which closing reads too.
    together = min(room, history.SIZE)
    with closing(StreamReader(app, queue, settings, start=chunk.next, size=together)) as reader:
        for read, record in enumerate(reader.records(wait=settings.confirm_timeout)):
            if not read:
                chunk.expired = _expired(app, settings, queue, chunk.next, record.offset, plan.end)
            chunk.next = record.offset + 1
            if record.offset > plan.end:
                chunk.next = plan.end + 1
                break
            why = plan.why_left_out(record, handler)
            if why is None:
                chunk.records.append(record)
            elif why:
                chunk.left[why] += 1
            size += len(record.received.body)
            full = len(chunk.records) >= room or size >= replay.CHUNK_BYTES or read >= most
            if full or monotonic() > until or record.offset >= plan.end:
                break
        else:
            if chunk.next == batch.next_offset:
                raise BrokerUnavailableError(Reason("queue-silent", queue=repr(queue)))
    _leave_out_handled(chunk, handler, settings, again=plan.again)
    return chunk


def _expired(
    app: Celery, settings: Settings, queue: str, expected: int, offset: int, end: int
) -> int:
    """Return how many events RabbitMQ has deleted between an offset and the first one read."""
    if offset == expected:
        return 0
    # RabbitMQ's own entries have offsets too, so a gap alone tells nothing.
    first = history.first(app, settings, queue)
    is_cut = first is None or first.offset >= offset
    return min(offset, end + 1) - expected if is_cut else 0


def _leave_out_handled(chunk: Chunk, handler: Handler, settings: Settings, *, again: bool) -> None:
    """Leave out what the inbox knows as handled."""
    if again or not handler.once:
        return
    keys = {
        record.offset: inbox.inbox_key(settings.service, handler.name, record.event)
        for record in chunk.records
        if record.event is not None
    }
    rows = InboxEntry.objects.using(inbox.database(handler, settings))
    try:
        handled = set(rows.filter(pk__in=keys.values()).values_list("pk", flat=True))
    except Error as exc:
        # Another database than that of the batches, which go on.
        raise AmqpEventsError(reason_of(exc)) from exc
    found = [record for record in chunk.records if keys.get(record.offset) not in handled]
    chunk.left["handled"] += len(chunk.records) - len(found)
    chunk.records = found


# -- running ------------------------------------------------------------------------------


def replay_chunk(batch: ReplayBatch, runner: UUID, room: int) -> replay.Report:
    """Read the next events of a batch, claim them and publish them.

    Raises:
        AmqpEventsError: as :func:`read_chunk`.
    """
    tables.check_no_transaction()
    chunk = read_chunk(batch, room)
    report = replay.Report()
    replay.publish_claimed(_claim(batch, runner, chunk), report)
    return report


# Of an event that a mirror has stored meanwhile, the row is in the way.
@retry_on_conflict(tables.database, IntegrityError)
def _claim(batch: ReplayBatch, runner: UUID, chunk: Chunk) -> list[Replay]:
    """Store a chunk: rows, queued replays and the next offset; nothing if another runner has."""
    using, now, plan = tables.database(), tables.clock(), Backfill.of(batch)
    new = {row.pk: row for row in (_row(batch, plan, record, now) for record in chunk.records)}
    left = Counter(batch.backfill_left or {}) + chunk.left
    left["expired"] += chunk.expired
    with tables.locking(new, without=["detail"]) as events:
        # A relay may have published an event twice.
        known = batch_states.events(batch.pk).filter(event__in=list(new))
        in_batch = set(known.values_list("event_id", flat=True))
        left["twice"] += len(chunk.records) - len(new) + len(in_batch)
        claimed = {}
        for pk, row in new.items():
            event = events.get(pk)
            if pk in in_batch:
                continue
            if plan.runs(event):
                claimed[pk] = event or row
            else:
                left["archived"] += 1
        mine = batch_states.rows().filter(
            pk=batch.pk,
            runner=runner,
            state=ReplayBatch.State.RUNNING,
            next_offset=batch.next_offset,
        )
        if not mine.update(
            next_offset=chunk.next,
            total=F("total") + len(claimed),
            queued=F("queued") + len(claimed),
            backfill_left=dict(+left),
        ):
            transaction.set_rollback(True, using=using)
            return []
        inserted = [row for pk, row in claimed.items() if pk not in events]
        for part in tables.statements(inserted, "body", "headers_raw", "detail"):
            tables.rows().bulk_create(part)
        values = (value for row in inserted for value in search_values.in_event(row))
        search_values.store(values, using=using)
        return states.queue_past(
            list(claimed.values()), batch, plan.receiver.name, forced=plan.again, now=now
        )


def preview_chunk(batch: ReplayBatch, most: int) -> Chunk:
    """Read the first *most* events as :func:`replay_chunk` does, and leave out what it would."""
    chunk, plan, now = read_chunk(batch, most), Backfill.of(batch), tables.clock()
    by_pk = {_entry(batch, plan, record, now).own_id: record for record in chunk.records}
    chunk.left["twice"] += len(chunk.records) - len(by_pk)
    rows = tables.rows().only("state", "unconfirmed").in_bulk(by_pk)
    chunk.records = [record for pk, record in by_pk.items() if plan.runs(rows.get(pk))]
    chunk.left["archived"] += len(by_pk) - len(chunk.records)
    return chunk


def _entry(batch: ReplayBatch, plan: Backfill, record: Record, now: datetime) -> Entry:
    """Return the entry of an event, with the id of its failure in this handler, if it had one."""
    received, service, handler = record.received, batch.service, plan.receiver
    archived = Archived(
        reason=BACKFILL,
        handler=handler.name,
        event=record.event,
        attempts=0,
        first_failed_at=record.at,
        last_failed_at=record.at,
        queue=handler.queue,
        body=received.body,
        headers={
            key: value for key, value in received.headers.items() if not is_broker_header(key)
        },
        content_type=str(received.properties.get("content_type") or ""),
        content_encoding=str(received.properties.get("content_encoding") or ""),
    )
    # Without an id: one row for each offset, whichever backfill reads it.
    own_id = archived.identity(service) or derived_id(
        service, handler.name, record.offset, digest(received)
    )
    return Entry(archived, received, service, now, own_id)


def _row(batch: ReplayBatch, plan: Backfill, record: Record, now: datetime) -> ArchivedEvent:
    entry = _entry(batch, plan, record, now)
    entry.begin(now)
    return row_writer.new_row(entry)
