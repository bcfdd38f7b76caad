"""Read and lock the archive's tables, and repeat a transaction that meets another one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import wraps
from typing import Final, ParamSpec, TypeVar
from uuid import UUID

from django.db import OperationalError, connections, router, transaction
from django.db.models import F, Model, QuerySet

from .. import databases
from ..backoff import Backoff
from ..databases import is_conflict, is_locked
from ..exceptions import ConfigurationError
from ..models import ArchivedEvent
from ..reasons import Reason
from .groups import group_counts
from .groups.group_counts import CountedEvent, counted_event

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=Model)

#: Rows, and bytes, in one statement, about: MariaDB takes 16 MiB with quotes.
STATEMENT_ROWS: Final = 500
STATEMENT_BYTES: Final = 4 * 1024 * 1024
#: Attempts at a transaction that conflicts with another one.
TRIES: Final = 10
#: Seconds after which a transaction that finds the database locked is not tried again.
LOCKED_SECONDS: Final = 15.0
#: Delays between tries of a transaction that finds the database locked.
LOCK_BACKOFF: Final = Backoff(0.02, 0.5)


def database() -> str:
    """Return the alias of the archive's tables."""
    return router.db_for_write(ArchivedEvent)


def rows() -> QuerySet[ArchivedEvent]:
    """Return the archived events, read where they are written: never from a replica."""
    return ArchivedEvent.objects.using(database())


def clock() -> datetime:
    """Return the database's time, so that leases do not depend on the clocks of hosts."""
    return databases.clock(database())


def check_no_transaction() -> None:
    """Refuse to run inside a transaction, whose rollback would undo a claim.

    Raises:
        ConfigurationError: a transaction is open.
    """
    connection = connections[database()]
    autocommit = connection.in_atomic_block or connection.get_autocommit()
    if databases.in_transaction(connection) or not autocommit:
        raise ConfigurationError(Reason("in-transaction", database=repr(database())))


def retry_on_conflict(function: Callable[P, T]) -> Callable[P, T]:
    """Repeat a function that is one transaction while the database ends it for another one.

    While the database is locked, it is repeated for :data:`LOCKED_SECONDS` seconds.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        conflicts = waits = 0
        end = time.monotonic() + LOCKED_SECONDS
        while True:
            try:
                return function(*args, **kwargs)
            except OperationalError as exc:
                if connections[database()].in_atomic_block:
                    raise
                if is_locked(exc) and time.monotonic() < end:
                    time.sleep(LOCK_BACKOFF.delay(waits) * random.uniform(0.5, 1))
                    waits += 1
                elif is_conflict(exc) and conflicts < TRIES - 1:
                    conflicts += 1
                else:
                    raise

    return run


def lock(ids: Iterable[UUID]) -> dict[UUID, CountedEvent]:
    """Lock rows in the order of their ids, and return what counts depend on of those that exist.

    Every transaction of several rows begins with it; otherwise a mirror and a replay of the same
    events could deadlock. SQLite has one writer at a time and fails a transaction that begins by
    reading while another one writes, so it begins with an UPDATE of nothing.
    """
    return group_counts.counted_events(locked(ids))


def locked(ids: Iterable[UUID]) -> QuerySet[ArchivedEvent]:
    """Return a query that locks rows in the order of their ids."""
    events = rows().filter(pk__in=list(ids)).order_by("pk")
    if connections[database()].features.has_select_for_update:
        return events.select_for_update()
    rows().filter(pk=UUID(int=0)).update(version=F("version"))
    return events


@contextmanager
def locking(
    ids: Iterable[UUID], *, now: datetime, without: Iterable[str] = ArchivedEvent.LARGE
) -> Iterator[dict[UUID, ArchivedEvent]]:
    """Lock events in a transaction, and record how the block changes the group counts.

    It changes the events here and in the database alike. They are read once, in the order of
    their ids, without the columns *without*.
    """
    with transaction.atomic(using=database()):
        events = {event.pk: event for event in locked(ids).defer(*without)}
        before = {pk: counted_event(event) for pk, event in events.items()}
        yield events
        after = {pk: counted_event(event) for pk, event in events.items()}
        group_counts.record_changes(before, after, now=now, using=database())


def statements(rows: Iterable[M], *columns: str) -> Iterator[list[M]]:
    """Cut rows into those of one statement each, by the sizes of these columns."""
    sized = ((row, sum(len(getattr(row, name)) for name in columns)) for row in rows)
    return databases.pieces(sized, count=STATEMENT_ROWS, size=STATEMENT_BYTES)
