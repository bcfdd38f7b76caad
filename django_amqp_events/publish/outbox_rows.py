"""Rows of the outbox: events in the database from their commit to their confirm.

::

    INSERT with the caller's rows --commit--> leased by the process that made it
        | confirmed                               | it ended, or the lease expired
     DELETE <--confirmed-- leased by a relay <--due--+
                                | failed
                                +--> due again later, with its error
                                        ^
                                        +--discard, restore--> discarded, never due

``due_at`` is when a relay may claim a row, by the database's clock. A process measures its leases
by its monotonic clock, from before the statement that made or claimed the row, so they end earlier
for the process than for relays. ``claim`` tells the leases of a row apart. Nothing here connects to
RabbitMQ.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID, uuid4

from django.apps import apps
from django.db import DEFAULT_DB_ALIAS, DatabaseError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F, QuerySet

from ..backoff import Backoff
from ..conf import LONGEST_CONFIRM, Settings
from ..databases import (
    Now,
    delete_by_id,
    error_line,
    exists,
    in_transaction,
    is_written,
    parts,
    pieces,
    table_missing,
    with_table,
    written,
)
from ..declare.registry import get_registry
from ..exceptions import (
    BrokerUnavailableError,
    ConfigurationError,
    OutboxError,
    PublishError,
    PublishRefusedError,
    UnroutableError,
)
from ..logs import event_fields, get_logger
from ..message.types import Message
from ..reasons import Reason

if TYPE_CHECKING:
    # Publishing is imported before Django's apps are loaded.
    from ..models import OutboxEvent

logger = get_logger(__name__)

#: The claim of the process that has inserted the row.
PUBLISHER: Final = "publisher"
#: Seconds of a lease, after which a relay may claim the row.
LEASE: Final = 2 * LONGEST_CONFIRM
#: Seconds of a lease after which its process does not publish the row any more, so that a relay
#: publishes the events of a long transaction.
BEGIN_WITHIN: Final = LEASE / 2
#: Seconds between renewals of a lease while confirms are pending.
RENEW: Final = LEASE / 6
#: Rows in one INSERT, at most: SQLite takes 999 parameters, and a row has up to 12.
INSERT_ROWS: Final = 80
#: Bytes of their bodies, at most: MariaDB takes 16 MiB with quotes.
INSERT_BYTES: Final = 4 * 1024 * 1024
#: Rows in one claim, at most: the number of parameters that each database accepts.
CLAIM_ROWS: Final = 900
#: Bytes of bodies in one claim, unless it is one larger body.
CLAIM_BYTES: Final = 16 * 1024 * 1024

#: Delays after a failed publish. Where some queues may have the event, each repeat duplicates it
#: there, so repeats are few.
_NOWHERE: Final = Backoff(5.0, 600.0)
_MAYBE_STORED: Final = Backoff(5.0, 6 * 3600.0, factor=4)


@dataclass(frozen=True, slots=True)
class Row:
    """A message and the row that it has in the outbox."""

    id: UUID
    message: Message
    attempts: int = 0
    claim: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The broker's answer for a row: ``None`` if confirmed."""

    row: Row
    error: PublishError | None

    def done(self, settings: Settings) -> bool:
        """Return True if the row can be deleted."""
        return is_accepted(self.error, settings)

    @property
    def untried(self) -> bool:
        """Return True if the row was not published, so that its attempts do not count."""
        return isinstance(self.error, BrokerUnavailableError)


def is_accepted(error: PublishError | None, settings: Settings) -> bool:
    """Return True if RabbitMQ has confirmed a message, or ``UNROUTED`` allows its error."""
    if isinstance(error, UnroutableError):
        return settings.unrouted in ("warn", "ignore")
    return error is None


# -- writing ---------------------------------------------------------------------------------


