"""Change the state of archived events; every change is one conditional UPDATE.

::

    archived --claim--> queued --confirmed--> replaying --> succeeded
       ^  ^               |  not published       |
       |  +---------------+                      | fails again
       +--------------- archived <---------------+
    archived <--restore-- discarded (with a reason) <--resolve-- replaying

A statement that names the state, the version or the claim that it expects changes nothing where
somebody else was faster; whoever called is told by what comes back. Nothing here talks to the
broker.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import wraps
from typing import Final, ParamSpec, TypeVar
from uuid import UUID, uuid4

from django.db import OperationalError, connections, router, transaction
from django.db.models import Case, Exists, F, Max, OuterRef, Q, QuerySet, Subquery, Value, When
from django.utils.translation import gettext_noop

from ..exceptions import ConfigurationError
from ..models import (
    LENGTH,
    ArchiveAction,
    ArchivedEvent,
    Replay,
    ReplayBatchEvent,
    Revision,
    State,
    clean,
)
from ..reasons import Reason
from .groups import group_counts
from .groups.group_counts import CountedEvent

P = ParamSpec("P")
T = TypeVar("T")

#: Who wants what, by version: what he saw when he decided.
Seen = Mapping[UUID, int]

#: Rows that one transaction changes at most, where somebody decides about any number.
BATCH: Final = 500
#: How often a transaction is tried that the database ends in favour of another one.
TRIES: Final = 10
#: What PostgreSQL calls that: serialization_failure (REPEATABLE READ and stricter), deadlock.
_CONFLICTS: Final = frozenset({"40001", "40P01"})
#: Columns that no copy of an event needs.
_NOT_COPIED: Final = (
    "detail",
    "exception",
    "first_failed_at",
    "last_failed_at",
    "location",
    "message",
    "mirrored_at",
)
_NOBODY: Final = UUID(int=0)
_RECORD_GONE: Final = gettext_noop("the record of the replay was deleted before it was published")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedReplay:
    """An event that this operation alone may publish, and its replay.

    Attributes:
        unforced: the replay was made for this claim, which was not by force.
    """

    event: ArchivedEvent
    replay: Replay
    unforced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """The payload published in place of an event's own.

    Attributes:
        base: the revision that the edit began with, 0 for the event's own body.
    """

    body: bytes
    base: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpublishedReplay:
    """A claimed event whose replay was not confirmed.

    Attributes:
        error: why.
        unconfirmed: it may be on its way all the same.
        general: the error says nothing about this event, so that a batch may try it again.
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
    """Return the database's time: hosts whose clocks differ would take a live claim for a dead one.

    That of SQLite is this process's.
    """
    connection = connections[database()]
    if connection.vendor == "sqlite":
        return datetime.now(UTC)
    with connection.cursor() as cursor:
        cursor.execute("SELECT CURRENT_TIMESTAMP")
        now: datetime = cursor.fetchone()[0]
    return now.astimezone(UTC)


def check_no_transaction() -> None:
    """Refuse to run inside a transaction, which could roll a claim back.

    Raises:
        ConfigurationError: names the remedy.
    """
    connection = connections[database()]
    # Those of Django's TestCase are never committed, and no test minds.
    blocks = [
        block for block in connection.atomic_blocks if not getattr(block, "_from_testcase", False)
    ]
    if not blocks and (connection.in_atomic_block or connection.get_autocommit()):
        return
    raise ConfigurationError(Reason("in-transaction", database=repr(database())))


