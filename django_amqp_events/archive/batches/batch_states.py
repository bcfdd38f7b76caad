"""Change the state of replay batches.

::

    draft --start--> running <--resume/pause--> paused
      |                 |  +--all settled--> done |
      +--cancel-->      +---cancel--> cancelled <-+
         deleted

:func:`freeze` makes a pending replay of each event in one statement; the batch contains exactly
these events.
Every change of state is a conditional UPDATE with a :class:`ReplayBatchAction`. A user's action
names the version that the page showed: if another one was faster, nothing is changed. Nothing here
uses the broker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from django.core.exceptions import EmptyResultSet
from django.db import connections, transaction
from django.db.models import (
    CharField,
    Count,
    F,
    Max,
    Q,
    QuerySet,
    UUIDField,
    Value,
    Window,
)
from django.db.models.functions import MD5, Cast, Coalesce, Concat, RowNumber, Substr

from ...conf import get_settings
from ...databases import Moment, check_commits, delete_by_id, sliced
from ...models import LENGTH, ArchivedEvent, Replay, ReplayBatch, ReplayBatchAction, clean
from ...reasons import Reason
from .. import states, tables
from ..eligibility import Skipped
from ..tables import database

#: Default percentage of failures among the last outcomes that pauses a batch.
THRESHOLD: Final = 20
#: Number of last outcomes that count.
WINDOW: Final = 50
#: Lowest and highest rate limit, in events per second.
RATES: Final = (0.02, 10_000.0)
#: Most reasons in a report or preview.
REASONS: Final = 50
ROWS_PER_DELETE: Final = 5_000
DRAFT_SECONDS: Final = 86_400.0

_Batch = ReplayBatch.State
_Replay = Replay.State
_Action = ReplayBatchAction.Action
_ENDS: Final = (_Batch.DONE, _Batch.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedEvents:
    """Events of a batch that were skipped or not published for one reason."""

    state: str
    why: Reason
    count: int


def rows() -> QuerySet[ReplayBatch]:
    """Return the batches, read where they are written."""
    return ReplayBatch.objects.using(database())


def events(batch: UUID) -> QuerySet[Replay]:
    """Return the replays of a batch, pending ones too, read where they are written."""
    return Replay.objects.using(database()).filter(batch_id=batch)


# -- creating -----------------------------------------------------------------------------


@tables.retry_on_conflict
def freeze(
    events_to_copy: QuerySet[ArchivedEvent],
    *,
    by: str,
    title: Reason | str | None = None,
    group: UUID | None = None,
) -> ReplayBatch:
    """Create a batch of the events that a queryset matches now; nothing is published.

    A batch without events is not stored; its total is 0.

    The database copies ids and versions in one statement, in the order of the last failures, so
    that a million events never come into this process.

    Args:
        events_to_copy: any queryset of archived events; its slice counts, its order does not.
        title: which events these are; by default their number.

    Raises:
        ConfigurationError: AMQP_EVENTS is wrong, or nothing would be committed.
    """
    using = database()
    check_commits(using)
    with transaction.atomic(using=using):
        batch = draft(by=by, title=title, group=group)
        batch.total = batch.pending = _copy(batch, events_to_copy)
        if not batch.total:
            transaction.set_rollback(True, using=using)
            return batch
        batch.save(using=using, update_fields=["total", "pending"])
    return batch


def draft(*, by: str, title: Reason | str | None, **values: Any) -> ReplayBatch:
    """Create a batch without events."""
    batch = rows().create(
        service=get_settings().service,
        title=title,
        created_at=tables.clock(),
        created_by=clean(by, LENGTH),
        **values,
    )
    _note(batch.pk, _Action.FREEZE, by=by)
    return batch


def _copy(batch: ReplayBatch, events_to_copy: QuerySet[ArchivedEvent]) -> int:
    using = database()
    ids = events_to_copy.using(using).values("pk")
    # By their ids: a join may find an event twice. Only a slice depends on the order.
    chosen: Any = sliced(ids) if ids.query.is_sliced else ids.order_by()
    order = (F("last_failed_at").asc(), F("pk").asc())
    md5 = MD5(Concat(Value(batch.pk.hex), Cast("pk", CharField(max_length=36))))
    # As derived_id() makes them: MariaDB accepts no others.
    uuid = Concat(Substr(md5, 1, 12), Value("8"), Substr(md5, 14, 3), Value("a"), Substr(md5, 18))
    values = {
        "id": Cast(uuid, UUIDField()),
        "event_id": F("pk"),
        "batch_id": Value(batch.pk, UUIDField()),
        "position": Window(RowNumber(), order_by=order),
        "version": F("version"),
        "state": Value(_Replay.PENDING.value),
        "requested_at": Value(batch.created_at, Moment()),
        "requested_by": Value(batch.created_by),
        "publishes": Value(0),
        **dict.fromkeys(("forced", "superseded"), Value(False)),
        **dict.fromkeys(("handler", "reason", "error"), Value("")),
    }
    rows = tables.rows().filter(pk__in=chosen).order_by()
    rows = rows.annotate(**{f"to_{name}": value for name, value in values.items()})
    query = rows.values(*(f"to_{name}" for name in values)).query
    try:
        select, params = query.get_compiler(using=using).as_sql()
    except EmptyResultSet:
        return 0
    quote = connections[using].ops.quote_name
    table = quote(Replay._meta.db_table)  # noqa: SLF001 - Django's public _meta
    columns = ", ".join(map(quote, values))
    with connections[using].cursor() as cursor:
        cursor.execute(f"INSERT INTO {table} ({columns}) {select}", params)
        copied: int = cursor.rowcount
    return max(0, copied)


# -- changing -----------------------------------------------------------------------------


def check(*, reason: str, rate: float | None, canary: int | None, threshold: int | None) -> None:
    """Refuse invalid options of a batch.

    Raises:
        ValueError: names the option.
    """
    low, high = RATES
    if not reason.strip():
        raise ValueError("a batch needs a reason, which is recorded in the history of its events")
    if len(reason.strip()) > states.REASON_CHARACTERS:
        raise ValueError(f"the reason has more than {states.REASON_CHARACTERS} characters")
    if rate is not None and not low <= rate <= high:
        raise ValueError(f"the rate is {rate!r}; it is from {low:g} to {high:g} events per second")
    if canary is not None and not 1 <= canary <= 1_000_000:
        raise ValueError(f"the canary is {canary!r}; it is from 1 to 1000000 events")
    if threshold is not None and not 1 <= threshold <= 100:
        raise ValueError(f"the threshold is {threshold!r}; it is a percentage from 1 to 100")


def start(
    pk: UUID,
    *,
    by: str,
    reason: str,
    seen: int | None = None,
    rate: float | None = None,
    canary: int | None = None,
    threshold: int | None = THRESHOLD,
) -> bool:
    """Start a draft; return True if this call did it.

    Args:
        seen: the version that the user saw; ``None`` for any, here and below.
        rate: events per second at most.
        canary: events that are published first; the others follow when all of these succeeded.
        threshold: percentage of failures among the last :data:`WINDOW` outcomes that pauses the
            batch; ``None`` for never.

    Raises:
        ValueError: an option is invalid.
    """
    check(reason=reason, rate=rate, canary=canary, threshold=threshold)
    now = tables.clock()
    return _change(
        pk,
        _Action.START,
        by=by,
        seen=seen,
        note=reason,
        started_at=now,
        resumed_at=now,
        started_by=clean(by, LENGTH),
        reason=clean(reason),
        rate=rate,
        canary=canary,
        threshold=threshold,
    )


def pause(
    pk: UUID,
    *,
    by: str,
    seen: int | None = None,
    note: Reason | str | None = None,
    runner: UUID | None = None,
) -> bool:
    """Pause a running batch; return True if this call did it.

    At most one chunk is still published.

    Args:
        by: ``""`` for the runner.
        runner: pause it only if this runner holds it.
    """
    return _change(pk, _Action.PAUSE, by=by, seen=seen, note=note, runner=runner, counted_at=None)


def resume(pk: UUID, *, by: str, seen: int | None = None) -> bool:
    """Resume a paused batch; return True if this call did it.

    The canary counts as succeeded, and earlier outcomes do not count for the failure threshold.
    """
    return _change(pk, _Action.RESUME, by=by, seen=seen, trusted=True, resumed_at=tables.clock())


def cancel(pk: UUID, *, by: str, seen: int | None = None) -> bool:
    """Cancel a batch; events not published yet stay archived. Return True if this call did it.

    A draft is deleted.
    """
    return _delete_draft(pk) or _change(
        pk, _Action.CANCEL, by=by, seen=seen, finished_at=tables.clock()
    )


def finish(pk: UUID, runner: UUID, *, note: Reason | str | None = None) -> bool:
    """Finish a batch that this runner holds; return True if this call did it."""
    return _change(pk, _Action.FINISH, by="", note=note, runner=runner, finished_at=tables.clock())


#: No runner holds the batch.
_FREE: Final[Mapping[str, Any]] = {"runner": None, "leased_until": None}
#: The states before and after each action.
_CHANGES: Final[Mapping[ReplayBatchAction.Action, tuple[Sequence[str], str]]] = {
    _Action.START: ([_Batch.DRAFT], _Batch.RUNNING),
    _Action.PAUSE: ([_Batch.RUNNING], _Batch.PAUSED),
    _Action.RESUME: ([_Batch.PAUSED], _Batch.RUNNING),
    _Action.CANCEL: ([_Batch.RUNNING, _Batch.PAUSED], _Batch.CANCELLED),
    _Action.FINISH: ([_Batch.RUNNING], _Batch.DONE),
}


@tables.retry_on_conflict
def _change(
    pk: UUID,
    action: ReplayBatchAction.Action,
    *,
    by: str,
    seen: int | None = None,
    note: Reason | str | None = None,
    runner: UUID | None = None,
    **values: Any,
) -> bool:
    using = database()
    check_commits(using)
    before, after = _CHANGES[action]
    kept = None if action in (_Action.START, _Action.RESUME) else note
    asked = {"version": seen, "runner": runner}
    only = {name: value for name, value in asked.items() if value is not None}
    values |= {"state": after, "note": kept, "version": F("version") + 1}
    with transaction.atomic(using=using):
        if not rows().filter(pk=pk, state__in=before, **only).update(**values, **_FREE):
            return False
        _note(pk, action, by=by, note=note)
    return True


def _note(
    pk: UUID, action: ReplayBatchAction.Action, *, by: str, note: Reason | str | None = None
) -> None:
    ReplayBatchAction.objects.using(database()).create(
        batch_id=pk, at=tables.clock(), action=action, by=clean(by, LENGTH), note=note
    )


# -- running ------------------------------------------------------------------------------


def lease(service: str, runner: UUID, seconds: float) -> list[UUID]:
    """Lease running batches that no process holds, by the database's clock; return the new ones."""
    now = tables.clock()
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
    if not mine.update(leased_until=tables.clock() + timedelta(seconds=seconds)):
        return None
    return mine.defer(*ReplayBatch.LARGE).first()


