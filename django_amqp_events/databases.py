"""Databases: how they store times, whether they commit, and what their errors mean."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from functools import lru_cache, wraps
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, TypeVar

from django.core.exceptions import EmptyResultSet
from django.db import (
    DataError,
    Error,
    IntegrityError,
    InterfaceError,
    OperationalError,
    connections,
    models,
    router,
    transaction,
)
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Model, QuerySet, functions
from django.db.models.expressions import RawSQL
from django.utils.timezone import get_default_timezone, is_naive, make_aware

from .backoff import Backoff
from .exceptions import ConfigurationError
from .logs import get_logger
from .reasons import Reason

if TYPE_CHECKING:
    _DateTimeField = models.DateTimeField[Any, Any]
else:
    _DateTimeField = models.DateTimeField

P = ParamSpec("P")
T = TypeVar("T")
View = TypeVar("View", bound=Callable[..., Any])

logger = get_logger(__name__)

#: Rows that one statement names: each database limits its parameters.
ROWS: Final = 500
#: PostgreSQL's undefined_table and undefined_column; those of MySQL; SQLITE_ERROR, SQLite's code
#: for errors without a code of their own: in our statements, a missing table or column.
_MISSING_CODES: Final = frozenset({"42P01", "42703", 1146, 1054, 1})
#: MySQL's errors about values that its drivers report as OperationalError.
_WRONG_VALUES: Final = frozenset({1292, 1366})
#: PostgreSQL's serialization_failure (REPEATABLE READ and stricter) and deadlock_detected; MySQL's
#: ER_LOCK_DEADLOCK, and MariaDB's ER_CHECKREAD (REPEATABLE READ).
_CONFLICT_CODES: Final = frozenset({"40001", "40P01", 1213, 1020})
#: PostgreSQL's read_only_sql_transaction; MySQL's for read_only and for a read-only transaction;
#: SQLITE_READONLY.
_READ_ONLY_CODES: Final = frozenset({"25006", 1290, 1792, 8})
#: PostgreSQL's lock_not_available, MySQL's ER_LOCK_WAIT_TIMEOUT, SQLITE_BUSY and SQLITE_LOCKED.
_LOCKED_CODES: Final = frozenset({"55P03", 1205, 5, 6})


#: Attempts at a transaction that conflicts with another one.
TRIES: Final = 10
#: Seconds after which a transaction that finds the database locked is not tried again.
LOCKED_SECONDS: Final = 15.0
#: Delays between tries, which are shortened at random: two transactions that meet would meet again.
RETRY_BACKOFF: Final = Backoff(0.01, 0.5)

#: Seconds for which it is remembered whether a database has a table, so that an unreachable
#: database does not delay each page.
REMEMBERED_SECONDS: Final = 60.0
_has_table: dict[tuple[str, str, type[Model]], tuple[float, bool]] = {}


# -- which databases -------------------------------------------------------------------------


def written(model: type[Model], *own: str) -> list[str]:
    """Return the databases in which rows of a model may be, without a query.

    These are *own*, and those that the routers allow and to which they write a row that is there.
    So a replica is not one of them, nor an alias without a database, nor a second alias of one.
    """
    aliases = list(dict.fromkeys(own))
    places = [_place(alias) for alias in aliases]
    for alias in connections:
        if alias not in aliases and is_written(alias, model) and _place(alias) not in places:
            aliases.append(alias)
            places.append(_place(alias))
    return aliases


def _place(alias: str) -> tuple[Any, ...]:
    """Return what two aliases of the same tables have in common."""
    given = connections.settings.get(alias, {})
    name = str(given.get("NAME", ""))
    if ":memory:" in name or "mode=memory" in name:
        return (alias,)
    # Other options or users may have another search path.
    return (name, *(given.get(key) for key in ("ENGINE", "HOST", "PORT", "USER", "OPTIONS")))


def is_written(alias: str, model: type[Model]) -> bool:
    """Return True if the routers let rows of a model be written to a database and stay there."""
    if not exists(alias) or not router.allow_migrate_model(alias, model):
        return False
    if connections.settings[alias].get("TEST", {}).get("MIRROR"):
        return False
    row = model()
    row._state.db = alias  # noqa: SLF001 - as Django tells its routers
    return bool(router.db_for_write(model, instance=row) == alias)


def exists(alias: str) -> bool:
    """Return True if there is a database behind an alias."""
    return bool(connections.settings[alias]["ENGINE"] != "django.db.backends.dummy")


def with_table(model: type[Model], *own: str) -> list[str]:
    """Return the databases of :func:`written` that have the model's table.

    A database that cannot be asked is left out, with a warning.

    Raises:
        Error: one of *own* is unreachable.
    """
    return [
        alias
        for alias in written(model, *own)
        if (has_table(alias, model) if alias in own else may_have_table(alias, model))
    ]


def has_table(alias: str, model: type[Model]) -> bool:
    """Return True if a query of a model's table succeeds.

    Introspection may know less, such as one schema of several that are searched.
    """
    try:
        # A savepoint: an error would end a transaction that is open.
        with transaction.atomic(using=alias):
            model._default_manager.using(alias).order_by().exists()  # noqa: SLF001 - a public name
    except Error as exc:
        if table_missing(exc):
            return False
        raise
    return True


def may_have_table(alias: str, model: type[Model]) -> bool:
    """Return True if a database answers and has the table; asked again after a while."""
    key = (alias, str(connections.settings[alias]["NAME"]), model)
    until, answer = _has_table.get(key, (0.0, False))
    if time.monotonic() >= until:
        try:
            answer = has_table(alias, model)
        except Exception as exc:  # noqa: BLE001 - its driver is missing, or raises errors of its own
            name = model._meta.object_name  # noqa: SLF001
            level = logging.WARNING if answer or not until else logging.DEBUG
            logger.log(level, "database %r is left out for %s: %s", alias, name, error_line(exc))
            answer = False
        _has_table[key] = (time.monotonic() + REMEMBERED_SECONDS, answer)
    return answer


def non_atomic(view: View) -> View:
    """Exempt a view from ``ATOMIC_REQUESTS`` on every database."""
    for alias in connections:
        view = transaction.non_atomic_requests(using=alias)(view)
    return view


# -- times -----------------------------------------------------------------------------------


class Moment(_DateTimeField):
    """A time: aware and in UTC, whatever ``USE_TZ`` and ``TIME_ZONE`` are.

    A database without time zones (SQLite, MySQL) stores it in UTC, so that no hour is ambiguous and
    every process and :class:`Now` agree. A naive value is in the default time zone.
    """

    def get_prep_value(self, value: Any) -> Any:
        moment = super().get_prep_value(value)
        return None if moment is None else _utc(moment)

    def get_db_prep_value(
        self, value: Any, connection: BaseDatabaseWrapper, prepared: bool = False
    ) -> Any:
        moment = value if prepared else self.get_prep_value(value)
        if isinstance(moment, datetime) and not connection.features.supports_timezones:
            # Django converts or refuses an aware time by USE_TZ, and writes a naive one as it is.
            moment = moment.replace(tzinfo=None)
        return connection.ops.adapt_datetimefield_value(moment)

    def from_db_value(
        self, value: datetime | None, _expression: object, connection: BaseDatabaseWrapper
    ) -> datetime | None:
        if value is None:
            return None
        return _utc(value) if connection.features.supports_timezones else value.replace(tzinfo=UTC)

    def deconstruct(self) -> Any:
        # The column is the same, so migrations do not refer to this class.
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.DateTimeField", args, kwargs


class Now(functions.Now):
    """The database's time."""

    output_field = Moment()

    def as_mysql(self, compiler: Any, connection: BaseDatabaseWrapper, **context: Any) -> Any:
        # Django's CURRENT_TIMESTAMP is in the session's time zone.
        return self.as_sql(compiler, connection, template="UTC_TIMESTAMP(6)", **context)


