"""Checks of ``AMQP_EVENTS``."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Final

from django.apps import apps
from django.conf import settings as django_settings
from django.utils.module_loading import import_string

from ..callables import deferred
from ..options import Problem
from .handlers import listed
from .project import Project

#: Bytes of the largest message that RabbitMQ 4.0 and later accept by default (max_message_size).
BROKER_MAXIMUM: Final = 16 * 1024 * 1024


def check_discovery(project: Project) -> Iterator[Problem]:
    """Declarations next to the settings, in a package that is not an app (W012)."""
    package = str(getattr(django_settings, "SETTINGS_MODULE", None) or "").rpartition(".")[0]
    while package:
        for name in filter(str.isidentifier, project.settings.autodiscover):
            module = f"{package}.{name}"
            if module in sys.modules or apps.get_containing_app_config(module) is not None:
                continue
            try:
                spec = importlib.util.find_spec(module)
            except (ImportError, ValueError):
                continue
            if spec is not None:
                yield Problem(
                    "W012",
                    f"The module {module} is not imported, because {package!r} is not an installed "
                    f"app.",
                    f"Add {package!r} to INSTALLED_APPS, or move the module into an app.",
                )
        package = package.rpartition(".")[0]


def check_renamed(project: Project) -> Iterator[Problem]:
    """RENAMED_HANDLERS that direct replays to a wrong handler (E023) or to none (W013)."""
    handlers = project.registry.handlers
    for old, new in project.settings.renamed_handlers.items():
        if old in handlers:
            yield Problem(
                "E023",
                f"AMQP_EVENTS['RENAMED_HANDLERS'] renames {old!r} to {new!r}, but there is still a "
                f"handler {old!r}: its archived events would be replayed to {new!r}.",
                "Remove the entry, or rename the handler.",
            )
        if new not in handlers:
            near = difflib.get_close_matches(new, handlers, n=1)
            yield Problem(
                "W013",
                f"AMQP_EVENTS['RENAMED_HANDLERS'] renames {old!r} to {new!r}, but there is no such "
                f"handler: archived events of {old!r} cannot be replayed.",
                (f"Did you mean {near[0]!r}? " if near else "")
                + f"Use the handler's current name, or remove the entry when the archive has no "
                f"more events of {old!r}.",
            )


def check_redaction(project: Project) -> Iterator[Problem]:
    """A redaction hook that cannot be called (E070)."""
    path = project.settings.redact
    if not path:
        return
    try:
        hook = import_string(path)
        kind = deferred(hook)
        why = f"is {kind}" if kind else "" if callable(hook) else "is not callable"
    except Exception as exc:  # noqa: BLE001 - a project's module may raise anything
        why = f"cannot be imported ({type(exc).__name__}: {exc})"
    if why:
        yield Problem(
            "E070",
            f"AMQP_EVENTS['REDACT'] is {path!r:.120}, which {why}: the admin and exports hide "
            f"every payload.",
            "Use the path of a function that takes an event's name and payload and returns a dict.",
        )


def check_limits(project: Project) -> Iterator[Problem]:
    """Settings that weaken a guarantee (W008, W009, W010)."""
    settings = project.settings
    limits = {"TTL": settings.archive.ttl, "MAX_LENGTH": settings.archive.max_length}
    if given := [name for name, value in limits.items() if value is not None]:
        yield Problem(
            "W008",
            f"AMQP_EVENTS['ARCHIVE'] has {listed(given)}: archived events beyond the limit are "
            f"lost.",
            "Remove the limit, or watch the depth and age of the archive queue with "
            "`manage.py events_status`. events_mirror keeps it empty.",
        )
    if settings.queue_type == "classic":
        yield Problem(
            "W009",
            "AMQP_EVENTS['QUEUE_TYPE'] is 'classic': without a delivery limit a poison message is "
            "redelivered endlessly, and dead letters can be lost.",
            "Remove it. The default, 'quorum', also works on a single node.",
        )
    if settings.max_body > BROKER_MAXIMUM:
        yield Problem(
            "W010",
            f"AMQP_EVENTS['MAX_BODY'] is {settings.max_body}, but RabbitMQ accepts at most "
            f"{BROKER_MAXIMUM} bytes by default.",
            "Publish a reference to large data, or raise max_message_size on the broker as well.",
        )


def check_metrics(project: Project) -> Iterator[Problem]:
    """Metrics without prometheus_client (E090)."""
    if project.settings.metrics and importlib.util.find_spec("prometheus_client") is None:
        yield Problem(
            "E090",
            "AMQP_EVENTS['METRICS'] is True, but prometheus_client is not installed: nothing is "
            "counted.",
            "Run pip install 'django-amqp-events[prometheus]'.",
        )


def check_alerts(project: Project) -> Iterator[Problem]:
    """E-mail alerts without recipients (W060)."""
    if project.settings.alerts.mail and not django_settings.ADMINS:
        yield Problem(
            "W060",
            "AMQP_EVENTS['ALERTS'] has MAIL, but Django's ADMINS is empty: no e-mail is sent.",
            "Set ADMINS (and EMAIL_HOST, SERVER_EMAIL), or remove MAIL and use the signal "
            "alert_raised.",
        )


def check_pages(_project: Project) -> Iterator[Problem]:
    """A project without Django's admin (I001)."""
    if not apps.is_installed("django.contrib.admin"):
        yield Problem(
            "I001",
            "django.contrib.admin is not in INSTALLED_APPS, so archive, outbox and dashboard have "
            "no pages. Everything else works.",
            "Use events_status, events_find, events_groups, events_replay, events_archive and "
            "events_alerts, or run the pages as a small site of its own; then add "
            "'django_amqp_events.I001' to SILENCED_SYSTEM_CHECKS.",
        )


def check_backend(project: Project) -> Iterator[Problem]:
    """A backend for development in production (W021)."""
    if project.settings.backend != "amqp" and not django_settings.DEBUG:
        yield Problem(
            "W021",
            f"AMQP_EVENTS['BACKEND'] is {project.settings.backend!r}: no event leaves the process.",
            "Remove it in production; the default is 'amqp'.",
        )
