"""Archive, groups, batches, outbox, inbox and dashboard in Django's admin.

Django's admin imports this package where it is installed; nothing else does. For an admin site of
one's own::

    from django_amqp_events.admin import (
        ArchivedEventAdmin, DashboardAdmin, FailureGroupAdmin, InboxEntryAdmin, OutboxEventAdmin,
        ReplayBatchAdmin
    )

    site.register(Dashboard, DashboardAdmin)
    site.register(ArchivedEvent, ArchivedEventAdmin)
    site.register(FailureGroup, FailureGroupAdmin)
    site.register(OutboxEvent, OutboxEventAdmin)
    site.register(InboxEntry, InboxEntryAdmin)
    site.register(ReplayBatch, ReplayBatchAdmin)
"""

from __future__ import annotations

from django.contrib import admin

from ..models import (
    ArchivedEvent,
    Dashboard,
    FailureGroup,
    InboxEntry,
    OutboxEvent,
    ReplayBatch,
)
from .archive import ArchivedEventAdmin
from .batches import ReplayBatchAdmin
from .dashboard import DashboardAdmin
from .groups import FailureGroupAdmin
from .inbox import InboxEntryAdmin
from .outbox import OutboxEventAdmin

admin.site.register(ArchivedEvent, ArchivedEventAdmin)
admin.site.register(FailureGroup, FailureGroupAdmin)
admin.site.register(OutboxEvent, OutboxEventAdmin)
admin.site.register(InboxEntry, InboxEntryAdmin)
admin.site.register(ReplayBatch, ReplayBatchAdmin)
admin.site.register(Dashboard, DashboardAdmin)

__all__ = [
    "ArchivedEventAdmin",
    "DashboardAdmin",
    "FailureGroupAdmin",
    "InboxEntryAdmin",
    "OutboxEventAdmin",
    "ReplayBatchAdmin",
]
