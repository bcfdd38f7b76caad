"""The outbox: events in the database from the commit of their transaction to their confirm.

::

    INSERT with the caller's rows --commit--> held by the process that made it
        | confirmed                               | it ended, or gave up
     DELETE <--confirmed-- taken by a relay <--due--+
                                | failed
                                +--> due again later, with its error
                                        ^
                                        +--discard, restore--> given up, never due

A row says from when on a relay may take it. Times are the database's own: hosts' clocks do not
have to agree. A process measures how long it holds a row by its monotonic clock, from before the
statement that made or took the row, so it always gives up first. Nothing here talks to the broker.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID, uuid4

from django.apps import apps
from django.db import DEFAULT_DB_ALIAS, DatabaseError, connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F, Model, QuerySet
from django.db.models.functions import Now

from ..conf import LONGEST_CONFIRM, Settings
from ..databases import table_missing
from ..exceptions import (
    BrokerUnavailableError,
    ConfigurationError,
    OutboxError,
    PublishError,
    PublishInterruptedError,
    PublishRefusedError,
    PublishTimeoutError,
    UnroutableError,
)
from ..message.types import Message

if TYPE_CHECKING:
    # Publishing is imported before Django's apps are loaded.
    from ..models import OutboxEvent

logger = logging.getLogger(__name__)

#: Seconds for which whoever made or took a row holds it. What died leaves it to others after them.
LEASE: Final = 2 * LONGEST_CONFIRM
#: Seconds after which a row that is held is not begun any more, only finished: a long transaction
#: leaves its events to the relay.
BEGIN_WITHIN: Final = LEASE / 2
#: Seconds between the renewals of a lease while confirms are waited for.
RENEW: Final = LEASE / 6
#: Rows and bytes of bodies of one INSERT at most.
INSERT_ROWS: Final = 1000
INSERT_BYTES: Final = 8 * 1024 * 1024
#: Rows of one claim at most: any database takes so many parameters.
CLAIM_ROWS: Final = 900
#: Bytes of bodies in one claim, or one body that is larger.
CLAIM_BYTES: Final = 16 * 1024 * 1024

#: First delay, factor and longest delay in seconds after a publish that failed. Where the event
#: may be in some of its queues already, each repeat doubles it there: those are few.
_SURELY_NOWHERE: Final = (5.0, 2.0, 600.0)
_CONNECTION_LOST: Final = (5.0, 4.0, 6 * 3600.0)
_PERHAPS_SOMEWHERE: Final = (30.0, 4.0, 6 * 3600.0)


@dataclass(frozen=True, slots=True)
class Row:
    """A message and the row that it has in the outbox."""

    id: UUID
    message: Message
    attempts: int = 0
    claim: UUID | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The broker's answer for a row: ``None`` if confirmed."""

    row: Row
    error: PublishError | None

    def done(self, settings: Settings) -> bool:
        """Return True if the row can be deleted; an unroutable event is normal, unless held."""
        if isinstance(self.error, UnroutableError):
            return settings.unrouted in ("warn", "ignore")
        return self.error is None

    @property
    def untried(self) -> bool:
        """Return True if nothing was sent, which says nothing about the row."""
        return isinstance(self.error, BrokerUnavailableError)


# -- writing ---------------------------------------------------------------------------------


def alias_for(settings: Settings, using: str | None) -> str:
    """Return the database whose transaction the events belong to.

    Raises:
        OutboxError: there is none; or a transaction is open on another one, which they would not
            be part of.
    """
    if using is not None:
        if using not in connections:
            raise ConfigurationError(f"using={using!r} is no alias in DATABASES")
        return using
    alias = settings.database
    connection = connections[alias]
    if connection.settings_dict["ENGINE"] == "django.db.backends.dummy":
        raise OutboxError(
            f"the outbox needs a database, and DATABASES has none for {alias!r}; nothing was "
            f'published. Set DATABASES, or AMQP_EVENTS["PUBLISH"] to "immediate"'
        )
    if not _open(connection):
        others = [
            other.alias
            for other in connections.all(initialized_only=True)
            if other.alias != alias and _open(other)
        ]
        if others:
            raise OutboxError(
                f"a transaction is open on database {others[0]!r}, but the outbox is on {alias!r} "
                f"and would not be part of it, so the event would be published even if it is "
                f"rolled back; nothing was published. Say which transaction the event belongs to: "
                f"using(using={others[0]!r}), whose outbox it then is in, or using(using={alias!r})"
            )
    return alias


