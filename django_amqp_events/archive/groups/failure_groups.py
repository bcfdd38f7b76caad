"""Failure groups: assign events to them, repair them, and record what people write about them.

The mirror assigns each event when it stores it. Line numbers change with each release and messages
with each event, so neither counts. All parts are columns of the archive, so a group is found
without reading a traceback.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Final
from uuid import UUID

from django.db import IntegrityError, transaction
from django.db.models import Exists, F, OuterRef, QuerySet, Value
from django.db.models.functions import Least

from ...callables import nothing
from ...databases import Moment
from ...message.types import derived_id
from ...models import LENGTH, ArchiveAction, ArchivedEvent, FailureGroup, GroupAction, clean
from .. import tables
from ..eligibility import BACKFILL
from ..tables import Repaired

#: Most events whose newest decisions a group's history reads.
DECISIONS: Final = 2_000
#: The texts that people write about a group, each with its action.
WRITTEN: Final[Mapping[str, GroupAction.Action]] = {
    "note": GroupAction.Action.NOTE,
    "assignee": GroupAction.Action.ASSIGN,
    "ticket": GroupAction.Action.TICKET,
}
#: Version of the algorithm of :func:`group_of`. A new one needs ``events_groups --rebuild``.
VERSION: Final = 1
#: As :attr:`django_amqp_events.message.archive_message.Archived.location` writes it.
_LOCATION: Final = re.compile(r"(.*):(?:\d+|\?) in (.*)", re.DOTALL)


def groups() -> QuerySet[FailureGroup]:
    """Return the groups, read where they are written: never from a replica."""
    return FailureGroup.objects.using(tables.database())


def group_of(event: ArchivedEvent) -> FailureGroup:
    """Return the group of an event, as it is before it is stored."""
    match = _LOCATION.fullmatch(event.location)
    frame = f"{match[1]} in {match[2]}" if match else event.location
    reason = "" if event.exception else event.reason
    return FailureGroup(
        pk=derived_id(VERSION, event.service, event.handler, event.exception, frame, reason),
        service=event.service,
        handler=event.handler,
        exception=event.exception,
        frame=frame,
        reason=reason,
        first_seen=event.last_failed_at,
    )


def assign_groups(events: Iterable[ArchivedEvent]) -> None:
    """Set the groups of events in memory, and insert the groups that are new."""
    by_id: dict[UUID, FailureGroup] = {}
    for event in events:
        group = group_of(event)
        event.group_id = group.pk
        group = by_id.setdefault(group.pk, group)
        group.first_seen = min(group.first_seen, event.last_failed_at)
    # In one order, so that concurrent inserts of the same groups do not deadlock.
    groups().bulk_create([by_id[pk] for pk in sorted(by_id)], ignore_conflicts=True)
    # Updated seldom, as events are mirrored about in the order in which they failed.
    for later in groups().filter(pk__in=list(by_id)).order_by("pk"):
        first_seen = by_id[later.pk].first_seen
        if first_seen < later.first_seen:
            groups().filter(pk=later.pk, first_seen__gt=first_seen).update(first_seen=first_seen)


def rebuild(
    *,
    progress: Callable[[Repaired], object] = nothing,
    stop: Callable[[], bool] = nothing,
) -> Repaired:
    """Move every event to its group.

    Run it after an upgrade that groups differently, or after rows were changed by hand. Notes about
    a group move with its events: they are copied until the last one has moved.
    """
    # An event of a backfill has not failed.
    rows = tables.rows().exclude(reason=BACKFILL)
    return tables.repair(rows, _regroup, progress=progress, stop=stop)


def _regroup(ids: list[UUID]) -> int:
    events = (
        tables.rows()
        .filter(pk__in=ids)
        .only("group_id", "service", "handler", "exception", "reason", "location", "last_failed_at")
    )
    wrong = [event.pk for event in events if event.group_id != group_of(event).pk]
    return _move(wrong) if wrong else 0


def prune(*, service: str) -> int:
    """Delete groups without events and notes; return how many."""
    events = tables.rows().filter(group=OuterRef("pk"))
    unused = groups().filter(~Exists(events), service=service, note="", assignee="", ticket="")
    gone = 0
    for pk in list(unused.values_list("pk", flat=True)):
        try:
            # Each in a savepoint: a group that gets an event meanwhile is kept.
            with transaction.atomic(using=tables.database()):
                deleted, _ = unused.filter(pk=pk).delete()
        except IntegrityError:
            continue
        if deleted:
            gone += 1
    return gone


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
    if (group := groups().filter(pk=pk).first()) is None:
        return None
    changed = [name for name, value in given.items() if getattr(group, name) != value]
    with transaction.atomic(using=using):
        shown = groups().filter(pk=pk, edits=seen)
        if changed and not shown.update(edits=seen + 1, **given):
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
    with tables.locking(ids) as events:
        moved = [event for event in events.values() if event.group_id != group_of(event).pk]
        before = {event.pk: event.group_id for event in moved}
        assign_groups(moved)
        together: defaultdict[UUID, list[UUID]] = defaultdict(list)
        for event in moved:
            together[group_of(event).pk].append(event.pk)
        for group, members in together.items():
            tables.rows().filter(pk__in=members).update(group=group)
            _move_notes({before[pk] for pk in members}, group)
    return len(moved)


def _move_notes(old: Collection[UUID | None], new: UUID) -> None:
    """Copy note, assignee and ticket of groups to one that has none.

    A group without further events loses them, and its history to the new group.
    """
    left = groups().filter(pk__in=[pk for pk in old if pk is not None])
    for group in left.order_by("first_seen"):
        if group.note or group.assignee or group.ticket:
            groups().filter(pk=new, note="", assignee="", ticket="").update(
                note=group.note,
                assignee=group.assignee,
                ticket=group.ticket,
                edits=F("edits") + 1,
                first_seen=Least("first_seen", Value(group.first_seen, Moment())),
            )
        if not tables.rows().filter(group=group).exists():
            GroupAction.objects.using(tables.database()).filter(group=group).update(group=new)
            groups().filter(pk=group.pk).update(
                note="", assignee="", ticket="", edits=F("edits") + 1
            )
