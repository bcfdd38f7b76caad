"""Count the open events of each group, and their outcomes per hour.

Counting a million rows on each page would be slow, and one counter per group would make everybody
wait who fails at the same time. So each transaction that changes the state of events inserts what
it changes in the tallies (:func:`record`), in the same transaction: both are there or neither is.
:func:`fold` adds these rows up now and then; the mirror does. Whoever reads adds what nobody has
added yet (:func:`standing`), and gets exact numbers at any time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple
from uuid import UUID

from django.db import connections, transaction
from django.db.models import F, QuerySet, Sum
from django.db.models.functions import Coalesce

from ...models import (
    ArchivedEvent,
    FailureGroup,
    GroupCountChange,
    GroupHour,
    State,
)

#: Hours of which the tallies are kept.
HOURS: Final = 30 * 24
#: Changes that are added up in one transaction at most.
FOLD: Final = 2_000
#: Rows that one statement of these writes at most.
ROWS: Final = 500
#: What is on its way to a handler.
IN_PROGRESS: Final = (State.QUEUED, State.REPLAYING)
_COUNTERS: Final = ("open", "again", "going", "archived", "succeeded", "discarded")
_OF_HOUR: Final = ("archived", "succeeded", "discarded")
_OF_GROUP: Final = ("open", "again", "going")


# Each table is read once: a subquery for each group would look for its events one by one.
_ERRORS: Final = """
WITH is_so AS (
    SELECT group_id, SUM(CASE WHEN state = 'archived' THEN 1 ELSE 0 END) AS opened,
        SUM(CASE WHEN state = 'archived' AND replays > 0 THEN 1 ELSE 0 END) AS again,
        SUM(CASE WHEN state IN ('queued', 'replaying') THEN 1 ELSE 0 END) AS going
    FROM django_amqp_events_archivedevent WHERE group_id IS NOT NULL GROUP BY group_id),
to_add AS (
    SELECT group_id, SUM(open) AS opened, SUM(again) AS again, SUM(going) AS going
    FROM django_amqp_events_groupcountchange GROUP BY group_id)
SELECT g.id, COALESCE(i.opened, 0) - g.open - COALESCE(a.opened, 0),
    COALESCE(i.again, 0) - g.again - COALESCE(a.again, 0),
    COALESCE(i.going, 0) - g.going - COALESCE(a.going, 0)
