"""Reserve the ordered products."""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.db.models import F

from django_amqp_events import handler
from example_project.releases import fixed

from .models import BackOrder, Product, Reservation


class OutOfStock(Exception):
    """A retry a few seconds later would not help, so there is none."""


@handler("shop.order.created", dont_autoretry_for=[OutOfStock])
def reserve_stock(number: str, lines: list[dict[str, Any]]) -> None:
    """Reserve all lines or none, in one transaction, once per order.

    In release 2, a missing product becomes a back-order.
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
            if not taken and fixed():
                BackOrder.objects.create(order_number=number, sku=line["sku"], pieces=quantity)
            elif not taken:
                raise OutOfStock(f"order {number}: {quantity} of {line['sku']} are not in stock")