def alias_for(settings: Settings, using: str | None) -> str:
    """Return the database whose transaction the events belong to.

    Raises:
        OutboxError: it is missing, or a transaction is open on another database, which would not
            include them.
    """
    if using is not None:
        from ..models import OutboxEvent

        if using != settings.database and not is_written(using, OutboxEvent):
            raise OutboxError(
                f"using={using!r} is no database of the outbox, so no relay would read it; nothing "
                f"was published. Let allow_migrate() return True there for django_amqp_events, and "
                f"db_for_write() the alias of the row in its hint instance"
            )
        return using
    alias = settings.database
    if not exists(alias):
        raise OutboxError(
            f"the outbox needs a database, and DATABASES has none for {alias!r}; nothing was "
            f'published. Set DATABASES, or AMQP_EVENTS["PUBLISH"] to "immediate"'
        )
    if not in_transaction(connections[alias]):
        others = [
            other.alias
            for other in connections.all(initialized_only=True)
            if other.alias != alias and in_transaction(other)
        ]
        if others:
            raise OutboxError(
                f"a transaction is open on database {others[0]!r}, but the outbox is on {alias!r}, "
                f"so a rollback would not include the event; nothing was published. Use "
                f"using(using={others[0]!r}) for the outbox of that database, or "
                f"using(using={alias!r})"
            )
    return alias


def insert(
    messages: Sequence[Message], *, alias: str, service: str, held: bool = True
) -> list[Row]:
    """Insert messages into the outbox, in the open transaction or one of their own.

    Args:
        held: lease the rows, to publish them after the commit; otherwise they are due at once.

    Raises:
        OutboxError: the table is missing.
    """
    connection = connections[alias]
    rows = [Row(new_id(), message, claim=PUBLISHER if held else None) for message in messages]
    sized = ((row, len(row.message.body)) for row in rows)
    chunks = list(pieces(sized, count=INSERT_ROWS, size=INSERT_BYTES))
    try:
        if len(chunks) == 1:
            _insert(connection, chunks[0], service, held)
        else:
            with transaction.atomic(using=alias, savepoint=False):
                for chunk in chunks:
                    _insert(connection, chunk, service, held)
    except DatabaseError as exc:
        if table_missing(exc):
            where = "" if alias == DEFAULT_DB_ALIAS else f" --database {alias}"
            raise OutboxError(
                f"database {alias!r} has no table for the outbox, so nothing was published; run "
                f'`manage.py migrate{where}`, or set AMQP_EVENTS["PUBLISH"] to "on_commit"'
            ) from exc
        raise
    return rows


def _insert(connection: BaseDatabaseWrapper, rows: Sequence[Row], service: str, held: bool) -> None:
    # bulk_create() resolves two expressions for each row, which takes longer than the INSERT.
    columns = [_columns(row, service, connection) for row in rows]
    head, group, tail = _statement(connection.vendor, connection.alias, held, tuple(columns[0]))
    values = [value for row in columns for value in (*row.values(), *tail)]
    with connection.cursor() as cursor:
        cursor.execute(f"{head}{', '.join([group] * len(rows))}", values)


def _columns(row: Row, service: str, connection: BaseDatabaseWrapper) -> dict[str, Any]:
    """Return what is stored of a new row, as parameters by column; the statement adds the rest."""
    message = row.message
    return {
        # As UUIDField.get_db_prep_value() does it.
        "id": row.id if connection.features.has_native_uuid_field else row.id.hex,
        "service": service,
        "event_id": message.event_id,
        "name": message.name,
        "exchange": message.exchange,
        "envelope": _encode(
            {"headers": dict(message.headers), "properties": dict(message.properties)}
        ),
        "body": connection.Database.Binary(message.body),  # type: ignore[attr-defined]
        "size": len(message.body),
        "claim": row.claim,
        "attempts": 0,
    }


#: Columns that are empty in a new row.
_EMPTY: Final = ("error", "discarded_by", "discard_reason")
#: json.dumps() with separators makes an encoder for each call.
_encode: Final = json.JSONEncoder(separators=(",", ":")).encode


@lru_cache(maxsize=32)
def _statement(
    _vendor: str, alias: str, held: bool, names: tuple[str, ...]
) -> tuple[str, str, tuple[Any, ...]]:
    """Return the head of an INSERT, and its group and last parameters per row."""
    if not apps.is_installed("django_amqp_events"):
        raise ConfigurationError(
            "'django_amqp_events' is not in INSTALLED_APPS, so the outbox has no table; nothing "
            'was published. Add it and run `manage.py migrate`, or set AMQP_EVENTS["PUBLISH"] to '
            '"on_commit"'
        )
    from ..models import OutboxEvent

    meta: Any = OutboxEvent._meta  # noqa: SLF001 - Django's documented name for it
    query: Any = OutboxEvent.objects.using(alias).query
    compiler = query.get_compiler(alias)
    times = {"created_at": Now(), "due_at": Now() + timedelta(seconds=LEASE) if held else Now()}
    compiled = [
        compiler.compile(time.resolve_expression(query, for_save=True)) for time in times.values()
    ]
    quote = connections[alias].ops.quote_name
    columns = ", ".join(
        quote(str(meta.get_field(name).column)) for name in (*names, *_EMPTY, *times)
    )
    group = ", ".join([*["%s"] * len(names), *["''"] * len(_EMPTY), *(sql for sql, _ in compiled)])
    return (
        f"INSERT INTO {quote(meta.db_table)} ({columns}) VALUES ",  # noqa: S608 - names of our own
        f"({group})",
        tuple(value for _, params in compiled for value in params),
    )


