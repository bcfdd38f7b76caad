"""Change the state of archived events; every change is one conditional UPDATE.

::

    archived --claim--> queued --confirmed--> replaying --> succeeded
       ^  ^               |  not published       |
       |  +---------------+                      | fails again
       +--------------- archived <---------------+
    archived <--restore-- discarded (with a reason) <--resolve-- replaying

A statement names the state, the version or the claim that it expects, and changes nothing if
another process was faster; the return value says what was changed. Nothing here uses the broker.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar
from uuid import UUID, uuid4

from django.db import OperationalError, connections, router, transaction
from django.db.models import Case, Exists, F, Max, OuterRef, Q, QuerySet, Subquery, Value, When
from django.utils.translation import gettext_noop

from .. import databases
from ..backoff import Backoff
from ..databases import is_conflict, is_locked, parts, pieces
from ..exceptions import ConfigurationError
from ..models import (
    LENGTH,
    ArchiveAction,
    ArchivedEvent,
    Replay,
    Revision,
    State,
    clean,
)
from ..reasons import Reason
from . import search_values
from .groups import group_counts
from .groups.group_counts import CountedEvent

P = ParamSpec("P")
T = TypeVar("T")

#: The version of each event by its id, as the caller saw it.
Seen = Mapping[UUID, int]

#: Most rows that one transaction discards or restores.
BATCH: Final = 500
#: Attempts at a transaction that conflicts with another one.
TRIES: Final = 10
#: Seconds after which a transaction that finds the database locked is not tried again.
LOCKED: Final = 15.0
#: Delays between tries of a transaction that finds the database locked.
LOCK_BACKOFF: Final = Backoff(0.02, 0.5)
_RECORD_GONE: Final = gettext_noop("the record of the replay was deleted before it was published")
_Action = ArchiveAction.Action
_Replay = Replay.State


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedReplay:
    """A queued event that only this operation may publish, and its replay.

    Attributes:
        forced: it may run although an earlier replay has not reported back.
    """

    event: ArchivedEvent
    replay: Replay
    forced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpublishedReplay:
    """A claimed replay that was not confirmed.

    Attributes:
        unconfirmed: it may have been published.
        general: the error does not concern this event, so a batch may try it again.
    """

    claimed: ClaimedReplay
    error: str
    unconfirmed: bool
    general: bool = False


def database() -> str:
    """Return the alias of the archive's tables."""
    return router.db_for_write(ArchivedEvent)


def rows() -> QuerySet[ArchivedEvent]:
    """Return the archived events, read where they are written: never from a replica."""
    return ArchivedEvent.objects.using(database())


def clock() -> datetime:
    """Return the database's time, so that leases do not depend on the clocks of hosts."""
    return databases.clock(database())


def check_no_transaction() -> None:
    """Refuse to run inside a transaction, whose rollback would undo a claim.

    Raises:
        ConfigurationError: a transaction is open.
    """
    connection = connections[database()]
    # Blocks of Django's TestCase are never committed.
    blocks = [
        block for block in connection.atomic_blocks if not getattr(block, "_from_testcase", False)
    ]
    if not blocks and (connection.in_atomic_block or connection.get_autocommit()):
        return
    raise ConfigurationError(Reason("in-transaction", database=repr(database())))