FROM django_amqp_events_failuregroup g
LEFT JOIN is_so i ON i.group_id = g.id LEFT JOIN to_add a ON a.group_id = g.id ORDER BY g.id
"""


class CountedEvent(NamedTuple):
    """The group, state and replays of an event, as far as counts depend on them."""

    group: UUID | None
    state: str
    replays: int


@dataclass(slots=True)
class _Change:
    open: int = 0
    again: int = 0
    going: int = 0
    archived: int = 0
    succeeded: int = 0
    discarded: int = 0
    first_at: datetime | None = None
    last_at: datetime | None = None

    def add(self, standing: CountedEvent, sign: int) -> None:
        """Count an event in, or out."""
        if standing.state == State.ARCHIVED:
            self.open += sign
            self.again += sign * (standing.replays > 0)
        elif standing.state in IN_PROGRESS:
            self.going += sign

    def failed(self, at: datetime) -> None:
        self.first_at = min(self.first_at or at, at)
        self.last_at = max(self.last_at or at, at)

    def __bool__(self) -> bool:
        return self.last_at is not None or any(getattr(self, name) for name in _COUNTERS)


def counted_event(event: ArchivedEvent) -> CountedEvent:
    """Return the counted features of an event in memory."""
    return CountedEvent(event.group_id, event.state, event.replays)


def counted_events(rows: QuerySet[ArchivedEvent]) -> dict[UUID, CountedEvent]:
    """Read the standings of events."""
    found = rows.order_by("pk").values_list("pk", "group_id", "state", "replays")
    return {pk: CountedEvent(group, state, replays) for pk, group, state, replays in found}


def record_changes(
    before: Mapping[UUID, CountedEvent],
    after: Mapping[UUID, CountedEvent],
    *,
    now: datetime,
    using: str,
    failed: Mapping[UUID, Sequence[datetime]] | None = None,
) -> None:
    """Record the count changes of a transaction; the caller is inside it and has locked the events.

    Args:
        before, after: the standing of each event that it may have changed; one that is made or
            deleted is missing in one of them.
        failed: when events failed, of failures that counted.
    """
    changes: defaultdict[tuple[UUID, datetime], _Change] = defaultdict(_Change)
    this_hour = hour_of(now)
    for pk in before.keys() | after.keys():
        old, new = before.get(pk), after.get(pk)
        if old == new:
            continue
        if old is not None and old.group is not None:
            changes[old.group, this_hour].add(old, -1)
        if new is not None and new.group is not None:
            change = changes[new.group, this_hour]
            change.add(new, 1)
            if old is not None and old.state != new.state:
                change.succeeded += new.state == State.SUCCEEDED
                change.discarded += new.state == State.DISCARDED
    for pk, moments in (failed or {}).items():
        group = after[pk].group
        for moment in moments:
            # A worker's clock may be ahead.
            at = min(moment, now)
            if group is not None:
                changes[group, hour_of(at)].archived += 1
                changes[group, this_hour].failed(at)
    made = [
        GroupCountChange(
            group_id=group,
            at=now,
            hour=hour,
            first_at=change.first_at,
            last_at=change.last_at,
            **{name: getattr(change, name) for name in _COUNTERS},
        )
        # In one order, so that those of one transaction are added up in one.
        for (group, hour), change in sorted(changes.items())
        if change
    ]
    if made:
        GroupCountChange.objects.using(using).bulk_create(made)


def fold_changes(*, using: str, now: datetime, limit: int = FOLD) -> int:
    """Fold count changes into groups and hours; return how many, 0 if none are left.

    Any number of processes may call it at once. It says when a group was put right (nothing of it
    is open or on its way any more), and when it came back.
    """
    changes = GroupCountChange.objects.using(using)
    with transaction.atomic(using=using):
        # A transaction that begins by reading cannot write in SQLite where another one does.
        changes.filter(pk=0).update(open=0)
        found = list(changes.select_for_update().order_by("pk")[:limit])
        if not found:
            return 0
        groups = _locked(using, {each.group_id for each in found})
        for each in found:
            if (group := groups.get(each.group_id)) is not None:
                _add(group, each)
        _add_hours([each for each in found if each.group_id in groups], using, now)
        # As an upsert, which is one statement for all of them: bulk_update() is a CASE with a
        # branch for each row and column. The rows are there, and locked.
        FailureGroup.objects.using(using).bulk_create(
            groups.values(),
            update_conflicts=True,
            unique_fields=["id"],
            update_fields=[*_OF_GROUP, "first_seen", "last_seen", "resolved_at", "reopened_at"],
            batch_size=ROWS,
        )
        changes.filter(pk__in=[each.pk for each in found])._raw_delete(using)  # noqa: SLF001
    return len(found)


def with_exact_counts(
    groups: QuerySet[FailureGroup], names: Sequence[str] = _OF_GROUP
) -> QuerySet[Any]:
    """Annotate groups with their exact numbers: ``open_now``, ``again_now``, ``going_now``.

    It is one statement, so it sees one moment: what another process adds up meanwhile is counted
    once.
    """
    # One join for all of them. A subquery for each group and number costs ten times as much.
    return groups.annotate(
        **{f"{name}_now": F(name) + Coalesce(Sum(f"change_set__{name}"), 0) for name in names}
    )


def hourly_counts(
    groups: Iterable[UUID], *, since: datetime, using: str
) -> dict[UUID, dict[datetime, dict[str, int]]]:
    """Return what happened to the events of groups in each hour from *since* on.

    It is one statement, for the reason above. A group that has nothing is missing.
    """
    found: dict[UUID, dict[datetime, dict[str, int]]] = {}
    wanted = {"group__in": list(groups), "hour__gte": hour_of(since)}
    columns = ("group", "hour", *_OF_HOUR)
    added = GroupHour.objects.using(using).filter(**wanted).order_by().values_list(*columns)
    changes = (
        GroupCountChange.objects.using(using).filter(**wanted).order_by().values_list(*columns)
    )
    for group, hour, *values in added.union(changes, all=True):
        of_hour = found.setdefault(group, {}).setdefault(hour, dict.fromkeys(_OF_HOUR, 0))
        for name, value in zip(_OF_HOUR, values, strict=True):
            of_hour[name] += value
    return found


def hourly_totals(*, since: datetime, using: str) -> dict[datetime, dict[str, int]]:
    """Return what happened to the events of all groups in each hour from *since* on.

    It is one statement, for the reason above. An hour in which nothing did is missing.
    """
    found: dict[datetime, dict[str, int]] = {}
    added, changes = (
        model.objects.using(using)
        .filter(hour__gte=hour_of(since))
        .order_by()
        .values_list("hour")
        .annotate(**{f"{name}_sum": Sum(name) for name in _OF_HOUR})
        for model in (GroupHour, GroupCountChange)
    )
    for hour, *values in added.union(changes, all=True):
        of_hour = found.setdefault(hour, dict.fromkeys(_OF_HOUR, 0))
        for name, value in zip(_OF_HOUR, values, strict=True):
            of_hour[name] += value
    return found


def recount(*, using: str, now: datetime) -> int:
    """Count the events of every group, and put its numbers right; returns how many were wrong.

    What is counted and what is written are read in one statement. Their difference is the error,
    whatever other transactions do before and after, and goes in as a change like any other.
    """
    with transaction.atomic(using=using):
        # One at a time: two that find the same error would put it right twice.
        GroupCountChange.objects.using(using).filter(pk=0).update(open=0)
        _locked(using, None)
        wrong = []
        with connections[using].cursor() as cursor:
            cursor.execute(_ERRORS)
            for pk, *errors in cursor.fetchall():
                if any(errors):
                    group = pk if isinstance(pk, UUID) else UUID(pk)
                    values = dict(zip(_OF_GROUP, map(int, errors), strict=True))
                    wrong.append(
                        GroupCountChange(group_id=group, at=now, hour=hour_of(now), **values)
                    )
        GroupCountChange.objects.using(using).bulk_create(wrong)
    return len(wrong)


def delete_old_hours(*, using: str, before: datetime) -> int:
    """Delete the tallies of hours that ended before; returns how many."""
    rows = GroupHour.objects.using(using).filter(hour__lt=hour_of(before))
    return rows.delete()[0]


def hour_of(moment: datetime) -> datetime:
    """Return the beginning of the hour; zones that are off by half an hour share UTC's."""
    return moment.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


