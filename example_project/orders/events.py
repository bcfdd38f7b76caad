"""The shop's events. Billing imports them too, so nothing here needs the shop's tables."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal, InvalidOperation
from typing import Any

from django_amqp_events import event

CURRENCIES = {"CHF", "DKK", "EUR", "GBP", "ILS", "JPY", "PLN", "SEK", "USD"}


@event("shop.order.created", search=["number", "customer.email", "lines.sku"])
def order_created(
    number: str,
    placed_at: str,
    customer: dict[str, Any],
    lines: list[dict[str, Any]],
    currency: str,
    total: Decimal | str,
) -> None:
    """An order was accepted. The publisher refuses an invalid one, before any handler sees it."""
    for name in ("name", "email", "country"):
        if not customer.get(name):
            raise ValueError(f"order {number}: the customer has no {name}")
    if currency not in CURRENCIES:
        raise ValueError(f"order {number}: the currency {currency!r} is not accepted")
    if datetime.fromisoformat(placed_at).tzinfo is None:
        raise ValueError(f"order {number}: placed_at has no time zone")
    if not lines:
        raise ValueError(f"order {number}: it has no lines")
    amount = _amount(number, "total", total)
    if amount < 0:
        raise ValueError(f"order {number}: the total {amount} is negative")
    parts = sum(line["quantity"] * _amount(number, line["sku"], line["price"]) for line in lines)
    if parts != amount:
        raise ValueError(f"order {number}: the lines add up to {parts}, not {amount}")


@event("shop.order.held", search=["number"])
def order_held(number: str, reason: str) -> None:
    """An order waits for a review."""


@event("billing.invoice.issued", search=["order_number", "invoice_number"])
def invoice_issued(order_number: str, invoice_number: str, currency: str, total: str) -> None:
    """Billing's event, declared here so that both services share the contract."""


def _amount(number: str, what: str, value: Decimal | str) -> Decimal:
    try:
        return Decimal(value)
    except (InvalidOperation, TypeError):
        raise ValueError(f"order {number}: {what} is {value!r}, not a decimal number") from None
