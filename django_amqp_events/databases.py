"""Databases: whether they commit, and what their errors mean."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from django.db import DataError, IntegrityError, connections
from django.db.models import Model, QuerySet

from .exceptions import ConfigurationError

#: PostgreSQL's undefined_table and undefined_column; the same of MySQL.
_MISSING_CODES: Final = frozenset({"42P01", "42703", 1146, 1054})
#: The same in the messages of SQLite.
_MISSING_TEXTS: Final = ("no such table", "no such column", "has no column")
#: MySQL's errors about values that its drivers report as OperationalError.
_WRONG_VALUES: Final = frozenset({1292, 1366})
#: PostgreSQL's serialization_failure (REPEATABLE READ and stricter) and deadlock_detected; MySQL's
#: ER_LOCK_DEADLOCK, and MariaDB's ER_CHECKREAD (REPEATABLE READ).
_CONFLICT_CODES: Final = frozenset({"40001", "40P01", 1213, 1020})


def table_missing(exc: BaseException) -> bool:
    """Return True if a database error means that a migration has not been applied."""
    return _code(exc) in _MISSING_CODES or any(text in str(exc) for text in _MISSING_TEXTS)


def is_refusal(exc: BaseException) -> bool:
    """Return True if the database refuses the values of a row."""
    return isinstance(exc, (DataError, IntegrityError)) or _code(exc) in _WRONG_VALUES


def is_conflict(exc: BaseException) -> bool:
    """Return True if the database ended a transaction for another one, so that a retry helps."""
    return _code(exc) in _CONFLICT_CODES


def _code(exc: BaseException) -> object:
    cause = exc.__cause__
    # MySQL's drivers give the number first; PyMySQL has a less exact sqlstate, too.
    number = next(iter(getattr(cause, "args", ())), None)
    if isinstance(number, int):
        return number
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)


def error_line(exc: BaseException) -> str:
    """Return the type and the first line of an error."""
    text = str(exc).strip().partition("\n")[0]
    return f"{type(exc).__name__}: {text}"


def sliced(rows: QuerySet[Any]) -> QuerySet[Any] | list[Any]:
    """Return a slice for ``__in``: as a subquery, or on MySQL, which allows none, its values."""
    allowed = connections[rows.db].features.allow_sliced_subqueries_with_in
    return rows if allowed else list(rows)


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
        values = [prepare(each, connection) for each in ids]
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
