"""Build the message of a new event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from django.core.serializers.json import DjangoJSONEncoder

from ..exceptions import InvalidEventError
from .headers import (
    EVENT_CAUSATION_ID,
    EVENT_CORRELATION_ID,
    EVENT_FORMAT,
    EVENT_ID,
    EVENT_NAME,
    EVENT_PUBLISHED_AT,
    EVENT_SERVICE,
    FORMAT,
    basic_properties,
)
from .text import (
    MAX_DEPTH,
    count_brackets,
    too_deep,
    utc_text,
)
from .types import Message

# -- publishing ---------------------------------------------------------------------------


# One for all: it keeps nothing between two calls.
_ENCODER: Final = DjangoJSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encode_payload(name: str, payload: Mapping[str, Any], args: Sequence[Any] = ()) -> bytes:
    """Write an event's payload as the body of a message.

    Values are written by Django's JSON encoder (ISO 8601, Decimal and UUID as strings).

    Args:
        args: values without a name, which a plain Celery publisher may have sent.

    Raises:
        InvalidEventError: the payload is no JSON.
    """
    try:
        body = _ENCODER.encode([list(args), payload, {}]).encode()
        if count_brackets(body) > MAX_DEPTH and too_deep(payload):
            raise ValueError(f"it is nested deeper than {MAX_DEPTH}")
        return body
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidEventError(
            f"the payload of event {name!r} cannot be written as JSON: {exc}; publish plain "
            f"values (text, numbers, booleans, None, lists, dicts, dates, Decimal, UUID)"
        ) from exc


def event_message(
    *,
    exchange: str,
    name: str,
    body: bytes,
    event_id: str,
    service: str,
    published_at: datetime,
    correlation_id: str | None = None,
    causation_id: str | None = None,
    headers: Mapping[str, Any] | None = None,
) -> Message:
    """Build the message of a new event."""
    ours: dict[str, Any] = {
        "lang": "py",
        "task": name,
        "id": event_id,
        "root_id": event_id,
        "retries": 0,
        "argsrepr": "()",
        "kwargsrepr": "{…}",
        "origin": service,
        EVENT_FORMAT: FORMAT,
        EVENT_ID: event_id,
        EVENT_NAME: name,
        EVENT_SERVICE: service,
        EVENT_PUBLISHED_AT: utc_text(published_at),
        EVENT_CORRELATION_ID: correlation_id or event_id,
    }
    if causation_id:
        ours[EVENT_CAUSATION_ID] = causation_id
    return Message(
        exchange=exchange,
        routing_key=name,
        body=body,
        headers={**(headers or {}), **ours},
        properties={**basic_properties(event_id), "correlation_id": event_id},
        event_id=event_id,
        name=name,
    )