_numbers = itertools.count()


def new_id() -> UUID:
    """Return a UUID of version 7 (RFC 9562); ids of one process and millisecond are in order."""
    milliseconds, number = time.time_ns() // 1_000_000, next(_numbers)
    value = milliseconds << 80 | 0x7 << 76 | (number >> 20 & 0xFFF) << 64
    value |= 0b10 << 62 | (number & 0xFFFFF) << 42
    return UUID(int=value | int.from_bytes(os.urandom(8), "big") >> 22)


# -- claiming --------------------------------------------------------------------------------


def rows(alias: str) -> QuerySet[OutboxEvent]:
    """Return the rows of all services in one database."""
    from ..models import OutboxEvent

    return OutboxEvent.objects.using(alias)


def aliases(settings: Settings) -> list[str]:
    """Return the databases that may have an outbox: first that of the settings, if there is one."""
    from ..models import OutboxEvent

    return written(OutboxEvent, *needed(settings))


def tables(settings: Settings) -> list[str]:
    """Return the databases that have an outbox.

    Raises:
        Error: a needed one is unreachable.
    """
    from ..models import OutboxEvent

    return with_table(OutboxEvent, *needed(settings))


def needed(settings: Settings) -> list[str]:
    """Return the databases that settings and handlers name; they must be reachable."""
    from ..models import OutboxEvent

    alias = settings.database
    own = [alias] if settings.publish == "outbox" and alias in connections else []
    named = [alias]
    # Pages show the outbox although something else is wrong.
    with suppress(ConfigurationError):
        named += [handler.using for handler in get_registry().handlers.values()]
    own += [each for each in named if each in connections and is_written(each, OutboxEvent)]
    return list(dict.fromkeys(own))


def due(alias: str, service: str) -> bool:
    """Return True if a relay may claim rows."""
    return rows(alias).filter(service=service, due_at__lte=Now()).exists()


def claim(alias: str, service: str, *, limit: int, failed: bool) -> list[Row]:
    """Lease due rows, oldest first; record an error on rows that hold no message.

    Args:
        failed: claim rows whose publish failed before, otherwise the others.
    """
    token = uuid4().hex
    readable: list[Row] = []
    due_rows = rows(alias).filter(
        service=service, due_at__lte=Now(), **({"attempts__gt": 0} if failed else {"attempts": 0})
    )
    while not readable and (ids := _lease(alias, due_rows, token, min(limit, CLAIM_ROWS))):
        # values_list(): making models takes longer than reading the rows.
        claimed = rows(alias).filter(pk__in=ids, claim=token).order_by("pk")
        for pk, attempts, event_id, name, exchange, envelope, body in claimed.values_list(
            "pk", "attempts", "event_id", "name", "exchange", "envelope", "body"
        ):
            try:
                message = _message(event_id, name, exchange, envelope, body)
            except Exception as exc:  # noqa: BLE001 - the columns may hold anything
                _unreadable(claimed.filter(pk=pk), attempts, event_id, name, exc)
            else:
                readable.append(Row(pk, message, attempts, token))
    return readable


def _lease(alias: str, due_rows: QuerySet[OutboxEvent], token: str, limit: int) -> list[UUID]:
    """Lease the oldest rows that nobody has locked; return their ids."""
    oldest = due_rows.order_by("due_at", "pk").values_list("pk", "size")
    taken = {"claim": token, "due_at": Now() + timedelta(seconds=LEASE)}
    if connections[alias].features.has_select_for_update_skip_locked:
        with transaction.atomic(using=alias):
            ids = _fitting(oldest.select_for_update(skip_locked=True)[:limit])
            if ids:
                rows(alias).filter(pk__in=ids).update(**taken)
    elif ids := _fitting(oldest[:limit]):
        # A relay that selected the same rows finds them no longer due.
        due_rows.filter(pk__in=ids).update(**taken)
    return ids


