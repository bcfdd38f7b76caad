"""Checks of databases, migrations and ``once``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from django.conf import settings as django_settings
from django.db import DEFAULT_DB_ALIAS, connections, router

from ..archive import tables
from ..conf import Settings
from ..declare.registry import Registry
from ..models.inbox import InboxEntry
from ..models.outbox import OutboxEvent
from ..options import Problem
from .handlers import listed
from .project import Project

#: Bytes of a statement that MariaDB accepts by default, and that the mirror's batches need.
PACKET: Final = 16 * 1024 * 1024
#: Django's names of the supported databases; MariaDB is a ``mysql``.
VENDORS: Final = frozenset({"mysql", "postgresql", "sqlite"})


def _databases() -> Mapping[Any, Any]:
    databases = getattr(django_settings, "DATABASES", None)
    return databases if isinstance(databases, Mapping) else {}


def _exists(alias: str) -> bool:
    """Return True if there is a database behind an alias."""
    entry = _databases().get(alias)
    engine = entry.get("ENGINE") if isinstance(entry, Mapping) else None
    return engine not in (None, "", "django.db.backends.dummy")


def check_database(project: Project) -> Iterator[Problem]:
    """A DATABASE that does not exist (E021)."""
    alias = project.settings.database
    if alias != DEFAULT_DB_ALIAS and alias not in _databases():
        yield Problem(
            "E021",
            f"AMQP_EVENTS['DATABASE'] is {alias!r}, which is not in DATABASES.",
            f"Use one of {listed(map(str, _databases())) or repr(DEFAULT_DB_ALIAS)}.",
        )


def check_archive_database(project: Project) -> Iterator[Problem]:
    """Handlers whose failed events no database can store (W014)."""
    if not project.registry.handlers:
        return
    alias = tables.database()
    if not _exists(alias):
        yield Problem(
            "W014",
            f"The archive has no database {alias!r}: failed events stay in the archive queue, "
            f"where you cannot see or replay them.",
            "Set DATABASES, and run `manage.py migrate`.",
        )


def check_once(project: Project) -> Iterator[Problem]:
    """Handlers with ``once`` that are async (E040) or have no inbox table (E041)."""
    for handler in project.registry.handlers.values():
        where = f"Handler {handler.name!r}"
        alias = handler.using or project.settings.database
        if not handler.once:
            if handler.using:
                yield Problem(
                    "W040",
                    f"{where} has using={handler.using!r}, which has no effect without once.",
                    "Add once=True, or remove using.",
                )
            continue
        if handler.is_async:
            yield Problem(
                "E040",
                f"{where} has once, but is async: Django's transactions do not work in async code.",
                "Write an ordinary function, or remove once and make the handler idempotent.",
            )
        if not _exists(alias):
            yield Problem(
                "E041",
                f"{where} has once on the database {alias!r}, which is not in DATABASES.",
                f"Set using to the alias that the handler writes to: "
                f"{listed(map(str, _databases())) or 'none'}.",
            )
        elif not router.allow_migrate_model(alias, InboxEntry):
            yield Problem(
                "E041",
                f"{where} has once on the database {alias!r}, but the database routers exclude "
                f"the inbox's table from it.",
                "Let allow_migrate() return True for django_amqp_events (model InboxEntry) there, "
                "so that inbox and handler share a transaction.",
            )


def used_databases(settings: Settings, registry: Registry) -> list[str]:
    """Return the aliases of outbox, inbox and archive."""
    handlers = registry.handlers.values()
    used = [handler.using or settings.database for handler in handlers if handler.once]
    if handlers:
        used.append(tables.database())
    if settings.publish == "outbox":
        used.append(settings.database)
    return list(dict.fromkeys(used))


def _used(project: Project) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Return the aliases, each with its entry in DATABASES."""
    for alias in used_databases(project.settings, project.registry):
        entry = _databases().get(alias)
        if _exists(alias) and isinstance(entry, Mapping):
            yield alias, entry


def check_autocommit(project: Project) -> Iterator[Problem]:
    """Databases of outbox, inbox and archive on which nothing is committed (E026)."""
    for alias, entry in _used(project):
        if not entry.get("AUTOCOMMIT", True):
            yield Problem(
                "E026",
                f"DATABASES[{alias!r}] has AUTOCOMMIT off: transaction.atomic() commits nothing, "
                f"so archive, outbox and inbox could lose events.",
                "Remove AUTOCOMMIT. Use another alias for code that commits itself.",
            )


