"""Change the state of archived events, each time in a transaction that locks them first.

::

    archived --claim--> queued --confirmed--> replaying --> succeeded
       ^  ^               |  not published       |
       |  +---------------+                      | fails again
       +--------------- archived <---------------+
    archived <--restore-- discarded (with a reason) <--resolve/restore--> replaying

A caller names the state and the version that it expects; if another process was faster, nothing is
changed. The return value says what was. Nothing here uses the broker.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID, uuid4

from django.db.models import Case, F, Max, QuerySet, Value, When

from ..databases import parts, pieces
from ..models import (
    LENGTH,
    ArchiveAction,
    ArchivedEvent,
    Replay,
    ReplayBatch,
    Revision,
    State,
    clean,
)
from ..reasons import Reason
from . import search_values, tables

#: The version of each event by its id, as the caller saw it.
Seen = Mapping[UUID, int]

#: Most rows that one transaction discards or restores.
BATCH: Final = 500
#: Most characters of the reason of a decision: each of its events keeps a copy.
REASON_CHARACTERS: Final = 1_000
_Action = ArchiveAction.Action
_Replay = Replay.State


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpublishedReplay:
    """A claimed replay that was not confirmed.

    Attributes:
        unconfirmed: it may have been published.
        general: the error does not concern this event, so a batch may try it again.
    """

    replay: Replay
    error: Reason
    unconfirmed: bool
    general: bool = False


def _as_seen(
    seen: Seen, events: Mapping[UUID, ArchivedEvent], *before: State
) -> dict[UUID, ArchivedEvent]:
    """Return the events that have one of these states, and the version that the caller saw."""
    return {
        pk: event
        for pk, event in events.items()
        if event.state in before and event.version == seen[pk]
    }


#: The event has no replay that may be underway or was not published.
_NO_ERROR: Final[Mapping[str, Any]] = {"unconfirmed": False, "error": None}


def _change(
    events: Collection[ArchivedEvent],
    state: State,
    now: datetime,
    *,
    replays: int = 0,
    **values: Any,
) -> None:
    """Change the state of locked events, and add to the number of their replays."""
    if not events:
        return
    values = {"state": state, "state_since": now, **values}
    tables.rows().filter(pk__in=[event.pk for event in events]).update(
        version=F("version") + 1, replays=F("replays") + replays, **values
    )
    for event in events:
        event.version += 1
        event.replays += replays
        for name, value in values.items():
            setattr(event, name, value)


# -- publishing ---------------------------------------------------------------------------


@tables.retry_on_conflict
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
) -> list[Replay]:
    """Queue events for replay; skip those that are not *archived* with the version seen.

    Only the caller may publish the replays that it returns, with their events; they are committed.
    A forced replay publishes what the one before it did, edited or not. A replay that was not
    confirmed is published again, under its id, and leaves its batch. The audit lists a replay once
    it is, or may be, published.

    Args:
        force: queue events that are *replaying* instead; the caller checks that they are overdue.
        batch: the batch to which the events belong; only those that are pending in it are queued.
            What a backfill has forced may have succeeded before.
        edit: an unsaved revision with the body of the only event. An event whose last replay was
            not confirmed is skipped: with another body, both could run.

    Raises:
        ConfigurationError: a transaction is open.
    """
    if not seen:
        return []
    tables.check_no_transaction()
    before = State.REPLAYING if force else State.ARCHIVED
    by, reason = clean(by, LENGTH), clean(reason)
    with tables.locking(seen, without=["detail"]) as events:
        current = _current_replays(events)
        pending = _pending(batch, events)
        claimable = {
            pk: event
            for pk, event in _as_seen(seen, events, before, State.SUCCEEDED).items()
            if (batch is None or pk in pending)
            and (event.state == before or (pk in pending and pending[pk].forced))
            and not (edit is not None and _is_unconfirmed(current.get(pk)))
        }
        # These may be published: they keep their ids, to which any run reports.
        again = {pk: current[pk] for pk in claimable if _is_unconfirmed(current.get(pk))}
        new = {pk: event for pk, event in claimable.items() if pk not in again}
        _change([events[pk] for pk in again], State.QUEUED, now, **_NO_ERROR)
        _change(new.values(), State.QUEUED, now, replays=1, **_NO_ERROR)
        places = [pending[pk].pk for pk in claimable if pk in pending]
        _replays().filter(pk__in=places)._raw_delete(tables.database())  # noqa: SLF001
        for replay in again.values():
            replay.requested_at, replay.requested_by, replay.reason = now, by, reason
        _queue(again, handlers, pending)
        last = current if force else {}
        started = _start(
            new, pending, seen, handlers, last, edit, force=force, by=by, reason=reason, now=now
        )
        replays = again | started
        return [replays[pk] for pk in events if pk in replays]


def queue_past(
    events: Collection[ArchivedEvent],
    batch: ReplayBatch,
    handler: str,
    *,
    forced: bool,
    now: datetime,
) -> list[Replay]:
    """Queue past events, which are new or locked, in the transaction of the caller.

    A forced replay publishes what the one before it did, edited or not.
    """
    by_pk = {event.pk: event for event in events}
    last = _current_replays(by_pk) if forced else {}
    _change(events, State.QUEUED, now, replays=1, **_NO_ERROR)
    started = _start(
        by_pk,
        {
            event.pk: Replay(pk=uuid4(), batch_id=batch.pk, position=batch.total + number)
            for number, event in enumerate(events)
        },
        {event.pk: event.version for event in events},
        {event.pk: handler for event in events},
        last,
        None,
        force=forced,
        by=batch.started_by,
        reason=batch.reason,
        now=now,
    )
    return list(started.values())


@tables.retry_on_conflict
def reclaim(
    *,
    service: str,
    handlers: Mapping[str, str],
    since_before: datetime,
    limit: int,
    size: int,
    now: datetime,
) -> list[Replay]:
    """Claim what a dead process left *queued*: the same replays, for this operation.

    Args:
        handlers: the current names of renamed handlers.
        limit, size: most events, and most bytes of their bodies (or one event with a larger body).

    Raises:
        ConfigurationError: a transaction is open.
    """
    waiting = tables.rows().filter(
        state=State.QUEUED, state_since__lt=since_before, service=service
    )
    oldest = waiting.order_by("state_since", "pk").values_list("pk", "body_size")[:limit]
    ids = next(pieces(oldest, count=limit, size=size), [])
    if not ids:
        return []
    tables.check_no_transaction()
    with tables.locking(ids, without=["detail"]) as events:
        # Of rows that another process has claimed meanwhile, state_since has changed.
        left = {
            pk: event
            for pk, event in events.items()
            if event.state == State.QUEUED and event.state_since < since_before
        }
        _change(left.values(), State.QUEUED, now)
        replays = _current_replays(left)
        old = {pk: replay.handler for pk, replay in replays.items()}
        _queue(replays, {pk: handlers.get(name, name) for pk, name in old.items()})
    return list(replays.values())


@tables.retry_on_conflict
def published(claimed: Collection[Replay], *, now: datetime) -> None:
    """Record that the broker has confirmed replays; an outcome that came before is kept."""
    ids = [replay.pk for replay in claimed]
    with tables.locking([replay.event_id for replay in claimed]) as events:
        _record_published(_replays().filter(pk__in=ids), now=now)
        ended = When(state__in=(_Replay.SUCCEEDED, _Replay.FAILED), then=F("state"))
        _replays().filter(pk__in=ids).update(
            published_at=now,
            error=None,
            state=Case(ended, default=Value(_Replay.PUBLISHED.value)),
        )
        # Whichever process holds the claim now: the confirm belongs to the replay.
        confirmed = [
            event
            for pk, replay in _current_replays(events).items()
            if replay.pk in ids and replay.state == _Replay.PUBLISHED
            for event in [events[pk]]
            if event.state == State.QUEUED or (event.state == State.ARCHIVED and event.unconfirmed)
        ]
        _change(confirmed, State.REPLAYING, now, **_NO_ERROR)


@tables.retry_on_conflict
def returned(unpublished: Collection[UnpublishedReplay], *, now: datetime) -> None:
    """Return replays that were not published or not confirmed to *archived*.

    One that was not published does not count as a replay of its event; if it was forced, the event
    is what the one before it is, which may have ended meanwhile. In a batch, those with a general
    error are pending again, unless they may have been published; until then, the event is as it
    was, since the batch may be cancelled.
    Those with an outcome, and those claimed by another process since, are not changed.
    """
    given = {unsent.replay.event_id: unsent for unsent in unpublished}
    with tables.locking(given) as events:
        claimed = {pk: unsent.replay.event.version for pk, unsent in given.items()}
        back = _as_seen(claimed, events, State.QUEUED)
        maybe = [given[pk].replay.pk for pk in back if given[pk].unconfirmed]
        _record_published(_replays().filter(pk__in=maybe), now=now)
        forced = [pk for pk in back if given[pk].replay.forced]
        earlier = _replays().filter(event__in=forced, number=F("event__replays") - 1)
        current = {old.event_id: old for old in earlier} if forced else {}
        for pk, event in back.items():
            unsent, replay = given[pk], given[pk].replay
            event.state, event.state_since, event.version = State.ARCHIVED, now, event.version + 1
            event.unconfirmed = unsent.unconfirmed
            event.error = replay.error = unsent.error
            if unsent.unconfirmed:
                replay.state = _Replay.UNCONFIRMED
                continue
            event.replays -= 1
            if (old := current.get(pk)) is not None and old.state == _Replay.PUBLISHED:
                event.state, event.state_since = State.REPLAYING, old.published_at or now
            elif old is not None and old.state == _Replay.SUCCEEDED:
                event.state, event.error = State.SUCCEEDED, None
                event.state_since = old.settled_at or now
            replay.state, replay.number = _Replay.RETURNED, None
            if unsent.general and replay.batch_id is not None:
                replay.state, replay.publishes, replay.version = _Replay.PENDING, 0, event.version
        _replays().bulk_update(
            [given[pk].replay for pk in back],
            ["state", "number", "version", "publishes", "error"],
        )
        tables.rows().bulk_update(
            back.values(),
            ["state", "state_since", "version", "error", "unconfirmed", "replays"],
        )


@tables.retry_on_conflict
def finish(
    ends: Mapping[UUID, datetime], *, superseded: Collection[UUID] = (), now: datetime
) -> int:
    """Record that replays succeeded, by replay id and the worker's time; it is final.

    The outcome of an older replay, or of a discarded event, is history only.

    Args:
        superseded: those whose handler was not called.

    Returns:
        how many of the replays are known.
    """
    ended = {replay.pk: replay for replay in replays().filter(pk__in=list(ends))}
    if not ended:
        return 0
    with tables.locking({replay.event_id for replay in ended.values()}) as events:
        _end({pk: ends[pk] for pk in ended}, _Replay.SUCCEEDED, now)
        if superseded:
            _replays().filter(pk__in=superseded).update(superseded=True)
        unsettled = {
            event.pk: event
            for replay in ended.values()
            if (event := events.get(replay.event_id)) is not None
            and event.replays == replay.number
            and event.state in (State.QUEUED, State.REPLAYING, State.ARCHIVED)
        }
        _change(unsettled.values(), State.SUCCEEDED, now, **_NO_ERROR)
    return len(ended)


def failed_again(ends: Mapping[UUID, datetime], *, now: datetime) -> None:
    """Record that replays failed, unless they succeeded; the caller changes the events."""
    _end(ends, _Replay.FAILED, now)


def _current_replays(events: Mapping[UUID, ArchivedEvent]) -> dict[UUID, Any]:
    """Return the current replay of each of these events that has one, with its revision."""
    newest = _replays().filter(event__in=list(events), number=F("event__replays"))
    newest = newest.select_related("revision")
    current = {replay.event_id: replay for replay in newest}
    for pk, replay in current.items():
        replay.event = events[pk]
    return current


def _is_unconfirmed(replay: Replay | None) -> bool:
    return replay is not None and replay.state == _Replay.UNCONFIRMED


def _start(
    events: Mapping[UUID, ArchivedEvent],
    pending: Mapping[UUID, Replay],
    seen: Seen,
    handlers: Mapping[UUID, str],
    last: Mapping[UUID, Replay],
    edit: Revision | None,
    *,
    force: bool,
    by: str,
    reason: str,
    now: datetime,
) -> dict[UUID, Replay]:
    """Create a replay of each event, at its place in a batch if it has one.

    Args:
        last: earlier replays, whose body is published again.
        edit: see :func:`claim`.
    """
    started = {}
    for pk, event in events.items():
        place = pending.get(pk)
        # A pending replay of a backfill that was not published keeps its revision.
        before = last.get(pk, place)
        revision = before.revision if before is not None else None
        if edit is not None:
            revision = _revise(event, edit, by=by, reason=reason, now=now)
        started[pk] = Replay(
            pk=place.pk if place is not None else uuid4(),
            event=event,
            batch_id=place.batch_id if place is not None else None,
            position=place.position if place is not None else None,
            version=seen[pk],
            number=event.replays,
            revision=revision,
            # One of a backfill that was not published stays forced.
            forced=force or (place is not None and place.forced),
            handler=clean(handlers[pk], LENGTH),
            requested_at=now,
            requested_by=by,
            reason=reason,
            publishes=1,
        )
    _replays().bulk_create(started.values())
    return started


def _queue(
    replays: Mapping[UUID, Replay],
    handlers: Mapping[UUID, str],
    places: Mapping[UUID, Replay] | None = None,
) -> None:
    """Queue replays again, under their old ids, for the current names of their handlers.

    Args:
        places: pending rows of a batch, whose places they get.
    """
    for pk, replay in replays.items():
        replay.state, replay.error = _Replay.QUEUED, None
        replay.publishes += 1
        replay.handler = clean(handlers[pk], LENGTH)
        if places and pk in places:
            replay.batch_id, replay.position = places[pk].batch_id, places[pk].position
    columns = ["state", "error", "publishes", "handler", "batch", "position"]
    columns += ["requested_at", "requested_by", "reason"]
    _replays().bulk_update(replays.values(), columns)


def _revise(
    event: ArchivedEvent, edit: Revision, *, by: str, reason: str, now: datetime
) -> Revision:
    """Add the next revision of an event that this transaction has claimed."""
    revisions = Revision.objects.using(tables.database())
    last = revisions.filter(event=event).aggregate(last=Max("number"))["last"]
    revision = revisions.create(
        pk=uuid4(),
        event=event,
        number=(last or 0) + 1,
        body=edit.body,
        by=by,
        at=now,
        reason=reason,
    )
    pairs = search_values.in_payload(event.name, revision.payload)
    search_values.store(((event.pk, *pair) for pair in pairs), using=tables.database())
    return revision


def _end(ends: Mapping[UUID, datetime], state: Replay.State, now: datetime) -> None:
    """Record outcomes by the worker's time; a success is never overwritten."""
    ended = _replays().filter(pk__in=list(ends)).exclude(state=_Replay.SUCCEEDED)
    to_end = list(ended.only("pk"))
    if not to_end:
        return
    # Their process has not recorded the publish.
    _record_published(ended, now=now)
    for replay in to_end:
        replay.finished_at = ends[replay.pk]
    _replays().bulk_update(to_end, ["finished_at"])
    ended.update(state=state, error=None, settled_at=now)