def retry_on_conflict(function: Callable[P, T]) -> Callable[P, T]:
    """Try a function that is one transaction again, where that had to give way to another one."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        for _ in range(TRIES - 1):
            try:
                return function(*args, **kwargs)
            except OperationalError as exc:
                code = getattr(exc.__cause__, "sqlstate", None)
                if code not in _CONFLICTS or connections[database()].in_atomic_block:
                    raise
        return function(*args, **kwargs)

    return run


def lock(ids: Iterable[UUID]) -> dict[UUID, CountedEvent]:
    """Lock rows in the order of their ids; every transaction of several rows begins with it.

    Returns:
        what the tallies need to know of those that there are.


    Otherwise a mirror and a replay of the same events could wait for each other, and PostgreSQL
    would end one of them. SQLite has one writer at a time, and lets a transaction that begins by
    reading fail at once where another one writes: so it begins by writing, nothing.
    """
    if connections[database()].features.has_select_for_update:
        return group_counts.counted_events(rows().filter(pk__in=list(ids)).select_for_update())
    rows().filter(pk=_NOBODY).update(version=F("version"))
    return group_counts.counted_events(rows().filter(pk__in=list(ids)))


@contextmanager
def counting_changes(ids: Collection[UUID], *, now: datetime) -> Iterator[None]:
    """Lock rows, and note in the tallies what the block changes of them; it is a transaction."""
    with transaction.atomic(using=database()):
        before = lock(ids)
        yield
        after = group_counts.counted_events(rows().filter(pk__in=before.keys()))
        group_counts.record_changes(before, after, now=now, using=database())


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
    edit: Edit | None = None,
) -> list[ClaimedReplay]:
    """Queue events for replay; those that are not *archived* as they were seen are left out.

    It is committed when this returns. A replay that is forced publishes what the one before it
    did, edited or not.

    Args:
        seen: the version of each event.
        handlers: where each goes.
        force: take those that are *replaying* instead; whoever calls knows how long they are.
        batch: the one that they are taken for; it is noted there in the same transaction.
        edit: of one event, which becomes its next revision. One whose last replay was not
            confirmed is left out: with another body, both could run.

    Raises:
        ConfigurationError: there is a transaction around it.
    """
    if not seen:
        return []
    token = uuid4()
    state = State.REPLAYING if force else State.ARCHIVED
    action = ArchiveAction.Action.FORCE if force else ArchiveAction.Action.REPLAY
    if edit is not None:
        action = ArchiveAction.Action.EDIT
    # A replay whose confirm did not come may be on its way: it goes on under its own id, so that
    # whatever runs reports to it.
    underway = _current_replay().filter(outcome=Replay.Outcome.UNCONFIRMED)
    with _committed(), counting_changes(seen, now=now):
        wanted = rows().filter(_as_seen(seen), state=state)
        if edit is not None:
            wanted = wanted.exclude(Exists(underway))
        taken = wanted.update(
            replays=Case(When(Exists(underway), then=F("replays")), default=F("replays") + 1),
            state=State.QUEUED,
            state_since=now,
            version=F("version") + 1,
            claim=token,
            error="",
            unconfirmed=False,
        )
        if not taken:
            return []
        found = _claimed(token)
        _go_on([each for each in found if each[1] is not None], handlers)
        revisions = _forced_revisions(token) if force else {}
        if edit is not None:
            revisions = {
                event.pk: _revise(event, edit, by=by, reason=reason, now=now) for event, _ in found
            }
        said_by, said = clean(by, LENGTH), clean(reason)
        new = [
            Replay(
                pk=uuid4(),
                event=event,
                number=event.replays,
                revision=revisions.get(event.pk),
                handler=clean(handlers[event.pk], LENGTH),
                requested_at=now,
                requested_by=said_by,
                reason=said,
                publishes=1,
            )
            for event, replay in found
            if replay is None
        ]
        _replays().bulk_create(new)
        made = {replay.event_id: replay for replay in new}
        claimed = [
            ClaimedReplay(event=event, replay=made[event.pk], unforced=not force)
            if replay is None
            else ClaimedReplay(event=event, replay=replay)
            for event, replay in found
        ]
        _note(
            ((each.event.pk, each.replay) for each in claimed),
            action=action,
            by=by,
            reason=reason,
            now=now,
            batch=batch,
        )
        if batch is not None:
            _take(batch, [each.event.pk for each in claimed])
    return claimed


def forced(claimed: Sequence[ClaimedReplay]) -> set[UUID]:
    """Return the ids of the replays that were forced."""
    unknown = [each.replay.pk for each in claimed if not each.unforced]
    if not unknown:
        return set()
    actions = ArchiveAction.objects.using(database()).filter(
        replay__in=unknown, action=ArchiveAction.Action.FORCE
    )
    return {pk for pk in actions.values_list("replay_id", flat=True) if pk is not None}


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
    """Take over what a process left *queued*: the same replays, claimed by this operation.

    Args:
        service: whose.
        handlers: today's names of those that were renamed.
        limit, size: so many at most, and bodies of so many bytes together (or one that is larger).

    Raises:
        ConfigurationError: there is a transaction around it.
    """
    token = uuid4()
    waiting = rows().filter(state=State.QUEUED, state_since__lt=since_before, service=service)
    ids: list[UUID] = []
    for pk, body_size in waiting.order_by("state_since", "pk").values_list("pk", "body_size")[
        :limit
    ]:
        size -= body_size
        if ids and size < 0:
            break
        ids.append(pk)
    if not ids:
        return []
    with _committed(), counting_changes(ids, now=now):
        # Whoever else saw the same rows finds them no longer that old.
        waiting.filter(pk__in=ids).update(claim=token, state_since=now, version=F("version") + 1)
        found = _claimed(token)
        orphans = [event.pk for event, replay in found if replay is None]
        if orphans:
            # Somebody deleted the replay by hand.
            rows().filter(pk__in=orphans).update(
                state=State.ARCHIVED,
                version=F("version") + 1,
                error=_RECORD_GONE,
            )
        names = {
            event.pk: handlers.get(replay.handler, replay.handler)
            for event, replay in found
            if replay is not None
        }
        _go_on(found, names)
        return [
            ClaimedReplay(event=event, replay=replay)
            for event, replay in found
            if replay is not None
        ]


@retry_on_conflict
def published(claimed: Collection[ClaimedReplay], *, now: datetime) -> None:
    """Note that the broker has confirmed replays; an outcome that came before stays."""
    ids = [each.replay.pk for each in claimed]
    with counting_changes([each.event.pk for each in claimed], now=now):
        _replays().filter(pk__in=ids).update(
            published_at=now,
            error="",
            outcome=Case(
                When(
                    outcome__in=(Replay.Outcome.SUCCEEDED, Replay.Outcome.FAILED),
                    then=F("outcome"),
                ),
                default=Value(Replay.Outcome.PUBLISHED.value),
            ),
        )
        # Whoever has the claim by now: a confirm is of the replay.
        rows().filter(
            Q(state=State.QUEUED) | Q(state=State.ARCHIVED, unconfirmed=True),
            Exists(_current_replay(ids).filter(outcome=Replay.Outcome.PUBLISHED)),
            pk__in=[each.event.pk for each in claimed],
        ).update(
            state=State.REPLAYING,
            state_since=now,
            version=F("version") + 1,
            unconfirmed=False,
            error="",
        )
        _in_batches(ids).exclude(state__in=_ENDED).update(
            state=ReplayBatchEvent.State.PUBLISHED, why=""
        )


@retry_on_conflict
def returned(unpublished: Collection[UnpublishedReplay], *, now: datetime) -> None:
    """Note that replays were not published, or that it is not known; back to *archived*.

    What has reported its outcome already, or was claimed by somebody else since, stays.
    """
    given = {each.claimed.event.pk: each for each in unpublished}
    with counting_changes(given, now=now):
        current = set(_current([each.claimed for each in unpublished]).values_list("pk", flat=True))
        events, replays = [], []
        back: dict[UUID, UnpublishedReplay] = {}
        for pk, each in given.items():
            if pk not in current:
                continue
            event, replay = each.claimed.event, each.claimed.replay
            error = clean(each.error)
            # Locked, and queued by this very claim: it is as it was read then.
            event.state, event.state_since, event.version = State.ARCHIVED, now, event.version + 1
            event.error, event.unconfirmed = error, each.unconfirmed
            events.append(event)
            replay.outcome = (
                Replay.Outcome.UNCONFIRMED if each.unconfirmed else Replay.Outcome.REFUSED
            )
            replay.error = error
            replays.append(replay)
            back[replay.pk] = each
        _replays().bulk_update(replays, ["outcome", "error"])
        rows().bulk_update(events, ["state", "state_since", "version", "error", "unconfirmed"])
        _back_in_batches(back)


@retry_on_conflict
def finish(ends: Mapping[UUID, datetime], *, now: datetime) -> int:
    """Note that replays reported success, by replay id and the worker's time; it is final.

    The outcome of an older replay is history only. So is one of an event that somebody has
    discarded meanwhile.

    Returns:
        how many of the replays are known.
    """
    events = dict(_replays().filter(pk__in=list(ends)).values_list("pk", "event_id"))
    if not events:
        return 0
    with counting_changes(set(events.values()), now=now):
        _end({pk: ends[pk] for pk in events}, Replay.Outcome.SUCCEEDED)
        rows().filter(
            Exists(_current_replay(events)),
            pk__in=set(events.values()),
            state__in=(State.QUEUED, State.REPLAYING, State.ARCHIVED),
        ).update(
            state=State.SUCCEEDED,
            state_since=now,
            version=F("version") + 1,
            unconfirmed=False,
            error="",
        )
    return len(events)


def failed_again(ends: Mapping[UUID, datetime]) -> None:
    """Record failed replays, unless success was reported before; the caller holds the events.

    The events themselves are the mirror's, with what the failure says.
    """
    _end(ends, Replay.Outcome.FAILED)


def discard(seen: Seen, *, by: str, reason: str, now: datetime) -> list[UUID]:
    """Settle *archived* events without handling them; returns those that were."""
    return _decide(
        seen, State.ARCHIVED, State.DISCARDED, ArchiveAction.Action.DISCARD, by, reason, now
    )


def resolve(seen: Seen, *, by: str, reason: str, now: datetime) -> list[UUID]:
    """Settle events whose replay never reports back; returns those that were *replaying*.

    An outcome that comes after all is history. Whoever calls knows how long they are.
    """
    return _decide(
        seen, State.REPLAYING, State.DISCARDED, ArchiveAction.Action.DISCARD, by, reason, now
    )


def restore(seen: Seen, *, by: str, reason: str, now: datetime) -> list[UUID]:
    """Take *discarded* events back into the archive; returns those that were."""
    return _decide(
        seen, State.DISCARDED, State.ARCHIVED, ArchiveAction.Action.RESTORE, by, reason, now
    )


def _decide(
    seen: Seen,
    before: State,
    after: State,
    action: ArchiveAction.Action,
    by: str,
    reason: str,
    now: datetime,
) -> list[UUID]:
    decided: list[UUID] = []
    items = sorted(seen.items())
    for start in range(0, len(items), BATCH):
        part = dict(items[start : start + BATCH])
        decided += _decide_part(part, before, after, action, by, reason, now)
    return decided


@retry_on_conflict
def _decide_part(
    seen: Seen,
    before: State,
    after: State,
    action: ArchiveAction.Action,
    by: str,
    reason: str,
    now: datetime,
) -> list[UUID]:
    token = uuid4()
    with counting_changes(seen, now=now):
        rows().filter(_as_seen(seen), state=before).update(
            state=after, state_since=now, version=F("version") + 1, claim=token
        )
        changed = list(rows().filter(claim=token).order_by("pk").values_list("pk", flat=True))
        _note(((pk, None) for pk in changed), action=action, by=by, reason=reason, now=now)
    return changed


@contextmanager
def _committed() -> Iterator[None]:
    """Run a transaction that is on the disk when the block is over."""
    check_no_transaction()
    with transaction.atomic(using=database()):
        yield


def _go_on(found: Sequence[tuple[ArchivedEvent, Replay | None]], names: Mapping[UUID, str]) -> None:
    """Take up replays again that may have been published, where their handler is today."""
    replays = {event.pk: replay for event, replay in found if replay is not None}
    if not replays:
        return
    for pk, replay in replays.items():
        replay.outcome, replay.error = Replay.Outcome.QUEUED, ""
        replay.publishes += 1
        replay.handler = clean(names[pk], LENGTH)
    _replays().bulk_update(replays.values(), ["outcome", "error", "publishes", "handler"])


def _end(ends: Mapping[UUID, datetime], outcome: Replay.Outcome) -> None:
    """Note how replays ended, by the worker's time; success, once reported, stays."""
    found = list(
        _replays()
        .filter(pk__in=list(ends))
        .exclude(outcome=Replay.Outcome.SUCCEEDED)
        .only("pk", "outcome", "finished_at")
    )
    for replay in found:
        replay.outcome, replay.finished_at = outcome, ends[replay.pk]
    _replays().bulk_update(found, ["outcome", "finished_at"])
    _in_batches([replay.pk for replay in found]).update(
        state=_OUTCOMES[outcome], why="", settled_at=clock()
    )


