"""Delete old rows that are settled; nothing else deletes them.

Rows are deleted oldest first, in short transactions. Each transaction locks its rows and checks
them again, so that an event that is restored meanwhile keeps its row and its history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, TypedDict, Unpack
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
    ReplayBatch,
    Revision,
    Snapshot,
    State,
)
from ..publish import outbox, outbox_rows
from ..worker import inbox
from . import states
from .batches import batch_states
from .groups import failure_groups, group_counts

#: Most rows in one transaction.
BATCH: Final = 500
#: States in which an event may be deleted: no replay of it is in progress.
STATES: Final = (State.SUCCEEDED, State.DISCARDED, State.ARCHIVED)
_OTHERS: Final = ("outbox", "inbox", "batches", "snapshots", "alerts", "groups")


@dataclass(slots=True, kw_only=True)
class Pruned:
    """The number of rows deleted, or to delete.

    Attributes:
        events: archived events by state, without states that are kept for ever.
        outbox: discarded events of the outbox.
        stopped: it was stopped before the end.
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
        others: list[int] = [getattr(self, name) for name in _OTHERS]
        return sum(self.events.values()) + sum(others)


class Ages(TypedDict, total=False):
    """Seconds for which other rows are kept; without a value, for ever.

    Discarded events of the outbox, rows of the inbox, replay batches that ended, snapshots, and
    alerts that ended. With *batch_age*, drafts are deleted after a day.
    """

    outbox_age: float | None
    inbox_age: float | None
    batch_age: float | None
    snapshots_age: float | None
    alerts_age: float | None


def ages(settings: RetentionSettings) -> dict[State, float]:
    """Return the retention of each state in seconds, without those kept for ever.

    Settings never delete *archived* events.
    """
    kept = {State.SUCCEEDED: settings.succeeded, State.DISCARDED: settings.discarded}
    return {state: age for state, age in kept.items() if age is not None}


def due(
    kept: Mapping[State, float],
    *,
    service: str,
    now: datetime | None = None,
    **others: Unpack[Ages],
) -> Pruned:
    """Count what :func:`prune` would delete; changes nothing."""
    now = now or datetime.now(UTC)
    counted = Pruned(
        events={state: rows.count() for state, rows in _old_events(kept, service, now).items()}
    )
    if (age := others.get("outbox_age")) is not None:
        counted.outbox = sum(
            outbox.discarded(alias, service, timedelta(seconds=age)).count()
            for alias in outbox_rows.tables(get_settings())
        )
    if (age := others.get("inbox_age")) is not None:
        counted.inbox = inbox.due(before=now - timedelta(seconds=age), service=service)
    if (age := others.get("batch_age")) is not None:
        counted.batches = batch_states.ended_before(service=service, age=age, now=now).count()
    for name, rows in _old_statistics(others, service, now).items():
        setattr(counted, name, rows.count())
    return counted