def clock(alias: str) -> datetime:
    """Return the database's time; SQLite has this process's time."""
    connection = connections[alias]
    if connection.vendor == "sqlite":
        return datetime.now(UTC)
    with connection.cursor() as cursor:
        mysql = connection.vendor == "mysql"
        cursor.execute("SELECT UTC_TIMESTAMP(6)" if mysql else "SELECT CURRENT_TIMESTAMP")
        [now] = cursor.fetchone()
    return now.replace(tzinfo=UTC) if mysql else _utc(now)


def _utc(moment: datetime) -> datetime:
    """Return a time in UTC; a naive one is in the default time zone, the second of two by fold."""
    if is_naive(moment):
        moment = make_aware(moment, get_default_timezone())
    return moment.astimezone(UTC)


# -- errors ----------------------------------------------------------------------------------


def table_missing(exc: BaseException) -> bool:
    """Return True if a database error means that a migration has not been applied."""
    return _code(exc) in _MISSING_CODES


def is_refusal(exc: BaseException) -> bool:
    """Return True if the database refuses the values of a row."""
    return isinstance(exc, (DataError, IntegrityError)) or _code(exc) in _WRONG_VALUES


def is_conflict(exc: BaseException) -> bool:
    """Return True if the database ended a transaction for another one, so that a retry helps."""
    return _code(exc) in _CONFLICT_CODES


