"""Reserving what was ordered."""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.db.models import F

from django_amqp_events import handler
from example_project.releases import mended

from .models import BackOrder, Product, Reservation


class OutOfStock(Exception):
    """Waiting a few seconds does not fill the shelves, so this is never retried."""


@handler("shop.order.created", dont_autoretry_for=[OutOfStock])
def reserve_stock(number: str, lines: list[dict[str, Any]]) -> None:
    """Take every line from the shelves, or none: one transaction, once per order.

    In release 2 what is not there is noted for the buyers instead.
    """
    with transaction.atomic():
        _, new = Reservation.objects.get_or_create(
            order_number=number,
            defaults={"pieces": sum(line["quantity"] for line in lines)},
        )
        if not new:
            return
        for line in lines:
            quantity = line["quantity"]
            taken = Product.objects.filter(sku=line["sku"], available__gte=quantity).update(
                available=F("available") - quantity
            )
            if not taken and mended():
                BackOrder.objects.create(order_number=number, sku=line["sku"], pieces=quantity)
            elif not taken:
                raise OutOfStock(f"order {number}: {quantity} of {line['sku']} are not there")
