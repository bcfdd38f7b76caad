"""Checks of databases, migrations and ``once``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from django.db import connections, router
from django.db.models import Model

from ..archive import tables
from ..conf import Settings
from ..databases import exists
from ..declare.registry import Registry
from ..models.archive import ArchivedEvent
from ..models.inbox_entry import InboxEntry, LatestVersion
from ..models.outbox_event import OutboxEvent
from ..options import Problem
from .project import Project


def _lacks(alias: str, model: type[Model] | None) -> str:
    """Return why there is no database, or no table of a model in it; ``""`` if there may be."""
    if alias not in connections.settings or not exists(alias):
        return f"DATABASES has no database {alias!r}"
    if model is None:
        return ""
    # In a thread of its own, where connections are as they begin: django-tenants answers for the
    # schema of the present tenant, in which a command may run.
    with ThreadPoolExecutor(1) as pool:
        allowed = pool.submit(router.allow_migrate_model, alias, model).result()
    return (
        ""
        if allowed
        else f"the database routers exclude {model.__name__} from the database {alias!r}"
    )


def check_archive_database(project: Project) -> Iterator[Problem]:
    """Handlers whose failed events no database can store (W014)."""
    if not project.registry.handlers:
        return
    if why := _lacks(tables.database(), ArchivedEvent):
        yield Problem(
            "W014",
            f"The archive has no table, because {why}: failed events stay in the archive queue, "
            f"where you cannot see or replay them.",
            "Set DATABASES, and run `manage.py migrate`.",
        )


def check_once(project: Project) -> Iterator[Problem]:
    """Handlers with ``once`` that are async (E040) or have no inbox table (E041)."""
    for handler in project.registry.handlers.values():
        where = f"Handler {handler.name!r}"
        alias = handler.using or project.settings.database
        if not handler.once:
            continue
        if handler.is_async:
            yield Problem(
                "E040",
                f"{where} has once, but is async: Django's transactions do not work in async code.",
                "Write an ordinary function, or remove once and make the handler idempotent.",
            )
        used = (InboxEntry, LatestVersion) if handler.newest else (InboxEntry,)
        if why := next(filter(None, (_lacks(alias, model) for model in used)), ""):
            yield Problem(
                "E041",
                f"{where} has once, but {why}.",
                "Set using to the alias that the handler writes to, and let allow_migrate() return "
                "True for django_amqp_events there.",
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


def check_outbox(project: Project) -> Iterator[Problem]:
    """An outbox without a table, or commits without a database (E025)."""
    settings = project.settings
    if settings.publish == "immediate":
        return
    if why := _lacks(settings.database, OutboxEvent if settings.publish == "outbox" else None):
        yield Problem(
            "E025",
            f"AMQP_EVENTS['PUBLISH'] is {settings.publish!r}, but {why}.",
            "Set DATABASE to an alias of DATABASES, for 'outbox' to one for which allow_migrate() "
            "returns True for django_amqp_events, or PUBLISH to 'immediate', which needs none.",
        )


def check_servers(project: Project, aliases: Iterable[str]) -> Iterator[Problem]:
    """Databases without transactions (E030)."""
    used = used_databases(project.settings, project.registry)
    for alias in (alias for alias in aliases if alias in used):
        connection: Any = connections[alias]
        name = f"The database {alias!r} ({connection.display_name})"
        if connection.vendor == "mysql" and not connection.features.supports_transactions:
            yield Problem(
                "E030",
                f"{name} creates tables without transactions (MyISAM), so events could be lost "
                f"or doubled.",
                "Set the server's default_storage_engine to InnoDB, and create the tables again.",
            )
