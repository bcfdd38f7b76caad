"""Store messages of the archive queue in the database.

A batch is one transaction. Storing the same message again makes the same rows, so a message may be
read any number of times, unless it has nothing that tells it from another one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Final
from uuid import UUID

from django.db import Error, IntegrityError
from django.db.models import QuerySet

from ..databases import check_commits, error_line, is_refusal, retry_on_conflict
from ..logs import event_fields, get_logger
from ..message.archive_message import Archived
from ..message.text import counted, valid_moment
from ..message.types import derived_id
from ..models import LENGTH, ArchivedEvent, ArchivedFailure, Replay, State, clean
from . import redaction, search_values, states, tables
from .eligibility import BACKFILL
from .entries import Entry, Item, Outcome, bare_entry
from .groups import failure_groups
from .selection import parse_uuid

logger = get_logger(__name__)

#: Largest number of attempts that a column holds.
LARGEST_INTEGER: Final = 2**31 - 1


@dataclass(slots=True, kw_only=True)
class Counts:
    """The number of messages stored.

    Attributes:
        events: new rows.
        failures: further failures of events that have a row.
        outcomes: replays that succeeded.
        known: messages that were stored before.
        foreign: outcomes of replays that this database does not have; they are dropped.
        unreadable: those of *events* of which only the bytes are kept.
    """

    events: int = 0
    failures: int = 0
    outcomes: int = 0
    known: int = 0
    foreign: int = 0
    unreadable: int = 0

    @property
    def messages(self) -> int:
        return self.events + self.failures + self.outcomes + self.known + self.foreign

    def add(self, other: Counts) -> None:
        for part in fields(self):
            setattr(self, part.name, getattr(self, part.name) + getattr(other, part.name))

    def __str__(self) -> str:
        """Write the counts for a console: ``3 new events, 1 replay succeeded``."""
        texts = (
            (self.events, counted(self.events, "new event")),
            (self.failures, f"{self.failures} failed again"),
            (self.outcomes, f"{counted(self.outcomes, 'replay')} succeeded"),
            (self.known, f"{self.known} known already"),
            (self.foreign, f"{counted(self.foreign, 'outcome')} of unknown replays"),
            (self.unreadable, f"{self.unreadable} unreadable"),
        )
        return ", ".join(text for count, text in texts if count) or "nothing"


Blame = Callable[[Exception, Item | None], None]


def store_items(items: Sequence[Item], blame: Blame) -> Counts:
    """Store what :func:`.read_entries` has returned, in one transaction.

    If the database refuses a message, only its bytes are stored.

    Args:
        blame: called with an error that storing only the bytes does not avoid, and with the item
            if it failed alone; unless it raises the error, the other items are stored.

    Raises:
        ConfigurationError: nothing would be committed, so nothing may be acked.
    """
    check_commits(tables.database())
    return _store(items, blame)


def _store(entries: Sequence[Item], blame: Blame, *, again: bool = False) -> Counts:
    """Store entries together; those with one that cannot be stored, by halves."""
    try:
        return _together(entries)
    except Exception as exc:  # noqa: BLE001 - passed on
        error = exc
    alone = len(entries) == 1
    if isinstance(error, Error) and not is_refusal(error):
        # A lost connection is replaced meanwhile, so a second attempt succeeds.
        alone = alone and again
        blame(error, entries[0] if alone else None)
        if alone:
            return Counts()
    if not alone:
        counts, middle = Counts(), len(entries) // 2
        for half in filter(None, (entries[:middle], entries[middle:])):
            counts.add(_store(half, blame, again=True))
        return counts
    [entry] = entries
    if isinstance(entry, Outcome) or entry.message.unreadable:
        blame(error, entry)
        return Counts()
    about = event_fields(entry.archived.event, entry.archived.handler)
    why = error_line(error)  # the other lines quote the row
    logger.error("an archive message cannot be stored; its bytes are kept: %s", why, extra=about)
    # Of its own ids: the event may have a row.
    own_id = derived_id(entry.failure_id.hex, "bytes")
    bare = bare_entry(entry.message, error, entry.service, entry.now, own_id)
    # The caller knows the entry, not what is stored for it.
    return _store([bare], lambda exc, item: blame(exc, item and entry))


# Of an event that another mirror has stored, or that was pruned, a row is in the way or missing.
@retry_on_conflict(tables.database, IntegrityError)
def _together(items: Sequence[Item]) -> Counts:
    now = tables.clock()
    counts = Counts()
    ends: dict[UUID, datetime] = {}
    superseded: set[UUID] = set()
    entries: list[Entry] = []
    for item in items:
        if isinstance(item, Outcome):
            if item.replay_id in ends:
                counts.known += 1
            ends[item.replay_id] = item.at
            if item.superseded:
                superseded.add(item.replay_id)
        else:
            item.begin(now)
            entries.append(item)
    replays = _find_replays(entries, ends)
    failures = {entry.failure_id: entry for entry in entries}
    counts.known += len(entries) - len(failures)
    # All at once: two processes that lock in two rounds can deadlock.
    ids = {entry.id for entry in failures.values()} | {replay.event_id for replay in replays}
    searched: dict[UUID, list[search_values.Value]] = {}
    if redaction.has_hook():
        # Before the lock: it is code of the project.
        stored = set(tables.rows().filter(pk__in=ids).values_list("pk", flat=True))
        for entry in failures.values():
            if entry.id not in stored:
                searched[entry.id] = search_values.in_event(new_row(entry))
    with tables.locking(ids, without=("body", "headers_raw")) as rows:
        if failures:
            _store_events(list(failures.values()), searched, rows, counts, now)
        if ends:
            counts.outcomes = states.finish(ends, superseded=superseded, now=now)
            counts.foreign = len(ends) - counts.outcomes
    if counts.foreign:
        logger.warning(
            "dropped %d outcomes of replays that this database does not have", counts.foreign
        )
    return counts


def _store_events(
    entries: list[Entry],
    searched: Mapping[UUID, list[search_values.Value]],
    rows: Mapping[UUID, ArchivedEvent],
    counts: Counts,
    now: datetime,
) -> None:
    stored = set(
        _failures().filter(pk__in=[e.failure_id for e in entries]).values_list("pk", flat=True)
    )
    # The last failure of an event describes it.
    fresh = sorted(
        (entry for entry in entries if entry.failure_id not in stored),
        key=lambda entry: (entry.id, entry.failed_at),
    )
    counts.known += len(entries) - len(fresh)
    new: dict[UUID, ArchivedEvent] = {}
    changed: dict[UUID, ArchivedEvent] = {}
    failures: list[ArchivedFailure] = []
    for entry in fresh:
        row = rows.get(entry.id) or new.get(entry.id)
        late = row is not None and not _add_failure(row, entry)
        failures.append(_failure(entry, late=late))
        if row is None:
            new[entry.id] = new_row(entry)
            counts.events += 1
            if entry.archived.reason == "unreadable":
                counts.unreadable += 1
            continue
        counts.failures += 1
        if not late and entry.id in rows:
            changed[entry.id] = row
    failure_groups.assign_groups([*new.values(), *changed.values()])
    # Rows of a faster mirror are a conflict, so that they are read.
    for part in tables.statements(new.values(), "body", "headers_raw", "detail"):
        tables.rows().bulk_create(part)
    values: list[search_values.Value] = []
    for pk, row in new.items():
        values += searched[pk] if pk in searched else search_values.in_event(row)
    search_values.store(values, using=tables.database())
    for failed_part in tables.statements(failures, "document"):
        _failures().bulk_create(failed_part)
    for part in tables.statements(changed.values(), "detail"):
        tables.rows().bulk_update(part, _FAILED)
    ends = {entry.replay.pk: entry.failed_at for entry in fresh if entry.replay is not None}
    states.failed_again(ends, now=now)


#: Columns that a further failure changes.
_FAILED: Final = (
    "state",
    "state_since",
    "version",
    "reason",
    "detail",
    "exception",
    "message",
    "location",
    "group",
    "attempts",
    "first_failed_at",
    "last_failed_at",
    "mirrored_at",
    "unconfirmed",
    "error",
)


def _add_failure(row: ArchivedEvent, entry: Entry) -> bool:
    """Add a further failure to its event; return False if it is too late to change it."""
    archived, replay, failed_at = entry.archived, entry.replay, entry.failed_at
    if replay is not None:
        if row.replays != replay.number or row.state in (State.SUCCEEDED, State.DISCARDED):
            return False
        attempts = row.attempts + archived.attempts
    elif row.state == State.DISCARDED and failed_at > row.state_since:
        # It was published again after the discard, and counts as archived anew.
        attempts = row.attempts + archived.attempts
        row.mirrored_at = entry.now
        row.unconfirmed = states.has_unconfirmed_replay(row)
    elif row.state == State.ARCHIVED:
        # A second copy of the same run, such as after a lost connection.
        attempts = max(row.attempts, archived.attempts)
    else:
        return False
    row.attempts = min(attempts, LARGEST_INTEGER)
    if row.state != State.ARCHIVED:
        row.state, row.state_since = State.ARCHIVED, entry.now
    if replay is not None:
        # A replay that reports back was published, confirmed or not.
        row.unconfirmed, row.error = False, None
    row.version += 1
    first = entry.first_failed_at
    if row.reason == BACKFILL:
        # It has not failed before.
        row.first_failed_at, row.mirrored_at = first, entry.now
    row.first_failed_at = min(row.first_failed_at, first)
    # A replay is later than what it replays, whatever the clocks say: RabbitMQ's times in x-death
    # are whole seconds.
    if replay is not None or failed_at >= row.last_failed_at:
        row.last_failed_at = max(row.last_failed_at, failed_at)
        for name, value in _words(archived).items():
            setattr(row, name, value)
    return True


def _find_replays(entries: Iterable[Entry], ends: Iterable[UUID]) -> list[Replay]:
    """Set the replay, and its event, of entries that are the end of one; return the replays."""
    entries_of: dict[UUID, list[Entry]] = {pk: [] for pk in ends}
    for entry in entries:
        event = entry.archived.event
        if event is not None and (replay_id := parse_uuid(event.replay_id or "")) is not None:
            entries_of.setdefault(replay_id, []).append(entry)
    if not entries_of:
        return []
    replays = list(states.replays().filter(pk__in=list(entries_of)))
    for replay in replays:
        for entry in entries_of[replay.pk]:
            entry.replay = replay
            # A replay belongs to one row, even with another body or a renamed handler.
            entry.id = replay.event_id
    return replays


def new_row(entry: Entry) -> ArchivedEvent:
    """Return the unsaved row of an entry."""
    archived, event = entry.archived, entry.archived.event
    name = event.name if event else entry.message.event_key
    return ArchivedEvent(
        pk=entry.id,
        service=clean(entry.service, LENGTH),
        handler=clean(archived.handler, LENGTH),
        queue=clean(archived.queue, LENGTH),
        name=clean(name, LENGTH),
        # A message without an id gets one, so that it can be found and replayed.
        event_id=clean(event.id if event else str(entry.id), LENGTH),
        source=clean(event.service if event else "", LENGTH),
        correlation_id=clean(event.correlation_id if event else "", LENGTH),
        causation_id=clean(event.causation_id if event else "", LENGTH),
        published_at=valid_moment(event.published_at) if event else None,
        first_failed_at=entry.first_failed_at,
        last_failed_at=entry.failed_at,
        mirrored_at=entry.now,
        state_since=entry.now,
        attempts=archived.attempts,
        body=archived.body,
        body_size=len(archived.body),
        headers_raw=ArchivedEvent.pack_headers(archived.headers),
        content_type=clean(archived.content_type, LENGTH),
        content_encoding=clean(archived.content_encoding, LENGTH),
        **_words(archived),
    )


def _words(archived: Archived) -> dict[str, str]:
    lines = archived.message.splitlines()
    return {
        "reason": clean(archived.reason, 32),
        "detail": clean(archived.detail),
        "exception": clean(archived.exception, LENGTH),
        "message": clean(lines[0] if lines else "", LENGTH),
        "location": clean(archived.location, LENGTH),
    }


def _failure(entry: Entry, *, late: bool) -> ArchivedFailure:
    archived = entry.archived
    words = _words(archived)
    text = archived.text
    if not text and archived.history:
        # Without the event-archive header, the attempts are in the message's history.
        text = json.dumps({"history": list(archived.history)}, default=str)
    return ArchivedFailure(
        pk=entry.failure_id,
        event_id=entry.id,
        replay=entry.replay,
        reason=words["reason"],
        exception=words["exception"],
        message=words["message"],
        failed_at=entry.failed_at,
        mirrored_at=entry.now,
        late=late,
        document=clean(text),
    )


def _failures() -> QuerySet[ArchivedFailure]:
    return ArchivedFailure.objects.using(tables.database())
