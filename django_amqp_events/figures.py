"""Figures of the archive in the database: what is open, how old, how much came and went.

Each is one query that an index bounds and that ends at a cap, so that a page costs the same with a
million rows as with a hundred.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, Final

from django.db.models import Count, Q, QuerySet

from . import lifecycle
from .models import ArchivedEvent, State

#: Rows that are counted at most, by whoever is no page.
CAP: Final = 100_000
#: Rows that a page counts or reads at most, the newest.
READ: Final = 5_000
HOUR: Final = timedelta(hours=1)
DAY: Final = timedelta(days=1)
#: Edges of the histogram of ages.
AGES: Final = (HOUR, 6 * HOUR, DAY, 3 * DAY, 7 * DAY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What is open.

    Attributes:
        open: archived events that nobody has dealt with, up to the cap.
        capped: there are more.
        ages: of them, by :data:`AGES`: younger than the first edge, than the second, … and older.
            Of the newest where there are more than the cap.
        oldest: when the one that waits longest has failed.
        unconfirmed: events whose last replay the broker did not confirm, up to the cap.
        new_hour, new_day: events that failed for good for the first time in the last hour and in
            the last 24 hours, up to :data:`READ`.
    """

    open: int = 0
    capped: bool = False
    ages: tuple[int, ...] = (0,) * (len(AGES) + 1)
    oldest: datetime | None = None
    unconfirmed: int = 0
    new_hour: int = 0
    new_day: int = 0


def standing(now: datetime | None = None, cap: int = READ) -> Standing:
    """Count what is open, up to *cap*; five queries.

    Raises:
        DatabaseError: the database is away.
    """
    now = now or datetime.now(UTC)
    found = lifecycle.rows().filter(state=State.ARCHIVED)
    edges = [Q(last_failed_at__gt=now - age) for age in AGES]
    bounds = [edges[0], *(~before & here for before, here in pairwise(edges)), ~edges[-1]]
    newest = found.order_by("-last_failed_at", "-pk").only("pk", "last_failed_at")
    counted: dict[str, int] = newest[: cap + 1].aggregate(
        total=Count("pk"),
        **{f"age_{place}": Count("pk", filter=bound) for place, bound in enumerate(bounds)},
    )
    first = found.order_by("last_failed_at", "pk").values_list("last_failed_at", flat=True).first()
    total = counted["total"]
    return Standing(
        open=min(total, cap),
        capped=total > cap,
        ages=tuple(counted[f"age_{place}"] for place in range(len(bounds))),
        oldest=first,
        unconfirmed=capped(lifecycle.rows().filter(unconfirmed=True), cap),
        new_hour=new_since(now - HOUR, READ),
        new_day=new_since(now - DAY, READ),
    )


def capped(rows: QuerySet[Any], cap: int) -> int:
    """Count rows, up to *cap*."""
    return rows.order_by()[:cap].count()


def new_since(since: datetime, cap: int) -> int:
    """Count events that failed for good for the first time since then, up to *cap*."""
    return capped(_new(since), cap)


def _new(since: datetime) -> QuerySet[ArchivedEvent]:
    # No event fails last before it fails first: the index of the one bounds the other.
    return lifecycle.rows().filter(last_failed_at__gte=since, first_failed_at__gte=since)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """What came and went, hour by hour.

    Attributes:
        hours: when each of them begins, oldest first; the last one goes on.
        archived, succeeded, discarded: numbers, one for each hour.
        top_handlers, top_exceptions: of what failed and is open, the most frequent first.
        cut: there was more than could be read: the oldest hours and the tops lack some.
    """

    hours: tuple[datetime, ...]
    archived: tuple[int, ...]
    succeeded: tuple[int, ...]
    discarded: tuple[int, ...]
    top_handlers: tuple[tuple[str, int], ...] = ()
    top_exceptions: tuple[tuple[str, int], ...] = ()
    cut: bool = False


def series(now: datetime | None = None, *, hours: int = 24, top: int = 10) -> Series:
    """Read what became of the archive in the last hours; four queries.

    Raises:
        DatabaseError: the database is away.
    """
    now = now or datetime.now(UTC)
    last = now.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    begins = tuple(last - HOUR * back for back in reversed(range(hours)))
    since = begins[0]
    rows = lifecycle.rows()
    archived = _read(_new(since).order_by("-last_failed_at", "-pk"), "first_failed_at")
    ended = [
        _read(
            rows.filter(state=state, state_since__gte=since).order_by("-state_since"),
            "state_since",
        )
        for state in (State.SUCCEEDED, State.DISCARDED)
    ]
    failed = list(
        rows.filter(state=State.ARCHIVED, last_failed_at__gte=since)
        .order_by("-last_failed_at", "-pk")
        .values_list("handler", "exception", "reason")[:READ]
    )
    handlers = Counter(handler for handler, _, _ in failed)
    exceptions = Counter(exception or reason for _, exception, reason in failed)
    return Series(
        hours=begins,
        archived=_by_hour(archived, begins),
        succeeded=_by_hour(ended[0], begins),
        discarded=_by_hour(ended[1], begins),
        top_handlers=tuple(handlers.most_common(top)),
        top_exceptions=tuple(exceptions.most_common(top)),
        cut=READ in {len(archived), len(failed), *map(len, ended)},
    )


def _read(rows: QuerySet[ArchivedEvent], column: str) -> list[datetime]:
    return list(rows.values_list(column, flat=True)[:READ])


def _by_hour(moments: Iterable[datetime], begins: Sequence[datetime]) -> tuple[int, ...]:
    counts = [0] * len(begins)
    for moment in moments:
        # A worker's clock may be ahead.
        place = min(int((moment - begins[0]) / HOUR), len(begins) - 1)
        if place >= 0:
            counts[place] += 1
    return tuple(counts)