def prune(
    kept: Mapping[State, float],
    *,
    service: str,
    batch_size: int = BATCH,
    now: datetime | None = None,
    progress: Callable[[Pruned], object] = bool,
    stop: Callable[[], bool] = bool,
    **others: Unpack[Ages],
) -> Pruned:
    """Delete rows that are older than they are kept; any number of processes may run at once.

    Failures, replays, revisions and actions are deleted with their event; task results are kept.

    Args:
        kept: seconds by state (:func:`ages`), counted from ``state_since``.
        service: the owner of the rows.
        batch_size: most rows in one transaction.
        now: the same time for the whole run.
        progress: called after each transaction.
        stop: called before each transaction; True ends.

    Raises:
        ValueError: a state is never deleted, or the inbox is not kept long enough.
        DatabaseError: the database is unreachable; committed transactions stay.
        ConfigurationError: nothing would be committed.
    """
    now = now or datetime.now(UTC)
    pruned = Pruned(events=dict.fromkeys(kept, 0))

    def stopped() -> bool:
        pruned.stopped = pruned.stopped or stop()
        return pruned.stopped

    def run(name: str, parts: Iterator[int]) -> None:
        while not stopped() and (count := next(parts, None)) is not None:
            setattr(pruned, name, getattr(pruned, name) + count)
            progress(pruned)

    for state, rows in _old_events(kept, service, now).items():
        parts = _delete_events(rows, batch_size)
        while not stopped() and (count := next(parts, None)) is not None:
            pruned.events[state] += count
            progress(pruned)
    if not pruned.stopped:
        age = kept.get(State.DISCARDED)
        before = None if age is None else now - timedelta(seconds=age)
        pruned.groups = failure_groups.prune(before=before, service=service)
    if (age := others.get("outbox_age")) is not None:
        for alias in outbox_rows.tables(get_settings()):
            check_commits(alias)
            delete = partial(
                outbox.delete_discarded,
                alias=alias,
                service=service,
                age=timedelta(seconds=age),
                limit=batch_size,
            )
            run("outbox", iter(delete, 0))
    if (age := others.get("inbox_age")) is not None and not pruned.stopped:

        def count_inbox(count: int) -> None:
            pruned.inbox = count
            progress(pruned)

        inbox.prune(
            before=now - timedelta(seconds=age),
            service=service,
            batch_size=batch_size,
            progress=count_inbox,
            stop=stopped,
        )
    if (age := others.get("batch_age")) is not None:
        run(
            "batches",
            _delete_batches(batch_states.ended_before(service=service, age=age, now=now)),
        )
    for name, found in _old_statistics(others, service, now).items():
        run(name, _delete_rows(found, batch_size))
    return pruned


def _old_events(
    kept: Mapping[State, float], service: str, now: datetime
) -> dict[State, QuerySet[ArchivedEvent]]:
    for state in kept:
        if state not in STATES:
            raise ValueError(f"{state.value} events are being replayed and are never deleted")
    return {
        state: states.rows().filter(
            service=service, state=state, state_since__lt=now - timedelta(seconds=age)
        )
        for state, age in kept.items()
    }


def _old_statistics(others: Ages, service: str, now: datetime) -> dict[str, QuerySet[Any]]:
    found: dict[str, QuerySet[Any]] = {}
    if (age := others.get("snapshots_age")) is not None:
        found["snapshots"] = Snapshot.objects.using(router.db_for_write(Snapshot)).filter(
            service=service, at__lt=now - timedelta(seconds=age)
        )
    if (age := others.get("alerts_age")) is not None:
        # An alert that lasts has no end.
        found["alerts"] = Alert.objects.using(router.db_for_write(Alert)).filter(
            service=service, ended__lt=now - timedelta(seconds=age)
        )
    return found


def _delete_rows(rows: QuerySet[Any], size: int) -> Iterator[int]:
    check_commits(rows.db)
    while keys := list(rows.order_by().values_list("pk", flat=True)[:size]):
        rows.filter(pk__in=keys).only("pk").delete()
        yield len(keys)


def _delete_batches(ended: QuerySet[ReplayBatch]) -> Iterator[int]:
    while ended.exists():
        yield batch_states.delete_batch(ended)


def _delete_events(old: QuerySet[ArchivedEvent], size: int) -> Iterator[int]:
    while ids := list(old.order_by("state_since").values_list("pk", flat=True)[:size]):
        yield _delete(old, ids)


def _delete(old: QuerySet[ArchivedEvent], ids: list[UUID]) -> int:
    """Delete those of *ids* that are still *old*, and their rows; return how many."""
    using = states.database()
    check_commits(using)
    with transaction.atomic(using=using):
        before = states.lock(ids)
        # Locked: earlier changes are committed, and later ones wait.
        ids = list(old.filter(pk__in=ids).values_list("pk", flat=True))
        # Rows that refer to replays first, so that no table is searched twice.
        ArchiveAction.objects.using(using).filter(event_id__in=ids).delete()
        ArchivedFailure.objects.using(using).filter(event_id__in=ids).delete()
        Replay.objects.using(using).filter(event_id__in=ids).only("pk").delete()
        Revision.objects.using(using).filter(event_id__in=ids).only("pk").delete()
        # Django would read the bodies before it deletes them.
        old.filter(pk__in=ids).only("pk").delete()
        gone = {pk: before[pk] for pk in ids if pk in before}
        group_counts.record_changes(gone, {}, now=datetime.now(UTC), using=using)
    return len(ids)
