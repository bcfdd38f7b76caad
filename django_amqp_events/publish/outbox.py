"""The outbox as people see it: counts, states of its rows, and what can be done with them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final, Literal
from uuid import UUID

from django.db.models import Count, Min, Q, QuerySet
from django.db.models.functions import Now

from ..conf import Settings
from .outbox_rows import LEASE, aliases, no_table, rows

if TYPE_CHECKING:
    # Publishing is imported before Django's apps are loaded.
    from ..models import OutboxEvent

#: Seconds that a due row may wait before it is said that no relay runs.
OVERDUE: Final = 60.0
#: Seconds after its commit from which on a row that is in somebody's hand is worth a warning.
STUCK: Final = 600.0
#: From now on until when a row that was discarded is not due: for ever.
_NEVER: Final = timedelta(days=365_000)
#: Publishes after which a row that fails is no passing trouble any more.
PERSISTENT: Final = 3


# -- looking ---------------------------------------------------------------------------------


def _be(number: int) -> str:
    return "is" if number == 1 else "are"


def _are(number: int) -> str:
    return f"{number} {_be(number)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxStatus:
    """The state of an outbox for one service.

    Attributes:
        total: rows.
        held: of them, those in the hands of their publisher or of a relay.
        stuck: of these, those that were committed :data:`STUCK` seconds ago and more.
        failing: those whose publish has failed; :attr:`error` is that of the one tried most.
        overdue: those that a relay should have taken long ago, so there is none.
        oldest: when the oldest was published.
        others: rows by other services, which their relays take.
        stray: of them, those that are overdue. A service that was renamed leaves such.
    """

    alias: str
    total: int = 0
    held: int = 0
    stuck: int = 0
    failing: int = 0
    overdue: int = 0
    attempts: int = 0
    oldest: datetime | None = None
    error: str = ""
    others: dict[str, int] = field(default_factory=dict)
    stray: dict[str, int] = field(default_factory=dict)

    @property
    def severity(self) -> str:
        """Return ``ok``, ``warning`` or ``error``."""
        if self.overdue or self.stray or self.attempts >= PERSISTENT:
            return "error"
        return "warning" if self.failing or self.stuck else "ok"

    @property
    def meaning(self) -> str:
        """Describe what waits and why."""
        said = []
        if self.overdue:
            said.append(f"{_are(self.overdue)} due and no relay takes them: run events_relay")
        # What has to be done comes first: a page may cut the end.
        for name, count in sorted(self.stray.items()):
            said.append(
                f"{count} of {name!r} {_be(count)} due and no relay takes them: run that service's "
                f"events_relay; or, if this service had that name, events_relay --service {name}"
            )
        if self.failing:
            said.append(
                f"{self.failing} could not be published and {_be(self.failing)} tried again, up to "
                f"{self.attempts} time{'s' * (self.attempts != 1)} so far: {self.error}"
            )
        if self.held:
            said.append(
                f"{_are(self.held)} in hand: the confirm has not come yet, or whoever published is "
                f"gone, and a relay goes on within {LEASE:g} s"
            )
        if self.stuck:
            said.append(
                f"{self.stuck} of those since more than {STUCK / 60:g} minutes after their commit: "
                f"if that lasts, see whether RabbitMQ blocks publishers (memory or disk alarm)"
            )
        if self.others:
            named = ", ".join(f"{name} ({count})" for name, count in sorted(self.others.items()))
            said.append(f"others are of services that share the table: {named}")
        return "; ".join(said) or ("due, for a relay" if self.total else "empty")


def read_status(settings: Settings) -> list[OutboxStatus | UnreachableOutbox]:
    """Look at all outboxes of this service; those that need not be there are left out if absent."""
    found: list[OutboxStatus | UnreachableOutbox] = []
    for alias in aliases(settings):
        try:
            state = count_pending(alias, settings.service)
        except Exception as exc:  # noqa: BLE001 - whatever a database or its driver raises
            if alias == settings.database and settings.publish == "outbox":
                remedy = "; run `manage.py migrate`" if no_table(exc) else ""
                text = str(exc).strip().partition("\n")[0]
                found.append(UnreachableOutbox(alias, f"cannot be seen: {text}{remedy}"))
            continue
        if state.total or state.others or alias == settings.database:
            found.append(state)
    return found


@dataclass(frozen=True, slots=True)
class UnreachableOutbox:
    """An outbox that cannot be looked at."""

    alias: str
    meaning: str
    severity: str = "unknown"


def count_pending(alias: str, service: str) -> OutboxStatus:
    """Count what waits and why.

    Raises:
        DatabaseError: it cannot be read.
    """
    open_ = rows(alias).filter(discarded_at__isnull=True)
    ours = open_.filter(service=service)
    total = ours.count()
    others: dict[str, int] = {}
    stray: dict[str, int] = {}
    for name, count, late in (
        open_.exclude(service=service)
        .order_by("service")
        .values_list("service")
        .annotate(count=Count("pk"), late=Count("pk", filter=_count_overdue()))
    ):
        others[name] = count
        if late:
            stray[name] = late
    if not total:
        return OutboxStatus(alias=alias, others=others, stray=stray)
    worst = ours.filter(attempts__gt=0).order_by("-attempts", "pk").first()
    return OutboxStatus(
        alias=alias,
        total=total,
        held=_count_leased(ours).count(),
        stuck=_count_leased(ours).filter(created_at__lt=Now() - timedelta(seconds=STUCK)).count(),
        failing=ours.filter(attempts__gt=0).count(),
        overdue=ours.filter(_count_overdue()).count(),
        attempts=worst.attempts if worst else 0,
        oldest=ours.aggregate(oldest=Min("created_at"))["oldest"],
        error=worst.error if worst else "",
        others=others,
        stray=stray,
    )


def _count_overdue() -> Q:
    return Q(due_at__lt=Now() - timedelta(seconds=OVERDUE))


def _count_leased(found: QuerySet[OutboxEvent]) -> QuerySet[OutboxEvent]:
    held = found.filter(due_at__gt=Now())
    return held.filter(attempts=0) | held.filter(claim__isnull=False)


def describe_row(row: OutboxEvent) -> str:
    """Return why a row is still in the outbox."""
    if row.discarded_at is not None:
        because = f": {row.discard_reason}" if row.discard_reason else ""
        return f"discarded by {row.discarded_by or 'nobody'}{because}"
    if row.claim is not None:
        return "a relay has it in hand, or ended while it had"
    if row.attempts:
        times = "once" if row.attempts == 1 else f"{row.attempts} times"
        return f"failed {times}: {row.error}"
    return "not confirmed yet; a relay takes it when it is due"


#: How a row stands (:func:`standing`).
RowState = Literal["held", "failed", "due", "overdue", "discarded"]


def row_state(row: OutboxEvent, now: datetime) -> RowState:
    """Return the state of a row.

    ``held``: in the hands of its process or a relay; ``failed``: waits for its next try; ``due``,
    and ``overdue`` where a relay should have taken it long ago; ``discarded``.

    Args:
        now: by the database's clock, as every time of a row is.
    """
    if row.discarded_at is not None:
        return "discarded"
    if row.due_at <= now:
        return "overdue" if row.due_at < now - timedelta(seconds=OVERDUE) else "due"
    return "failed" if row.attempts and row.claim is None else "held"


def in_state(found: QuerySet[OutboxEvent], wanted: RowState) -> QuerySet[OutboxEvent]:
    """Return those rows that stand so: :func:`standing` in SQL."""
    if wanted == "discarded":
        return found.filter(discarded_at__isnull=False)
    found = found.filter(discarded_at__isnull=True)
    if wanted == "overdue":
        return found.filter(_count_overdue())
    if wanted == "due":
        return found.filter(~_count_overdue(), due_at__lte=Now())
    if wanted == "failed":
        return found.filter(due_at__gt=Now(), attempts__gt=0, claim__isnull=True)
    return _count_leased(found)


# -- deciding --------------------------------------------------------------------------------


def publish_now(ids: Collection[UUID], *, alias: str) -> int:
    """Make failed rows due now; rows with a lease are skipped.

    Returns:
        how many there were.
    """
    waiting_again = rows(alias).filter(
        pk__in=list(ids), claim__isnull=True, attempts__gt=0, discarded_at__isnull=True
    )
    return waiting_again.update(due_at=Now())


def discard(ids: Collection[UUID], *, alias: str, by: str = "", reason: str = "") -> int:
    """Give rows up: their events are not published, unless :func:`restore` brings them back.

    Those in hand stay there. The rows stay too, with their messages, until ``events_prune`` finds
    them old.

    Args:
        by: user name, or the command's.
        reason: why, as somebody said.

    Returns:
        how many there were.
    """
    from ..models import LENGTH, clean

    # Nobody has it in hand: it waits for its next try, or whoever had it has lost its lease.
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
    """Bring back rows that were discarded; they are due at once.

    Returns:
        how many there were.
    """
    given_up = rows(alias).filter(pk__in=list(ids), discarded_at__isnull=False)
    return given_up.update(discarded_at=None, discarded_by="", discard_reason="", due_at=Now())


def discarded(alias: str, service: str, age: timedelta) -> QuerySet[OutboxEvent]:
    """Return the rows of a service that were discarded longer ago than *age*."""
    return rows(alias).filter(service=service, discarded_at__lt=Now() - age)


def delete_discarded(*, alias: str, service: str, age: timedelta, limit: int = 500) -> int:
    """Delete rows that were discarded longer ago than *age*, those first.

    Returns:
        how many went; call it again where there were any.
    """
    old = discarded(alias, service, age)
    ids = list(old.order_by("discarded_at").values_list("pk", flat=True)[:limit])
    # Again by their age: somebody may have restored one.
    return _delete(old, ids)


def _delete(found: QuerySet[OutboxEvent], ids: Sequence[UUID]) -> int:
    # Nothing points at these rows, so none has to be read first.
    return found.filter(pk__in=ids)._raw_delete(found.db) if ids else 0  # noqa: SLF001


__all__ = [
    "OutboxStatus",
    "RowState",
    "UnreachableOutbox",
    "count_pending",
    "delete_discarded",
    "describe_row",
    "discard",
    "discarded",
    "in_state",
    "publish_now",
    "read_status",
    "restore",
    "row_state",
    "rows",
]
