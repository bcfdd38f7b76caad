"""Counts and states of outbox rows, and the actions of users on them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any, Final, Literal
from uuid import UUID

from django.db.models import Count, Min, Q, QuerySet

from ..conf import Settings
from ..databases import Now, error_line, table_missing
from ..reasons import Reason
from .outbox_rows import LEASE, aliases, needed
from .outbox_rows import rows as rows  # noqa: PLC0414 - a re-export, for mypy

if TYPE_CHECKING:
    # Publishing is imported before Django's apps are loaded.
    from ..models import OutboxEvent

#: Time that a row may be due before a relay is considered missing.
OVERDUE: Final = timedelta(minutes=1)
#: Time after its commit from which a leased row is reported.
STUCK: Final = timedelta(minutes=10)
#: Delay of ``due_at`` that makes a discarded row never due.
_NEVER: Final = timedelta(days=365_000)
#: Failed attempts after which a row's error is considered permanent.
PERSISTENT: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxStatus:
    """The state of one service's rows in one database.

    Attributes:
        held: leased by their publisher or a relay.
        stuck: of these, committed more than :data:`STUCK` ago.
        failing: the last publish failed; :attr:`attempts` and :attr:`error` are of the worst.
        overdue: due for longer than :data:`OVERDUE`.
        oldest: when the oldest was published.
        stray: overdue rows by other services, as a renamed one leaves.
    """

    alias: str
    total: int = 0
    held: int = 0
    stuck: int = 0
    failing: int = 0
    overdue: int = 0
    attempts: int = 0
    oldest: datetime | None = None
    error: Reason | None = None
    stray: dict[str, int] = field(default_factory=dict)

    @property
    def severity(self) -> str:
        """Return ``ok``, ``warning`` or ``error``."""
        if self.overdue or self.stray or self.attempts >= PERSISTENT:
            return "error"
        return "warning" if self.failing or self.stuck else "ok"

    @property
    def meaning(self) -> Reason:
        """Why rows are in the outbox; what needs an action comes first."""
        said = []
        if self.overdue:
            said.append(Reason("rows-overdue", count=self.overdue))
        for name, count in sorted(self.stray.items()):
            said.append(Reason("rows-stray", count=count, service=name))
        if self.failing:
            attempts = Reason("rows-attempts", count=self.attempts)
            said.append(
                Reason("rows-failing", count=self.failing, attempts=attempts, error=self.error)
            )
        if self.held:
            said.append(Reason("rows-held", count=self.held, seconds=f"{LEASE:g}"))
        if self.stuck:
            said.append(Reason("rows-stuck", number=self.stuck, minutes=STUCK.seconds // 60))
        said = said or [Reason("rows-due" if self.total else "empty")]
        return reduce(lambda first, then: Reason("both", first=first, then=then), said)


def read_status(
    settings: Settings, *, empty: bool = False
) -> list[OutboxStatus | UnreachableOutbox]:
    """Return the state of each outbox of this service.

    An unreachable one is omitted if neither settings nor handlers need it.

    Args:
        empty: return the empty ones of other databases than that of the settings, too.
    """
    statuses: list[OutboxStatus | UnreachableOutbox] = []
    for alias in aliases(settings):
        try:
            state = count_pending(alias, settings.service)
        except Exception as exc:  # noqa: BLE001 - drivers raise errors of their own
            missing = table_missing(exc)
            if alias == settings.database:
                told = settings.publish == "outbox"
            else:
                told = alias in needed(settings) and not missing
            if told:
                code = "rows-unreadable-migrate" if missing else "rows-unreadable"
                statuses.append(UnreachableOutbox(alias, Reason(code, error=error_line(exc))))
            continue
        if empty or state.total or state.stray or alias == settings.database:
            statuses.append(state)
    return statuses


@dataclass(frozen=True, slots=True)
class UnreachableOutbox:
    """An outbox that cannot be read."""

    alias: str
    meaning: Reason
    severity: str = "unknown"


def count_pending(alias: str, service: str) -> OutboxStatus:
    """Count the rows in one database."""
    pending = rows(alias).filter(discarded_at__isnull=True)
    late = pending.exclude(service=service).filter(overdue()).order_by()
    stray = dict(late.values_list("service").annotate(count=Count("pk")))
    ours = pending.filter(service=service)
    counts: dict[str, Any] = ours.aggregate(
        total=Count("pk"),
        held=Count("pk", filter=_leased()),
        stuck=Count("pk", filter=_leased() & Q(created_at__lt=Now() - STUCK)),
        failing=Count("pk", filter=Q(attempts__gt=0)),
        overdue=Count("pk", filter=overdue()),
        oldest=Min("created_at"),
    )
    worst = ours.filter(attempts__gt=0).order_by("-attempts", "pk").first()
    if worst is not None:
        counts |= {"attempts": worst.attempts, "error": worst.error}
    return OutboxStatus(alias=alias, **counts, stray=stray)


def overdue() -> Q:
    """Express the state ``overdue`` of :func:`row_state` in SQL."""
    return Q(due_at__lt=Now() - OVERDUE)


def _leased() -> Q:
    return Q(due_at__gt=Now(), claim__isnull=False)


RowState = Literal["held", "failed", "due", "overdue", "discarded"]


def row_state(row: OutboxEvent, now: datetime) -> RowState:
    """Return the state of a row.

    ``held``: leased; ``failed``: delayed until its retry; ``due``, and ``overdue`` after
    :data:`OVERDUE`; ``discarded``.

    Args:
        now: by the database's clock.
    """
    if row.discarded_at is not None:
        return "discarded"
    if row.due_at <= now:
        return "overdue" if row.due_at < now - OVERDUE else "due"
    return "failed" if row.claim is None else "held"


# -- actions ---------------------------------------------------------------------------------


def publish_failed_now(alias: str, service: str) -> int:
    """Make all failed rows of a service due now, as after an outage; return how many changed."""
    failed = rows(alias).filter(claim__isnull=True, attempts__gt=0, discarded_at__isnull=True)
    return failed.filter(service=service, due_at__gt=Now()).update(due_at=Now())


def discard(ids: Collection[UUID], *, alias: str, by: str = "", reason: str = "") -> int:
    """Discard rows without a lease; return how many were changed.

    Their events are not published unless restored. ``events_prune`` deletes old ones.

    Args:
        by: user name or command.
    """
    from ..models import LENGTH, clean

    # Without a lease: delayed until its retry, or the lease has expired.
    given_up = rows(alias).filter(
        Q(claim__isnull=True, attempts__gt=0) | Q(due_at__lte=Now()),
        pk__in=list(ids),
        discarded_at__isnull=True,
    )
    return given_up.update(
        discarded_at=Now(),
        discarded_by=clean(by, LENGTH),
        discard_reason=clean(reason),
        due_at=Now() + _NEVER,
        claim=None,
    )


def restore(ids: Collection[UUID], *, alias: str) -> int:
    """Make discarded rows due again; return how many were changed."""
    given_up = rows(alias).filter(pk__in=list(ids), discarded_at__isnull=False)
    return given_up.update(discarded_at=None, discarded_by="", discard_reason="", due_at=Now())


def discarded(alias: str, service: str, age: timedelta) -> QuerySet[OutboxEvent]:
    """Return the rows of a service that were discarded longer ago than *age*."""
    return rows(alias).filter(service=service, discarded_at__lt=Now() - age)
