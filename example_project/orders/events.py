"""The events of the shop. Billing imports them too, so nothing here needs the shop's tables."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal, InvalidOperation
from typing import Any

from django_amqp_events import event

CURRENCIES = {"CHF", "DKK", "EUR", "GBP", "ILS", "JPY", "PLN", "SEK", "USD"}


@event("shop.order.created")
def order_created(
    number: str,
    placed_at: str,
    customer: dict[str, Any],
    lines: list[dict[str, Any]],
    currency: str,
    total: Decimal | str,
) -> None:
    """An order was accepted. What does not fit is refused in the publisher, not in a handler."""
    for name in ("name", "email", "country"):
        if not customer.get(name):
            raise ValueError(f"order {number}: the customer has no {name}")
    if currency not in CURRENCIES:
        raise ValueError(f"order {number}: {currency!r} is no currency of ours")
    if datetime.fromisoformat(placed_at).tzinfo is None:
        raise ValueError(f"order {number}: placed_at has no time zone")
    if not lines:
        raise ValueError(f"order {number}: there is nothing in it")
    amount = _amount(number, "total", total)
    if amount < 0:
        raise ValueError(f"order {number}: the total {amount} is negative")
    parts = sum(line["quantity"] * _amount(number, line["sku"], line["price"]) for line in lines)
    if parts != amount:
        raise ValueError(f"order {number}: the lines make {parts}, not {amount}")


@event("shop.order.held")
def order_held(number: str, reason: str) -> None:
    """An order waits for a person to look at it."""


@event("billing.invoice.issued")
def invoice_issued(order_number: str, invoice_number: str, currency: str, total: str) -> None:
    """Billing's event; declared here so that both services know the contract."""


def _amount(number: str, what: str, value: Decimal | str) -> Decimal:
    try:
        return Decimal(value)
    except (InvalidOperation, TypeError):
        raise ValueError(f"order {number}: {what} is {value!r}, no decimal number") from None
