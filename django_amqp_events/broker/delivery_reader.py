"""Read the deliveries of a channel in place of py-amqp.

py-amqp decodes a delivery while it reads the socket. If it cannot (a time beyond the year 9999,
such as JavaScript's milliseconds; a message id that is not UTF-8; thousands of nested tables), the
error passes through Celery's event loop and ends the worker, and the next worker gets the same
message. Here a delivery is its bytes, and :func:`decode` leaves out what cannot be decoded. Frames:
https://www.rabbitmq.com/resources/specs/amqp0-9-1.pdf, 4.2.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from struct import Struct, pack, unpack_from
from typing import Any, Final

import amqp
from amqp.exceptions import UnexpectedFrame
from amqp.serialization import decode_properties_basic, loads

from ..message.headers import EVENT_UNREADABLE
from ..message.text import MAX_DEPTH, routing_key_text, too_deep
from ..message.types import Delivered, Received

METHOD: Final = 1
HEADER: Final = 2
BODY: Final = 3
DELIVER: Final = b"\x00\x3c\x00\x3c"
#: Size of class and weight, which come before the size of the body, and of all three.
_BODY_SIZE: Final = 4
_PROPERTIES: Final = 12
_unpack_size: Final = Struct(">Q").unpack_from
#: Delivery tag and the bit ``redelivered``.
_TAG: Final = Struct(">QB")

#: The properties in the order of their flags, and the bytes of a table's values by their type.
_NAMES: Final = (
    "content_type", "content_encoding", "application_headers", "delivery_mode", "priority",
    "correlation_id", "reply_to", "expiration", "message_id", "timestamp", "type", "user_id",
    "app_id", "cluster_id",
)  # fmt: skip
_SIZES: Final = {
    "V": 0, "t": 1, "b": 1, "B": 1, "s": 2, "U": 2, "u": 2, "I": 4, "i": 4, "f": 4, "D": 5, "L": 8,
    "l": 8, "d": 8, "T": 8,
}  # fmt: skip

#: Called with a delivery tag and the delivery.
OnDelivery = Callable[[int, Delivered], None]


class DeliveryReader:
    """Reads the deliveries of one channel; other frames go to py-amqp.

    Args:
        channel: an open channel that only consumes.
        requeue: rejects a delivery by its tag, since its consumer was cancelled.

    Attributes:
        frames: how many frames of deliveries it has read.
    """

    def __init__(
        self, channel: amqp.Channel, requeue: Callable[[int], object] | None = None
    ) -> None:
        self._channel = channel
        self._requeue = requeue or partial(channel.basic_reject, requeue=True)
        self._connection = channel.connection
        # The delivery that is arriving, and the missing bytes of its body.
        self._deliver = self._header = b""
        self._body: list[bytes] = []
        self._missing = 0
        self.frames = 0
        self._others = self._connection.on_inbound_frame
        self._connection.on_inbound_frame = self._on_frame

    def consume(self, queue: str, on_delivery: OnDelivery, **options: Any) -> str:
        """Consume a queue, with the options of py-amqp's ``basic_consume``.

        Returns:
            the consumer tag.
        """

        def callback(number: int, *fields: Any) -> None:
            on_delivery(number, Delivered(queue, *fields))

        tag: str = self._channel.basic_consume(queue, callback=callback, **options)
        return tag

    def _on_frame(self, frame: tuple[int, int, bytes]) -> Any:
        """Take a frame in place of py-amqp's ``Connection.on_inbound_frame``.

        Returns:
            whether a method is complete, with its content.

        Raises:
            amqp.exceptions.UnexpectedFrame: the content of a delivery is incomplete.
        """
        kind, channel, payload = frame
        # py-amqp sets the number to None when the channel is closed.
        if channel != self._channel.channel_id:
            return self._others(frame)
        if not self._deliver:
            if kind != METHOD or not payload.startswith(DELIVER):
                return self._others(frame)
            self._deliver = payload
        elif kind == HEADER and not self._header:
            self._header = payload
            (self._missing,) = _unpack_size(payload, _BODY_SIZE)
        elif kind == BODY and self._header:
            self._body.append(payload)
            self._missing -= len(payload)
        else:
            raise UnexpectedFrame(f"a frame of type {kind} came within a delivery")
        # py-amqp counts frames here, for its heartbeats.
        self._connection.bytes_recv += 1
        self.frames += 1
        if not self._header or self._missing > 0:
            return False
        self._complete()
        return True

    def _complete(self) -> None:
        deliver, header, body = self._deliver, self._header, b"".join(self._body)
        # Before the callback, which may read from this connection.
        self._deliver = self._header = b""
        self._body.clear()
        channel = self._channel
        if channel.is_closing:
            return  # RabbitMQ delivers it again
        # After class and method, each name follows its length of one byte.
        start = 5
        end = start + deliver[4]
        number, redelivered = _TAG.unpack_from(deliver, end)
        callback = channel.callbacks.get(deliver[start:end].decode())
        if callback is None:
            self._requeue(number)
            return
        start = end + _TAG.size + 1
        end = start + deliver[start - 1]
        exchange, key = _text(deliver[start:end]), _text(deliver[end + 1 :])
        callback(number, exchange, key, bool(redelivered), header, body)


def decode(delivered: Delivered) -> Received:
    """Return a delivery with its headers and properties; it never raises."""
    return Received(
        queue=delivered.queue,
        exchange=delivered.exchange,
        routing_key=delivered.routing_key,
        redelivered=delivered.redelivered,
        body=delivered.body,
        **_content(delivered.header),
    )


def _content(header: bytes) -> dict[str, Any]:
    """Return headers and properties, without those that cannot be decoded.

    If it is not clear where they end, return their bytes and the reason.
    """
    try:
        properties = decode_properties_basic(header, _PROPERTIES)[0]
        if too_deep(properties.get("application_headers") or {}):
            raise ValueError(f"they are nested deeper than {MAX_DEPTH}")
    except Exception:  # noqa: BLE001 - a publisher decides what py-amqp raises
        try:
            properties = _decode_each(header)
        except (struct.error, LookupError) as exc:
            why = f"the headers and properties cannot be read: {type(exc).__name__}: {exc}"
            raw = {EVENT_UNREADABLE: header[_PROPERTIES:]}
            return {"headers": raw, "properties": {}, "unreadable": why}
    headers = properties.pop("application_headers", None)
    return {"headers": headers if isinstance(headers, dict) else {}, "properties": properties}


def _decode_each(header: bytes) -> dict[str, Any]:
    """Return the properties that can be decoded, each by itself, and so each header.

    Raises:
        LookupError, struct.error: the bytes end too early, or a value has an unknown type.
    """
    properties: dict[str, Any] = {}
    flags, at = unpack_from(">H", header, _PROPERTIES)[0], _PROPERTIES + 2
    for place, name in enumerate(_NAMES):
        flag = 0x8000 >> place
        if not flags & flag:
            continue
        kind = {"application_headers": "F", "timestamp": "T"}.get(name, "s")
        if name in ("delivery_mode", "priority"):
            kind = "B"
        end = at + (1 + header[at] if kind == "s" else _size(kind, header, at))
        if name == "application_headers":
            properties[name] = _headers(header, at + 4, end)
        else:
            with suppress(Exception):
                alone = b"".join((pack(">H", flag), header[at:end]))
                properties |= decode_properties_basic(alone, 0)[0]
        at = end
    return properties


def _headers(raw: bytes, at: int, end: int) -> dict[str, Any]:
    """Return the entries of a table between two places that can be decoded."""
    found: dict[str, Any] = {}
    while at < end:
        value = at + 1 + raw[at]
        after = value + 1 + _size(chr(raw[value]), raw, value + 1)
        with suppress(Exception):
            entry = loads("F", pack(">I", after - at) + raw[at:after], 0)[0][0]
            if not too_deep(entry):
                found |= entry
        at = after
    return found


def _size(kind: str, raw: bytes, at: int) -> int:
    """Return the bytes of a table's value, by RabbitMQ's letters (AMQP 0-9-1 errata, 3)."""
    if kind in "SxFA":
        return int(4 + unpack_from(">I", raw, at)[0])
    return _SIZES[kind]


def _text(name: bytes) -> str:
    """Return the name of an exchange or a routing key; a publisher may choose any bytes."""
    try:
        return name.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return routing_key_text(name.decode("utf-8", "backslashreplace"))
