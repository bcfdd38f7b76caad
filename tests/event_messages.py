"""Messages of events as a service publishes them, and their deliveries."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from django_amqp_events.message import encoding
from django_amqp_events.message.types import Message, Received


def published(
    name: str = "shop.order.created",
    payload: Mapping[str, Any] | None = None,
    *,
    event_id: str = "",
    service: str = "shop",
    at: datetime | None = None,
    body: bytes | None = None,
    **more: Any,
) -> Message:
    """Return the message of an event; *body* is used instead of a payload."""
    return encoding.event_message(
        exchange="events",
        name=name,
        body=encoding.encode_payload(name, payload or {}) if body is None else body,
        event_id=event_id or str(uuid4()),
        service=service,
        published_at=at or datetime.now(UTC),
        **more,
    )


def delivered(message: Message, queue: str, **changes: Any) -> Received:
    """Return a message as a queue delivers it."""
    return Received(
        **{
            "queue": queue,
            "exchange": message.exchange,
            "routing_key": message.routing_key,
            "body": message.body,
            "headers": message.headers,
            "properties": message.properties,
            **changes,
        }
    )


def taken(message: Any, queue: str) -> Received:
    """Return the delivery of a message that a test took off a queue with py-amqp."""
    properties = dict(message.properties)
    return Received(
        queue=queue,
        exchange=message.delivery_info["exchange"],
        routing_key=message.delivery_info["routing_key"],
        # py-amqp's empty body is a text.
        body=message.body or b"",
        headers=properties.pop("application_headers", {}),
        properties=properties,
    )
