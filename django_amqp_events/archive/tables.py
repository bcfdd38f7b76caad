"""Read, lock and repair the archive's tables, and repeat a transaction that meets another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Final, TypeVar
from uuid import UUID

from django.db import connections, router, transaction
from django.db.models import F, Model, QuerySet

from .. import databases
from ..callables import nothing
from ..exceptions import ConfigurationError
from ..models import ArchivedEvent
from ..reasons import Reason

M = TypeVar("M", bound=Model)

#: Rows, and bytes, in one statement, about: MariaDB takes 16 MiB with quotes.
STATEMENT_ROWS: Final = 500
STATEMENT_BYTES: Final = 4 * 1024 * 1024
#: Most events, and most bytes of their bodies, that are read together.
CHUNK: Final = 200
CHUNK_BYTES: Final = 8 * 1024 * 1024


def database() -> str:
    """Return the alias of the archive's tables."""
    return router.db_for_write(ArchivedEvent)


def rows() -> QuerySet[ArchivedEvent]:
    """Return the archived events, read where they are written: never from a replica."""
    return ArchivedEvent.objects.using(database())


def in_chunks(rows: QuerySet[ArchivedEvent]) -> Iterator[list[UUID]]:
    """Yield the ids of events in their order, as many as are read together."""
    page = rows = rows.order_by("pk")
    while sizes := list(page.values_list("pk", "body_size")[:CHUNK]):
        yield from databases.pieces(sizes, count=CHUNK, size=CHUNK_BYTES)
        page = rows.filter(pk__gt=sizes[-1][0])


@dataclass(slots=True, kw_only=True)
class Repaired:
    """The result of a repair: events examined, and those of them that changed."""

    seen: int = 0
    changed: int = 0
    stopped: bool = False


def repair(
    rows: QuerySet[ArchivedEvent],
    correct: Callable[[list[UUID]], int],
    *,
    progress: Callable[[Repaired], object] = nothing,
    stop: Callable[[], bool] = nothing,
) -> Repaired:
    """Correct what is derived from events, in the order of their ids, in short transactions.

    Everything else may run meanwhile.

    Args:
        correct: corrects the events with these ids; returns how many changed.

    Raises:
        ConfigurationError: nothing would be committed.
    """
    databases.check_commits(database())
    repaired = Repaired()
    for ids in in_chunks(rows):
        if stop():
            repaired.stopped = True
            break
        repaired.changed += correct(ids)
        repaired.seen += len(ids)
        progress(repaired)
    return repaired


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


#: Repeat a function that is one transaction of the archive, see :func:`.retry_on_conflict`.
retry_on_conflict: Final = databases.retry_on_conflict(database)


@contextmanager
def locking(
    ids: Iterable[UUID], *, without: Iterable[str] = ArchivedEvent.LARGE
) -> Iterator[dict[UUID, ArchivedEvent]]:
    """Lock events in a transaction, in the order of their ids, without the columns *without*.

    Every transaction of several rows begins with this; otherwise a mirror and a replay of the same
    events could deadlock. SQLite has one writer at a time and fails a transaction that begins by
    reading while another one writes, so it begins with an UPDATE of nothing.
    """
    with transaction.atomic(using=database()):
        events = rows().filter(pk__in=list(ids)).order_by("pk").defer(*without)
        if connections[database()].features.has_select_for_update:
            events = events.select_for_update()
        else:
            rows().filter(pk=UUID(int=0)).update(version=F("version"))
        yield {event.pk: event for event in events}


def statements(rows: Iterable[M], *columns: str) -> Iterator[list[M]]:
    """Cut rows into those of one statement each, by the sizes of these columns."""
    sized = ((row, sum(len(getattr(row, name)) for name in columns)) for row in rows)
    return databases.pieces(sized, count=STATEMENT_ROWS, size=STATEMENT_BYTES)
