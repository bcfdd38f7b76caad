"""Statistics of the archive: open events and changes per hour.

An index and a limit bound the queries, so their cost hardly grows with the archive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from django.db.models import Count, IntegerField, Q, QuerySet, Value

from ..archive import tables
from ..archive.eligibility import BACKFILL
from ..archive.groups import failure_groups, group_counts
from ..models import ArchivedEvent, ArchivedFailure, State

#: Rows that a snapshot counts, at most.
CAP: Final = 100_000
#: Rows that a page counts or reads, at most.
READ_ROWS: Final = 5_000
HOUR: Final = timedelta(hours=1)
DAY: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEvents:
    """The number of open events, up to :data:`READ_ROWS`.

    Attributes:
        oldest: when the oldest open event failed.
    """

    open: int
    capped: bool
    oldest: datetime | None


def open_events() -> OpenEvents:
    """Count open events, in two queries."""
    events = open_rows()
    total = capped(events, READ_ROWS + 1)
    first = events.order_by("last_failed_at", "pk").values_list("last_failed_at", flat=True).first()
    return OpenEvents(open=min(total, READ_ROWS), capped=total > READ_ROWS, oldest=first)


def open_rows() -> QuerySet[ArchivedEvent]:
    """Return the open events, without past events that were given to a handler."""
    return tables.rows().exclude(reason=BACKFILL).filter(state=State.ARCHIVED)


def capped(rows: QuerySet[Any], cap: int) -> int:
    """Count rows, up to *cap*."""
    return rows.order_by()[:cap].count()


def new_since(since: datetime, cap: int, *, service: str) -> int:
    """Count a service's events first archived since then, up to *cap*, among the newest failures.

    An event mirrored late counts only if it also failed since then.
    """
    failed = _of(service).filter(last_failed_at__gte=since).only("pk", "mirrored_at")
    newest = failed.order_by("-last_failed_at", "-pk")[: max(CAP, cap)]
    counted: int = newest.aggregate(new=Count("pk", filter=Q(mirrored_at__gte=since)))["new"]
    return min(counted, cap)


def newest_failure(now: datetime, *, service: str) -> datetime | None:
    """Return when the newest mirrored event of a service failed, without those in the future."""
    rows = _of(service).filter(last_failed_at__lte=now).order_by("-last_failed_at", "-pk")
    return rows.values_list("last_failed_at", flat=True).first()


def _of(service: str) -> QuerySet[ArchivedEvent]:
    return tables.rows().exclude(reason=BACKFILL).filter(service=service)


def hourly_series(now: datetime) -> dict[datetime, Mapping[str, int]]:
    """Return what happened in the last 24 hours, by the start of the hour, in three queries.

    ``archived`` counts failures, so an event that is archived again counts again. ``succeeded``
    and ``discarded`` count events that are in this state since then. The last hour has not ended.
    """
    last = now.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    hours = [last - HOUR * back for back in reversed(range(24))]
    failures = ArchivedFailure.objects.using(tables.database()).filter(late=False)
    counts = {
        "archived": _by_hour(failures, "failed_at", hours),
        "succeeded": _by_hour(tables.rows().filter(state=State.SUCCEEDED), "state_since", hours),
        "discarded": _by_hour(tables.rows().filter(state=State.DISCARDED), "state_since", hours),
    }
    return {
        hour: {name: by_hour[number] for name, by_hour in counts.items()}
        for number, hour in enumerate(hours)
    }


def _by_hour(rows: QuerySet[Any], column: str, hours: list[datetime]) -> dict[int, int]:
    """Count the rows of each hour, in one query that reads only an index.

    It has a part for each hour: SQLite would call Python to truncate each time to its hour.
    """
    counts = [
        rows.filter(**{f"{column}__gte": hour, f"{column}__lt": hour + HOUR})
        .order_by()
        .values_list(Value(number, IntegerField()))
        .annotate(count=Count("*"))
        for number, hour in enumerate(hours)
    ]
    # Django 6.1 orders a union as its model.
    return dict(counts[0].union(*counts[1:], all=True).order_by())


def top_groups() -> list[Any]:
    """Return the ten groups with the most open events, in one query."""
    groups = group_counts.with_counts(failure_groups.groups()).filter(group_counts.has_open())
    return list(groups.order_by("-open", "-last_seen", "-pk")[:10])