def running(service: str) -> bool:
    """Return True if a batch of a service is running, in any process or waiting for one."""
    return rows().filter(service=service, state=_Batch.RUNNING).exists()


def release(runner: UUID) -> int:
    """Release the batches of a runner, so that another one can lease them at once."""
    return rows().filter(runner=runner, state=_Batch.RUNNING).update(**_FREE)


def set_note(batch: ReplayBatch, note: Reason | None) -> None:
    """Set what a running batch is waiting for."""
    if batch.note != note:
        rows().filter(pk=batch.pk, state=_Batch.RUNNING).update(note=note)


def mark_canary_succeeded(pk: UUID) -> None:
    """Let the other events follow the canary."""
    rows().filter(pk=pk).update(trusted=True)


def waiting_since(batch: ReplayBatch) -> datetime:
    """Return since when a batch only waits for outcomes."""
    waiting = events(batch.pk).filter(state__in=(_Replay.QUEUED, _Replay.PUBLISHED))
    # The mirror may publish one long after its process has died.
    last = waiting.aggregate(last=Max(Coalesce("published_at", "requested_at")))["last"]
    return max(filter(None, (last, batch.resumed_at)), default=tables.clock())


def next_events(pk: UUID, limit: int) -> dict[UUID, int]:
    """Return id and version of the next pending events."""
    pending = events(pk).filter(state=_Replay.PENDING).order_by("position")
    return dict(pending.values_list("event_id", "version")[:limit])