def read_only(exc: BaseException) -> bool:
    """Return True if a server refuses to write, as one does that has lost a failover.

    Its connections stay open, and usable for Django: close them, to reach the server that writes.
    """
    return _code(exc) in _READ_ONLY_CODES


def is_locked(exc: BaseException) -> bool:
    """Return True if another transaction has held a lock for longer than the database waits.

    SQLite has one writer at a time, and waits for ``timeout`` seconds, or not at all if a
    transaction that has read writes after another one.
    """
    return _code(exc) in _LOCKED_CODES


ErrorKind = Literal["missing", "locked", "read-only", "unreachable", "error"]
_PROBLEMS: Final[Mapping[ErrorKind, str]] = {
    "missing": "a table is missing; run `manage.py migrate`",
    "locked": "another process has locked the database",
    "read-only": "the database is read-only",
    "unreachable": "the database is unreachable",
    "error": "the database reports an error",
}


def error_kind(exc: BaseException) -> ErrorKind:
    """Return what a database error means: "missing" is a table or column of a migration."""
    if table_missing(exc):
        return "missing"
    if is_locked(exc):
        return "locked"
    if read_only(exc):
        return "read-only"
    return "unreachable" if isinstance(exc, (InterfaceError, OperationalError)) else "error"


def problem_text(exc: BaseException) -> str:
    """Return what a database error means, as a part of a sentence."""
    return _PROBLEMS[error_kind(exc)]


def is_passing(exc: BaseException) -> bool:
    """Return True if a database error is over when a server that writes can be reached."""
    return error_kind(exc) in ("locked", "read-only", "unreachable")


def reason_of(exc: BaseException) -> Reason:
    """Return what a person is told of a database error that passes."""
    code = "database-locked" if is_locked(exc) else "database-unreachable"
    return Reason(code, error=error_line(exc))


def retry_on_conflict(
    alias: Callable[[], str], *also: type[Error]
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Repeat a function that is one transaction while the database ends it for another one.

    While the database is locked, it is repeated for :data:`LOCKED_SECONDS` seconds.

    Args:
        alias: returns the database.
        also: further errors by which the function notices another process.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            end = time.monotonic() + LOCKED_SECONDS
            for failures in count():
                try:
                    return function(*args, **kwargs)
                except Error as exc:
                    if isinstance(exc, OperationalError) and connections[alias()].in_atomic_block:
                        raise
                    locked = is_locked(exc) and time.monotonic() < end
                    conflict = is_conflict(exc) or isinstance(exc, also)
                    if not locked and (not conflict or failures >= TRIES - 1):
                        raise
                    logger.info("a transaction is repeated: %s", error_line(exc))
                time.sleep(RETRY_BACKOFF.delay(failures) * random.uniform(0.5, 1))
            raise AssertionError("unreachable")

        return run

    return decorate


def reconnect(alias: str) -> None:
    """Close this thread's connection after an error, unless a transaction is open."""
    if not connections[alias].in_atomic_block:
        connections[alias].close()


def _code(exc: BaseException) -> object:
    cause = exc.__cause__
    # MySQL's drivers give the number first; PyMySQL has a less exact sqlstate, too.
    number = next(iter(getattr(cause, "args", ())), None)
    if isinstance(number, int):
        return number
    if (extended := getattr(cause, "sqlite_errorcode", None)) is not None:
        return extended & 0xFF
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)


def error_line(exc: BaseException) -> str:
    """Return the type and the first line of an error."""
    text = str(exc).strip().partition("\n")[0]
    return f"{type(exc).__name__}: {text}"


# -- statements ------------------------------------------------------------------------------


def sliced(rows: QuerySet[Any]) -> Any:
    """Return the first column of a slice for ``__in``, in a table of its own: MySQL needs that.

    With DISTINCT or a union, the slice has the columns of its order, too.
    """
    compiler = rows.query.get_compiler(using=rows.db)
    try:
        sql, params = compiler.as_sql(with_col_aliases=True)
    except EmptyResultSet:
        return []
    column = connections[rows.db].ops.quote_name(compiler.select[0][2])
    return RawSQL(f"SELECT sliced.{column} FROM ({sql}) sliced", params)  # noqa: S608, S611


