"""Decode the headers and properties of deliveries after py-amqp has read them.

py-amqp decodes a message's properties while it reads the socket. If it cannot (a time beyond the
year 9999, such as JavaScript's milliseconds; a message id that is not UTF-8; thousands of nested
tables), the error passes through Celery's event loop and ends the worker, and the next worker gets
the same message. So the properties are withheld from py-amqp as bytes, and decoded for each
delivery. Frames: https://www.rabbitmq.com/resources/specs/amqp0-9-1.pdf, 4.2.
"""

from __future__ import annotations

from typing import Any, Final

import amqp
from amqp.serialization import decode_properties_basic

from ..message.headers import EVENT_UNREADABLE
from ..message.text import MAX_DEPTH, too_deep
from ..message.types import Received
from .quick_properties import quick_properties

METHOD: Final = 1
HEADER: Final = 2
DELIVER: Final = b"\x00\x3c\x00\x3c"
#: Size of class, weight and body size, which come before the properties.
_PROPERTIES: Final = 12
_NO_PROPERTIES: Final = b"\x00\x00"


class HeaderReader:
    """Withholds the properties of one channel's deliveries from py-amqp; their bodies stay bytes.

    Args:
        channel: an open channel that only consumes.
    """

    def __init__(self, channel: amqp.Channel) -> None:
        channel.auto_decode = False
        connection = channel.connection
        self._channel = channel.channel_id
        self.header = b""
        self._read = connection.on_inbound_frame
        connection.on_inbound_frame = self._on_frame

    def received(self, queue: str, message: amqp.Message) -> Received:
        """Return the last delivery, which py-amqp passes on as *message*, as plain data."""
        properties, unreadable = self.properties()
        headers = properties.pop("application_headers", None)
        info = message.delivery_info
        return Received(
            queue=queue,
            exchange=info.get("exchange", ""),
            routing_key=info.get("routing_key", ""),
            # A message without a body has an empty string.
            body=bytes(message.body or b""),
            headers=headers if isinstance(headers, dict) else {},
            properties=properties,
            redelivered=bool(info.get("redelivered")),
            unreadable=unreadable,
        )

    def properties(self) -> tuple[dict[str, Any], str]:
        """Decode the properties of the last delivery.

        Returns:
            the properties and ``""``; if they cannot be decoded, their bytes as the header
            ``event-unreadable``, and the reason.
        """
        try:
            if (quick := quick_properties(self.header, _PROPERTIES)) is not None:
                return quick, ""
            found: dict[str, Any] = decode_properties_basic(self.header, _PROPERTIES)[0]
            if not too_deep(found.get("application_headers") or {}):
                return found, ""
            why = f"they are nested deeper than {MAX_DEPTH}"
        except Exception as exc:  # noqa: BLE001 - a publisher decides what py-amqp raises
            why = f"{type(exc).__name__}: {exc}"
        raw = bytes(self.header[_PROPERTIES:])
        return (
            {"application_headers": {EVENT_UNREADABLE: raw}},
            f"the headers and properties cannot be read: {why}",
        )

    def _on_frame(self, frame: tuple[int, int, bytes]) -> Any:
        kind, channel, payload = frame
        if channel == self._channel:
            if kind == HEADER:
                self.header = payload
                frame = kind, channel, payload[:_PROPERTIES] + _NO_PROPERTIES
            elif kind == METHOD and payload[:4] == DELIVER:
                frame = kind, channel, _readable(payload)
        return self._read(frame)


def _readable(deliver: bytes) -> bytes:
    """Return a Basic.Deliver whose exchange and routing key are valid UTF-8."""
    # Consumer tag, delivery tag (8 bytes), redelivered (1 byte), exchange, routing key.
    start = 4 + 1 + deliver[4] + 8 + 1
    middle = start + 1 + deliver[start]
    exchange, key = deliver[start + 1 : middle], deliver[middle + 1 :]
    try:
        exchange.decode("utf-8", "surrogatepass")
        key.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        names = (_text(exchange), _text(key))
        return deliver[:start] + b"".join(bytes([len(name)]) + name for name in names)
    return deliver


def _text(name: bytes) -> bytes:
    text = name.decode("utf-8", "backslashreplace").encode()[:255]
    return text.decode("utf-8", "ignore").encode()
