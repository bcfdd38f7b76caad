"""Failure groups: assign events to them, repair them, and record what people write about them.

The mirror assigns each event when it stores it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from itertools import groupby
from typing import Final
from uuid import UUID

from django.db import IntegrityError, transaction
from django.db.models import Exists, F, OuterRef, QuerySet

from ...callables import nothing
from ...databases import check_commits
from ...models import LENGTH, ArchiveAction, ArchivedEvent, FailureGroup, GroupAction, clean
from .. import tables
from . import group_counts
from .fingerprint import Fingerprint, fingerprint

#: Most events whose newest decisions a group's history reads.
DECISIONS: Final = 2_000
#: The texts that people write about a group, each with its action.
WRITTEN: Final[Mapping[str, GroupAction.Action]] = {
    "note": GroupAction.Action.NOTE,
    "assignee": GroupAction.Action.ASSIGN,
    "ticket": GroupAction.Action.TICKET,
}
#: Columns of an event that determine its group.
_PARTS: Final = ("service", "handler", "exception", "reason", "location")


def groups() -> QuerySet[FailureGroup]:
    """Return the groups, read where they are written: never from a replica."""
    return FailureGroup.objects.using(tables.database())


def fingerprint_of(event: ArchivedEvent) -> Fingerprint:
    """Return the fingerprint of an event's group."""
    return fingerprint(**{name: getattr(event, name) for name in _PARTS})


def assign_groups(
    events: Iterable[ArchivedEvent], failed: Mapping[UUID, Sequence[datetime]], *, now: datetime
) -> None:
    """Set the groups of unsaved events, and insert the groups that are new.

    Args:
        failed: when each event failed.
    """
    by_id: dict[UUID, FailureGroup] = {}
    for event in events:
        identity = fingerprint_of(event)
        event.group_id = identity.id
        moments = failed.get(event.pk) or [now]
        group = by_id.get(identity.id)
        if group is None:
            group = by_id[identity.id] = FailureGroup(
                **asdict(identity),
                first_seen=moments[0],
                last_seen=moments[0],
            )
        group.first_seen = min(group.first_seen, *moments)
        group.last_seen = max(group.last_seen, *moments)
    # In one order, so that concurrent inserts of the same groups do not deadlock.
    groups().bulk_create([by_id[pk] for pk in sorted(by_id)], ignore_conflicts=True)


def fold_all_counts(stop: Callable[[], bool] = nothing) -> int:
    """Fold all group count changes into their groups; return how many were folded."""
    fold = tables.retry_on_conflict(group_counts.fold_changes)
    total = 0
    while not stop() and (done := fold(using=tables.database(), now=tables.clock())):
        total += done
    return total


@dataclass(slots=True, kw_only=True)
class Rebuilt:
    """The result of a rebuild.

    Attributes:
        seen: examined events.
        moved: events that were in another group.
        corrected: groups whose numbers were wrong.
    """

    seen: int = 0
    moved: int = 0
    corrected: int = 0
    stopped: bool = False


def rebuild(
    *,
    progress: Callable[[Rebuilt], object] = nothing,
    stop: Callable[[], bool] = nothing,
) -> Rebuilt:
    """Move every event to its group, and correct the numbers of all groups.

    Run it after a change of the algorithm or of rows by hand. Notes about a group move with its
    events. Everything else may run meanwhile.
    """
    rebuilt = Rebuilt()
    using = tables.database()
    check_commits(using)
    for ids in tables.in_chunks(tables.rows()):
        if stop():
            rebuilt.stopped = True
            return rebuilt
        rebuilt.seen += len(ids)
        events = tables.rows().filter(pk__in=ids).only("group_id", *_PARTS)
        if wrong := [event.pk for event in events if event.group_id != fingerprint_of(event).id]:
            rebuilt.moved += _move(wrong)
        progress(rebuilt)
    correct = tables.retry_on_conflict(group_counts.recount)
    rebuilt.corrected = correct(using=using, now=tables.clock())
    fold_all_counts(stop)
    return rebuilt


def prune(*, before: datetime | None, service: str) -> int:
    """Delete groups without events and notes; return how many.

    Counts of hours older than :data:`.group_counts.KEPT_HOURS` are deleted too.

    Args:
        before: groups whose last failure was earlier; ``None`` keeps all.
    """
    using = tables.database()
    fold_all_counts()
    group_counts.delete_old_hours(
        using=using, before=tables.clock() - timedelta(hours=group_counts.KEPT_HOURS)
    )
    if before is None:
        return 0
    old = _empty().filter(service=service, last_seen__lt=before, note="", assignee="", ticket="")
    return _delete(list(old.values_list("pk", flat=True)))