def replays() -> QuerySet[Replay]:
    """Return the replays, without what is only in a batch, read where they are written."""
    return _replays().filter(number__isnull=False)


def _replays() -> QuerySet[Replay]:
    return Replay.objects.using(tables.database())


def _pending(batch: UUID | None, events: Iterable[UUID]) -> dict[UUID, Replay]:
    """Return the rows of these events that are pending in a batch."""
    if batch is None:
        return {}
    pending = _replays().filter(batch=batch, state=_Replay.PENDING, event__in=list(events))
    return {row.event_id: row for row in pending}


def has_unconfirmed_replay(event: ArchivedEvent) -> bool:
    """Return True if the current replay of an event may have been published."""
    return _is_unconfirmed(_current_replays({event.pk: event}).get(event.pk))


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
    """Return *discarded* events to the archive, resolved ones to *replaying*; return these."""
    return _decide(seen, State.DISCARDED, _Action.RESTORE, by=by, reason=reason, now=now)


def _decide(
    seen: Seen, before: State, action: ArchiveAction.Action, *, by: str, reason: str, now: datetime
) -> list[UUID]:
    decided: list[UUID] = []
    for part in parts(sorted(seen.items()), BATCH):
        decided += _decide_part(dict(part), before, action, by=by, reason=reason, now=now)
    return decided


