"""Archive, groups of failures, outbox and inbox in Django's admin: look, replay, discard, restore.

Django's admin imports this package where it is installed; nothing else does. For an admin site of
one's own::

    from django_amqp_events.admin import ArchivedEventAdmin, FailureGroupAdmin
    from django_amqp_events.admin import InboxEntryAdmin, OutboxEventAdmin

    site.register(ArchivedEvent, ArchivedEventAdmin)
    site.register(FailureGroup, FailureGroupAdmin)
    site.register(OutboxEvent, OutboxEventAdmin)
    site.register(InboxEntry, InboxEntryAdmin)
"""

from __future__ import annotations

from django.contrib import admin

from ..models import ArchivedEvent, FailureGroup, InboxEntry, OutboxEvent
from .archive import ArchivedEventAdmin
from .groups import FailureGroupAdmin
from .inbox import InboxEntryAdmin
from .outbox import OutboxEventAdmin

admin.site.register(ArchivedEvent, ArchivedEventAdmin)
admin.site.register(FailureGroup, FailureGroupAdmin)
admin.site.register(OutboxEvent, OutboxEventAdmin)
admin.site.register(InboxEntry, InboxEntryAdmin)

__all__ = ["ArchivedEventAdmin", "FailureGroupAdmin", "InboxEntryAdmin", "OutboxEventAdmin"]
