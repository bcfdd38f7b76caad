"""Orders as the admin shows them: whether they were confirmed and invoiced."""

from __future__ import annotations

from django.contrib import admin

from .models import Confirmation, Order

admin.site.register(
    Order,
    list_display=("number", "placed_at", "total", "currency", "invoice_number"),
    search_fields=("number", "event_id"),
)
admin.site.register(Confirmation, list_display=("number", "sent_at"), search_fields=("number",))
