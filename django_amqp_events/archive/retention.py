"""Delete old rows that are settled; nothing else deletes them.

Rows are deleted oldest first, in short transactions. Each transaction locks its rows and checks
them again, so that an event that is restored meanwhile keeps its row and its history.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from django.db import router
from django.db.models import QuerySet

from ..callables import nothing
from ..conf import get_settings
from ..databases import check_commits
from ..models import (
    Alert,
    ArchiveAction,
    ArchivedEvent,
    ArchivedFailure,
    Replay,
    ReplayBatch,
    Revision,
    SearchValue,
    Snapshot,
    State,
)
from ..publish import outbox, outbox_rows
from . import inbox_retention, tables
from .batches import batch_states
from .groups import failure_groups

ROWS_PER_TRANSACTION: Final = 500
#: States in which an event may be deleted: no replay of it is in progress.
STATES: Final = (State.SUCCEEDED, State.DISCARDED, State.ARCHIVED)
#: Names of the rows that have an age: events by their state, discarded events of the outbox, rows
#: of the inbox, snapshots, alerts that ended, replay batches that ended.
NAMES: Final = (*map(str, STATES), "outbox", "inbox", "snapshots", "alerts", "batches")
#: Seconds for which rows are kept, by their name; without a value, for ever.
Ages = Mapping[str, float | None]


@dataclass(slots=True, kw_only=True)
class Pruned:
    """The number of rows deleted, or to delete.

    Attributes:
        counts: by the names of the ages, and ``groups``.
        stopped: it was stopped before the end.
    """

    counts: Counter[str] = field(default_factory=Counter)
    stopped: bool = False

    @property
    def total(self) -> int:
        return self.counts.total()


def due(ages: Ages, *, service: str, now: datetime | None = None) -> Pruned:
    """Count what :func:`prune` would delete; changes nothing."""
    now = now or tables.clock()
    counted = Pruned()
    for name, rows in _old(ages, service, now):
        counted.counts[name] += rows.count()
    if (age := ages.get("inbox")) is not None:
        counted.counts["inbox"] = inbox_retention.due(
            before=now - timedelta(seconds=age), service=service
        )
    return counted


def prune(
    ages: Ages,
    *,
    service: str,
    now: datetime | None = None,
    progress: Callable[[Pruned], object] = nothing,
    stop: Callable[[], bool] = nothing,
) -> Pruned:
    """Delete rows that are older than they are kept; any number of processes may run at once.

    Failures, replays, revisions and actions are deleted with their event; task results are kept.

    Args:
        ages: by :data:`NAMES`. The age of an event counts from ``state_since``; drafts of batches
            are kept for a day.
        now: the same time for the whole run.

    Raises:
        ValueError: a name has no age, or the inbox is not kept long enough.
        DatabaseError: the database is unreachable; committed transactions stay.
    """
    now = now or tables.clock()
    pruned = Pruned()
    deletions = _deletions(ages, service, now)
    while not stop():
        if (deletion := next(deletions, None)) is None:
            pruned.counts["groups"] = failure_groups.prune(service=service)
            return pruned
        name, count = deletion
        pruned.counts[name] += count
        progress(pruned)
    pruned.stopped = True
    return pruned


def _deletions(ages: Ages, service: str, now: datetime) -> Iterator[tuple[str, int]]:
    """Delete rows in short transactions; yield the name and the number of each."""
    for name, rows in _old(ages, service, now):
        yield from ((name, count) for count in _delete(rows))
    if (age := ages.get("inbox")) is not None:
        before = now - timedelta(seconds=age)
        for count in inbox_retention.prune(before=before, service=service):
            yield "inbox", count


def _old(ages: Ages, service: str, now: datetime) -> Iterator[tuple[str, QuerySet[Any]]]:
    """Yield the rows that are older than their age, except those of the inbox."""
    if unknown := ages.keys() - set(NAMES):
        raise ValueError(f"{', '.join(sorted(unknown))} rows are never deleted")
    for name in NAMES:
        if (age := ages.get(name)) is None:
            continue
        kept = timedelta(seconds=age)
        if name in STATES:
            events = tables.rows().filter(service=service, state=name, state_since__lt=now - kept)
            yield name, events.order_by("state_since")
        elif name == "outbox":
            for alias in outbox_rows.tables(get_settings()):
                yield name, outbox.discarded(alias, service, kept).order_by("discarded_at")
        elif name == "snapshots":
            snapshots = Snapshot.objects.using(router.db_for_write(Snapshot))
            yield name, snapshots.filter(service=service, at__lt=now - kept).order_by("at")
        elif name == "alerts":
            # An alert that lasts has no end.
            alerts = Alert.objects.using(router.db_for_write(Alert))
            yield name, alerts.filter(service=service, ended__lt=now - kept).order_by()
        elif name == "batches":
            yield name, batch_states.ended_before(service=service, age=age, now=now)


def _delete(old: QuerySet[Any]) -> Iterator[int]:
    """Delete rows in short transactions; yield the number of each."""
    check_commits(old.db)
    if old.model is ReplayBatch:
        while old.exists():
            yield batch_states.delete_batch(old)
        return
    delete = _delete_events if old.model is ArchivedEvent else _delete_rows
    while ids := list(old.values_list("pk", flat=True)[:ROWS_PER_TRANSACTION]):
        yield delete(old, ids)


def _delete_rows(old: QuerySet[Any], ids: list[Any]) -> int:
    # By age again: a row of the outbox may have been restored.
    return old.filter(pk__in=ids).only("pk").delete()[0]


@tables.retry_on_conflict
def _delete_events(old: QuerySet[ArchivedEvent], ids: list[UUID]) -> int:
    """Delete those of *ids* that are still *old*, and their rows; return how many."""
    using = tables.database()
    with tables.locking(ids):
        # Locked: earlier changes are committed, and later ones wait.
        ids = list(old.filter(pk__in=ids).values_list("pk", flat=True))
        # Rows that refer to replays first, so that no table is searched twice.
        ArchiveAction.objects.using(using).filter(event_id__in=ids).delete()
        ArchivedFailure.objects.using(using).filter(event_id__in=ids).delete()
        replays = Replay.objects.using(using).filter(event_id__in=ids)
        replays._raw_delete(using)  # noqa: SLF001 - nothing refers to them now
        Revision.objects.using(using).filter(event_id__in=ids)._raw_delete(using)  # noqa: SLF001
        SearchValue.objects.using(using).filter(event_id__in=ids).delete()
        # Django would read the bodies before it deletes them.
        old.filter(pk__in=ids).only("pk").delete()
    return len(ids)
