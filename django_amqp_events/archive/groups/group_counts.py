"""Read a group's numbers, last failure and reopening from its events.

None of these is stored. Two indexes of the archive begin with the group and the state, so one of
them answers each.
"""

from __future__ import annotations

from typing import Any, Final

from django.db.models import Case, Count, Exists, F, OuterRef, Q, QuerySet, Subquery, When
from django.db.models.functions import Coalesce

from ...models import ArchivedEvent, FailureGroup, State

#: States of events that are in progress, and of those that are settled.
IN_PROGRESS: Final = (State.QUEUED, State.REPLAYING)
SETTLED: Final = (State.SUCCEEDED, State.DISCARDED)


def has_open() -> Exists:
    """Return the condition that a group has open events; it stops at the first one."""
    return Exists(_events().filter(state=State.ARCHIVED))


def with_counts(groups: QuerySet[FailureGroup]) -> QuerySet[Any]:
    """Annotate groups with what their events tell.

    ``open``, ``in_progress``: the numbers of these events.

    ``last_seen``: the time of the last failure; of a group without events, of its first one.

    ``reopened_at``: when the oldest open event was mirrored, if all open events failed and were
    mirrored after another event of the group was settled; else ``None``. A failed replay or a
    restored event does not reopen a group, because it was mirrored before. A failure that is
    mirrored late does not either, because it failed before.
    """
    opened = _events().filter(state=State.ARCHIVED)
    settled = _events().filter(
        Q(state_since__lt=OuterRef("oldest_mirrored")),
        Q(state_since__lt=OuterRef("oldest_failed")),
        state__in=SETTLED,
        # It follows from the first, and bounds what is read of the index.
        mirrored_at__lt=OuterRef("oldest_mirrored"),
    )
    return groups.alias(
        oldest_mirrored=_first(opened, "mirrored_at"),
        oldest_failed=_first(opened, "last_failed_at"),
    ).annotate(
        open=_number(State.ARCHIVED),
        in_progress=_number(*IN_PROGRESS),
        last_seen=Coalesce(_first(_events(), "-last_failed_at"), "first_seen"),
        reopened_at=Case(When(Exists(settled), then=F("oldest_mirrored"))),
    )


def _events() -> QuerySet[ArchivedEvent]:
    return ArchivedEvent.objects.filter(group=OuterRef("pk")).order_by()


def _number(*states: State) -> Any:
    events = _events().filter(state__in=states)
    number = Subquery(events.values("group").annotate(number=Count("*")).values("number"))
    return Coalesce(number, 0)


def _first(events: QuerySet[ArchivedEvent], order: str) -> Subquery:
    """Return the first value of a column in this order, which its index has."""
    return Subquery(events.order_by(order).values(order.removeprefix("-"))[:1])
