"""Deliveries whose headers and properties py-amqp cannot read.

py-amqp decodes a message's properties while it reads the socket. What it cannot decode (a header
with a time beyond the year 9999, which is what JavaScript's milliseconds are; a message id that is
no UTF-8; thousands of nested tables) raises there, through Celery's event loop, and the worker
ends: the next one gets the same message. So the properties are kept back as bytes here and decoded
where one delivery is in hand. Frames: https://www.rabbitmq.com/resources/specs/amqp0-9-1.pdf, 4.2.
"""

from __future__ import annotations

import struct
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
#: expiration, timestamp, type, user_id, app_id, cluster_id, and what no message has.
_UNUSUAL: Final = 0x0100 | 0x007F
_LONG_TEXT: Final = ord("S")
_BOOLEAN: Final = ord("t")
#: Whole numbers, as py-amqp reads them.
_NUMBERS: Final = {
    ord("I"): struct.Struct(">i"),
    ord("l"): struct.Struct(">q"),
    ord("L"): struct.Struct(">q"),
}
_unpack_short: Final = struct.Struct(">H").unpack_from
_unpack_long: Final = struct.Struct(">I").unpack_from
#: Short texts behind the priority, in their order.
_SHORT_TEXTS: Final = ((0x0400, "correlation_id"), (0x0200, "reply_to"), (0x0080, "message_id"))


class HeaderReader:
    """Reads the frames of one channel before py-amqp does.

    Args:
        channel: an open channel that does nothing but consume.
        quick: try :func:`quick_properties` first.
    """

    def __init__(self, channel: Channel, *, quick: bool = False) -> None:
        connection = channel.connection
        self._channel = channel.channel_id
        self.header = b""
        self._quick = quick
        self._read = connection.on_inbound_frame
        connection.on_inbound_frame = self._on_frame

    def properties(self) -> tuple[dict[str, Any], str]:
        """Decode the properties of the delivery that has just come.

        Returns:
            the properties, and ``""``; where they cannot be read only their bytes, as the header
            ``event-unreadable``, and a sentence that says why.
        """
        try:
            if self._quick and (quick := quick_properties(self.header)) is not None:
                return quick, ""
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


def quick_properties(header: bytes) -> dict[str, Any] | None:
    """Decode a content header as those of events nearly always are, in a third of the time.

    Returns:
        exactly what py-amqp's ``decode_properties_basic`` does; ``None`` where there is anything
        but texts, whole numbers and booleans in the headers, or a property that no event has.
    """
    try:
        (flags,) = _unpack_short(header, _PROPERTIES)
        if flags & _UNUSUAL:
            return None
        found: dict[str, Any] = {}
        at = _PROPERTIES + 2
        if flags & 0x8000:
            found["content_type"], at = _short_text(header, at)
        if flags & 0x4000:
            found["content_encoding"], at = _short_text(header, at)
        if flags & 0x2000:
            end = at + 4 + _unpack_long(header, at)[0]
            headers = _quick_table(header, at + 4, end)
            if headers is None:
                return None
            found["application_headers"], at = headers, end
        if flags & 0x1000:
            found["delivery_mode"] = header[at]
            at += 1
        if flags & 0x0800:
            found["priority"] = header[at]
            at += 1
        for flag, name in _SHORT_TEXTS:
            if flags & flag:
                found[name], at = _short_text(header, at)
    except (IndexError, UnicodeDecodeError, struct.error):
        return None
    return found if at == len(header) else None


def _quick_table(header: bytes, at: int, end: int) -> dict[str, Any] | None:
    table: dict[str, Any] = {}
    while at < end:
        start = at + 1
        at = start + header[at]
        key = header[start:at].decode()
        kind = header[at]
        if kind == _LONG_TEXT:
            start = at + 5
            at = start + _unpack_long(header, at + 1)[0]
            if at > end:
                return None
            table[key] = header[start:at].decode()
        elif (number := _NUMBERS.get(kind)) is not None:
            (table[key],) = number.unpack_from(header, at + 1)
            at += 1 + number.size
        elif kind == _BOOLEAN:
            table[key] = header[at + 1] != 0
            at += 2
        else:
            return None
    return table if at == end else None


def _short_text(header: bytes, at: int) -> tuple[str, int]:
    start = at + 1
    end = start + header[at]
    if end > len(header):
        raise IndexError
    return header[start:end].decode(), end


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
