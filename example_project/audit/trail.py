"""The audit trail of orders. `AMQP_EVENTS` of the shop makes this a handler."""

from __future__ import annotations

from typing import Any

from .models import Entry


def record(self: Any, number: str) -> None:
    """Write an entry for any event whose name begins with `shop.order.`."""
    event = self.event
    Entry.objects.get_or_create(
        event_id=event.id,
        defaults={
            "event_name": event.name,
            "published_at": event.published_at,
            "subject": number,
        },
    )
