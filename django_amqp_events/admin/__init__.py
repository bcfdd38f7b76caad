"""Archive, groups, batches, outbox and dashboard in Django's admin.

For an admin site of one's own::

    from django_amqp_events.admin import register

    site = admin.AdminSite(name="ops")
    register(site)
"""

from __future__ import annotations

from django.contrib import admin

from ..models import ArchivedEvent, Dashboard, FailureGroup, OutboxEvent, ReplayBatch
from .archived_event_pages import ArchivedEventAdmin
from .dashboard_pages import DashboardAdmin
from .failure_group_pages import FailureGroupAdmin
from .outbox_pages import OutboxEventAdmin
from .replay_batch_pages import ReplayBatchAdmin


def register(site: admin.AdminSite) -> None:
    """Register all pages of the console on a site; they link to each other there."""
    site.register(ArchivedEvent, ArchivedEventAdmin)
    site.register(FailureGroup, FailureGroupAdmin)
    site.register(OutboxEvent, OutboxEventAdmin)
    site.register(ReplayBatch, ReplayBatchAdmin)
    site.register(Dashboard, DashboardAdmin)


register(admin.site)

__all__ = [
    "ArchivedEventAdmin",
    "DashboardAdmin",
    "FailureGroupAdmin",
    "OutboxEventAdmin",
    "ReplayBatchAdmin",
    "register",
]