@tables.retry_on_conflict
def write(
    pk: UUID, *, seen: int, by: str, now: datetime, note: str, assignee: str, ticket: str
) -> list[str] | None:
    """Write note, assignee and ticket of a group, and the changes into its history.

    Args:
        seen: :attr:`~django_amqp_events.models.FailureGroup.edits` as the writer saw it.

    Returns:
        the names of the changed texts; ``None`` if the group has been changed or deleted since.
    """
    using = tables.database()
    given = {
        "note": clean(note),
        "assignee": clean(assignee, LENGTH),
        "ticket": clean(ticket, LENGTH),
    }
    with transaction.atomic(using=using):
        # The UPDATE locks the row.
        if not groups().filter(pk=pk).update(edits=F("edits")):
            return None
        group = groups().get(pk=pk)
        changed = [name for name, value in given.items() if getattr(group, name) != value]
        if not changed:
            return []
        if not groups().filter(pk=pk, edits=seen).update(edits=seen + 1, **given):
            return None
        GroupAction.objects.using(using).bulk_create(
            GroupAction(
                group=group,
                at=now,
                action=WRITTEN[name],
                by=clean(by, LENGTH),
                text=given[name],
            )
            for name in changed
        )
    return changed


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """An entry of a group's history.

    Attributes:
        text: what was written, or the reason.
        events: how many events were decided about in a row; ``None`` for a text.
        batch: the replay batch that did it.
    """

    at: datetime
    what: str
    by: str
    text: str
    events: int | None = None
    batch: UUID | None = None


def history(group: FailureGroup, limit: int) -> list[HistoryEntry]:
    """Return what people wrote about a group and decided about its events, the newest first.

    Args:
        limit: most entries; decisions are read from the newest :data:`DECISIONS` events.
    """
    using = tables.database()
    written = GroupAction.objects.using(using).filter(group=group).order_by("-at", "-pk")[:limit]
    steps = [
        HistoryEntry(at=row.at, what=row.get_action_display(), by=row.by, text=row.text)
        for row in written
    ]
    decided = ArchiveAction.objects.using(using).filter(group_id=group.pk).order_by("-at", "-pk")
    decisions = groupby(
        decided[:DECISIONS], key=lambda row: (row.action, row.by, row.reason, row.batch_id)
    )
    for (_, by, reason, batch), rows in decisions:
        newest, *others = rows
        steps.append(
            HistoryEntry(
                at=newest.at,
                what=newest.get_action_display(),
                by=by,
                text=reason,
                events=1 + len(others),
                batch=batch,
            )
        )
    return sorted(steps, key=lambda step: step.at, reverse=True)[:limit]


@tables.retry_on_conflict
def _move(ids: Collection[UUID]) -> int:
    """Move events to their groups; return how many were moved."""
    now = tables.clock()
    using = tables.database()
    with transaction.atomic(using=using):
        events = tables.lock(ids)
        moved = [event for event in events.values() if event.group_id != fingerprint_of(event).id]
        before = {event.pk: group_counts.counted_event(event) for event in moved}
        failed = {event.pk: [event.last_failed_at] for event in moved}
        assign_groups(moved, failed, now=now)
        together: defaultdict[UUID, list[UUID]] = defaultdict(list)
        for event in moved:
            together[fingerprint_of(event).id].append(event.pk)
        for group, members in together.items():
            tables.rows().filter(pk__in=members).update(group=group)
            _copy_notes({before[pk].group for pk in members}, group)
        group_counts.record_changes(
            before,
            {event.pk: group_counts.counted_event(event) for event in moved},
            failed=failed,
            moved=True,
            now=now,
            using=using,
        )
    return len(moved)


def _copy_notes(old: Collection[UUID | None], new: UUID) -> None:
    """Copy note, assignee and ticket of groups to one that has none."""
    noted = groups().filter(pk__in=[pk for pk in old if pk is not None])
    for group in noted.exclude(note="", assignee="", ticket="").order_by("last_seen"):
        groups().filter(pk=new, note="", assignee="", ticket="").update(
            note=group.note, assignee=group.assignee, ticket=group.ticket, edits=F("edits") + 1
        )


def _empty() -> QuerySet[FailureGroup]:
    events = ArchivedEvent.objects.using(tables.database()).filter(group=OuterRef("pk"))
    return groups().filter(~Exists(events))


def _delete(ids: Collection[UUID]) -> int:
    gone = 0
    for pk in ids:
        try:
            # Each in a savepoint: a group that gets an event meanwhile is kept.
            with transaction.atomic(using=tables.database()):
                groups().filter(pk=pk).delete()
        except IntegrityError:
            continue
        gone += 1
    return gone
