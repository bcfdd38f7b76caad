"""Billing's handlers of an order: three, each with its own retries."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from celery import Task
from django.db import transaction

from example_project.orders.events import invoice_issued, order_created

from .models import Invoice, Revenue, SaleReport
from .tasks import render_document
from .tax import TaxError, rate, report_sale

CENT = Decimal("0.01")


@order_created.handler(dont_autoretry_for=[TaxError])
def issue_invoice(number: str, customer: dict[str, Any], currency: str, total: str) -> None:
    """Write the invoice and publish `billing.invoice.issued`, in one transaction."""
    percentage = rate(customer["country"], customer.get("vat_id"))
    gross = Decimal(total)
    net = (gross / (1 + percentage)).quantize(CENT)
    with transaction.atomic():
        invoice, _ = Invoice.objects.get_or_create(
            order_number=number,
            defaults={
                "number": number.replace("S", "R", 1),
                "customer": customer,
                "currency": currency,
                "net": net,
                "tax": gross - net,
                "total": gross,
            },
        )
        # Even if the invoice exists: an earlier attempt may have died between its commit and the
        # confirm. The event id depends on the order alone, so consumers recognise a repeat.
        event_id = str(uuid5(NAMESPACE_URL, f"invoice:{number}"))
        invoice_issued.using(event_id=event_id).publish(
            order_number=number,
            invoice_number=invoice.number,
            currency=currency,
            total=str(gross),
        )
        if not invoice.document:
            transaction.on_commit(lambda: render_document.delay(invoice.pk))


@order_created.handler
def book_revenue(number: str, placed_at: str, currency: str, total: str) -> None:
    """Book the amount on the day of the order, once per order even if delivered twice."""
    Revenue.objects.get_or_create(
        order_number=number,
        defaults={
            "day": datetime.fromisoformat(placed_at).date(),
            "currency": currency,
            "amount": Decimal(total),
        },
    )


@order_created.handler(name="invoices.register_sale")
class RegisterSale(Task):
    """Report the sale to the tax office; retries after 1, 2 and 4 seconds."""

    def run(self, number: str, customer: dict[str, Any]) -> None:
        """Report it once; `self.request` is Celery's request, with the number of retries."""
        if SaleReport.objects.filter(order_number=number).exists():
            return
        receipt = report_sale(number, customer["country"], attempt=self.request.retries + 1)
        SaleReport.objects.get_or_create(order_number=number, defaults={"receipt": receipt})
