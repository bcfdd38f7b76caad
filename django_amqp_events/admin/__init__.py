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

#: The module with the pages of each model.
_MODULES: dict[type[Model], str] = {
    ArchivedEvent: "archived_event_pages",
    FailureGroup: "failure_group_pages",
    OutboxEvent: "outbox_pages",
    ReplayBatch: "replay_batch_pages",
    Dashboard: "dashboard_pages",
}


def __getattr__(name: str) -> Any:
    for model, module in _MODULES.items():
        if name == f"{model.__name__}Admin":
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register(site: admin.AdminSite) -> None:
    """Register all pages on a site, where they link to each other."""
    for model in _MODULES:
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
