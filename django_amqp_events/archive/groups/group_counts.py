"""Count the open events of each group, and their outcomes per hour.

Counting a million rows for each page would be slow, and one counter per group would make concurrent
failures of a group wait for each other. So each transaction that changes events inserts its count
changes (:func:`record_changes`), and :func:`fold_changes` adds them to the groups soon after.
Readers add the changes that are not folded yet, so their numbers are always exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple
from uuid import UUID

from django.db import connections, transaction
from django.db.models import Count, F, OuterRef, QuerySet, Subquery, Sum
from django.db.models.functions import Coalesce

from ...databases import delete_by_id
from ...models import ArchivedEvent, FailureGroup, GroupCountChange, GroupHour, State

KEPT_HOURS: Final = 30 * 24
CHANGES_PER_FOLD: Final = 2_000
ROWS_PER_STATEMENT: Final = 500
#: States of events that are in progress.
IN_PROGRESS: Final = (State.QUEUED, State.REPLAYING)
_OF_HOUR: Final = ("archived", "succeeded", "discarded")
_OF_GROUP: Final = ("open", "in_progress")


class CountedEvent(NamedTuple):
    """What the counts depend on."""

    group: UUID | None
    state: str


def counted_event(event: ArchivedEvent) -> CountedEvent:
    """Return what the counts depend on."""
    return CountedEvent(event.group_id, event.state)


def record_changes(
    before: Mapping[UUID, CountedEvent],
    after: Mapping[UUID, CountedEvent],
    *,
    now: datetime,
    using: str,
    failed: Mapping[UUID, Sequence[datetime]] | None = None,
    moved: bool = False,
) -> None:
    """Record the count changes of a transaction; the caller is inside it and has locked the events.

    Args:
        before, after: the events that it may have changed, without those that did not exist.
        failed: when events failed.
        moved: these failures were counted before, in other groups.
    """
    changes: dict[tuple[UUID, datetime], GroupCountChange] = {}

    def change_of(group: UUID, hour: datetime) -> GroupCountChange:
        if (change := changes.get((group, hour))) is None:
            change = changes[group, hour] = GroupCountChange(group_id=group, at=now, hour=hour)
        return change

    this_hour = hour_of(now)
    for pk in before.keys() | after.keys():
        old, new = before.get(pk), after.get(pk)
        if old == new:
            continue
        if old is not None and old.group is not None:
            _count(change_of(old.group, this_hour), old, -1)
        if new is not None and new.group is not None:
            change = change_of(new.group, this_hour)
            _count(change, new, 1)
            if old is not None and old.state != new.state:
                if new.state == State.SUCCEEDED:
                    change.succeeded += 1
                elif new.state == State.DISCARDED:
                    change.discarded += 1
    for pk, moments in (failed or {}).items():
        if (group := after[pk].group) is None:
            continue
        for at in moments:
            if not moved:
                change_of(group, hour_of(at)).archived += 1
            change = change_of(group, this_hour)
            change.first_at = min(change.first_at or at, at)
            change.last_at = max(change.last_at or at, at)
    # Sorted, so that the changes of one transaction are folded together.
    made = [
        change
        for _, change in sorted(changes.items(), key=lambda item: item[0])
        if change.last_at or any(getattr(change, name) for name in _OF_GROUP + _OF_HOUR)
    ]
    if made:
        GroupCountChange.objects.using(using).bulk_create(made)


def _count(change: GroupCountChange, event: CountedEvent, sign: int) -> None:
    if event.state == State.ARCHIVED:
        change.open += sign
    elif event.state in IN_PROGRESS:
        change.in_progress += sign


def fold_changes(*, using: str, now: datetime) -> int:
    """Fold count changes into groups and hours; return how many, 0 if none are left.

    Any number of processes may call it at once. It sets when a group was resolved and reopened.
    """
    changes = GroupCountChange.objects.using(using)
    with transaction.atomic(using=using):
        _begin_writing(using)
        oldest = list(changes.select_for_update().order_by("pk")[:CHANGES_PER_FOLD])
        if not oldest:
            return 0
        groups = _locked(using, {change.group_id for change in oldest})
        for change in oldest:
            if (group := groups.get(change.group_id)) is not None:
                _add(group, change)
        _add_hours([change for change in oldest if change.group_id in groups], using, now)
        changed = [*_OF_GROUP, "first_seen", "last_seen", "resolved_at", "reopened_at"]
        for group in groups.values():
            # Not save(), whose signals would call receivers of the project.
            FailureGroup.objects.using(using).filter(pk=group.pk).update(
                **{name: getattr(group, name) for name in changed}
            )
        delete_by_id(GroupCountChange, using, [change.pk for change in oldest])
    return len(oldest)


def with_exact_counts(groups: QuerySet[FailureGroup]) -> QuerySet[Any]:
    """Annotate groups with their exact numbers: ``open_now``, ``in_progress_now``.

    One statement sees one moment, so a change that is folded meanwhile is counted once.
    """
    # One join for all of them: a subquery for each group and number costs ten times as much.
    return groups.annotate(
        **{f"{name}_now": F(name) + Coalesce(Sum(f"change_set__{name}"), 0) for name in _OF_GROUP}
    )


def hourly_totals(*, since: datetime, using: str) -> dict[datetime, dict[str, int]]:
    """Return the outcomes of all events by hour, without hours that have none.

    Hours and changes are read in one statement, as in :func:`with_exact_counts`.
    """
    by_hour: dict[datetime, dict[str, int]] = {}
    folded, changes = (
        model.objects.using(using)
        .filter(hour__gte=hour_of(since))
        .order_by()
        .values_list("hour")
        .annotate(**{f"{name}_sum": Sum(name) for name in _OF_HOUR})
        for model in (GroupHour, GroupCountChange)
    )
    for hour, *numbers in folded.union(changes, all=True):
        counts = by_hour.setdefault(hour, dict.fromkeys(_OF_HOUR, 0))
        for name, value in zip(_OF_HOUR, numbers, strict=True):
            counts[name] += value
    return by_hour


def recount(*, using: str, now: datetime) -> int:
    """Count the events of every group and correct its numbers; return how many were wrong.

    Events and numbers are read in one statement. Their difference is the error, whatever other
    transactions do before and after, and is recorded as a change.
    """
    with transaction.atomic(using=using):
        # One process at a time: two would correct the same error twice.
        _begin_writing(using)
        _locked(using, None)
        groups = with_exact_counts(FailureGroup.objects.using(using)).order_by("pk")
        errors = groups.values_list(
            "pk",
            _number_of(State.ARCHIVED) - F("open_now"),
            _number_of(*IN_PROGRESS) - F("in_progress_now"),
        )
        wrong = [
            GroupCountChange(
                group_id=pk, at=now, hour=hour_of(now), open=open_, in_progress=in_progress
            )
            for pk, open_, in_progress in errors
            if open_ or in_progress
        ]
        GroupCountChange.objects.using(using).bulk_create(wrong)
    return len(wrong)


def _number_of(*states: State) -> Any:
    """Express the number of a group's events in some states."""
    events = ArchivedEvent.objects.filter(group=OuterRef("pk"), state__in=states).order_by()
    number = Subquery(events.values("group").annotate(number=Count("pk")).values("number"))
    return Coalesce(number, 0)


