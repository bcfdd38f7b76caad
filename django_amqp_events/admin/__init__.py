"""Archive, groups, batches, outbox, inbox and dashboard in Django's admin.

Django's admin imports this package where it is installed; nothing else does. For an admin site of
one's own::

    from django_amqp_events.admin import register

    site = admin.AdminSite(name="ops")
    register(site)
"""

from __future__ import annotations

from django.contrib import admin

from ..models import ArchivedEvent, Dashboard, FailureGroup, InboxEntry, OutboxEvent, ReplayBatch
from .archived_events import ArchivedEventAdmin
from .dashboard import DashboardAdmin
from .failure_groups import FailureGroupAdmin
from .inbox import InboxEntryAdmin
from .outbox import OutboxEventAdmin
from .replay_batches import ReplayBatchAdmin


def register(site: admin.AdminSite) -> None:
    """Register all pages of the console on a site; they link to each other there.

    Raises:
        django.contrib.admin.exceptions.AlreadyRegistered: one of them is.
    """
    site.register(ArchivedEvent, ArchivedEventAdmin)
    site.register(FailureGroup, FailureGroupAdmin)
    site.register(OutboxEvent, OutboxEventAdmin)
    site.register(InboxEntry, InboxEntryAdmin)
    site.register(ReplayBatch, ReplayBatchAdmin)
    site.register(Dashboard, DashboardAdmin)


register(admin.site)

__all__ = [
    "ArchivedEventAdmin",
    "DashboardAdmin",
    "FailureGroupAdmin",
    "InboxEntryAdmin",
    "OutboxEventAdmin",
    "ReplayBatchAdmin",
    "register",
]
