"""The inbox: the effects of a handler with ``once`` happen once in the database.

A row records that a handler has handled an event. It is inserted in the transaction of the
handler's own effects, so both commit or neither does. A second delivery finds the row and is
skipped; a concurrent one waits for the first transaction to end (on SQLite for the write lock).

With ``newest``, a second row records the newest version of a thing in the same transaction, and an
event that is not newer is skipped too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar
from uuid import UUID

from celery.exceptions import Ignore
from django.db import (
    IntegrityError,
    InternalError,
    OperationalError,
    connections,
    transaction,
)

from .. import signals
from ..conf import Settings, get_settings
from ..context import ReceivedEvent
from ..databases import check_commits, is_conflict, is_locked
from ..declare.newest import LIMIT, Version
from ..declare.registry import Handler, get_registry
from ..exceptions import RolledBackError
from ..logs import event_fields, get_logger
from ..message.text import printable
from ..message.types import derived_id, handling
from .verdict import InvalidArguments, Superseded

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from ..models import InboxEntry

logger = get_logger(__name__)

T = TypeVar("T")

#: Seconds that a run waits for another one of its event, or for SQLite's lock, however short the
#: database's own timeout is, and at most a third of RabbitMQ's consumer timeout: the event may have
#: waited in the worker before, and runs afterwards.
LOCK_WAIT: Final = 600.0
LOCK_PAUSE_SECONDS: Final = 0.05


def inbox_key(service: str, handler: str, event: ReceivedEvent) -> UUID:
    """Return the primary key of the row of an event and a handler.

    A replay has the key of its event: it runs if no earlier run has committed. A forced replay runs
    in any case, so it has a key of its own.
    """
    forced = event.replay_id if event.replay_forced else None
    return derived_id(*handling(service, handler, event, forced))


def database(handler: Handler, settings: Settings | None = None) -> str:
    """Return the alias of the database in which a handler with ``once`` has its effects."""
    return handler.using or (settings or get_settings()).database


def once(
    handler: Handler,
    event: ReceivedEvent,
    run: Callable[[], T],
    version: Version | None = None,
) -> T:
    """Call *run* and insert the row in one transaction; skip it if the row exists.

    An exception of *run* rolls both back, so that the next attempt runs.

    Args:
        version: of a handler with ``newest``; skip an event that is not newer, unless its replay is
            forced.

    Raises:
        Ignore: the event is skipped: it is handled already, or (Superseded) a newer one is.
        InvalidArguments: an earlier version is of another type.
        RolledBackError: *run* returned, but its transaction cannot be committed.
        ConfigurationError: the database would not commit; *run* was not called.
        DatabaseError: the row cannot be inserted, for another reason than that it exists.
    """
    from ..models import LENGTH, InboxEntry, clean

    settings = get_settings()
    alias = database(handler, settings)
    check_commits(alias)
    nested = connections[alias].in_atomic_block
    entry = InboxEntry(
        id=inbox_key(settings.service, handler.name, event),
        service=settings.service,
        handler=clean(handler.name, LENGTH),
        source=clean(event.service, LENGTH),
        event_id=clean(event.id, LENGTH),
        name=clean(event.name, LENGTH),
        handled_at=datetime.now(UTC),
    )
    refused = partial(RolledBackError.of, handler.name, event.id, alias)
    deadline = time.monotonic() + min(LOCK_WAIT, settings.consumer_timeout / 3)
    superseded = False
    while True:
        inserted = False
        results: list[T] = []
        try:
            with transaction.atomic(using=alias):
                # Not save(), whose signals would call receivers of the project.
                InboxEntry.objects.using(alias).bulk_create([entry])
                superseded = (
                    version is not None
                    and not _record_version(alias, handler, version, entry)
                    and not event.replay_forced
                )
                inserted = True
                if superseded:
                    _same(alias, entry).update(superseded=True)
                else:
                    results.append(run())
                _check_commit(alias, entry, refused)
            if superseded:
                break
            return results[0]
        except Exception as exc:
            # A soft time limit may interrupt the commit, or its answer may be lost with the
            # connection. Django may then raise another error, because it cannot end the
            # transaction.
            if results and not nested and _committed(alias, entry):
                logger.exception(
                    "event %r (%s) is handled by %s and its transaction is committed, but the end "
                    "of the transaction, or a callback of transaction.on_commit(), has failed",
                    event.name,
                    printable(event.id),
                    handler.name,
                    extra=event_fields(event, handler.name),
                )
                return results[0]
            if inserted:
                raise
            if isinstance(exc, IntegrityError) and _found(alias, entry):
                superseded = _same(alias, entry).filter(superseded=True).exists()
                break
            # MySQL ends all but one of those that wait for a transaction that is rolled back.
            waits = is_conflict(exc) or (is_locked(exc) and time.monotonic() < deadline)
            if nested or not isinstance(exc, OperationalError) or not waits:
                raise
            time.sleep(LOCK_PAUSE_SECONDS)
    logger.info(
        "event %r (%s) is skipped, since %s has handled %s already",
        event.name,
        printable(event.id),
        handler.name,
        "a newer one" if superseded else "it",
        extra=event_fields(event, handler.name),
    )
    signals.event_skipped.send_robust(
        settings.service, handler=handler.name, event=event, superseded=superseded
    )
    # No result replaces that of the earlier run.
    raise Superseded if superseded else Ignore


def latest_key(service: str, handler: Handler, version: Version) -> UUID:
    """Return the primary key of the row with the newest version of a thing.

    With other paths, other things have these names, or other versions.
    """
    return derived_id(service, handler.name, *(handler.newest or ()), version.thing)


def _record_version(alias: str, handler: Handler, version: Version, entry: InboxEntry) -> bool:
    """Record the version of an event; return False if the recorded one is not older.

    Each statement compares and writes at once, and locks the row until the transaction ends.

    Raises:
        InvalidArguments: one version is an integer, and the other one a time.
    """
    from ..models import LENGTH, LatestVersion, clean

    pk = latest_key(entry.service, handler, version)
    rows = LatestVersion.objects.using(alias).filter(pk=pk)
    now = {
        "version": version.number, "event_id": entry.event_id, "handled_at": entry.handled_at,
    }  # fmt: skip
    older = rows.filter(is_time=version.is_time, version__lt=version.number)
    if older.update(**now):
        return True
    first = LatestVersion(
        id=pk, service=entry.service, handler=entry.handler, event_id=entry.event_id,
        handled_at=entry.handled_at, thing=clean(version.thing, LENGTH), version=-LIMIT,
        is_time=version.is_time,
    )  # fmt: skip
    LatestVersion.objects.using(alias).bulk_create([first], ignore_conflicts=True)
    if older.update(**now):
        return True
    if not rows.filter(is_time=version.is_time).exists():
        kinds = ("a time", "an integer") if version.is_time else ("an integer", "a time")
        raise InvalidArguments(
            f"the version of {version.thing!r:.80} is {kinds[0]}, and that of an earlier event is "
            f"{kinds[1]}"
        )
    return False


def _check_commit(alias: str, entry: InboxEntry, refused: Callable[[], Exception]) -> None:
    """Raise what *refused* returns if the transaction, which began with the row, cannot commit.

    If the handler swallowed a database error, ``atomic()`` rolls back without an exception, and so
    does PostgreSQL's COMMIT. Django's flag shows the first case. A query of the row shows the
    second: it fails, or finds nothing. It also finds nothing if the handler itself has rolled back;
    libpq's transaction status would not show that, since another transaction may be open by now.
    """
    if transaction.get_rollback(using=alias):
        raise refused()
    try:
        found = _found(alias, entry)
    except InternalError as exc:
        raise refused() from exc  # PostgreSQL: the transaction is aborted
    if not found:
        raise refused()


def _committed(alias: str, entry: InboxEntry) -> bool:
    """Return True if the row is there when the transaction is over."""
    with suppress(Exception):  # an interrupted driver may raise anything
        connections[alias].rollback()
    connections[alias].close()
    return _found(alias, entry)


def _found(alias: str, entry: InboxEntry) -> bool:
    return _same(alias, entry).exists()


def _same(alias: str, entry: InboxEntry) -> QuerySet[InboxEntry]:
    return type(entry).objects.using(alias).filter(pk=entry.pk)


def aliases() -> list[str]:
    """Return the databases of this service's handlers with ``once``."""
    settings, handlers = get_settings(), get_registry().handlers.values()
    used = (database(handler, settings) for handler in handlers if handler.once)
    return list(dict.fromkeys(used))