def skip(pk: UUID, skipped: Iterable[Skipped]) -> None:
    """Record why events of a batch were skipped; events claimed meanwhile are not changed."""
    whys: dict[Reason, list[UUID]] = {}
    for left_out in skipped:
        whys.setdefault(left_out.why, []).append(left_out.id)
    for why, ids in whys.items():
        events(pk).filter(state=_Replay.PENDING, event_id__in=ids).update(
            state=_Replay.SKIPPED, error=why
        )


def failures(batch: ReplayBatch) -> tuple[int, int]:
    """Return how many of the last :data:`WINDOW` outcomes are failures, and how many there are.

    A superseded replay succeeded without a run, so it proves nothing.
    """
    ended = events(batch.pk).filter(settled_at__isnull=False, superseded=False)
    if batch.resumed_at is not None:
        ended = ended.filter(settled_at__gte=batch.resumed_at)
    # Outcomes that were recorded together, by the worker's time.
    last = list(
        ended.order_by("-settled_at", "-finished_at").values_list("state", flat=True)[:WINDOW]
    )
    return last.count(_Replay.FAILED), len(last)


def last_tried(batch: ReplayBatch, limit: int) -> list[tuple[str, datetime]]:
    """Return state and time of the events that were tried last, the newest first."""
    tried = events(batch.pk).exclude(state__in=(_Replay.PENDING, _Replay.SKIPPED))
    return list(tried.order_by("-position").values_list("state", "requested_at")[:limit])


