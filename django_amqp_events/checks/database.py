"""Checks of databases, migrations and ``once``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from django.apps import apps
from django.conf import settings as django_settings
from django.db import DEFAULT_DB_ALIAS, connections, router
from django.utils.connection import ConnectionDoesNotExist

from ..archive import states
from ..options import Problem
from .handlers import listed
from .project import Project


def check_database(project: Project) -> Iterator[Problem]:
    """A DATABASE that does not exist (E021)."""
    alias = project.settings.database
    databases = getattr(django_settings, "DATABASES", None)
    known = list(databases) if isinstance(databases, Mapping) else []
    if alias != DEFAULT_DB_ALIAS and alias not in known:
        yield Problem(
            "E021",
            f'AMQP_EVENTS["DATABASE"] is {alias!r}, which DATABASES does not have.',
            f"It is the alias of the outbox, or whose commit a publish waits for: "
            f"{listed(map(str, known)) or repr(DEFAULT_DB_ALIAS)}.",
        )


def check_archive_database(project: Project) -> Iterator[Problem]:
    """A service whose failed events no database can take (W014, W015)."""
    if not project.registry.handlers:
        # Nothing of it is ever archived.
        return
    alias = states.database()
    try:
        connection = connections[alias]
    except ConnectionDoesNotExist:
        connection = None
    if connection is None or connection.settings_dict["ENGINE"] == "django.db.backends.dummy":
        yield Problem(
            "W014",
            f"There is no database {alias!r} for the archive: events that failed stay in their "
            f"queue, where they can neither be seen nor replayed.",
            "Set DATABASES, and run `manage.py migrate`.",
        )
    elif not (getattr(django_settings, "USE_TZ", True) or connection.features.supports_timezones):
        yield Problem(
            "W015",
            f"USE_TZ is False, and the database {alias!r} ({connection.display_name}) then takes "
            f"no times with a time zone, which all times of the archive have: events_mirror "
            f"cannot store an event.",
            "Set USE_TZ = True, or send the archive's tables to PostgreSQL with a router.",
        )


def check_once(project: Project) -> Iterator[Problem]:
    """Handlers with ``once`` that are async (E040), or that have no inbox table (E041)."""
    databases = getattr(django_settings, "DATABASES", None)
    known = databases if isinstance(databases, Mapping) else {}
    for handler in project.registry.handlers.values():
        if not handler.once:
            if handler.using:
                yield Problem(
                    "W040",
                    f"Handler {handler.name!r} has using={handler.using!r} without once.",
                    "It says which database once is about; add once=True, or take it out.",
                )
            continue
        if handler.is_async:
            yield Problem(
                "E040",
                f"Handler {handler.name!r} has once and is async, and Django's transactions do "
                f"not work in async code.",
                "Write it as an ordinary function, or take once out and make its second run "
                "harmless.",
            )
        alias = handler.using or project.settings.database
        entry = known.get(alias)
        engine = entry.get("ENGINE") if isinstance(entry, Mapping) else None
        if engine in (None, "", "django.db.backends.dummy"):
            yield Problem(
                "E041",
                f"Handler {handler.name!r} has once on database {alias!r}, which DATABASES does "
                f"not have.",
                f"Name in using the alias that it writes to: {listed(map(str, known)) or 'none'}.",
            )
        elif not router.allow_migrate_model(
            alias, apps.get_model("django_amqp_events", "InboxEntry")
        ):
            yield Problem(
                "E041",
                f"The database routers keep the inbox's table out of database {alias!r}, to which "
                f"handler {handler.name!r} writes.",
                "Let allow_migrate() say yes there for the app django_amqp_events (model "
                "InboxEntry); its row must be in the transaction of the handler's effects.",
            )


def check_autocommit(project: Project) -> Iterator[Problem]:
    """Databases of outbox, inbox and archive on which nothing is committed (E026)."""
    handlers = project.registry.handlers.values()
    used = [h.using or project.settings.database for h in handlers if h.once]
    if handlers:
        used.append(states.database())
    if project.settings.publish == "outbox":
        used.append(project.settings.database)
    databases = getattr(django_settings, "DATABASES", None)
    known = databases if isinstance(databases, Mapping) else {}
    for alias in dict.fromkeys(used):
        entry = known.get(alias)
        if isinstance(entry, Mapping) and not entry.get("AUTOCOMMIT", True):
            yield Problem(
                "E026",
                f"DATABASES[{alias!r}] has AUTOCOMMIT off: transaction.atomic() then commits "
                f"nothing, so archive, outbox and inbox could lose what they have taken.",
                "Take AUTOCOMMIT out; for code that commits by itself make another alias.",
            )


def check_outbox(project: Project) -> Iterator[Problem]:
    """An outbox that has no table (E025), or that is asked to hold and is not used (W017)."""
    settings = project.settings
    if settings.publish != "outbox":
        if settings.unrouted == "hold":
            yield Problem(
                "W017",
                f'AMQP_EVENTS["UNROUTED"] is "hold", but PUBLISH is {settings.publish!r}: there is '
                f"no row that could be held, so an event that no queue is bound for raises.",
                'Set PUBLISH to "outbox", or say "raise".',
            )
        return
    if settings.backend != "amqp":
        return
    alias = settings.database
    databases = getattr(django_settings, "DATABASES", None)
    entry = databases.get(alias) if isinstance(databases, Mapping) else None
    if entry is None and alias != DEFAULT_DB_ALIAS:
        return  # E021
    entry = entry if isinstance(entry, Mapping) else {}
    engine = entry.get("ENGINE") or "django.db.backends.dummy"
    if engine == "django.db.backends.dummy":
        yield Problem(
            "E025",
            f'AMQP_EVENTS["PUBLISH"] is "outbox", which needs a database, and DATABASES has none '
            f"named {alias!r}.",
            'Set DATABASES, or PUBLISH to "immediate", which needs none.',
        )
    elif not router.allow_migrate_model(alias, apps.get_model("django_amqp_events", "OutboxEvent")):
        yield Problem(
            "E025",
            f"The database routers keep the outbox's table out of database {alias!r}, where "
            f"events are published.",
            "Let allow_migrate() say yes for the app django_amqp_events there, or name in DATABASE "
            "the alias where it does; an event belongs to the outbox of its own transaction.",
        )