def _open(connection: BaseDatabaseWrapper) -> bool:
    """Return True if a transaction is open other than that of Django's TestCase."""
    blocks = getattr(connection, "atomic_blocks", [])
    return connection.in_atomic_block and not all(
        getattr(block, "_from_testcase", False) for block in blocks
    )


def insert(
    messages: Sequence[Message], *, alias: str, service: str, held: bool = True
) -> list[Row]:
    """Write messages into the outbox, in the transaction that is open or one of their own.

    Args:
        held: this process publishes them after the commit; a relay may take them after
            :data:`LEASE`, otherwise at once.

    Raises:
        OutboxError: there is no such table.
    """
    connection = connections[alias]
    rows = [Row(new_id(), message) for message in messages]
    one = len(rows) == 1
    chunks = [rows] if one else list(_chunks(rows, _statement_size(connection)))
    try:
        if len(chunks) == 1:
            _insert(connection, chunks[0], service, held)
        else:
            with transaction.atomic(using=alias, savepoint=False):
                for chunk in chunks:
                    _insert(connection, chunk, service, held)
    except DatabaseError as exc:
        if no_table(exc):
            where = "" if alias == DEFAULT_DB_ALIAS else f" --database {alias}"
            raise OutboxError(
                f"database {alias!r} has no table for the outbox, so nothing was published; run "
                f'`manage.py migrate{where}`, or set AMQP_EVENTS["PUBLISH"] to "on_commit"'
            ) from exc
        raise
    return rows


def _insert(connection: BaseDatabaseWrapper, rows: Sequence[Row], service: str, held: bool) -> None:
    # Not bulk_create: resolving two expressions for each row takes longer than the INSERT.
    head, group, tail, prepare = _statement(connection.vendor, connection.alias, held)
    values: list[Any] = []
    for row in rows:
        message = row.message
        values += (
            prepare(row.id, connection),
            service,
            message.event_id,
            message.name,
            message.exchange,
            _encode({"headers": dict(message.headers), "properties": dict(message.properties)}),
            connection.Database.Binary(message.body),  # type: ignore[attr-defined]
            len(message.body),
            *tail,
        )
    with connection.cursor() as cursor:
        cursor.execute(f"{head}{', '.join([group] * len(rows))}", values)


#: Made once: json.dumps() with separators makes one for each call.
_encode: Final = json.JSONEncoder(separators=(",", ":")).encode
#: Columns with values of their own; then the times, and what every new row has.
_VALUES: Final = ("id", "service", "event_id", "name", "exchange", "envelope", "body", "size")
_COLUMNS: Final = (*_VALUES, "created_at", "due_at", "attempts", "error")