def _unreadable(
    row: QuerySet[OutboxEvent], attempts: int, event_id: str, name: str, exc: Exception
) -> None:
    error = PublishRefusedError(
        Reason("row-invalid", error=error_line(exc)), event_id=event_id, event_name=name
    )
    about = {**event_fields(None), "event_id": event_id}
    logger.error("%s", error, extra=about)
    _postpone(row, error, attempts)


def _fitting(sizes: Iterable[tuple[UUID, int]]) -> list[UUID]:
    return next(pieces(sizes, count=CLAIM_ROWS, size=CLAIM_BYTES), [])


def _message(event_id: str, name: str, exchange: str, envelope: str, body: Any) -> Message:
    stored = json.loads(envelope)
    for part in ("headers", "properties"):
        if not isinstance(stored[part], dict):
            raise TypeError(f"its {part} are not an object but {stored[part]!r:.40}")
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
    for part in parts(held):
        _still_leased(alias, part).update(due_at=Now() + timedelta(seconds=LEASE))


def release(alias: str, held: Sequence[Row]) -> None:
    """End the leases of rows that were not published; they are due at once."""
    for part in parts(held):
        _still_leased(alias, part).update(due_at=Now(), claim=None)


def delete_confirmed(alias: str, done: Sequence[Row], *, lazily: bool = False) -> None:
    """Delete rows whose events RabbitMQ has confirmed, whichever process has leased them."""
    from ..models import OutboxEvent

    connection = connections[alias]
    # The option must not reach the caller's transaction.
    own = not connection.in_atomic_block and connection.get_autocommit()
    condition = _LAZILY if lazily and own and connection.vendor == "postgresql" else ""
    for part in parts(done):
        # delete() would add a transaction, and the committing thread may wait for this.
        delete_by_id(OutboxEvent, alias, [row.id for row in part], condition)


#: Ends the condition of a DELETE. PostgreSQL reads the option at the commit, so this is one
#: round trip, where ``SET LOCAL`` in a transaction would be four.
_LAZILY: Final = " AND set_config('synchronous_commit', 'off', true) = 'off'"


def record_failures(alias: str, answers: Sequence[Answer]) -> None:
    """Record why publishes failed, and when each is retried."""
    with transaction.atomic(using=alias, savepoint=False):
        for answer in answers:
            error, row = answer.error, answer.row
            assert error is not None  # noqa: S101
            _postpone(_still_leased(alias, [row]), error, row.attempts)


def _postpone(events: QuerySet[OutboxEvent], error: PublishError, attempts: int) -> None:
    """Record an error on a row with so many failed attempts before, and delay it."""
    events.update(
        attempts=F("attempts") + 1,
        error=error.reason,
        due_at=Now() + timedelta(seconds=delay(error, attempts)),
        claim=None,
    )


def delay(error: PublishError, attempts: int) -> float:
    """Return the seconds until the retry of a row with so many failed attempts before."""
    return (_MAYBE_STORED if error.published is None else _NOWHERE).delay(attempts)


def record_answers(
    alias: str, answers: Sequence[Answer], settings: Settings, *, lazily: bool = False
) -> None:
    """Delete rows that are done, record errors on failed ones, release untried ones.

    Args:
        lazily: do not wait for PostgreSQL's disk. Rows deleted within three times its
            ``wal_writer_delay`` before it crashes reappear, and are published again.
    """
    done = [answer.row for answer in answers if answer.done(settings)]
    if done:
        delete_confirmed(alias, done, lazily=lazily)
    untried = [answer.row for answer in answers if answer.untried]
    if untried:
        release(alias, untried)
    rest = [answer for answer in answers if not answer.done(settings) and not answer.untried]
    if rest:
        record_failures(alias, rest)


def _still_leased(alias: str, held: Sequence[Row]) -> QuerySet[OutboxEvent]:
    """Return those rows that no other process has claimed since."""
    return rows(alias).filter(
        pk__in=[row.id for row in held],
        claim__in={row.claim for row in held},
        discarded_at__isnull=True,
    )