def _claimed(token: UUID) -> list[tuple[ArchivedEvent, Replay | None]]:
    """Return the events of a claim, each with its current replay where there is one already."""
    events = list(rows().filter(claim=token).order_by("pk").defer(*_NOT_COPIED))
    replays = {
        replay.event_id: replay
        for replay in _replays()
        .filter(event__claim=token, number=F("event__replays"))
        .select_related("revision")
    }
    for event in events:
        if event.pk in replays:
            replays[event.pk].event = event
    return [(event, replays.get(event.pk)) for event in events]


def _forced_revisions(token: UUID) -> dict[UUID, Revision]:
    """Return what the replays before those of a claim have published in place of the bodies."""
    before = _replays().filter(event__claim=token, number=F("event__replays") - 1)
    return {
        replay.event_id: replay.revision
        for replay in before.select_related("revision")
        if replay.revision is not None
    }


def _revise(event: ArchivedEvent, edit: Edit, *, by: str, reason: str, now: datetime) -> Revision:
    """Add the next revision of an event that this transaction has claimed."""
    revisions = Revision.objects.using(database())
    last = revisions.filter(event=event).aggregate(last=Max("number"))["last"]
    return revisions.create(
        pk=uuid4(),
        event=event,
        number=(last or 0) + 1,
        base=edit.base,
        body=edit.body,
        by=clean(by, LENGTH),
        at=now,
        reason=clean(reason),
    )


