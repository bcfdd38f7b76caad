"""Runs of handlers, to look up the outcome of an event."""

from __future__ import annotations

from django.contrib import admin

from .models import Attempt

admin.site.register(
    Attempt,
    list_display=("handler", "event_name", "event_id", "attempt", "state", "exception", "began_at"),
    list_filter=("state", "handler"),
    search_fields=("=event_id",),
)
