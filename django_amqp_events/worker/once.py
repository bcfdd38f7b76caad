"""The inbox: handlers with ``once`` have their effects in the database once.

A row says that a handler has handled an event. It is in the transaction of the handler's own
effects, on the database that they are in: both are there, or neither. A second delivery finds the
row and is skipped; one that comes at the same time waits for the first to commit or to roll back
(on SQLite for the write lock).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import UUID, uuid5

from django.db import IntegrityError, InternalError, connections, router, transaction
from django.db.models import Q, QuerySet

from .. import signals
from ..conf import INBOX_MIN, Settings, get_settings
from ..context import ReceivedEvent
from ..databases import check_commits
from ..declare.registry import Handler, Registry, get_registry
from ..exceptions import RolledBackError
from ..publish import outbox

if TYPE_CHECKING:
    # Handlers are declared before Django's apps are loaded.
    from ..models import InboxEntry

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: That a row is kept at the least.
KEEP: Final = timedelta(seconds=INBOX_MIN)
#: Rows that one statement deletes.
CHUNK: Final = 500

_NAMESPACE: Final = UUID("0f5c3a4e-9c53-4b44-8f4c-0d1b6a2f7c11")


class _Known(Exception):
    """Somebody has handled it; ends the transaction that has done nothing yet."""


def key(service: str, handler: str, event: ReceivedEvent) -> UUID:
    """Return the id of the row of an event and a handler.

    The name is part of it: a publisher may give ``order.created`` and ``order.paid`` one id.

    A replay has the event's own: it runs because no run of it has committed. A forced replay is
    asked for although one may have, and has one of its own.
    """
    forced = event.replay_id if event.replay_forced else None
    parts = (service, handler, event.service, event.id, event.name, forced or "")
    return uuid5(_NAMESPACE, "\0".join(parts))


def database(handler: Handler, settings: Settings | None = None) -> str:
    """Return the alias of the database that a handler with ``once`` writes to."""
    return handler.using or (settings or get_settings()).database


def once(handler: Handler, event: ReceivedEvent, run: Callable[[], T]) -> T | None:
    """Run *run* in a transaction with the row that says so; nothing where there is one already.

    What *run* raises rolls both back, so that the next attempt runs.

    Raises:
        RolledBackError: *run* returned, but what it wrote cannot be committed.
        ConfigurationError: nothing would be committed; *run* was not called.
    """
    from ..models import LENGTH, clean

    settings = get_settings()
    alias = database(handler, settings)
    check_commits(alias)
    pk = key(settings.service, handler.name, event)
    values = {
        "id": pk,
        "service": settings.service,
        "handler": clean(handler.name, LENGTH),
        "source": clean(event.service, LENGTH),
        "event_id": clean(event.id, LENGTH),
        "name": clean(event.name, LENGTH),
        "handled_at": datetime.now(UTC),
    }
    try:
        with transaction.atomic(using=alias):
            try:
                _insert(alias, values)
            except IntegrityError as exc:
                raise _Known from exc
            result = run()
            if not _stands(alias, pk):
                raise RolledBackError.of(handler.name, event.id, alias)
            return result
    except _Known:
        logger.info(
            "event %r (%s) is not run again: %s has handled it", event.name, event.id, handler.name
        )
        signals.event_skipped.send_robust(settings.service, handler=handler.name, event=event)
        return None


# Not by the ORM: it takes several times as long to make these two statements, for each event, as
# the database takes to run them.


@lru_cache(maxsize=32)
def _statements(_vendor: str, alias: str) -> tuple[str, str]:
    """Return an INSERT of a row, and a SELECT of one by its id."""
    from ..models import InboxEntry

    quote = connections[alias].ops.quote_name
    meta = InboxEntry._meta  # noqa: SLF001 - Django's documented name for it
    columns = [quote(str(field.column)) for field in meta.concrete_fields]
    names, places = ", ".join(columns), ", ".join(["%s"] * len(columns))
    table, pk = quote(meta.db_table), quote(str(meta.pk.column))
    return (
        f"INSERT INTO {table} ({names}) VALUES ({places})",  # noqa: S608 - names of our own
        f"SELECT 1 FROM {table} WHERE {pk} = %s",  # noqa: S608 - names of our own
    )


def _insert(alias: str, values: Mapping[str, Any]) -> None:
    from ..models import InboxEntry

    connection = connections[alias]
    insert, _ = _statements(connection.vendor, alias)
    fields = InboxEntry._meta.concrete_fields  # noqa: SLF001 - Django's documented name for it
    row = [field.get_db_prep_save(values[field.name], connection) for field in fields]
    with connection.cursor() as cursor:
        cursor.execute(insert, row)


def _stands(alias: str, pk: UUID) -> bool:
    """Say whether the transaction that the row *pk* was inserted in can be committed still.

    Where a database error was swallowed in it, ``atomic()`` rolls back without a word, and so does
    PostgreSQL at a COMMIT. Django knows of the first; the row itself, read by its primary key,
    tells of the second, and of a transaction that somebody has ended by hand. (What libpq knows
    without asking is no answer to that: another transaction may be open by now.)
    """
    from ..models import InboxEntry

    if transaction.get_rollback(using=alias):
        return False
    connection = connections[alias]
    _, find = _statements(connection.vendor, alias)
    field = InboxEntry._meta.pk  # noqa: SLF001 - Django's documented name for it
    try:
        with connection.cursor() as cursor:
            cursor.execute(find, [field.get_db_prep_value(pk, connection, prepared=False)])
            return cursor.fetchone() is not None
    except InternalError:
        # PostgreSQL: the transaction is aborted.
        return False


def aliases(settings: Settings | None = None, registry: Registry | None = None) -> list[str]:
    """Return the databases that have rows of this service's handlers."""
    settings, registry = settings or get_settings(), registry or get_registry()
    found = (database(handler, settings) for handler in registry.handlers.values() if handler.once)
    return list(dict.fromkeys(found))


