"""Checks of ``AMQP_EVENTS``."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Iterator

from django.apps import apps
from django.conf import settings as django_settings
from django.utils.module_loading import import_string

from ..options import Problem
from .broker import BROKER_MAXIMUM
from .handlers import listed
from .project import Project

# -- our own settings ---------------------------------------------------------------------


def check_discovery(project: Project) -> Iterator[Problem]:
    """Declarations beside the settings, in a package that is no app (W012)."""
    package = str(getattr(django_settings, "SETTINGS_MODULE", None) or "").rpartition(".")[0]
    while package:
        for name in project.settings.autodiscover:
            module = f"{package}.{name}"
            if module in sys.modules or apps.get_containing_app_config(module) is not None:
                continue
            try:
                found = importlib.util.find_spec(module)
            except (ImportError, ValueError):
                continue
            if found is not None:
                yield Problem(
                    "W012",
                    f"There is a module {module}, but {package!r} is no installed app, so what it "
                    f"declares is not found.",
                    f"Add {package!r} to INSTALLED_APPS, or move the module into an app.",
                )
        package = package.rpartition(".")[0]


def check_renamed(project: Project) -> Iterator[Problem]:
    """RENAMED_HANDLERS that send replays to a wrong handler (E023) or to none (W013)."""
    handlers = project.registry.handlers
    for old, new in project.settings.renamed_handlers.items():
        if old in handlers:
            yield Problem(
                "E023",
                f'AMQP_EVENTS["RENAMED_HANDLERS"] says that {old!r} is named {new!r} today, but '
                f"there is a handler {old!r}, whose archived events would be replayed to the "
                f"other one.",
                "Take the entry out, or give the handler another name.",
            )
        if new not in handlers:
            near = difflib.get_close_matches(new, handlers, n=1)
            yield Problem(
                "W013",
                f'AMQP_EVENTS["RENAMED_HANDLERS"] says that {old!r} is named {new!r} today, but '
                f"no handler is: archived events of {old!r} cannot be replayed.",
                (f"Did you mean {near[0]!r}? " if near else "")
                + "Name today's handler, or take the entry out once nothing of it is archived.",
            )


def check_redaction(project: Project) -> Iterator[Problem]:
    """A redaction hook that cannot be called: every payload would be hidden (E070)."""
    path = project.settings.redact
    if not path:
        return
    try:
        why = "" if callable(import_string(path)) else "it is not callable"
    except Exception as exc:  # noqa: BLE001 - a project's module may raise anything
        why = f"it cannot be imported ({type(exc).__name__}: {exc})"
    if why:
        yield Problem(
            "E070",
            f'AMQP_EVENTS["REDACT"] is {path!r:.120}, and {why}: the admin and exports hide every '
            f"payload.",
            "Name a function that takes an event's name and its payload and returns a dict.",
        )


def check_limits(project: Project) -> Iterator[Problem]:
    """Settings that weaken a guarantee (W008, W009, W010)."""
    settings = project.settings
    limits = {"TTL": settings.archive.ttl, "MAX_LENGTH": settings.archive.max_length}
    given = [name for name, value in limits.items() if value is not None]
    if given:
        yield Problem(
            "W008",
            f"The archive is limited by {listed(given)}: archived events beyond the limit are "
            f"lost.",
            "Take the limit out of AMQP_EVENTS['ARCHIVE'], or watch the archive's depth and age "
            "with `manage.py events_status`; the mirror keeps it empty.",
        )
    if settings.queue_type == "classic":
        yield Problem(
            "W009",
            'AMQP_EVENTS["QUEUE_TYPE"] is "classic": no delivery limit, so a poison message is '
            "redelivered without end, and dead letters that may be lost.",
            'Take it out; the default "quorum" works on a single node too.',
        )
    if settings.max_body > BROKER_MAXIMUM:
        yield Problem(
            "W010",
            f'AMQP_EVENTS["MAX_BODY"] is {settings.max_body}, but RabbitMQ takes messages up to '
            f"{BROKER_MAXIMUM} bytes by default.",
            "Publish a reference to large data, or raise max_message_size on the broker as well.",
        )


def check_alerts(project: Project) -> Iterator[Problem]:
    """E-mail alerts without recipients (W060)."""
    if project.settings.alerts.mail and not django_settings.ADMINS:
        yield Problem(
            "W060",
            "AMQP_EVENTS['ALERTS'] has MAIL, but Django's ADMINS is empty: nobody gets the e-mail.",
            "Set ADMINS (and EMAIL_HOST, SERVER_EMAIL), or take MAIL out and use the signal "
            "alert_raised.",
        )


def check_backend(project: Project) -> Iterator[Problem]:
    """A backend for development in production (W021)."""
    if project.settings.backend != "amqp" and not django_settings.DEBUG:
        yield Problem(
            "W021",
            f'AMQP_EVENTS["BACKEND"] is {project.settings.backend!r}: no event leaves the process.',
            'Take it out of the settings for production; the default is "amqp".',
        )
