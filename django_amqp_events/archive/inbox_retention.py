"""Delete old rows of the inbox."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, Error
from django.db.models import Q, QuerySet

from ..conf import INBOX_MIN, get_settings
from ..databases import check_commits, delete_by_id, has_table, with_table
from ..declare.registry import get_registry
from ..models import ArchivedEvent, InboxEntry, LatestVersion, OutboxEvent, State
from ..publish import outbox_rows
from ..worker.inbox import aliases
from . import tables

#: Shortest time that a row is kept.
KEEP: Final = timedelta(seconds=INBOX_MIN)
ROWS_PER_DELETE: Final = 500


def minimum_retention() -> timedelta:
    """Return the shortest time that rows are kept: twice the longest retry schedule, or 30 days.

    By then a retry or a queued copy of the event has found the row. A replay has no such limit, so
    :func:`prune` keeps the rows of archived events.
    """
    handlers = get_registry().handlers.values()
    longest = max((h.policy.total() for h in handlers if h.once), default=0.0)
    return max(KEEP, timedelta(seconds=2 * longest))


def databases() -> list[str]:
    """Return the databases that may have rows, including those of removed or moved handlers."""
    return with_table(InboxEntry, *aliases())


def due(*, before: datetime, service: str) -> int:
    """Return the number of rows that :func:`prune` would delete."""
    batches = (_pages(_rows(alias, service), before) for alias in databases())
    versions = sum(_versions(alias, service, before).count() for alias in databases())
    return versions + sum(len(gone) for pages in batches for gone in pages)


def prune(*, before: datetime, service: str) -> Iterator[int]:
    """Delete old rows in short transactions; yield the number of each.

    A row must outlive everything that may deliver its event again: queues, delays, the archive and
    this service's own outbox (:func:`_open_events`).

    Args:
        before: aware, at least :func:`minimum_retention` ago by the archive's clock.
        service: the owner of the rows.

    Raises:
        ValueError: *before* is too late.
    """
    retention = minimum_retention()
    latest = tables.clock() - retention
    if before > latest:
        raise ValueError(
            f"inbox rows are kept for at least {retention}, since their events may be delivered "
            f"again until then. before= is {before}, and must not be later than {latest}"
        )
    for alias in databases():
        check_commits(alias)
        rows = _rows(alias, service)
        for gone in _pages(rows, before):
            yield delete_by_id(rows.model, alias, gone) if gone else 0
        versions = _versions(alias, service, before)
        while gone := list(versions.values_list("pk", flat=True)[:ROWS_PER_DELETE]):
            # One that was handled meanwhile is newer.
            yield versions.filter(pk__in=gone).delete()[0]


def _rows(alias: str, service: str) -> QuerySet[InboxEntry]:
    return InboxEntry.objects.using(alias).filter(service=service)


def _versions(alias: str, service: str, before: datetime) -> QuerySet[LatestVersion]:
    """Return old rows of handlers that no open event may reach.

    Without its row, a handler would run an event that is older than the last one it handled.
    """
    settings, registry = get_settings(), get_registry()
    archived = _open_archived().filter(service=service).order_by()
    handlers = set(archived.values_list("handler", flat=True).distinct())
    # A replay goes to the handler's new name, or to one that matches now.
    handlers |= {settings.renamed_handlers.get(name, name) for name in handlers}
    open_events = [archived.filter(handler="")]
    open_events += [rows.filter(created_at__lt=before).order_by() for rows in _outboxes()]
    for events in open_events:
        for name in events.values_list("name", flat=True).distinct():
            handlers |= {handler.name for handler in registry.receivers(name)}
    rows = LatestVersion.objects.using(alias).filter(service=service, handled_at__lt=before)
    return rows.exclude(handler__in=handlers)


def _pages(rows: QuerySet[InboxEntry], before: datetime) -> Iterator[list[UUID]]:
    """Return the ids of rows that can be deleted, oldest first, page by page."""
    open_events = _open_events()
    page = rows.filter(handled_at__lt=before).order_by("handled_at", "pk")
    while expired := list(page.values_list("pk", "event_id", "handled_at")[:ROWS_PER_DELETE]):
        kept: set[str] = set()
        for events in open_events:
            ids = {row[1] for row in expired} - kept
            kept.update(events.filter(event_id__in=ids).values_list("event_id", flat=True))
        yield [pk for pk, event_id, _ in expired if event_id not in kept]
        # Rows that are kept are not read again.
        last, _, at = expired[-1]
        page = rows.filter(
            Q(handled_at__gt=at) | Q(pk__gt=last), handled_at__gte=at, handled_at__lt=before
        ).order_by("handled_at", "pk")


def _open_events() -> list[QuerySet[Any]]:
    """Return the rows whose events may be delivered again: open archived events, all of the outbox.

    A failed or discarded event in the outbox may have reached some of its queues and been handled,
    and may be published or restored later.
    """
    return [_open_archived(), *_outboxes()]


def _outboxes() -> list[QuerySet[Any]]:
    outboxes = []
    for alias in outbox_rows.aliases(get_settings()):
        try:
            if has_table(alias, OutboxEvent):
                outboxes.append(outbox_rows.rows(alias))
        except (Error, ImproperlyConfigured, ImportError) as exc:
            raise DatabaseError(
                f"database {alias!r} cannot be read ({exc}), and inbox rows of events in its "
                f"outbox must be kept; if it has no outbox, let the routers' allow_migrate() "
                f"return False for it"
            ) from exc
    return outboxes


def _open_archived() -> QuerySet[ArchivedEvent]:
    return tables.rows().exclude(state=State.SUCCEEDED)