def _current(claimed: Collection[ClaimedReplay]) -> QuerySet[ArchivedEvent]:
    """Return those that are still queued by these very claims."""
    tokens = {each.event.claim for each in claimed}
    ids = [each.event.pk for each in claimed]
    return rows().filter(pk__in=ids, claim__in=tokens, state=State.QUEUED)


def _current_replay(ids: Collection[UUID] | None = None) -> QuerySet[Replay]:
    """Return the current replay of the event of an outer query, if it is one of these."""
    found = _replays().filter(event=OuterRef("pk"), number=OuterRef("replays"))
    return found if ids is None else found.filter(pk__in=list(ids))


def _replays() -> QuerySet[Replay]:
    return Replay.objects.using(database())


def _as_seen(seen: Seen) -> Q:
    """Return a filter for rows that still have the version seen."""
    versions: dict[int, list[UUID]] = {}
    for pk, version in seen.items():
        versions.setdefault(version, []).append(pk)
    # Nothing seen is nothing picked: an empty condition would be true of every row.
    wanted = Q(pk__in=[])
    for version, ids in versions.items():
        wanted |= Q(version=version, pk__in=ids)
    return wanted


def _note(
    what: Iterable[tuple[UUID, Replay | None]],
    *,
    action: ArchiveAction.Action,
    by: str,
    reason: str,
    now: datetime,
    batch: UUID | None = None,
) -> Sequence[ArchiveAction]:
    by, reason = clean(by, LENGTH), clean(reason)
    return ArchiveAction.objects.using(database()).bulk_create(
        [
            ArchiveAction(
                event_id=pk,
                at=now,
                action=action,
                by=by,
                reason=reason,
                replay=replay,
                batch_id=batch,
            )
            for pk, replay in what
        ]
    )


