"""Archive, groups, batches, outbox and dashboard in Django's admin.

Django's admin imports this package in each process, also in workers and commands, which show no
page. A page is imported when the site is first asked for it. For an admin site of one's own::

    from django_amqp_events.admin import register

    site = admin.AdminSite(name="ops")
    register(site)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.db.models import Model
from django.utils.functional import SimpleLazyObject

from ..models import ArchivedEvent, Dashboard, FailureGroup, OutboxEvent, ReplayBatch

if TYPE_CHECKING:
    from .archived_event_pages import ArchivedEventAdmin
    from .dashboard_pages import DashboardAdmin
    from .failure_group_pages import FailureGroupAdmin
    from .outbox_pages import OutboxEventAdmin
    from .replay_batch_pages import ReplayBatchAdmin

_MODULES = {
    "ArchivedEventAdmin": "archived_event_pages",
    "DashboardAdmin": "dashboard_pages",
    "FailureGroupAdmin": "failure_group_pages",
    "OutboxEventAdmin": "outbox_pages",
    "ReplayBatchAdmin": "replay_batch_pages",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register(site: admin.AdminSite) -> None:
    """Register all pages on a site, where they link to each other."""
    for model in (ArchivedEvent, FailureGroup, OutboxEvent, ReplayBatch, Dashboard):
        # The site calls what is registered as it would call a class.
        site.register(model, _page)  # type: ignore[arg-type]


def _page(model: type[Model], site: admin.AdminSite) -> Any:
    return SimpleLazyObject(lambda: __getattr__(f"{model.__name__}Admin")(model, site))


register(admin.site)

__all__ = [
    "ArchivedEventAdmin",
    "DashboardAdmin",
    "FailureGroupAdmin",
    "OutboxEventAdmin",
    "ReplayBatchAdmin",
    "register",
]