def check_vendor(project: Project) -> Iterator[Problem]:
    """Databases of outbox, inbox and archive that are not supported (E028)."""
    for alias, _ in _used(project):
        connection = connections[alias]
        if connection.vendor not in VENDORS:
            yield Problem(
                "E028",
                f"The outbox, inbox or archive is on the database {alias!r} "
                f"({connection.display_name}), which is not supported.",
                "Route django_amqp_events to an alias with PostgreSQL, MySQL, MariaDB or SQLite, "
                "and set DATABASE to it.",
            )


def check_sqlite(project: Project) -> Iterator[Problem]:
    """SQLite whose requests read first and write later, which it does not wait for (W028)."""
    for alias, entry in _used(project):
        if connections[alias].vendor != "sqlite" or not entry.get("ATOMIC_REQUESTS"):
            continue
        mode = str((entry.get("OPTIONS") or {}).get("transaction_mode") or "DEFERRED")
        if mode.upper() == "DEFERRED":
            yield Problem(
                "W028",
                f"DATABASES[{alias!r}] is SQLite with ATOMIC_REQUESTS: a request that reads and "
                f"then writes fails with 'database is locked' if a worker writes meanwhile.",
                "Set its OPTIONS to {'transaction_mode': 'IMMEDIATE', 'timeout': 30}.",
            )


def check_outbox(project: Project) -> Iterator[Problem]:
    """An outbox without a table (E025), or UNROUTED = "hold" without an outbox (W017)."""
    settings = project.settings
    alias = settings.database
    if settings.publish != "outbox":
        if settings.unrouted == "hold":
            yield Problem(
                "W017",
                f"AMQP_EVENTS['UNROUTED'] is 'hold', but PUBLISH is {settings.publish!r}: without "
                f"the outbox, an event that no queue is bound for raises an error.",
                "Set PUBLISH to 'outbox', or UNROUTED to 'raise'.",
            )
    elif settings.backend != "amqp" or (alias != DEFAULT_DB_ALIAS and alias not in _databases()):
        return  # no broker, or reported as E021
    elif not _exists(alias):
        yield Problem(
            "E025",
            f"AMQP_EVENTS['PUBLISH'] is 'outbox', but there is no database {alias!r}.",
            "Set DATABASES, or PUBLISH to 'immediate', which needs none.",
        )
    elif not router.allow_migrate_model(alias, OutboxEvent):
        yield Problem(
            "E025",
            f"AMQP_EVENTS['PUBLISH'] is 'outbox', but the database routers exclude the outbox's "
            f"table from the database {alias!r}.",
            "Let allow_migrate() return True for django_amqp_events there, or set DATABASE to an "
            "alias where it does.",
        )


def check_servers(aliases: Iterable[str], max_body: int) -> Iterator[Problem]:
    """MySQL and MariaDB: old versions (E029), tables without transactions (E030), W019, W024."""
    for alias in aliases:
        connection: Any = connections[alias]
        if connection.vendor != "mysql" or not router.allow_migrate(alias, "django_amqp_events"):
            continue
        name = f"The database {alias!r} ({connection.display_name})"
        oldest = (10, 6) if connection.mysql_is_mariadb else (8, 0, 17)
        if connection.mysql_version < oldest:
            yield Problem(
                "E029",
                f"{name} has version {_dotted(connection.mysql_version)}, which is too old.",
                f"Upgrade to {connection.display_name} {_dotted(oldest)} or newer.",
            )
        if not connection.features.supports_transactions:
            yield Problem(
                "E030",
                f"{name} creates tables without transactions (MyISAM), so events could be lost "
                f"or doubled.",
                "Set the server's default_storage_engine to InnoDB, and create the tables again.",
            )
        with connection.cursor() as cursor:
            cursor.execute("SELECT @@character_set_client, @@max_allowed_packet")
            charset, packet = cursor.fetchone()
        if charset != "utf8mb4":
            yield Problem(
                "W019",
                f"{name} is connected with the character set {charset}, which lacks characters "
                f"such as emoji: events with them could not be stored.",
                "Remove charset from the OPTIONS of its entry in DATABASES, or set it to utf8mb4.",
            )
        # Quoting can double a body.
        if packet < (needed := max(PACKET, 2 * max_body)):
            yield Problem(
                "W024",
                f"{name} has a max_allowed_packet of {packet} bytes: events with a large body "
                f"could not be stored.",
                f"Set the server's max_allowed_packet to at least {needed}, 16 MiB or twice "
                f"AMQP_EVENTS['MAX_BODY'].",
            )


def _dotted(version: Iterable[int]) -> str:
    return ".".join(map(str, version))
