"""Checks of ``AMQP_EVENTS``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator

from django.apps import apps
from django.conf import settings as django_settings

from ..options import Problem
from .handlers import listed
from .project import Project


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
    """RENAMED_HANDLERS that direct replays to a wrong handler (E023)."""
    for old, new in project.settings.renamed_handlers.items():
        if old in project.registry.handlers:
            yield Problem(
                "E023",
                f"AMQP_EVENTS['RENAMED_HANDLERS'] renames {old!r} to {new!r}, but there is still a "
                f"handler {old!r}: its archived events would be replayed to {new!r}.",
                "Remove the entry, or rename the handler.",
            )


def check_limits(project: Project) -> Iterator[Problem]:
    """Settings that weaken a guarantee (W008, W009, W029)."""
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

    if settings.history is not None and settings.unrouted in ("raise", "hold"):
        yield Problem(
            "W029",
            f"AMQP_EVENTS['UNROUTED'] is {settings.unrouted!r}, which has no effect with HISTORY: "
            f"the history gets every event, so RabbitMQ never says that no handler's queue does.",
            "Remove UNROUTED, or HISTORY in every service with this exchange.",
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


def check_backend(project: Project) -> Iterator[Problem]:
    """A backend for development in production (W021)."""
    if project.settings.backend != "amqp" and not django_settings.DEBUG:
        yield Problem(
            "W021",
            f"AMQP_EVENTS['BACKEND'] is {project.settings.backend!r}: no event leaves the process.",
            "Remove it in production; the default is 'amqp'.",
        )
