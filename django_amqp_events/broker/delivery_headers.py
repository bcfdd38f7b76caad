"""Deliveries whose headers and properties py-amqp cannot read.

py-amqp decodes a message's properties while it reads the socket. What it cannot decode (a header
with a time beyond the year 9999, which is what JavaScript's milliseconds are; a message id that is
no UTF-8; thousands of nested tables) raises there, through Celery's event loop, and the worker
ends: the next one gets the same message. So the properties are kept back as bytes here and decoded
where one delivery is in hand. Frames: https://www.rabbitmq.com/resources/specs/amqp0-9-1.pdf, 4.2.
"""

from __future__ import annotations

from typing import Any, Final

from amqp import Channel
from amqp.serialization import decode_properties_basic

from ..message.headers import EVENT_UNREADABLE
from ..message.text import MAX_DEPTH, too_deep

METHOD: Final = 1
HEADER: Final = 2
DELIVER: Final = b"\x00\x3c\x00\x3c"
#: Class, weight and body size stand before the properties.
_PROPERTIES: Final = 12
_NO_PROPERTIES: Final = b"\x00\x00"


class HeaderReader:
    """Reads the frames of one channel before py-amqp does.

    Args:
        channel: an open channel that does nothing but consume.
    """

    def __init__(self, channel: Channel) -> None:
        connection = channel.connection
        self._channel = channel.channel_id
        self.header = b""
        self._read = connection.on_inbound_frame
        connection.on_inbound_frame = self._on_frame

    def properties(self) -> tuple[dict[str, Any], str]:
        """Decode the properties of the delivery that has just come.

        Returns:
            the properties, and ``""``; where they cannot be read only their bytes, as the header
            ``event-unreadable``, and a sentence that says why.
        """
        try:
            found: dict[str, Any] = decode_properties_basic(self.header, _PROPERTIES)[0]
            if not too_deep(found.get("application_headers") or {}):
                return found, ""
            why = f"they are nested deeper than {MAX_DEPTH}"
        except Exception as exc:  # noqa: BLE001 - whatever a publisher makes py-amqp raise
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
    """Return a Basic.Deliver with exchange and routing key in UTF-8, whatever was published."""
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
