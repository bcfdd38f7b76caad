"""Transactions of handlers with ``once``, in fewer round trips to PostgreSQL.

BEGIN goes with the first statement, and COMMIT with a check. psycopg sends the two in round trips
of their own; its pipeline mode, which could join them, takes more processor time than it saves.
:func:`are_joined` says where the transaction remains an ordinary one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

from django.db import DatabaseError, connections, transaction

from ..broker.private_names import PrivateName, unavailable

#: A statement and its parameters.
Statement = tuple[str, Sequence[Any]]

#: SQLSTATEs of a division by zero, and of a statement in an aborted transaction.
_REFUSALS: Final = frozenset({"22012", "25P02"})
_JOIN: Final = "begin and commit in one round trip with a statement"
_PSYCOPG: Final = (PrivateName("psycopg:Connection._autocommit", _JOIN),)
_DJANGO: Final = (
    PrivateName(
        "django.db.backends.base.base:BaseDatabaseWrapper._commit",
        _JOIN,
        ("self",),
        overridden=True,
    ),
)


def are_joined(alias: str) -> bool:
    """Return True if :func:`joined` can be used on a database now."""
    connection: Any = connections[alias]
    if connection.in_atomic_block or connection.vendor != "postgresql":
        return False
    # A wrapper may have queries of its own, before BEGIN or after COMMIT.
    if connection.execute_wrappers:
        return False
    if connection.Database.__name__ != "psycopg" or _missing():
        return False
    connection.ensure_connection()
    raw = connection.connection
    # Our BEGIN has no options, and parameters that the server binds belong to one statement.
    plain = raw.isolation_level is raw.read_only is raw.deferrable is None
    return plain and hasattr(raw.cursor_factory, "mogrify")


@cache
def _missing() -> str:
    feature = "saving round trips of handlers with once"
    return unavailable("django", feature, _DJANGO) or unavailable("psycopg", feature, _PSYCOPG)


@contextmanager
def joined(
    alias: str, insert: Statement, find: Statement, refused: Callable[[], Exception]
) -> Iterator[None]:
    """Run a block in a transaction that begins with *insert*, and is committed if *find* has a row.

    Args:
        refused: makes the error that is raised if it has none, if the transaction is aborted, or if
            Django would roll it back.
    """
    connection: Any = connections[alias]
    committed = False

    def commit() -> None:
        nonlocal committed
        # The hooks of on_commit() may have transactions of their own.
        del connection._commit  # noqa: SLF001 - in _DJANGO
        query, values = find
        # Without a row it divides by zero, so COMMIT does not run.
        check = f"SELECT 1 / count(*) FROM ({query}) AS found"  # noqa: S608 - our own
        try:
            with connection.cursor() as cursor:
                cursor.execute(f"{check}; COMMIT", values)
        except DatabaseError as exc:
            if not _is_refusal(exc.__cause__):
                raise
            connection.rollback()
            raise refused() from exc
        except BaseException:
            # A time limit. Django rolls back for a DatabaseError alone.
            connection.close()
            raise
        committed = True

    try:
        with transaction.atomic(using=alias):
            _begin(connection, insert)
            yield
            # With this flag, atomic() rolls back without an error.
            if transaction.get_rollback(using=alias):
                raise refused()
            # Called by atomic(), which then runs the hooks of on_commit().
            connection._commit = commit  # noqa: SLF001 - in _DJANGO
        # The handler has closed the connection, and cleared the flag.
        if not committed:
            raise refused()
    finally:
        vars(connection).pop("_commit", None)


def _is_refusal(error: Any) -> bool:
    """Return True for an error of the check; one in a trigger, at COMMIT, has a context."""
    return getattr(error, "sqlstate", "") in _REFUSALS and error.diag.context is None


def _begin(connection: Any, insert: Statement) -> None:
    sql, values = insert
    raw = connection.connection
    with connection.cursor() as cursor:
        # psycopg would send a BEGIN of its own. Its public setter works between transactions only.
        raw._autocommit = True  # noqa: SLF001 - in _PSYCOPG
        try:
            cursor.execute(f"BEGIN; {sql}", values)
        finally:
            raw._autocommit = False  # noqa: SLF001
