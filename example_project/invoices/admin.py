"""Billing's tables as the admin shows them."""

from __future__ import annotations

from django.contrib import admin

from .models import Invoice, SaleReport

admin.site.register(
    Invoice,
    list_display=("number", "order_number", "net", "tax", "total", "currency"),
    search_fields=("number", "order_number"),
)
admin.site.register(
    SaleReport, list_display=("order_number", "receipt"), search_fields=("order_number",)
)
