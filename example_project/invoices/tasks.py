"""Ordinary Celery tasks, which run beside the handlers in the same worker."""

from __future__ import annotations

from celery import shared_task

from .models import Invoice


@shared_task
def render_document(invoice_id: int) -> None:
    """Render an invoice. In production this is slow, so no handler waits for it."""
    invoice = Invoice.objects.get(pk=invoice_id)
    invoice.document = (
        f"INVOICE {invoice.number}\n{invoice.customer['name']}\n"
        f"net {invoice.net} {invoice.currency}\nVAT {invoice.tax} {invoice.currency}\n"
        f"total {invoice.total} {invoice.currency}\n"
    )
    invoice.save(update_fields=["document"])