def retry_on_conflict(function: Callable[P, T]) -> Callable[P, T]:
    """Repeat a function that is one transaction while the database ends it for another one.

    While the database is locked, it is repeated for :data:`LOCKED` seconds.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        conflicts = waits = 0
        end = time.monotonic() + LOCKED
        while True:
            try:
                return function(*args, **kwargs)
            except OperationalError as exc:
                if connections[database()].in_atomic_block:
                    raise
                if is_locked(exc) and time.monotonic() < end:
                    time.sleep(LOCK_BACKOFF.delay(waits) * random.uniform(0.5, 1))
                    waits += 1
                elif is_conflict(exc) and conflicts < TRIES - 1:
                    conflicts += 1
                else:
                    raise

    return run


def lock(ids: Iterable[UUID]) -> dict[UUID, CountedEvent]:
    """Lock rows in the order of their ids, and return what counts depend on of those that exist.

    Every transaction of several rows begins with it; otherwise a mirror and a replay of the same
    events could deadlock. SQLite has one writer at a time and fails a transaction that begins by
    reading while another one writes, so it begins with an UPDATE of nothing.
    """
    found = rows().filter(pk__in=list(ids))
    if connections[database()].features.has_select_for_update:
        found = found.select_for_update()
    else:
        rows().filter(pk=UUID(int=0)).update(version=F("version"))
    return group_counts.counted_events(found)


@contextmanager
def counting_changes(
    ids: Collection[UUID], *, now: datetime
) -> Iterator[Mapping[UUID, CountedEvent]]:
    """Lock rows in a transaction, and record how the block changes the group counts."""
    with transaction.atomic(using=database()):
        before = lock(ids)
        yield before
        after = group_counts.counted_events(rows().filter(pk__in=before.keys()))
        group_counts.record_changes(before, after, now=now, using=database())


#: The event has no replay that may be underway or was not published.
_NO_ERROR: Final[Mapping[str, Any]] = {"unconfirmed": False, "error": ""}


def _change(found: QuerySet[ArchivedEvent], state: State, now: datetime, **values: Any) -> int:
    """Change the state of the rows that still match; return how many did."""
    return found.update(state=state, state_since=now, version=F("version") + 1, **values)


# -- publishing ---------------------------------------------------------------------------


@retry_on_conflict
def claim(
    seen: Seen,
    *,
    handlers: Mapping[UUID, str],
    by: str,
    reason: str,
    now: datetime,
    force: bool = False,
    batch: UUID | None = None,
    edit: Revision | None = None,
) -> list[ClaimedReplay]:
    """Queue events for replay; skip those that are not *archived* with the version seen.

    It is committed when this returns. A forced replay publishes what the one before it did, edited
    or not.

    Args:
        handlers: the handler of each event.
        force: queue events that are *replaying* instead; the caller checks that they are overdue.
        batch: the batch to which the events belong; only those that are pending in it are queued.
        edit: an unsaved revision with the body of the only event. An event whose last replay was
            not confirmed is skipped: with another body, both could run.

    Raises:
        ConfigurationError: a transaction is open.
    """
    if not seen:
        return []
    check_no_transaction()
    token = uuid4()
    by, reason = clean(by, LENGTH), clean(reason)
    # A replay that was not confirmed may be published: it keeps its id, to which any run reports.
    underway = _current_replay().filter(state=_Replay.UNCONFIRMED)
    with counting_changes(seen, now=now) as before:
        wanted = rows().filter(_as_seen(seen), state=State.REPLAYING if force else State.ARCHIVED)
        if edit is not None:
            wanted = wanted.exclude(Exists(underway))
        if batch is not None:
            wanted = wanted.filter(Exists(_pending(batch).filter(event=OuterRef("pk"))))
        number = Case(When(Exists(underway), then=F("replays")), default=F("replays") + 1)
        if not _change(wanted, State.QUEUED, now, claim=token, replays=number, **_NO_ERROR):
            return []
        claimed, new = _claimed(token, force=force)
        if batch is not None:
            claimed += _from_batch(batch, claimed, new, by=by, reason=reason, now=now)
            new = []
        _queue(claimed, handlers)
        revisions = _forced_revisions(token) if force else {}
        if edit is not None:
            for event in new:
                revisions[event.pk] = _revise(event, edit, by=by, reason=reason, now=now)
        made = [
            Replay(
                pk=uuid4(),
                event=event,
                version=seen[event.pk],
                number=event.replays,
                revision=revisions.get(event.pk),
                handler=clean(handlers[event.pk], LENGTH),
                requested_at=now,
                requested_by=by,
                reason=reason,
                publishes=1,
            )
            for event in new
        ]
        _replays().bulk_create(made)
        claimed += [ClaimedReplay(event=each.event, replay=each, forced=force) for each in made]
        claimed.sort(key=lambda each: each.event.pk)
        action = _Action.EDIT if edit is not None else _Action.FORCE if force else _Action.REPLAY
        _record_actions(
            {each.event.pk: each.replay for each in claimed},
            before,
            action=action,
            by=by,
            reason=reason,
            now=now,
            batch=batch,
        )
    return claimed


@retry_on_conflict
def reclaim(
    *,
    service: str,
    handlers: Mapping[str, str],
    since_before: datetime,
    limit: int,
    size: int,
    now: datetime,
) -> list[ClaimedReplay]:
    """Claim what a dead process left *queued*: the same replays, for this operation.

    Args:
        handlers: the current names of renamed handlers.
        limit, size: most events, and most bytes of their bodies (or one event with a larger body).

    Raises:
        ConfigurationError: a transaction is open.
    """
    token = uuid4()
    waiting = rows().filter(state=State.QUEUED, state_since__lt=since_before, service=service)
    oldest = waiting.order_by("state_since", "pk").values_list("pk", "body_size")[:limit]
    ids = next(pieces(oldest, count=limit, size=size), [])
    if not ids:
        return []
    check_no_transaction()
    with counting_changes(ids, now=now):
        # Another process that saw the same rows finds their state_since changed.
        waiting.filter(pk__in=ids).update(claim=token, state_since=now, version=F("version") + 1)
        claimed, orphans = _claimed(token)
        if orphans:
            # Their replays were deleted by hand.
            rows().filter(pk__in=[event.pk for event in orphans]).update(
                state=State.ARCHIVED,
                version=F("version") + 1,
                error=_RECORD_GONE,
            )
        old = {each.event.pk: each.replay.handler for each in claimed}
        _queue(claimed, {pk: handlers.get(name, name) for pk, name in old.items()})
    return claimed


@retry_on_conflict
def published(claimed: Collection[ClaimedReplay], *, now: datetime) -> None:
    """Record that the broker has confirmed replays; an outcome that came before is kept."""
    ids = [each.replay.pk for each in claimed]
    events = [each.event.pk for each in claimed]
    with counting_changes(events, now=now):
        ended = When(state__in=(_Replay.SUCCEEDED, _Replay.FAILED), then=F("state"))
        _replays().filter(pk__in=ids).update(
            published_at=now,
            error="",
            state=Case(ended, default=Value(_Replay.PUBLISHED.value)),
        )
        # Whichever process holds the claim now: the confirm belongs to the replay.
        confirmed = rows().filter(
            Q(state=State.QUEUED) | Q(state=State.ARCHIVED, unconfirmed=True),
            Exists(_current_replay(ids).filter(state=_Replay.PUBLISHED)),
            pk__in=events,
        )
        _change(confirmed, State.REPLAYING, now, **_NO_ERROR)


@retry_on_conflict
def returned(unpublished: Collection[UnpublishedReplay], *, now: datetime) -> None:
    """Return replays that were not published or not confirmed to *archived*.

    In a batch, those with a general error are pending again, unless they may have been published.
    Those with an outcome, and those claimed by another process since, are not changed.
    """
    given = {each.claimed.event.pk: each for each in unpublished}
    with counting_changes(given, now=now):
        tokens = {each.claimed.event.claim for each in unpublished}
        current = rows().filter(pk__in=given, claim__in=tokens, state=State.QUEUED)
        back = [given[pk] for pk in current.values_list("pk", flat=True)]
        for each in back:
            # Locked, and queued by this claim: the row is as it was read.
            event, replay = each.claimed.event, each.claimed.replay
            event.state, event.state_since, event.version = State.ARCHIVED, now, event.version + 1
            event.unconfirmed = each.unconfirmed
            event.error = replay.error = clean(each.error)
            replay.state = _Replay.UNCONFIRMED if each.unconfirmed else _Replay.RETURNED
            if each.general and not each.unconfirmed and replay.batch_id is not None:
                replay.state, replay.number, replay.publishes = _Replay.PENDING, None, 0
                replay.version = event.version
        _replays().bulk_update(
            [each.claimed.replay for each in back],
            ["state", "number", "version", "publishes", "error"],
        )
        rows().bulk_update(
            [each.claimed.event for each in back],
            ["state", "state_since", "version", "error", "unconfirmed"],
        )


@retry_on_conflict
def finish(ends: Mapping[UUID, datetime], *, now: datetime) -> int:
    """Record that replays succeeded, by replay id and the worker's time; it is final.

    The outcome of an older replay, or of a discarded event, is history only.

    Returns:
        how many of the replays are known.
    """
    events = dict(replays().filter(pk__in=list(ends)).values_list("pk", "event_id"))
    if not events:
        return 0
    with counting_changes(set(events.values()), now=now):
        _end({pk: ends[pk] for pk in events}, _Replay.SUCCEEDED)
        unsettled = rows().filter(
            Exists(_current_replay(events)),
            pk__in=set(events.values()),
            state__in=(State.QUEUED, State.REPLAYING, State.ARCHIVED),
        )
        _change(unsettled, State.SUCCEEDED, now, **_NO_ERROR)
    return len(events)


def failed_again(ends: Mapping[UUID, datetime]) -> None:
    """Record that replays failed, unless they succeeded; the caller changes the events."""
    _end(ends, _Replay.FAILED)


def _claimed(
    token: UUID, *, force: bool = False
) -> tuple[list[ClaimedReplay], list[ArchivedEvent]]:
    """Return the replays that events of a claim have already, and the events without one."""
    actions = ArchiveAction.objects.using(database())
    by_force = actions.filter(replay=OuterRef("pk"), action=_Action.FORCE)
    current = {
        replay.event_id: replay
        for replay in _replays()
        .filter(event__claim=token, number=F("event__replays"))
        .select_related("revision")
        .annotate(was_forced=Exists(by_force))
    }
    claimed, new = [], []
    for event in rows().filter(claim=token).order_by("pk").defer("detail"):
        if (replay := current.get(event.pk)) is None:
            new.append(event)
        else:
            replay.event = event
            forced = force or replay.was_forced
            claimed.append(ClaimedReplay(event=event, replay=replay, forced=forced))
    return claimed, new


def _from_batch(
    batch: UUID,
    claimed: Iterable[ClaimedReplay],
    new: Iterable[ArchivedEvent],
    *,
    by: str,
    reason: str,
    now: datetime,
) -> list[ClaimedReplay]:
    """Make the pending rows of a batch the replays of its events."""
    again = {each.event.pk: each.replay for each in claimed}
    events = {event.pk: event for event in new}
    pending = {row.event_id: row for row in _pending(batch).filter(event__in=[*again, *events])}
    _take_places(again, pending)
    for pk, event in events.items():
        pending[pk].event, pending[pk].number = event, event.replays
    number = rows().filter(pk=OuterRef("event")).values("replays")
    _pending(batch).filter(event__in=list(events)).update(
        number=Subquery(number), requested_at=now, requested_by=by, reason=reason
    )
    return [ClaimedReplay(event=event, replay=pending[pk]) for pk, event in events.items()]


def _take_places(again: Mapping[UUID, Replay], pending: Mapping[UUID, Replay]) -> None:
    """Move replays that are published again, under their old ids, to the places of pending ones.

    The batch that they leave keeps a row that says what it knows.
    """
    if not again:
        return
    places = {pk: pending[pk] for pk in again}
    _replays().filter(pk__in=[row.pk for row in places.values()])._raw_delete(database())  # noqa: SLF001
    for pk, replay in again.items():
        row = places[pk]
        row.state, row.error = replay.state, replay.error
        for name in ("batch_id", "position"):
            ours, theirs = getattr(replay, name), getattr(row, name)
            setattr(replay, name, theirs)
            setattr(row, name, ours)
    _replays().bulk_update(again.values(), ["batch", "position"])
    _replays().bulk_create(row for row in places.values() if row.batch_id is not None)


def _queue(claimed: Iterable[ClaimedReplay], handlers: Mapping[UUID, str]) -> None:
    """Queue replays that have a row, for the current names of their handlers."""
    together: dict[str, list[UUID]] = {}
    for each in claimed:
        replay = each.replay
        replay.state, replay.error = _Replay.QUEUED, ""
        replay.publishes += 1
        replay.handler = clean(handlers[each.event.pk], LENGTH)
        together.setdefault(replay.handler, []).append(replay.pk)
    for handler, ids in together.items():
        _replays().filter(pk__in=ids).update(
            state=_Replay.QUEUED, error="", publishes=F("publishes") + 1, handler=handler
        )


def _forced_revisions(token: UUID) -> dict[UUID, Revision]:
    """Return the revisions that the replays before those of a claim have published."""
    before = _replays().filter(event__claim=token, number=F("event__replays") - 1)
    return {
        replay.event_id: replay.revision
        for replay in before.select_related("revision")
        if replay.revision is not None
    }


def _revise(
    event: ArchivedEvent, edit: Revision, *, by: str, reason: str, now: datetime
) -> Revision:
    """Add the next revision of an event that this transaction has claimed."""
    revisions = Revision.objects.using(database())
    last = revisions.filter(event=event).aggregate(last=Max("number"))["last"]
    revision = revisions.create(
        pk=uuid4(),
        event=event,
        number=(last or 0) + 1,
        base=edit.base,
        body=edit.body,
        by=by,
        at=now,
        reason=reason,
    )
    pairs = search_values.in_payload(event.name, revision.payload)
    search_values.store(((event.pk, *pair) for pair in pairs), using=database())
    return revision


def _end(ends: Mapping[UUID, datetime], state: Replay.State) -> None:
    """Record outcomes by the worker's time; a success is never overwritten."""
    ended = _replays().filter(pk__in=list(ends)).exclude(state=_Replay.SUCCEEDED)
    found = list(ended.only("pk"))
    if not found:
        return
    for replay in found:
        replay.finished_at = ends[replay.pk]
    _replays().bulk_update(found, ["finished_at"])
    ended.update(state=state, error="", settled_at=clock())


