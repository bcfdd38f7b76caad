"""Statistics of the archive: open events and changes per hour.

An index and a limit bound the queries, so their cost hardly grows with the archive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from django.db.models import Count, Q, QuerySet

from ..archive import tables
from ..archive.eligibility import BACKFILL
from ..archive.groups import group_counts
from ..models import ArchivedEvent, FailureGroup, State

#: Rows that a snapshot counts, at most.
CAP: Final = 100_000
#: Rows that a page counts or reads, at most.
READ_ROWS: Final = 5_000
#: Newest failures among which a page counts new events, at most.
NEWEST_FAILURES: Final = 2 * READ_ROWS
HOUR: Final = timedelta(hours=1)
DAY: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEvents:
    """The number of open events; numbers are limited by the caller's cap.

    Attributes:
        oldest: when the oldest open event failed.
        unconfirmed: events whose last replay RabbitMQ did not confirm.
        new_hour: events first archived in the last hour, up to :data:`READ_ROWS`, among the last
            :data:`NEWEST_FAILURES` failures.
    """

    open: int = 0
    capped: bool = False
    oldest: datetime | None = None
    unconfirmed: int = 0
    new_hour: int = 0


def open_events(now: datetime | None = None, cap: int = READ_ROWS) -> OpenEvents:
    """Count open events, up to *cap*, in four queries."""
    now = now or datetime.now(UTC)
    events = tables.rows().filter(state=State.ARCHIVED)
    total = capped(events, cap + 1)
    first = events.order_by("last_failed_at", "pk").values_list("last_failed_at", flat=True).first()
    return OpenEvents(
        open=min(total, cap),
        capped=total > cap,
        oldest=first,
        unconfirmed=capped(tables.rows().filter(unconfirmed=True), cap),
        new_hour=new_since(now - HOUR, READ_ROWS, NEWEST_FAILURES),
    )


def capped(rows: QuerySet[Any], cap: int) -> int:
    """Count rows, up to *cap*."""
    return rows.order_by()[:cap].count()


def new_since(since: datetime, cap: int, looked: int, *, service: str = "") -> int:
    """Count events first archived since then, up to *cap*, among the newest *looked* failures.

    Args:
        service: count its events only.
    """
    # The index on the last failure bounds the first, which is not later.
    failed = _of(service).filter(last_failed_at__gte=since).only("pk", "first_failed_at")
    newest = failed.order_by("-last_failed_at", "-pk")[:looked]
    counted: int = newest.aggregate(new=Count("pk", filter=Q(first_failed_at__gte=since)))["new"]
    return min(counted, cap)


def newest_failure(now: datetime, *, service: str) -> datetime | None:
    """Return when the newest mirrored event of a service failed, without those in the future."""
    rows = _of(service).filter(last_failed_at__lte=now).order_by("-last_failed_at", "-pk")
    return rows.values_list("last_failed_at", flat=True).first()


def _of(service: str) -> QuerySet[ArchivedEvent]:
    rows = tables.rows().exclude(reason=BACKFILL)
    return rows.filter(service=service) if service else rows


def hourly_series(now: datetime) -> dict[datetime, Mapping[str, int]]:
    """Return what happened in the last 24 hours, by the start of the hour, in one query.

    The last hour has not ended. An event that is archived again counts again.
    """
    last = group_counts.hour_of(now)
    begins = [last - HOUR * back for back in reversed(range(24))]
    totals = group_counts.hourly_totals(since=begins[0], using=tables.database())
    return {hour: totals.get(hour, {}) for hour in begins}


def top_groups() -> list[FailureGroup]:
    """Return the ten groups with the most open events by their stored counts, in one query."""
    groups = FailureGroup.objects.using(tables.database()).filter(open__gt=0)
    return list(groups.order_by("-open", "-last_seen", "-pk")[:10])