# -- batches ------------------------------------------------------------------------------

_ENDED: Final = (ReplayBatchEvent.State.SUCCEEDED, ReplayBatchEvent.State.FAILED)
_OUTCOMES: Final = {
    Replay.Outcome.SUCCEEDED: ReplayBatchEvent.State.SUCCEEDED,
    Replay.Outcome.FAILED: ReplayBatchEvent.State.FAILED,
}


def _in_batches(replays: Collection[UUID]) -> QuerySet[ReplayBatchEvent]:
    """Return the batch rows of these replays; the caller holds the events."""
    found = ReplayBatchEvent.objects.using(database())
    return found.filter(replay_id__in=replays) if replays else found.none()


def _take(batch: UUID, ids: Sequence[UUID]) -> None:
    """Note that a batch has claimed events, and the current replay of each."""
    current = _replays().filter(event=OuterRef("event_id"), number=F("event__replays"))
    ReplayBatchEvent.objects.using(database()).filter(
        batch_id=batch, event_id__in=ids, state=ReplayBatchEvent.State.WAITING
    ).update(state=ReplayBatchEvent.State.QUEUED, replay_id=Subquery(current.values("pk")[:1]))


def _back_in_batches(back: Mapping[UUID, UnpublishedReplay]) -> None:
    """Note what came back: it waits for another try where only the broker was at fault.

    What may be on its way is never tried again by itself.
    """
    found = list(_in_batches(back).filter(state=ReplayBatchEvent.State.QUEUED))
    for each in found:
        assert each.replay_id is not None  # noqa: S101 - it was found by it
        given = back[each.replay_id]
        each.version, each.why = given.claimed.event.version, clean(given.error)
        if given.unconfirmed:
            each.state = ReplayBatchEvent.State.UNCONFIRMED
        elif given.general:
            each.state, each.replay_id = ReplayBatchEvent.State.WAITING, None
        else:
            each.state = ReplayBatchEvent.State.RETURNED
    ReplayBatchEvent.objects.using(database()).bulk_update(
        found, ["state", "why", "version", "replay"]
    )
