"""Shelves, and what was promised from them."""

from __future__ import annotations

from django.contrib import admin

from .models import BackOrder, Product, Reservation

admin.site.register(Product, list_display=("sku", "name", "available"))
admin.site.register(
    Reservation, list_display=("order_number", "pieces"), search_fields=("order_number",)
)
admin.site.register(BackOrder, list_display=("order_number", "sku", "pieces"))