@lru_cache(maxsize=32)
def _statement(_vendor: str, alias: str, held: bool) -> tuple[str, str, tuple[Any, ...], Any]:
    """Return an INSERT: head, group of a row, the end of its parameters, and how ids are given.

    Raises:
        ConfigurationError: the app is not installed.
    """
    if not apps.is_installed("django_amqp_events"):
        raise ConfigurationError(
            "'django_amqp_events' is not in INSTALLED_APPS, so there is no outbox; nothing was "
            'published. Add it and run `manage.py migrate`, or set AMQP_EVENTS["PUBLISH"] to '
            '"on_commit"'
        )
    from ..models import OutboxEvent

    connection = connections[alias]
    meta = OutboxEvent._meta  # noqa: SLF001 - Django's documented name for it
    query: Any = OutboxEvent.objects.using(alias).query
    compiler = query.get_compiler(alias)
    expressions: tuple[Any, ...] = (Now(), Now() + timedelta(seconds=LEASE) if held else Now())
    times = [
        compiler.compile(expression.resolve_expression(query, for_save=True))
        for expression in expressions
    ]
    quote = connection.ops.quote_name
    fields = {field.name: field for field in meta.concrete_fields}
    names = ", ".join(quote(str(fields[name].column)) for name in _COLUMNS)
    group = ", ".join([*["%s"] * len(_VALUES), times[0][0], times[1][0], "%s", "%s"])
    table = quote(meta.db_table)
    return (
        f"INSERT INTO {table} ({names}) VALUES ",  # noqa: S608 - names of our own
        f"({group})",
        (*times[0][1], *times[1][1], 0, ""),
        fields["id"].get_db_prep_value,
    )