def delete_old_hours(*, using: str, before: datetime) -> int:
    """Delete the counts of hours that ended before a time; return how many rows."""
    return GroupHour.objects.using(using).filter(hour__lt=hour_of(before)).delete()[0]


def hour_of(moment: datetime) -> datetime:
    """Return the beginning of the hour in UTC."""
    return moment.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


def _begin_writing(using: str) -> None:
    """Begin a transaction with an UPDATE of nothing.

    SQLite fails one that begins by reading and writes while another one does.
    """
    GroupCountChange.objects.using(using).filter(pk=0).update(open=0)


def _locked(using: str, ids: set[UUID] | None) -> dict[UUID, FailureGroup]:
    """Lock groups in the order of their ids; on PostgreSQL, events may still be inserted."""
    groups = FailureGroup.objects.using(using)
    selected = groups.all() if ids is None else groups.filter(pk__in=ids)
    no_key = connections[using].features.has_select_for_no_key_update
    return {group.pk: group for group in selected.select_for_update(no_key=no_key).order_by("pk")}


def _add(group: FailureGroup, change: GroupCountChange) -> None:
    before = group.open + group.in_progress
    for name in _OF_GROUP:
        setattr(group, name, getattr(group, name) + getattr(change, name))
    after = group.open + group.in_progress
    if change.first_at is not None and change.last_at is not None:
        group.first_seen = min(group.first_seen, change.first_at)
        group.last_seen = max(group.last_seen, change.last_at)
    if after <= 0 and (before > 0 or group.resolved_at is None):
        # Its events may have been settled before it was made.
        group.resolved_at, group.reopened_at = change.at, None
    elif after > 0 >= before and group.resolved_at is not None:
        if change.last_at is not None and change.last_at > group.resolved_at:
            group.reopened_at = change.at
        else:
            # A restored event, or one that failed before, does not reopen a group: it was not
            # resolved.
            group.resolved_at = None


def _add_hours(changes: Sequence[GroupCountChange], using: str, now: datetime) -> None:
    oldest = hour_of(now) - timedelta(hours=KEPT_HOURS)
    sums: defaultdict[tuple[UUID, datetime], dict[str, int]] = defaultdict(
        lambda: dict.fromkeys(_OF_HOUR, 0)
    )
    for change in changes:
        if change.hour >= oldest and any(getattr(change, name) for name in _OF_HOUR):
            for name in _OF_HOUR:
                sums[change.group_id, change.hour][name] += getattr(change, name)
    if not sums:
        return
    rows = GroupHour.objects.using(using)
    # The lock of its group protects an hour, so no other process adds to it meanwhile.
    for row in rows.filter(
        group_id__in={group for group, _ in sums}, hour__in={hour for _, hour in sums}
    ):
        if (row.group_id, row.hour) in sums:
            for name in _OF_HOUR:
                sums[row.group_id, row.hour][name] += getattr(row, name)
    made = [
        GroupHour(group_id=group, hour=hour, **values)
        for (group, hour), values in sorted(sums.items())
    ]
    # MySQL takes any unique key.
    named = connections[using].features.supports_update_conflicts_with_target
    rows.bulk_create(
        made,
        update_conflicts=True,
        unique_fields=["group_id", "hour"] if named else None,
        update_fields=_OF_HOUR,
        batch_size=ROWS_PER_STATEMENT,
    )
