"""The shop's handlers."""

from __future__ import annotations

from typing import Any

from asgiref.sync import sync_to_async
from django.core.mail import EmailMessage

from example_project.releases import fixed

from .events import invoice_issued, order_created
from .models import Confirmation, Order


@order_created.handler(max_retries=3, dont_autoretry_for=[ValueError])
async def send_confirmation(
    number: str, customer: dict[str, Any], currency: str, total: str
) -> None:
    """Mail the customer. An invalid header does not improve, so a ValueError is not retried."""
    if await Confirmation.objects.filter(number=number).aexists():
        return  # delivered again: "at least once" includes twice
    name = customer["name"]
    if fixed():
        name = " ".join(name.split())  # a subject has one line
    mail = EmailMessage(
        subject=f"Your order {number}, {name}",
        body=f"Thank you for your order {number}: {total} {currency}.",
        to=[customer["email"]],
    )
    await sync_to_async(mail.send)()
    await Confirmation.objects.aget_or_create(number=number)


@invoice_issued.handler
def mark_invoiced(order_number: str, invoice_number: str) -> None:
    """Store the invoice's number; a repeat changes nothing."""
    if not Order.objects.filter(number=order_number).update(invoice_number=invoice_number):
        raise Order.DoesNotExist(f"invoice {invoice_number}: order {order_number} does not exist")