def replays() -> QuerySet[Replay]:
    """Return the replays, without what is only in a batch, read where they are written."""
    return _replays().filter(number__isnull=False)


def _replays() -> QuerySet[Replay]:
    return Replay.objects.using(database())


def _pending(batch: UUID) -> QuerySet[Replay]:
    return _replays().filter(batch=batch, state=_Replay.PENDING)


def _current_replay(ids: Collection[UUID] | None = None) -> QuerySet[Replay]:
    """Return the current replay of the event of an outer query, if it is one of *ids*."""
    found = _replays().filter(event=OuterRef("pk"), number=OuterRef("replays"))
    return found if ids is None else found.filter(pk__in=list(ids))


def is_unconfirmed(event: ArchivedEvent) -> bool:
    """Return True if the last replay of an event may have been published without a confirm."""
    return replays().filter(event=event, number=event.replays, state=_Replay.UNCONFIRMED).exists()


# -- deciding -----------------------------------------------------------------------------


def discard(seen: Seen, *, by: str, reason: str, now: datetime) -> list[UUID]:
    """Settle *archived* events without handling them; return those that were."""
    return _decide(seen, State.ARCHIVED, _Action.DISCARD, by=by, reason=reason, now=now)


def resolve(seen: Seen, *, by: str, reason: str, now: datetime) -> list[UUID]:
    """Discard *replaying* events; return those that were.

    The caller checks that they are overdue. A later outcome is history only.
    """
    return _decide(seen, State.REPLAYING, _Action.RESOLVE, by=by, reason=reason, now=now)


