"""Delete settled rows when they are old; nothing else deletes them.

Of the archive events that have succeeded or were discarded, and groups that have none left, of the
outbox those that were discarded (what is confirmed goes by itself), of the inbox what no event can
ask for any more, and replay batches, snapshots and alerts that are over. In parts, oldest first,
each in its own short transaction. What a part found is locked and looked at again before anything
of it goes, so that an event that somebody restored meanwhile keeps its row and its history.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from django.db import router, transaction
from django.db.models import QuerySet

from ..conf import RetentionSettings, get_settings
from ..databases import check_commits
from ..models import (
    Alert,
    ArchiveAction,
    ArchivedEvent,
    ArchivedFailure,
    Replay,
    Revision,
    Snapshot,
    State,
)
from ..publish import outbox, outbox_rows
from ..worker import once
from . import states
from .batches import batch_states
from .groups import failure_groups, group_counts

#: Rows in one transaction at most.
BATCH: Final = 500
#: What may be deleted at all: what is on its way to a handler is not.
STATES: Final = (State.SUCCEEDED, State.DISCARDED, State.ARCHIVED)


@dataclass(slots=True, kw_only=True)
class Pruned:
    """The number of rows deleted, or to delete.

    Attributes:
        events: their number by state; a state that is kept for ever is missing.
        outbox: discarded events of the outbox.
        inbox: rows of the inbox.
        batches: replay batches, with what they say of each event.
        snapshots, alerts: rows of theirs.
        groups: failure groups of which no event was left, and that nobody wrote about.
        stopped: the rest was left because somebody said so.
    """

    events: dict[State, int] = field(default_factory=dict)
    outbox: int = 0
    inbox: int = 0
    batches: int = 0
    snapshots: int = 0
    alerts: int = 0
    groups: int = 0
    stopped: bool = False

    @property
    def total(self) -> int:
        return (
            sum(self.events.values())
            + self.outbox
            + self.inbox
            + self.batches
            + self.snapshots
            + self.alerts
            + self.groups
        )


def ages(settings: RetentionSettings) -> dict[State, float]:
    """Return the retention of each state in seconds, without those kept for ever.

    Events that nobody has dealt with are never deleted by a setting.
    """
    kept = {State.SUCCEEDED: settings.succeeded, State.DISCARDED: settings.discarded}
    return {state: age for state, age in kept.items() if age is not None}


def due(
    kept: Mapping[State, float],
    *,
    service: str,
    outbox_age: float | None = None,
    inbox_age: float | None = None,
    batch_age: float | None = None,
    snapshots_age: float | None = None,
    alerts_age: float | None = None,
    now: datetime | None = None,
) -> Pruned:
    """Count what :func:`prune` would delete; changes nothing."""
    now = now or datetime.now(UTC)
    counted = Pruned(
        events={
            state: _old(service, state, age, now).count() for state, age in _checked(kept).items()
        }
    )
    if outbox_age is not None:
        age = timedelta(seconds=outbox_age)
        counted.outbox = sum(
            outbox.discarded(alias, service, age).count()
            for alias in outbox_rows.tables(get_settings())
        )
    if inbox_age is not None:
        counted.inbox = once.due(before=now - timedelta(seconds=inbox_age), service=service)
    if batch_age is not None:
        counted.batches = batch_states.ended_before(service=service, age=batch_age, now=now).count()
    if snapshots_age is not None:
        counted.snapshots = _old_snapshots(service, snapshots_age, now).count()
    if alerts_age is not None:
        counted.alerts = _old_alerts(service, alerts_age, now).count()
    return counted


def prune(
    kept: Mapping[State, float],
    *,
    service: str,
    outbox_age: float | None = None,
    inbox_age: float | None = None,
    batch_age: float | None = None,
    snapshots_age: float | None = None,
    alerts_age: float | None = None,
    batch_size: int = BATCH,
    now: datetime | None = None,
    progress: Callable[[Pruned], object] = bool,
    stop: Callable[[], bool] = bool,
) -> Pruned:
    """Delete events that have been in their state for longer than they are kept.

    Their failures, replays and actions go with them; task results stay. Any number may run at
    once.

    Args:
        kept: seconds by state (:func:`ages`), counted from ``state_since``.
        service: whose; another one in the same tables keeps its own as long as it wants.
        outbox_age, inbox_age: seconds that discarded events of the outbox and rows of the inbox
            are kept; for ever by default.
        batch_age: seconds that a replay batch is kept which has ended; for ever by default. With
            one, drafts that nobody has started go after a day.
        snapshots_age, alerts_age: seconds that snapshots, and alerts that are over, are kept.
        batch_size: rows in one transaction at most.
        now: until when it is counted; once for the whole run, so that it ends.
        progress: called after each batch.
        stop: asked before each batch whether to end.

    Raises:
        ValueError: a state of which nothing is ever deleted, or an inbox that is not kept for
            as long as it must be.
        DatabaseError: the database is away; batches that were committed are gone.
        ConfigurationError: nothing would be committed.
    """
    now = now or datetime.now(UTC)
    pruned = Pruned()
    for state, age in _checked(kept).items():
        pruned.events[state] = 0
        old = _old(service, state, age, now)
        while not pruned.stopped:
            if stop():
                pruned.stopped = True
                break
            ids = list(old.order_by("state_since").values_list("pk", flat=True)[:batch_size])
            if not ids:
                break
            pruned.events[state] += _delete(old, ids)
            progress(pruned)
    if not pruned.stopped:
        kept_for = kept.get(State.DISCARDED)
        before = None if kept_for is None else now - timedelta(seconds=kept_for)
        pruned.groups = failure_groups.prune(before=before, service=service, batch_size=batch_size)
    if outbox_age is not None:
        age_kept = timedelta(seconds=outbox_age)
        for alias in outbox_rows.tables(get_settings()):
            check_commits(alias)
            while not pruned.stopped:
                if stop():
                    pruned.stopped = True
                    break
                gone = outbox.delete_discarded(
                    alias=alias, service=service, age=age_kept, limit=batch_size
                )
                if not gone:
                    break
                pruned.outbox += gone
                progress(pruned)
    if inbox_age is not None and not pruned.stopped:

        def so_far(count: int) -> None:
            pruned.inbox = count
            progress(pruned)

        def ended() -> bool:
            pruned.stopped = pruned.stopped or stop()
            return pruned.stopped

        once.prune(
            before=now - timedelta(seconds=inbox_age),
            service=service,
            batch_size=batch_size,
            progress=so_far,
            stop=ended,
        )
    if batch_age is not None:
        ended_long_ago = batch_states.ended_before(service=service, age=batch_age, now=now)
        while not pruned.stopped and ended_long_ago.exists():
            if stop():
                pruned.stopped = True
                break
            pruned.batches += batch_states.delete_batch(ended_long_ago)
    watched: list[tuple[str, QuerySet[Any]]] = []
    if snapshots_age is not None:
        watched.append(("snapshots", _old_snapshots(service, snapshots_age, now)))
    if alerts_age is not None:
        watched.append(("alerts", _old_alerts(service, alerts_age, now)))
    for name, rows in watched:
        while not pruned.stopped:
            if stop():
                pruned.stopped = True
                break
            check_commits(rows.db)
            keys = list(rows.order_by().values_list("pk", flat=True)[:batch_size])
            if not keys:
                break
            rows.filter(pk__in=keys).only("pk").delete()
            setattr(pruned, name, getattr(pruned, name) + len(keys))
            progress(pruned)
    return pruned


def _old_snapshots(service: str, age: float, now: datetime) -> QuerySet[Snapshot]:
    rows = Snapshot.objects.using(router.db_for_write(Snapshot))
    return rows.filter(service=service, at__lt=now - timedelta(seconds=age))


def _old_alerts(service: str, age: float, now: datetime) -> QuerySet[Alert]:
    # What lasts has not ended, and is kept.
    rows = Alert.objects.using(router.db_for_write(Alert))
    return rows.filter(service=service, ended__lt=now - timedelta(seconds=age))


def _old(service: str, state: State, age: float, now: datetime) -> QuerySet[ArchivedEvent]:
    before = now - timedelta(seconds=age)
    return states.rows().filter(service=service, state=state, state_since__lt=before)


def _delete(old: QuerySet[ArchivedEvent], ids: list[UUID]) -> int:
    """Delete those of *ids* that are *old* still, and what belongs to them; returns how many."""
    using = states.database()
    check_commits(using)
    with transaction.atomic(using=using):
        before = states.lock(ids)
        # Locked: whoever was faster has committed, and nobody changes them until this commits.
        ids = list(old.filter(pk__in=ids).values_list("pk", flat=True))
        # First what points at replays, so that no row is looked through twice.
        ArchiveAction.objects.using(using).filter(event_id__in=ids).delete()
        ArchivedFailure.objects.using(using).filter(event_id__in=ids).delete()
        Replay.objects.using(using).filter(event_id__in=ids).only("pk").delete()
        Revision.objects.using(using).filter(event_id__in=ids).only("pk").delete()
        # Without their bodies, which Django would read before it deletes them.
        old.filter(pk__in=ids).only("pk").delete()
        gone = {pk: before[pk] for pk in ids if pk in before}
        group_counts.record_changes(gone, {}, now=datetime.now(UTC), using=using)
    return len(ids)


def _checked(kept: Mapping[State, float]) -> Mapping[State, float]:
    for state in kept:
        if state not in STATES:
            raise ValueError(f"events that are {state.value} are on their way, and never deleted")
    return kept
