"""Batches: any number of archived events, replayed in the background.

::

    draft --start--> running <--resume/pause--> paused
      |                 |  +--all settled--> done |
      +---cancel--> cancelled <-------------------+

:func:`freeze` writes down ids and versions in one statement; from then on the batch is about these
and no others. Every change of state is a conditional UPDATE, with a row that says who and why.
Nothing here talks to the broker: :mod:`django_amqp_events.archive.batches.runner` publishes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from django.core.exceptions import EmptyResultSet
from django.db import connections, transaction
from django.db.models import Count, Exists, F, Min, OuterRef, Q, QuerySet

from ...conf import get_settings
from ...databases import check_commits
from ...models import (
    LENGTH,
    ArchivedEvent,
    ReplayBatch,
    ReplayBatchAction,
    ReplayBatchEvent,
    clean,
)
from .. import states
from ..eligibility import Skipped
from ..selection import Selection
from ..states import database

#: Percent of the last outcomes that may be failures, where nobody says otherwise.
THRESHOLD: Final = 20
#: Outcomes that are looked at for it.
WINDOW: Final = 50
#: Events per second that a batch can be limited to, at most and at least.
RATES: Final = (0.01, 10_000.0)
#: New events are counted up to here.
COUNTED: Final = 1_000
#: Reasons why events were left out that a report names; it counts the rest.
REASONS: Final = 50
#: Rows that one transaction deletes at most.
DELETED: Final = 5_000
#: Seconds that a batch is kept which nobody has started.
DRAFT: Final = 86_400.0

_Batch = ReplayBatch.State
_Event = ReplayBatchEvent.State
_Action = ReplayBatchAction.Action
_ENDS: Final = (_Batch.DONE, _Batch.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedEvents:
    """Events of a batch that were not replayed, for one reason.

    Attributes:
        first: the id of one of them.
    """

    state: str
    why: str
    count: int
    first: str


def rows() -> QuerySet[ReplayBatch]:
    """Return the batches, read where they are written."""
    return ReplayBatch.objects.using(database())


def events(batch: UUID) -> QuerySet[ReplayBatchEvent]:
    """Return the events of a batch, read where they are written."""
    return ReplayBatchEvent.objects.using(database()).filter(batch_id=batch)


# -- making one ---------------------------------------------------------------------------


def freeze(
    found: QuerySet[ArchivedEvent],
    *,
    by: str,
    title: str = "",
    criteria: Selection | None = None,
) -> ReplayBatch:
    """Make a batch of the events that a queryset finds now; nothing is published.

    Ids and versions are copied by the database, in one statement and in the order of their last
    failures: a million of them never come into this process.

    Args:
        found: any queryset of archived events; its order is not looked at, its slice is.
        by: who asks.
        title: what it is about, for people.
        criteria: the filter that found them, to count new matches later; ``None`` if there is none.

    Raises:
        ConfigurationError: AMQP_EVENTS is wrong, or nothing would be committed.
    """
    using = database()
    service = get_settings().service
    check_commits(using)
    with transaction.atomic(using=using):
        batch = ReplayBatch.objects.using(using).create(
            service=service,
            title=clean(title, LENGTH),
            criteria=None if criteria is None else criteria.as_json(),
            created_at=states.clock(),
            created_by=clean(by, LENGTH),
        )
        batch.total = batch.waiting = _copy(batch, found)
        batch.save(using=using, update_fields=["total", "waiting"])
        _note(batch.pk, _Action.FREEZE, by=by)
    return batch


def _copy(batch: ReplayBatch, found: QuerySet[ArchivedEvent]) -> int:
    using = database()
    connection = connections[using]
    # Ordered only where a slice depends on it; the outer statement has the order that counts.
    found = found if found.query.is_sliced else found.order_by()
    wanted = found.using(using).defer(None).values("id", "version", "last_failed_at")
    try:
        inner, params = wanted.query.get_compiler(using=using).as_sql()
    except EmptyResultSet:
        return 0
    quote = connection.ops.quote_name
    table = quote(ReplayBatchEvent._meta.db_table)  # noqa: SLF001 - Django's public _meta
    key = ReplayBatchEvent._meta.get_field("batch").get_db_prep_value(  # noqa: SLF001
        batch.pk, connection
    )
    sql = (
        f"INSERT INTO {table} (batch_id, event_id, version, state, why) "  # noqa: S608 - our names
        f"SELECT %s, f.id, f.version, %s, %s FROM ({inner}) f ORDER BY f.last_failed_at, f.id"
    )
    with connection.cursor() as cursor:
        cursor.execute(sql, [key, _Event.WAITING.value, "", *params])
        copied: int = cursor.rowcount
    return max(0, copied)


def count_new_matches(batch: ReplayBatch) -> int | None:
    """Count open events that match the filter and failed after the batch was created.

    Counts no further than :data:`COUNTED` and one. Those that failed again in this very batch are
    left out. ``None`` where there is no filter to ask again.
    """
    if batch.criteria is None:
        return None
    wanted = Selection.from_json(batch.criteria)
    since = max(filter(None, (wanted.since, batch.created_at)))
    wanted = replace(wanted, since=since, until=None, service=batch.service)
    mine = events(batch.pk).filter(event_id=OuterRef("pk"))
    found = wanted.queryset().exclude(Exists(mine))
    return found.order_by()[: COUNTED + 1].count()


# -- changing one -------------------------------------------------------------------------


def check(*, reason: str, rate: float | None, canary: int | None, threshold: int | None) -> None:
    """Refuse values that no batch is started with.

    Raises:
        ValueError: says which.
    """
    low, high = RATES
    if not reason.strip():
        raise ValueError("a batch needs a reason; it stands in the history of each of its events")
    if rate is not None and not low <= rate <= high:
        raise ValueError(f"the rate is {rate!r}; it is from {low:g} to {high:g} events per second")
    if canary is not None and not 1 <= canary <= 1_000_000:
        raise ValueError(f"the canary is {canary!r}; it is a number of events above 0")
    if threshold is not None and not 1 <= threshold <= 100:
        raise ValueError(f"the threshold is {threshold!r}; it is a percentage from 1 to 100")


def start(
    pk: UUID,
    *,
    by: str,
    reason: str,
    rate: float | None = None,
    canary: int | None = None,
    threshold: int | None = THRESHOLD,
) -> bool:
    """Let a draft run; returns whether this call did it.

    Args:
        reason: why; it stands in the history of each event.
        rate: events per second at most.
        canary: so many first, the others when all of these have succeeded.
        threshold: percent of the last :data:`WINDOW` outcomes that pause it when they are failures;
            ``None``: nothing does.

    Raises:
        ValueError: a value is none.
    """
    check(reason=reason, rate=rate, canary=canary, threshold=threshold)
    now = states.clock()
    return _change(
        pk,
        [_Batch.DRAFT],
        _Action.START,
        by=by,
        note=reason,
        state=_Batch.RUNNING,
        started_at=now,
        resumed_at=now,
        started_by=clean(by, LENGTH),
        reason=clean(reason),
        rate=rate,
        canary=canary,
        threshold=threshold,
    )


def pause(pk: UUID, *, by: str, note: str = "") -> bool:
    """Let nothing more of it be published; returns whether this call did it.

    What is in the broker's hands already stays there: a chunk at most.

    Args:
        by: ``""`` where its runner does it by itself.
    """
    return _change(
        pk, [_Batch.RUNNING], _Action.PAUSE, by=by, note=note, state=_Batch.PAUSED, **_FREE
    )


def resume(pk: UUID, *, by: str) -> bool:
    """Resume a paused batch; return True if this call did it.

    Whoever resumes has looked at it: the canary counts as passed, and outcomes so far pause it no
    more.
    """
    return _change(
        pk,
        [_Batch.PAUSED],
        _Action.RESUME,
        by=by,
        state=_Batch.RUNNING,
        trusted=True,
        resumed_at=states.clock(),
        **_FREE,
    )


def cancel(pk: UUID, *, by: str) -> bool:
    """Cancel a batch; events not published yet stay archived. Return True if this call did it."""
    return _change(
        pk,
        [_Batch.DRAFT, _Batch.RUNNING, _Batch.PAUSED],
        _Action.CANCEL,
        by=by,
        state=_Batch.CANCELLED,
        finished_at=states.clock(),
        **_FREE,
    )


#: Nobody works on it.
_FREE: Final[Mapping[str, Any]] = {"runner": None, "leased_until": None}


def _change(
    pk: UUID,
    before: Sequence[str],
    action: ReplayBatchAction.Action,
    *,
    by: str,
    note: str = "",
    only: Q | None = None,
    **values: Any,
) -> bool:
    using = database()
    check_commits(using)
    kept = "" if action in (_Action.START, _Action.RESUME) else clean(note)
    with transaction.atomic(using=using):
        wanted = rows().filter(only or Q(), pk=pk, state__in=before)
        if not wanted.update(note=kept, **values):
            return False
        _note(pk, action, by=by, note=note)
    return True


def _note(pk: UUID, action: ReplayBatchAction.Action, *, by: str, note: str = "") -> None:
    ReplayBatchAction.objects.using(database()).create(
        batch_id=pk, at=states.clock(), action=action, by=clean(by, LENGTH), note=clean(note)
    )


# -- what a runner needs ------------------------------------------------------------------


def lease(service: str, runner: UUID, seconds: float) -> list[UUID]:
    """Lease running batches that no process holds; return the new ones.

    Who is dead is said by the database's clock.
    """
    now = states.clock()
    free = rows().filter(
        Q(leased_until=None) | Q(leased_until__lt=now), service=service, state=_Batch.RUNNING
    )
    until = now + timedelta(seconds=seconds)
    return [
        pk
        for pk in free.order_by("started_at", "pk").values_list("pk", flat=True)
        if free.filter(pk=pk).update(runner=runner, leased_until=until)
    ]


def renew(pk: UUID, runner: UUID, seconds: float) -> ReplayBatch | None:
    """Renew the lease of a batch; return ``None`` if it ended or another process holds it."""
    mine = rows().filter(pk=pk, runner=runner, state=_Batch.RUNNING)
    if not mine.update(leased_until=states.clock() + timedelta(seconds=seconds)):
        return None
    return mine.defer("plan", "criteria").first()


def running(service: str) -> bool:
    """Return True if the batch is running in any process."""
    return rows().filter(service=service, state=_Batch.RUNNING).exists()


def release(runner: UUID) -> int:
    """Give back what a runner has, so that another one need not wait for its lease."""
    return rows().filter(runner=runner, state=_Batch.RUNNING).update(**_FREE)


def set_note(batch: ReplayBatch, note: str) -> None:
    """Set the note of a running batch: what it waits for, or ``""``."""
    if batch.note != note:
        rows().filter(pk=batch.pk, state=_Batch.RUNNING).update(note=clean(note))


def mark_canary_succeeded(pk: UUID) -> None:
    """Note that the canary has succeeded."""
    rows().filter(pk=pk).update(trusted=True)


def finish(pk: UUID, runner: UUID, *, note: str = "") -> bool:
    """Note that there is nothing left to do; returns whether this call did it."""
    return _change(
        pk,
        [_Batch.RUNNING],
        _Action.FINISH,
        by="",
        note=note,
        only=Q(runner=runner),
        state=_Batch.DONE,
        finished_at=states.clock(),
        **_FREE,
    )


def next_events(pk: UUID, limit: int) -> dict[UUID, int]:
    """Return id and version of the events that come next, at most so many."""
    waiting = events(pk).filter(state=_Event.WAITING).order_by("pk")
    return dict(waiting.values_list("event_id", "version")[:limit])


def skip(pk: UUID, skipped: Iterable[Skipped]) -> None:
    """Record why events of a batch were skipped; events claimed meanwhile are not changed."""
    whys: dict[str, list[UUID]] = {}
    for each in skipped:
        whys.setdefault(clean(str(each.why)), []).append(each.id)
    for why, ids in whys.items():
        events(pk).filter(state=_Event.WAITING, event_id__in=ids).update(
            state=_Event.SKIPPED, why=why
        )


def failures(batch: ReplayBatch) -> tuple[int, int]:
    """Return how many of the last outcomes are failures, and how many were looked at.

    At most :data:`WINDOW`, since somebody started or resumed it.
    """
    ended = events(batch.pk).filter(settled_at__isnull=False)
    if batch.resumed_at is not None:
        ended = ended.filter(settled_at__gte=batch.resumed_at)
    last = list(ended.order_by("-settled_at").values_list("state", flat=True)[:WINDOW])
    return last.count(_Event.FAILED), len(last)


def count(pk: UUID) -> dict[str, int]:
    """Count the events of a batch by state, and write it into its row, where pages read it."""
    found = events(pk).order_by().values_list("state").annotate(number=Count("pk"))
    counts = {**dict.fromkeys(_Event.values, 0), **dict(found)}
    rows().filter(pk=pk).update(**counts, counted_at=states.clock())
    return counts


def awaiting_outcomes(service: str) -> list[UUID]:
    """Return batches that publish nothing now and whose outcomes come in still."""
    recent = states.clock() - timedelta(days=7)
    found = rows().filter(
        Q(finished_at=None) | Q(finished_at__gte=recent),
        Q(published__gt=0) | Q(queued__gt=0),
        service=service,
        state__in=(_Batch.PAUSED, *_ENDS),
    )
    return list(found.order_by().values_list("pk", flat=True)[:100])


# -- what became of it --------------------------------------------------------------------


def skipped_by_reason(pk: UUID, looked: int | None = None) -> list[SkippedEvents]:
    """Return why events of a batch were not replayed, the most frequent reason first.

    Args:
        looked: events that are counted at most, of those that were left; ``None`` for all.
    """
    alone = events(pk).filter(state__in=(_Event.SKIPPED, _Event.RETURNED, _Event.UNCONFIRMED))
    if looked is not None:
        alone = events(pk).filter(pk__in=alone.order_by().values("pk")[:looked])
    found = (
        alone.order_by()
        .values("state", "why")
        .annotate(number=Count("pk"), first=Min("pk"))
        .order_by("-number", "first")[:REASONS]
    )
    groups = list(found)
    firsts = dict(
        events(pk).filter(pk__in=[group["first"] for group in groups]).values_list("pk", "event_id")
    )
    return [
        SkippedEvents(
            state=group["state"],
            why=group["why"],
            count=group["number"],
            first=str(firsts.get(group["first"], "")),
        )
        for group in groups
    ]


# -- deleting -----------------------------------------------------------------------------


def ended_before(*, service: str, age: float, now: datetime) -> QuerySet[ReplayBatch]:
    """Return batches that ended before a time, and drafts that were never started."""
    return rows().filter(
        Q(state__in=_ENDS, finished_at__lt=now - timedelta(seconds=age))
        | Q(state=_Batch.DRAFT, created_at__lt=now - timedelta(seconds=DRAFT)),
        service=service,
    )


def delete_batch(found: QuerySet[ReplayBatch]) -> bool:
    """Delete rows of a batch, the batch with the last of them; return True if it is gone.

    In steps, so that no transaction is long. The audit of the events keeps its id.
    """
    using = database()
    check_commits(using)
    pk = found.order_by("created_at").values_list("pk", flat=True).first()
    if pk is None:
        return False
    ids = list(events(pk).order_by().values_list("pk", flat=True)[:DELETED])
    with transaction.atomic(using=using):
        # Locked by it: a draft that somebody starts at this moment is one no longer.
        if not found.filter(pk=pk).update(total=F("total")):
            return False
        if ids:
            events(pk).filter(pk__in=ids)._raw_delete(using)  # noqa: SLF001 - no cascade
            return False
        ReplayBatchAction.objects.using(using).filter(batch_id=pk)._raw_delete(using)  # noqa: SLF001
        rows().filter(pk=pk)._raw_delete(using)  # noqa: SLF001
    return True