@tables.retry_on_conflict
def _decide_part(
    seen: Seen, before: State, action: ArchiveAction.Action, *, by: str, reason: str, now: datetime
) -> list[UUID]:
    restored = action == _Action.RESTORE
    with tables.locking(seen) as events:
        changed = _as_seen(seen, events, before)
        after = State.ARCHIVED if restored else State.DISCARDED
        # Of an event that is not settled, the flag is the state of its replay.
        current = _current_replays(changed) if restored else {}
        underway = [events[pk] for pk, old in current.items() if _is_unconfirmed(old)]
        running = {pk: old for pk, old in current.items() if old.state == _Replay.PUBLISHED}
        others = [
            event for pk, event in changed.items() if event not in underway and pk not in running
        ]
        _change(others, after, now, **_NO_ERROR)
        _change(underway, after, now, unconfirmed=True, error=None)
        for pk, old in running.items():
            # It was resolved, and may still run: another replay has to be forced.
            _change([events[pk]], State.REPLAYING, old.published_at or now, **_NO_ERROR)
        _record_actions(
            ArchiveAction(
                event=event,
                at=now,
                action=action,
                by=clean(by, LENGTH),
                reason=clean(reason),
                group_id=event.group_id,
            )
            for event in changed.values()
        )
    return list(changed)


def _record_published(replays: QuerySet[Replay], *, now: datetime) -> None:
    """Record the actions of those replays that are queued, and that may run."""
    large = [f"event__{name}" for name in ArchivedEvent.LARGE]
    underway = replays.filter(state=_Replay.QUEUED).select_related("event", "revision")
    actions = []
    for replay in underway.defer(*large, "revision__body"):
        action = _Action.REPLAY
        if replay.forced:
            action = _Action.FORCE
        # One that was not confirmed may be requested again, by another user.
        elif replay.revision is not None and replay.revision.at == replay.requested_at:
            action = _Action.EDIT
        actions.append(
            ArchiveAction(
                event=replay.event,
                at=now,
                action=action,
                by=replay.requested_by,
                reason=replay.reason,
                replay_id=replay.pk,
                batch_id=replay.batch_id,
                group_id=replay.event.group_id,
            )
        )
    _record_actions(actions)


def _record_actions(actions: Iterable[ArchiveAction]) -> None:
    ArchiveAction.objects.using(tables.database()).bulk_create(actions)
