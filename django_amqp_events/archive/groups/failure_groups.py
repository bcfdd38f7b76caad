"""Failure groups: which group an event is in, what people write about one, and the repair of both.

The mirror puts each event into its group as it comes. Events that were there before the groups
were, or that a process of an older version has stored, are in none until somebody calls
:func:`adopt`; an idle mirror does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

from django.db import IntegrityError, transaction
from django.db.models import Exists, OuterRef, QuerySet

from ...databases import check_commits
from ...models import (
    LENGTH,
    ArchivedEvent,
    FailureGroup,
    GroupAction,
    clean,
)
from .. import states
from . import group_counts
from .fingerprint import VERSION, Fingerprint, fingerprint

#: Events that one transaction puts into groups at most.
BATCH: Final = 500
#: What people write about a group, and what the history calls it.
WRITTEN: Final[Mapping[str, GroupAction.Action]] = {
    "note": GroupAction.Action.NOTE,
    "assignee": GroupAction.Action.ASSIGN,
    "ticket": GroupAction.Action.TICKET,
}
#: Columns that a group is made of.
_PARTS: Final = ("service", "handler", "exception", "reason", "location")


def groups() -> QuerySet[FailureGroup]:
    """Return the groups, read where they are written: never from a replica."""
    return FailureGroup.objects.using(states.database())


def fingerprint_of(event: ArchivedEvent) -> Fingerprint:
    """Return the group of an event."""
    return fingerprint(**{name: getattr(event, name) for name in _PARTS})


def assign_groups(
    events: Iterable[ArchivedEvent], failed: Mapping[UUID, Sequence[datetime]], *, now: datetime
) -> None:
    """Put events into their groups, in memory, and make those groups that are new.

    Args:
        failed: when the events failed.
    """
    wanted: dict[UUID, FailureGroup] = {}
    for event in events:
        found = fingerprint_of(event)
        event.group_id = found.id
        # A worker's clock may be ahead.
        moments = [min(moment, now) for moment in failed.get(event.pk, ())] or [now]
        group = wanted.get(found.id)
        if group is None:
            group = wanted[found.id] = FailureGroup(
                pk=found.id,
                algorithm=VERSION,
                service=found.service,
                handler=found.handler,
                exception=found.exception,
                frame=clean(found.frame, LENGTH),
                reason=found.reason,
                first_seen=moments[0],
                last_seen=moments[0],
            )
        group.first_seen = min(group.first_seen, *moments)
        group.last_seen = max(group.last_seen, *moments)
    # In one order: whoever makes the same ones at the same time waits for nobody who waits for him.
    groups().bulk_create([wanted[pk] for pk in sorted(wanted)], ignore_conflicts=True)


@states.retry_on_conflict
def fold_counts(*, now: datetime | None = None) -> int:
    """Fold group count changes into their groups; return how many were folded."""
    return group_counts.fold_changes(using=states.database(), now=now or datetime.now(UTC))


def fold_all_counts(stop: Callable[[], bool] = bool) -> int:
    """Add up everything that was counted; returns how much."""
    total = 0
    while not stop() and (done := fold_counts()):
        total += done
    return total


def group_ungrouped(limit: int = BATCH) -> int:
    """Put events that are in no group into theirs, the last failures first; returns how many.

    They count in the hour of their last failure.
    """
    check_commits(states.database())
    missing = states.rows().filter(group__isnull=True).order_by("-last_failed_at", "-pk")
    ids = list(missing.values_list("pk", flat=True)[:limit])
    return _move(ids) if ids else 0


@dataclass(slots=True, kw_only=True)
class Rebuilt:
    """The result of a rebuild.

    Attributes:
        seen: events that were looked at.
        moved: those that were in another group, or in none.
        corrected: groups whose numbers were wrong.
        gone: groups of older versions of the algorithm that have no events any more.
        stopped: the rest was left because somebody said so.
    """

    seen: int = 0
    moved: int = 0
    corrected: int = 0
    gone: int = 0
    stopped: bool = False


def rebuild(
    *,
    batch_size: int = BATCH,
    progress: Callable[[Rebuilt], object] = bool,
    stop: Callable[[], bool] = bool,
) -> Rebuilt:
    """Put every event into the group where it belongs, and count anew what is open.

    For events that are in no group, for another version of the algorithm, and where somebody
    changed or deleted rows by hand. What people wrote about a group moves with its events. It may
    run while everything else does; hours of events that stay in their group are left as they are.
    """
    rebuilt = Rebuilt()
    using = states.database()
    check_commits(using)
    last: UUID | None = None
    while True:
        if stop():
            rebuilt.stopped = True
            return rebuilt
        rows = states.rows().order_by("pk")
        if last is not None:
            rows = rows.filter(pk__gt=last)
        found = list(rows.only("pk", "group_id", *_PARTS)[:batch_size])
        if not found:
            break
        last = found[-1].pk
        rebuilt.seen += len(found)
        if wrong := [event.pk for event in found if event.group_id != fingerprint_of(event).id]:
            rebuilt.moved += _move(wrong)
        progress(rebuilt)
    rebuilt.corrected = _correct()
    fold_all_counts(stop)
    events = ArchivedEvent.objects.using(using).filter(group=OuterRef("pk"))
    outdated = groups().exclude(algorithm=VERSION).filter(~Exists(events))
    rebuilt.gone = _delete(list(outdated.values_list("pk", flat=True)))
    return rebuilt


def prune(*, before: datetime | None, service: str, batch_size: int = BATCH) -> int:
    """Delete groups without events and without notes; return how many.

    Tallies of hours that are older than
    :data:`django_amqp_events.archive.groups.group_counts.HOURS` go too.

    Args:
        before: they failed last before then; ``None`` keeps them all.
        service: whose.
    """
    using = states.database()
    check_commits(using)
    fold_all_counts()
    group_counts.delete_old_hours(
        using=using, before=datetime.now(UTC) - timedelta(hours=group_counts.HOURS)
    )
    if before is None:
        return 0
    events = ArchivedEvent.objects.using(using).filter(group=OuterRef("pk"))
    old = groups().filter(
        ~Exists(events), service=service, last_seen__lt=before, note="", assignee="", ticket=""
    )
    ids = list(old.values_list("pk", flat=True))
    return sum(_delete(ids[start : start + batch_size]) for start in range(0, len(ids), batch_size))


def write(
    pk: UUID, *, seen: int, by: str, now: datetime, note: str, assignee: str, ticket: str
) -> list[str] | None:
    """Write note, assignee and ticket of a group, and who did into its history.

    Args:
        seen: how often they had been changed when somebody began to write.

    Returns:
        the names of those that were changed; ``None`` where somebody else was faster, or the
        group is gone, and nothing was.
    """
    using = states.database()
    given = {
        "note": clean(note),
        "assignee": clean(assignee, LENGTH),
        "ticket": clean(ticket, LENGTH),
    }
    with transaction.atomic(using=using):
        # One conditional UPDATE, as of events: the row is locked from here on.
        if not groups().filter(pk=pk, edits=seen).update(edits=seen + 1):
            return None
        group = groups().get(pk=pk)
        changed = [name for name, value in given.items() if getattr(group, name) != value]
        groups().filter(pk=pk).update(**given)
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


def record_decision(
    pk: UUID, *, action: str, events: int, by: str, reason: str, now: datetime
) -> None:
    """Add an action on a group's events to the group's history, if the group exists.

    Args:
        action: ``replay`` or ``discard``.
    """
    if events and groups().filter(pk=pk).exists():
        GroupAction.objects.using(states.database()).create(
            group_id=pk,
            at=now,
            action=action,
            by=clean(by, LENGTH),
            text=clean(reason),
            events=events,
        )


@states.retry_on_conflict
def _move(ids: Collection[UUID]) -> int:
    now = datetime.now(UTC)
    using = states.database()
    with transaction.atomic(using=using):
        before = states.lock(ids)
        found = list(
            states.rows().filter(pk__in=before).only(*_PARTS, "group_id", "last_failed_at")
        )
        moved = [event for event in found if event.group_id != fingerprint_of(event).id]
        failed = {event.pk: [event.last_failed_at] for event in moved}
        assign_groups(moved, failed, now=now)
        together: defaultdict[UUID, list[UUID]] = defaultdict(list)
        for event in moved:
            together[fingerprint_of(event).id].append(event.pk)
        for group, members in together.items():
            states.rows().filter(pk__in=members).update(group=group)
            _copy_notes({before[pk].group for pk in members}, group)
        group_counts.record_changes(
            {pk: before[pk] for pk in failed},
            {event.pk: before[event.pk]._replace(group=event.group_id) for event in moved},
            failed=failed,
            now=now,
            using=using,
        )
    return len(moved)


def _copy_notes(old: Collection[UUID | None], new: UUID) -> None:
    """Copy what people wrote about groups to one that has nothing written yet."""
    said = groups().filter(pk__in=[pk for pk in old if pk is not None])
    for group in said.exclude(note="", assignee="", ticket="").order_by("last_seen"):
        groups().filter(pk=new, note="", assignee="", ticket="").update(
            note=group.note, assignee=group.assignee, ticket=group.ticket
        )


@states.retry_on_conflict
def _correct() -> int:
    return group_counts.recount(using=states.database(), now=datetime.now(UTC))


def _delete(ids: Collection[UUID]) -> int:
    gone = 0
    for pk in ids:
        try:
            # A savepoint each: an event may come back to it meanwhile, and it stays.
            with transaction.atomic(using=states.database()):
                groups().filter(pk=pk).delete()
        except IntegrityError:
            continue
        gone += 1
    return gone
