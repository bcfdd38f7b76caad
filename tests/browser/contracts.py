"""Contracts for the page Catalogue."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import Any, Literal
from uuid import UUID


def order_paid(
    order_id: int,
    total: Decimal,
    method: Literal["card", "invoice", "transfer"],
    customer: dict[str, Any],
    due: date | None = None,
) -> None:
    """A payment covers the order.

    It is published once per order, after the last partial payment.
    """


def invoice_issued(
    invoice: UUID, order_id: int, total: Decimal, currency: str = "EUR", **more: Any
) -> None:
    """An invoice has its number and was mailed."""
