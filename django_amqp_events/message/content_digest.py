"""Tell equal messages apart from others by all that they consist of."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from hashlib import sha256
from typing import Final

from .headers import EVENT_COPY, EVENT_UNREADABLE, is_broker_header
from .types import Message, Received, derived_id

#: Entries of a header table that count deliveries: a short name, a type, a number.
_COUNT: Final = re.compile(
    rb"\x10x-(?:delivery|acquired)-count(?:[lLT].{8}|[iI].{4}|[sUu].{2}|[bB].)", re.DOTALL
)


def content_digest(message: Received | Message) -> str:
    """Return a digest of all that a message consists of, the same at each delivery."""
    lasting = {
        key: value
        for key, value in message.headers.items()
        if key != EVENT_COPY and not is_broker_header(key)
    }
    raw = lasting.get(EVENT_UNREADABLE)
    if isinstance(raw, bytes):
        lasting[EVENT_UNREADABLE] = _uncounted(raw)
    properties = {
        key: value
        for key, value in message.properties.items()
        if key not in ("headers", "application_headers")
    }
    body = sha256(message.body).hexdigest()
    parts = (message.exchange, message.routing_key, body, _lasting(lasting), _lasting(properties))
    return derived_id(*parts).hex


def _lasting(value: object) -> str:
    """Return a table or its value as text; RabbitMQ's counts change the order of a table."""
    if isinstance(value, Mapping):
        items = sorted((str(key), _lasting(item)) for key, item in value.items())
        return "{" + ", ".join(f"{key!r}: {item}" for key, item in items) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_lasting, value)) + "]"
    return repr(value)


def _uncounted(raw: bytes) -> tuple[bytes, ...]:
    """Split encoded properties, and drop delivery counts and the header table's length and order.

    Properties: https://www.rabbitmq.com/resources/specs/amqp0-9-1.pdf, 4.2.6.1.
    """
    try:
        (flags,) = struct.unpack_from(">H", raw)
        at = 2
        for flag in (0x8000, 0x4000):  # content type and encoding: short strings
            at += 1 + raw[at] if flags & flag else 0
        table = b""
        end = at
        if flags & 0x2000:
            (length,) = struct.unpack_from(">I", raw, at)
            end = at + 4 + length
            table = _COUNT.sub(b"", raw[at + 4 : end])
    except (struct.error, IndexError):
        return (raw,)
    # RabbitMQ adds a table for its counts to a message without headers.
    return (struct.pack(">H", flags & ~0x2000), raw[2:at], bytes(sorted(table)), raw[end:])
