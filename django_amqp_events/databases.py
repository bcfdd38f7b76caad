"""Databases: whether they commit, and what their errors mean."""

from __future__ import annotations

from typing import Final

from django.db import connections

from .exceptions import ConfigurationError

#: PostgreSQL's undefined_table and undefined_column.
_MISSING_CODES: Final = frozenset({"42P01", "42703"})
#: The same in the messages of SQLite and MySQL.
_MISSING_TEXTS: Final = ("no such table", "no such column", "has no column", "doesn't exist")


def table_missing(exc: BaseException) -> bool:
    """Return True if a database error means that a migration has not been applied."""
    cause = exc.__cause__
    code = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
    return code in _MISSING_CODES or any(text in str(exc) for text in _MISSING_TEXTS)


def error_line(exc: BaseException) -> str:
    """Return the type and the first line of an error."""
    text = str(exc).strip().partition("\n")[0]
    return f"{type(exc).__name__}: {text}"


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