def parts(items: Sequence[T], size: int = ROWS) -> Iterator[Sequence[T]]:
    """Cut items into parts of at most *size*."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def pieces(sizes: Iterable[tuple[T, int]], *, count: int, size: int) -> Iterator[list[T]]:
    """Cut rows or their ids into pieces of at most *count* and *size* bytes, or a larger one.

    Args:
        sizes: each row or id with its bytes.
    """
    piece: list[T] = []
    left = size
    for item, bytes_of_it in sizes:
        left -= bytes_of_it
        if piece and (len(piece) == count or left < 0):
            yield piece
            piece, left = [], size - bytes_of_it
        piece.append(item)
    if piece:
        yield piece


def in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Return True in a block of ``atomic()`` other than those of Django's TestCase."""
    return not all(getattr(block, "_from_testcase", False) for block in connection.atomic_blocks)


def check_commits(alias: str) -> None:
    """Raise ConfigurationError if ``atomic()`` would commit nothing; makes no query."""
    connection = connections[alias]
    # An open transaction, such as that of a TestCase, is committed by its owner.
    if connection.in_atomic_block:
        return
    # Django sets connection.autocommit when it connects.
    connected = connection.connection is not None
    if not (connection.autocommit if connected else connection.settings_dict["AUTOCOMMIT"]):
        raise ConfigurationError(
            f"autocommit is off on the database {alias!r}, so transaction.atomic() commits nothing "
            f"and nothing was done. Remove AUTOCOMMIT from its entry in DATABASES"
        )


def delete_by_id(model: type[Model], alias: str, ids: Sequence[Any], condition: str = "") -> int:
    """Delete rows by primary key, without cascades; return how many there were.

    Args:
        ids: one at least.
        condition: ends the WHERE.
    """
    connection = connections[alias]
    delete, prepare = _delete_statement(connection.vendor, alias, model)
    places = ", ".join(["%s"] * len(ids))
    with connection.cursor() as cursor:
        values = [prepare(pk, connection) for pk in ids]
        cursor.execute(delete.format(places, condition, len(ids)), values)
        return int(cursor.rowcount)


@lru_cache(maxsize=32)
def _delete_statement(vendor: str, alias: str, model: type[Model]) -> tuple[str, Any]:
    """Return the template of a DELETE, and the adapter of its ids."""
    quote = connections[alias].ops.quote_name
    meta = model._meta  # noqa: SLF001 - Django's documented name for it
    table, column = quote(meta.db_table), quote(str(meta.pk.column))
    # MySQL would read all of a small table, and wait for transactions that inserted other rows.
    order = f" ORDER BY {column} LIMIT {{2}}" if vendor == "mysql" else ""
    delete = f"DELETE FROM {table} WHERE {column} IN ({{0}}){{1}}{order}"  # noqa: S608 - our names
    return delete, meta.pk.get_db_prep_value


@contextmanager
def user_code() -> Iterator[None]:
    """Run user code whose errors are caught within the block, in a thread or transaction of others.

    It gets a savepoint in each open transaction, which its errors would break. Connections that it
    has lost are closed: the thread may be one of ours, in which no request ends, and each later
    query would fail too.
    """
    try:
        with _savepoints():
            yield
    finally:
        _close_broken()


@contextmanager
def _savepoints() -> Iterator[None]:
    with ExitStack() as stack:
        for connection in connections.all(initialized_only=True):
            if connection.in_atomic_block:
                savepoint: Any = transaction.atomic(using=connection.alias)
                # To user code, a test's transaction is none, as to Django's durable=True.
                savepoint._from_testcase = not in_transaction(connection)  # noqa: SLF001
                stack.enter_context(_undone(connection))
                with suppress(Error):  # the transaction is broken already
                    stack.enter_context(savepoint)
        yield


@contextmanager
def _undone(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Suppress a database error that a savepoint has undone.

    Raises:
        TransactionManagementError: the transaction ended; Django would roll back silently.
    """
    before, error = connection.needs_rollback, None
    try:
        yield
    except Error as exc:
        error = exc
    if connection.needs_rollback and not before:
        raise transaction.TransactionManagementError(
            "a receiver or hook ended the open transaction; nothing of it is committed"
        ) from error


def _close_broken() -> None:
    """Close this thread's broken connections, on all databases."""
    for connection in connections.all(initialized_only=True):
        # One in a transaction belongs to the caller.
        held = connection.in_atomic_block or not connection.autocommit
        if held or connection.connection is None or not connection.errors_occurred:
            continue
        # As Django does at the end of a request.
        if connection.is_usable():
            connection.errors_occurred = False
        else:
            connection.close()
