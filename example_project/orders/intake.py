"""Accepting orders."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Any

from django.db import transaction

from .events import order_created
from .models import Order

#: Above this a person looks at the order; in its currency, which is close enough here.
HELD_ABOVE = Decimal(20_000)


def place(entry: dict[str, Any]) -> Order:
    """Save an order and publish `shop.order.created`: both, or neither.

    Raises:
        ValueError: the contract refuses the entry.
        IntegrityError: there is an order of that number already.
        PublishError: the order is saved, but its event was not confirmed.
    """
    with transaction.atomic():
        # Validated here, published when the transaction has committed: if the number is taken,
        # the insert fails and no event leaves.
        event_id = order_created.publish(**entry)
        return Order.objects.create(
            number=entry["number"],
            event_id=event_id,
            placed_at=datetime.fromisoformat(entry["placed_at"]),
            customer=entry["customer"],
            lines=entry["lines"],
            currency=entry["currency"],
            total=Decimal(entry["total"]),
        )