def _statement_size(connection: BaseDatabaseWrapper) -> int:
    most = connection.features.max_query_params
    if not most:
        return INSERT_ROWS
    tail = _statement(connection.vendor, connection.alias, True)[2]
    return min(INSERT_ROWS, most // (len(_VALUES) + len(tail)))


def _chunks(rows: Sequence[Row], most: int) -> Iterable[list[Row]]:
    chunk: list[Row] = []
    size = 0
    for row in rows:
        if chunk and (len(chunk) >= most or size + len(row.message.body) > INSERT_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(row)
        size += len(row.message.body)
    yield chunk


_last_id = 0
# Reentrant: a signal handler may publish while its thread is in here.
_id_lock = threading.RLock()


def new_id() -> UUID:
    """Return a UUID of version 7 (RFC 9562): its order is that of time, within a process exactly.

    60 bits are the time, in quarters of a microsecond; the rest is random.
    """
    global _last_id  # noqa: PLW0603 - one clock for the process
    milliseconds, nanoseconds = divmod(time.time_ns(), 1_000_000)
    ticks = milliseconds << 12 | nanoseconds * 4096 // 1_000_000
    with _id_lock:
        _last_id = ticks = max(ticks, _last_id + 1)
    value = (ticks >> 12) << 80 | 0x7 << 76 | (ticks & 0xFFF) << 64 | 0b10 << 62
    return UUID(int=value | int.from_bytes(os.urandom(8), "big") >> 2)


def _new_lock() -> None:
    global _id_lock  # noqa: PLW0603 - the parent's may be held by a thread that is not here
    _id_lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)


# -- taking ----------------------------------------------------------------------------------


def rows(alias: str) -> QuerySet[OutboxEvent]:
    """Return all rows of an outbox, of all services."""
    from ..models import OutboxEvent

    return OutboxEvent.objects.using(alias)


def aliases(settings: Settings) -> list[str]:
    """Return the databases that may have an outbox: the routers let the table be there."""
    from ..models import OutboxEvent

    found = [alias for alias in connections if router.allow_migrate_model(alias, OutboxEvent)]
    return [settings.database, *(alias for alias in found if alias != settings.database)]


def has_table(alias: str, model: type[Model]) -> bool:
    """Return True if a database has a model's table.

    Raises:
        DatabaseError: it is away.
    """
    connection = connections[alias]
    with connection.cursor() as cursor:
        table = model._meta.db_table  # noqa: SLF001 - Django's documented name for it
        return table in connection.introspection.table_names(cursor)


def tables(settings: Settings) -> list[str]:
    """Return the databases that have an outbox.

    Raises:
        DatabaseError: one is away.
    """
    from ..models import OutboxEvent

    return [
        alias
        for alias in aliases(settings)
        if alias in connections and has_table(alias, OutboxEvent)
    ]


def due(alias: str, service: str) -> bool:
    """Return a filter for rows that a relay may claim."""
    return rows(alias).filter(service=service, due_at__lte=Now()).exists()


def claim(alias: str, service: str, *, limit: int, failed: bool) -> list[Row]:
    """Lease due rows, oldest first, for :data:`LEASE` seconds.

    A row that holds no message any more waits with that error, and is not among those returned.

    Args:
        failed: those that a publish has failed for before, otherwise those that none has.
    """
    token, limit = uuid4(), min(limit, CLAIM_ROWS)
    wanted = rows(alias).filter(
        service=service, due_at__lte=Now(), **({"attempts__gt": 0} if failed else {"attempts": 0})
    )
    oldest = wanted.order_by("due_at", "pk").values_list("pk", "size")
    taken = {"claim": token, "due_at": Now() + timedelta(seconds=LEASE)}
    if connections[alias].features.has_select_for_update_skip_locked:
        with transaction.atomic(using=alias):
            ids = _fitting(oldest.select_for_update(skip_locked=True)[:limit])
            if ids:
                rows(alias).filter(pk__in=ids).update(**taken)
    elif ids := _fitting(oldest[:limit]):
        # Whoever saw the same rows finds them no longer due.
        wanted.filter(pk__in=ids).update(**taken)
    if not ids:
        return []
    # Not the models themselves: making them takes longer than reading the rows.
    found = rows(alias).filter(pk__in=ids, claim=token).order_by("pk")
    readable: list[Row] = []
    for pk, attempts, event_id, name, exchange, envelope, body in found.values_list(
        "pk", "attempts", "event_id", "name", "exchange", "envelope", "body"
    ):
        try:
            message = _message(event_id, name, exchange, envelope, body)
        except Exception as exc:  # noqa: BLE001 - whatever somebody has written there
            _unreadable(found.filter(pk=pk), attempts, event_id, exc)
        else:
            readable.append(Row(pk, message, attempts, token))
    return readable


def _unreadable(found: QuerySet[OutboxEvent], attempts: int, event_id: str, exc: Exception) -> None:
    error = PublishRefusedError(
        f"the row cannot be read as a message ({type(exc).__name__}: {exc}); nothing was sent. "
        f"Its columns were changed by hand: put them right, or discard it",
        event_id=event_id,
    )
    logger.error("event %r in the outbox: %s", event_id, error)
    _postpone(found, error, attempts)


def _fitting(found: Iterable[tuple[UUID, int]]) -> list[UUID]:
    ids: list[UUID] = []
    total = 0
    for pk, size in found:
        total += size
        if ids and total > CLAIM_BYTES:
            break
        ids.append(pk)
    return ids


def _message(event_id: str, name: str, exchange: str, envelope: str, body: Any) -> Message:
    stored = json.loads(envelope)
    for part in ("headers", "properties"):
        if not isinstance(stored[part], dict):
            raise TypeError(f"its {part} are no object but {stored[part]!r:.40}")
    return Message(
        exchange=exchange,
        routing_key=name,
        body=bytes(body),
        headers=stored["headers"],
        properties=stored["properties"],
        event_id=event_id,
        name=name,
    )


def renew(alias: str, held: Sequence[Row]) -> None:
    """Extend the leases of rows that no other process has claimed."""
    for part in _parts(held):
        _still_leased(alias, part).update(due_at=Now() + timedelta(seconds=LEASE))


def release(alias: str, held: Sequence[Row]) -> None:
    """Give back rows that no publish was begun for; they are due at once."""
    for part in _parts(held):
        _still_leased(alias, part).update(due_at=Now(), claim=None)


def confirmed(alias: str, done: Sequence[Row], *, wait: bool = True) -> None:
    """Delete rows whose events the broker has confirmed, whoever has the lease.

    Args:
        wait: until they are gone for good. Otherwise PostgreSQL does not wait for its disk, and
            rows that it deleted in the last moments before it crashed are there again after it:
            under a second, three times its ``wal_writer_delay``. How the process itself ends makes
            no difference.
    """
    connection = connections[alias]
    delete, prepare = _delete_statement(connection.vendor, alias)
    # What is set there is of this one statement's own transaction, never of somebody's.
    own = not connection.in_atomic_block and connection.get_autocommit()
    lazily = _LAZILY if not wait and own and connection.vendor == "postgresql" else ""
    for part in _parts(done):
        places = ", ".join(["%s"] * len(part))
        # One statement, without the transaction around it that delete() would make: somebody may
        # wait for it, and nothing hangs on these rows.
        with connection.cursor() as cursor:
            ids = [prepare(row.id, connection) for row in part]
            cursor.execute(f"{delete} ({places}){lazily}", ids)


#: Ends the condition of a DELETE. PostgreSQL looks at the setting when it commits, so that this is
#: one round trip, where ``SET LOCAL`` in a transaction would be four.
_LAZILY: Final = " AND set_config('synchronous_commit', 'off', true) = 'off'"


@lru_cache(maxsize=32)
def _delete_statement(_vendor: str, alias: str) -> tuple[str, Callable[..., Any]]:
    """Return a DELETE up to the list of ids, and how these are given."""
    from ..models import OutboxEvent

    quote = connections[alias].ops.quote_name
    meta = OutboxEvent._meta  # noqa: SLF001 - Django's documented name for it
    id_field = meta.get_field("id")
    table, column = quote(meta.db_table), quote(str(id_field.column))
    delete = f"DELETE FROM {table} WHERE {column} IN"  # noqa: S608 - names of our own
    return delete, id_field.get_db_prep_value


def failed(alias: str, answers: Sequence[Answer]) -> None:
    """Note why publishes failed, and when each is tried again."""
    with transaction.atomic(using=alias, savepoint=False):
        for answer in answers:
            error, row = answer.error, answer.row
            assert error is not None  # noqa: S101 - for whoever reads types
            _postpone(_still_leased(alias, [row]), error, row.attempts)


def _postpone(found: QuerySet[OutboxEvent], error: PublishError, attempts: int) -> None:
    """Let a row that had failed so often before wait with its error until it is due again."""
    found.update(
        attempts=F("attempts") + 1,
        error=_storable(error),
        due_at=Now() + timedelta(seconds=delay(error, attempts)),
        claim=None,
    )


def delay(error: PublishError, attempts: int) -> float:
    """Return after how many seconds a row is tried again that had failed so often before."""
    if isinstance(error, (PublishInterruptedError, PublishTimeoutError)):
        first, factor, longest = _CONNECTION_LOST
    elif error.published is None:
        first, factor, longest = _PERHAPS_SOMEWHERE
    else:
        first, factor, longest = _SURELY_NOWHERE
    return float(min(first * factor ** min(attempts, 32), longest))


def settle(alias: str, answers: Sequence[Answer], settings: Settings, *, wait: bool = True) -> None:
    """Note what the broker answered: rows go, or wait with their error, or are given back.

    Args:
        wait: see :func:`confirmed`.
    """
    done = [answer.row for answer in answers if answer.done(settings)]
    if done:
        confirmed(alias, done, wait=wait)
    untried = [answer.row for answer in answers if answer.untried]
    if untried:
        release(alias, untried)
    rest = [answer for answer in answers if not answer.done(settings) and not answer.untried]
    if rest:
        failed(alias, rest)


def _still_leased(alias: str, held: Sequence[Row]) -> QuerySet[OutboxEvent]:
    """Return the rows that still have the lease they were claimed with."""
    claims = {row.claim for row in held}
    found = rows(alias).filter(pk__in=[row.id for row in held], discarded_at__isnull=True)
    return found.filter(claim__isnull=True) if claims == {None} else found.filter(claim__in=claims)


def _parts(held: Sequence[Row]) -> Iterable[list[Row]]:
    """Split into chunks that any database accepts as parameters."""
    left = iter(held)
    while part := list(islice(left, 500)):
        yield part


def _storable(error: PublishError) -> str:
    from ..models import clean

    return clean(error)


def no_table(exc: BaseException) -> bool:
    """Return True if a database error means that the outbox has no table."""
    return "outboxevent" in str(exc) and table_missing(exc)