def count(pk: UUID) -> dict[str, int]:
    """Count the events of a batch by state, and store the counts in its row for pages."""
    by_state = events(pk).order_by().values_list("state").annotate(count=Count("pk"))
    counts = {**dict.fromkeys(_Replay.values, 0), **dict(by_state)}
    rows().filter(pk=pk).update(**counts, counted_at=tables.clock())
    return counts


def awaiting_outcomes(service: str) -> list[UUID]:
    """Return batches that publish nothing but may still receive outcomes.

    A runner that died has not counted the last events of a batch that was paused or cancelled.
    """
    recent = tables.clock() - timedelta(days=7)
    uncounted = Q(counted_at=None) | Q(counted_at__lt=F("finished_at"))
    unfinished = rows().filter(
        Q(finished_at=None) | Q(finished_at__gte=recent),
        Q(published__gt=0) | Q(queued__gt=0) | Q(unconfirmed__gt=0) | uncounted,
        service=service,
        state__in=(_Batch.PAUSED, *_ENDS),
    )
    return list(unfinished.order_by("pk").values_list("pk", flat=True))


# -- reporting ----------------------------------------------------------------------------


def skipped_by_reason(pk: UUID, looked: int | None = None) -> list[SkippedEvents]:
    """Return why events of a batch were not replayed, the most frequent reason first.

    Args:
        looked: most events that are counted; ``None`` for all.
    """
    alone = events(pk).filter(state__in=(_Replay.SKIPPED, _Replay.RETURNED, _Replay.UNCONFIRMED))
    if looked is not None:
        first = alone.order_by().values_list("pk", flat=True)[:looked]
        alone = events(pk).filter(pk__in=sliced(first))
    by_reason = (
        alone.order_by()
        .values_list("state", "error")
        .annotate(count=Count("pk"))
        .order_by("-count", "state", "error")[:REASONS]
    )
    return [
        SkippedEvents(state=state, why=Reason.of(error or ""), count=count)
        for state, error, count in by_reason
    ]


# -- deleting -----------------------------------------------------------------------------


@tables.retry_on_conflict
def _delete_draft(pk: UUID) -> bool:
    """Delete a batch that was not started; return True if this call did it."""
    using = database()
    check_commits(using)
    with transaction.atomic(using=using):
        # The UPDATE locks the row.
        if not rows().filter(pk=pk, state=_Batch.DRAFT).update(total=F("total")):
            return False
        events(pk)._raw_delete(using)  # noqa: SLF001
        _delete_row(pk)
    return True


def _delete_row(pk: UUID) -> None:
    """Delete a batch without events, and its actions."""
    using = database()
    ReplayBatchAction.objects.using(using).filter(batch_id=pk)._raw_delete(using)  # noqa: SLF001
    rows().filter(pk=pk)._raw_delete(using)  # noqa: SLF001


def ended_before(*, service: str, age: float, now: datetime) -> QuerySet[ReplayBatch]:
    """Return batches that ended before a time, and drafts that were never started."""
    return rows().filter(
        Q(state__in=_ENDS, finished_at__lt=now - timedelta(seconds=age))
        | Q(state=_Batch.DRAFT, created_at__lt=now - timedelta(seconds=DRAFT_SECONDS)),
        service=service,
    )


@tables.retry_on_conflict
def delete_batch(batches: QuerySet[ReplayBatch]) -> bool:
    """Delete a draft, or one portion of another batch; return True if the batch is gone.

    Replays belong to the history of their events and stay. The actions on its events keep its id.
    """
    using = database()
    check_commits(using)
    pk = batches.order_by("created_at").values_list("pk", flat=True).first()
    if pk is None:
        return False
    if _delete_draft(pk):
        # Whole: a part of it could be started.
        return True
    ids = list(events(pk).order_by().values_list("pk", flat=True)[:ROWS_PER_DELETE])
    with transaction.atomic(using=using):
        # The UPDATE locks the row: a draft that was started meanwhile does not match.
        if not batches.filter(pk=pk).update(total=F("total")):
            return False
        if ids:
            made = states.replays().filter(pk__in=ids)
            kept = set(made.values_list("pk", flat=True))
            made.update(batch=None, position=None)
            if gone := [pk for pk in ids if pk not in kept]:
                delete_by_id(Replay, using, gone)
            return False
        _delete_row(pk)
    return True
