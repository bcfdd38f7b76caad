"""The Django app: registers the checks and imports what declares events and handlers."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from django.apps import AppConfig, apps
from django.core.checks import CheckMessage, Tags, register
from django.utils.module_loading import module_has_submodule
from django.utils.translation import gettext_lazy as _

#: Tag of the checks, for ``manage.py check --tag``.
CHECKS: Final = "amqp_events"


class DjangoAmqpEventsConfig(AppConfig):
    name = "django_amqp_events"
    verbose_name = _("AMQP events")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the system checks, import the declarations, connect the worker's signals."""
        from . import conf
        from .worker import celery_signals

        register(_later("check"), CHECKS)
        register(_later("check_databases"), CHECKS, Tags.database)
        register(_later("check_deployment"), CHECKS, deploy=True)
        settings, _problems = conf.load()
        # Without a service nothing is published or handled, which the checks report.
        if settings.service:
            discover(settings.autodiscover)
        celery_signals.connect()
        # A check reports that it is missing.
        if settings.metrics and find_spec("prometheus_client"):
            from .monitor import metrics

            metrics.connect()


def _later(name: str) -> Any:
    """Return a check whose module is imported when it runs: web servers and workers run none."""

    def run(**kwargs: Any) -> list[CheckMessage]:
        from . import checks

        return list(getattr(checks, name)(**kwargs))

    return run


def discover(names: tuple[str, ...]) -> None:
    """Import the modules that AUTODISCOVER names."""
    for module in _modules(names):
        try:
            import_module(module)
        except Exception as exc:
            exc.add_note(
                f"django_amqp_events imports {module}, because of AMQP_EVENTS['AUTODISCOVER']. If "
                f"it declares no events, add {f'-{module}'!r} to that list."
            )
            raise


def _modules(names: tuple[str, ...]) -> Iterator[str]:
    """Yield the paths of those modules."""
    for app in apps.get_app_configs():
        for name in names:
            module = f"{app.name}.{name}"
            if (
                name.isidentifier()
                and f"-{module}" not in names
                and module_has_submodule(app.module, name)
            ):
                yield module
    yield from (name for name in names if "." in name and not name.startswith("-"))
