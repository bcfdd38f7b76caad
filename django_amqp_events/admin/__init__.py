"""Archive, outbox and inbox in Django's admin: look, replay, publish now, discard, restore.

Django's admin imports this package where it is installed; nothing else does. For an admin site of
one's own::

    from django_amqp_events.admin import (
        ArchivedEventAdmin, InboxEntryAdmin, OutboxEventAdmin, ReplayBatchAdmin
    )

    site.register(ArchivedEvent, ArchivedEventAdmin)
    site.register(OutboxEvent, OutboxEventAdmin)
    site.register(InboxEntry, InboxEntryAdmin)
    site.register(ReplayBatch, ReplayBatchAdmin)
"""

from __future__ import annotations

from django.contrib import admin

from ..models import ArchivedEvent, InboxEntry, OutboxEvent, ReplayBatch
from .archive import ArchivedEventAdmin
from .batches import ReplayBatchAdmin
from .inbox import InboxEntryAdmin
from .outbox import OutboxEventAdmin

admin.site.register(ArchivedEvent, ArchivedEventAdmin)
admin.site.register(OutboxEvent, OutboxEventAdmin)
admin.site.register(InboxEntry, InboxEntryAdmin)
admin.site.register(ReplayBatch, ReplayBatchAdmin)

__all__ = ["ArchivedEventAdmin", "InboxEntryAdmin", "OutboxEventAdmin", "ReplayBatchAdmin"]