def _locked(using: str, ids: set[UUID] | None) -> dict[UUID, FailureGroup]:
    """Lock groups in the order of their ids; events of theirs may be inserted meanwhile."""
    groups = FailureGroup.objects.using(using)
    wanted = groups.all() if ids is None else groups.filter(pk__in=ids)
    return {each.pk: each for each in wanted.select_for_update(no_key=True).order_by("pk")}


def _add(group: FailureGroup, change: GroupCountChange) -> None:
    before = group.open + group.going
    for name in _OF_GROUP:
        setattr(group, name, getattr(group, name) + getattr(change, name))
    after = group.open + group.going
    if change.first_at is not None and change.last_at is not None:
        group.first_seen = min(group.first_seen, change.first_at)
        group.last_seen = max(group.last_seen, change.last_at)
    if before > 0 >= after:
        group.resolved_at, group.reopened_at = change.at, None
    elif after > 0 >= before and group.resolved_at is not None:
        if change.last_at is not None:
            group.reopened_at = change.at
        else:
            # Somebody restored an event: it is as if it had never been put right.
            group.resolved_at = None


def _add_hours(changes: Sequence[GroupCountChange], using: str, now: datetime) -> None:
    oldest = hour_of(now) - timedelta(hours=HOURS)
    sums: defaultdict[tuple[UUID, datetime], dict[str, int]] = defaultdict(
        lambda: dict.fromkeys(_OF_HOUR, 0)
    )
    for each in changes:
        if each.hour >= oldest and any(getattr(each, name) for name in _OF_HOUR):
            for name in _OF_HOUR:
                sums[each.group_id, each.hour][name] += getattr(each, name)
    if not sums:
        return
    rows = GroupHour.objects.using(using)
    known = {
        (row.group_id, row.hour): row
        for row in rows.filter(
            group__in={group for group, _ in sums}, hour__in={hour for _, hour in sums}
        )
        if (row.group_id, row.hour) in sums
    }
    for key, row in known.items():
        for name in _OF_HOUR:
            sums[key][name] += getattr(row, name)
    # Whoever holds a group's lock alone adds to its hours, so nothing came between.
    rows.bulk_create(
        (
            GroupHour(group_id=group, hour=hour, **values)
            for (group, hour), values in sorted(sums.items())
        ),
        update_conflicts=True,
        unique_fields=["group", "hour"],
        update_fields=_OF_HOUR,
        batch_size=ROWS,
    )