def restore(seen: Seen, *, by: str, reason: str, now: datetime) -> list[UUID]:
    """Return *discarded* events to the archive; return those that were."""
    return _decide(seen, State.DISCARDED, _Action.RESTORE, by=by, reason=reason, now=now)


def _decide(
    seen: Seen, before: State, action: ArchiveAction.Action, *, by: str, reason: str, now: datetime
) -> list[UUID]:
    decided: list[UUID] = []
    for part in parts(sorted(seen.items()), BATCH):
        decided += _decide_part(dict(part), before, action, by=by, reason=reason, now=now)
    return decided


@retry_on_conflict
def _decide_part(
    seen: Seen, before: State, action: ArchiveAction.Action, *, by: str, reason: str, now: datetime
) -> list[UUID]:
    token = uuid4()
    with counting_changes(seen, now=now) as locked:
        restored = action == _Action.RESTORE
        after = State.ARCHIVED if restored else State.DISCARDED
        # Of an event that is not settled, the flag is the state of its replay.
        underway = _current_replay().filter(state=_Replay.UNCONFIRMED)
        flags = {**_NO_ERROR, **({"unconfirmed": Exists(underway)} if restored else {})}
        _change(rows().filter(_as_seen(seen), state=before), after, now, claim=token, **flags)
        changed = list(rows().filter(claim=token).order_by("pk").values_list("pk", flat=True))
        _record_actions(
            dict.fromkeys(changed), locked, action=action, by=by, reason=reason, now=now
        )
    return changed


def _as_seen(seen: Seen) -> Q:
    """Return a filter for rows that still have the version seen."""
    versions: dict[int, list[UUID]] = {}
    for pk, version in seen.items():
        versions.setdefault(version, []).append(pk)
    # An empty condition would match every row.
    wanted = Q(pk__in=[])
    for version, ids in versions.items():
        wanted |= Q(version=version, pk__in=ids)
    return wanted


def _record_actions(
    replays: Mapping[UUID, Replay | None],
    before: Mapping[UUID, CountedEvent],
    *,
    action: ArchiveAction.Action,
    by: str,
    reason: str,
    now: datetime,
    batch: UUID | None = None,
) -> None:
    ArchiveAction.objects.using(database()).bulk_create(
        ArchiveAction(
            event_id=pk,
            at=now,
            action=action,
            by=clean(by, LENGTH),
            reason=clean(reason),
            replay=replay,
            batch_id=batch,
            group_id=before[pk].group,
        )
        for pk, replay in replays.items()
    )