def keep(registry: Registry | None = None) -> timedelta:
    """Return how long rows are kept at the least: twice any retry schedule, or 30 days.

    A row stands where the handler has handled the event, so only another copy can come after it:
    one that waits for a retry of its own, whose next attempt finds the row and ends it, or one
    that waits in a queue. A replay has no such limit; rows of archived events stay (:func:`prune`).
    """
    handlers = (registry or get_registry()).handlers.values()
    longest = max((h.policy.total() for h in handlers if h.once), default=0.0)
    return max(KEEP, timedelta(seconds=2 * longest))


def databases() -> list[str]:
    """Return the databases that may have rows: of handlers that were removed or moved too."""
    from ..models import InboxEntry

    own = aliases()
    allowed = (alias for alias in connections if router.allow_migrate_model(alias, InboxEntry))
    others = [alias for alias in allowed if alias not in own]
    return own + [alias for alias in others if outbox.has_table(alias, InboxEntry)]


def due(*, before: datetime, service: str | None = None) -> int:
    """Count what :func:`prune` would delete; changes nothing."""
    return sum(
        len(gone)
        for alias in databases()
        for gone in _pages(_rows(alias, service), before, lambda: CHUNK)
    )


def prune(
    *,
    before: datetime,
    limit: int | None = None,
    service: str | None = None,
    batch_size: int | None = None,
    progress: Callable[[int], object] = bool,
    stop: Callable[[], bool] = bool,
) -> int:
    """Delete rows from before a time, but none of an event that archive or outbox have still.

    A row must outlive whatever could bring its event again: queues, delays, the archive, from
    which it may be replayed as long as it is there, and this service's own outbox, which may
    have an event that some of its queues have taken (:func:`_coming`).

    Args:
        before: aware, at least :func:`keep` ago.
        limit: rows at the most, over all databases.
        service: whose, this one by default.
        batch_size: rows in one transaction at most, :data:`CHUNK` by default.
        progress: called after each of them with how many went so far.
        stop: asked before each whether to end.

    Returns:
        how many.

    Raises:
        ValueError: *before* is later than that.
    """
    latest = datetime.now(UTC) - keep()
    if before > latest:
        raise ValueError(
            f"inbox rows are kept for at least {keep()}, because an event may come again as long; "
            f"before= is {before}, and at the latest {latest}"
        )
    total, most = 0, batch_size or CHUNK

    def size() -> int:
        return 0 if stop() else most if limit is None else min(most, limit - total)

    for alias in databases():
        check_commits(alias)
        rows = _rows(alias, service)
        for gone in _pages(rows, before, size):
            total += rows.filter(pk__in=gone).delete()[0]
            progress(total)
    return total


def _rows(alias: str, service: str | None) -> QuerySet[InboxEntry]:
    from ..models import InboxEntry

    return InboxEntry.objects.using(alias).filter(service=service or get_settings().service)


def _pages(
    rows: QuerySet[InboxEntry], before: datetime, size: Callable[[], int]
) -> Iterator[list[UUID]]:
    """Return the ids of rows that can go, oldest first, page by page.

    Args:
        size: asked for the next page's; 0 ends it.
    """
    coming = _coming()
    page = rows.filter(handled_at__lt=before).order_by("handled_at", "pk")
    while wanted := size():
        found = list(page.values_list("pk", "event_id", "handled_at")[:wanted])
        if not found:
            break
        kept: set[str] = set()
        for events in coming:
            ids = {row[1] for row in found} - kept
            kept.update(events.filter(event_id__in=ids).values_list("event_id", flat=True))
        yield [pk for pk, event_id, _ in found if event_id not in kept]
        # Those that stay are not looked at again.
        last, _, at = found[-1]
        page = rows.filter(
            Q(handled_at__gt=at) | Q(pk__gt=last), handled_at__gte=at, handled_at__lt=before
        ).order_by("handled_at", "pk")


def _coming() -> list[QuerySet[Any]]:
    """Return the rows whose events may come again: open ones of the archive, all of the outbox.

    An outbox's row whose publish has failed, or that somebody discarded and may restore, can be
    of an event that another queue took, so that its handler has handled it.
    """
    from ..models import ArchivedEvent

    archive = ArchivedEvent.objects.using(router.db_for_write(ArchivedEvent))
    outboxes = map(outbox.rows, outbox.tables(get_settings()))
    return [archive.exclude(state="succeeded"), *outboxes]
