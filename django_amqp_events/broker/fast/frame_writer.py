"""Messages as the bytes of their frames, for the fast path ``frames``.

The same bytes as py-amqp's, made with less work: what is the same in all messages to one exchange
and key is made once, and texts and numbers are written without a look at what else AMQP could
have. Whatever is not plain (another type, another property, a message of several frames, anything
that is refused) is left to py-amqp, which writes it or says what is wrong with it. Frames:
https://www.rabbitmq.com/resources/specs/amqp0-9-1.pdf, 4.2. Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct, pack
from typing import Any, Final

from amqp.serialization import dumps
from amqp.spec import Basic

from ...message.types import Message

_METHOD, _HEADER, _BODY, _END = 1, 2, 3, b"\xce"
_FRAME: Final = Struct(">BHI").pack
#: The frame's head, class, weight and the size of the body.
_HEADER_FRAME: Final = Struct(">BHIHHQ").pack
_LENGTH: Final = Struct(">I").pack
_INTEGER: Final = Struct(">ci").pack
_LONG: Final = Struct(">cq").pack
_DOUBLE: Final = Struct(">cd").pack
#: py-amqp's FRAME_OVERHEAD: a message that may be longer than a frame is its business.
_OVERHEAD: Final = 40
#: Texts that are remembered at most, and their bytes: publishers may make them up.
_REMEMBERED: Final = 1024
_SHORT: Final = 260

#: The properties that messages of ours have, in the order of AMQP: name and flag.
_CONTENT_TYPE, _CONTENT_ENCODING, _HEADERS = 0x8000, 0x4000, 0x2000
_DELIVERY_MODE, _CORRELATION_ID, _MESSAGE_ID = 0x1000, 0x0400, 0x0080
_PLAIN: Final = frozenset(
    {"content_type", "content_encoding", "delivery_mode", "correlation_id", "message_id"}
)

# Texts as they are written, because most come again: names, the service, an id in six places.
_shorts: dict[str, bytes] = {}
_longs: dict[str, bytes] = {}


class UnsupportedMessageError(Exception):
    """The message has to be written by py-amqp."""


def header_table(headers: Mapping[str, Any]) -> bytes:
    """Write headers as AMQP's table.

    Raises:
        NotPlainError: some name or value is not plain.
    """
    parts: list[bytes] = []
    add = parts.append
    for key, value in headers.items():
        add(_shorts.get(key) or _short(key))
        kind = type(value)
        if kind is str:
            add(_longs.get(value) or _long(value))
        elif kind is int:
            if -0x80000000 < value < 0x80000000:
                add(_INTEGER(b"I", value))
            elif -(2**63) <= value < 2**63:
                add(_LONG(b"L", value))
            else:
                raise UnsupportedMessageError
        elif kind is bool:
            add(b"t\x01" if value else b"t\x00")
        elif kind is float:
            add(_DOUBLE(b"d", value))
        else:
            raise UnsupportedMessageError
    table = b"".join(parts)
    return _LENGTH(len(table)) + table


def _long(text: str) -> bytes:
    """Write a header's value that is text."""
    raw = text.encode("utf-8", "surrogatepass")
    return _remembered(_longs, text, b"S" + _LENGTH(len(raw)) + raw)


def _short(text: Any) -> bytes:
    """Write AMQP's short string."""
    if type(text) is not str:
        raise UnsupportedMessageError
    raw = text.encode("utf-8", "surrogatepass")
    if len(raw) > 255:
        raise UnsupportedMessageError
    return _remembered(_shorts, text, bytes((len(raw),)) + raw)


def _remembered(known: dict[str, bytes], text: str, written: bytes) -> bytes:
    if len(written) <= _SHORT:
        if len(known) >= _REMEMBERED:
            known.clear()
        known[text] = written
    return written


def properties(message: Message) -> bytes:
    """Write flags and values of a message's properties, headers among them.

    Raises:
        NotPlainError: some of them are not plain.
    """
    given = message.properties
    if not _PLAIN.issuperset(given):
        raise UnsupportedMessageError
    flags = _HEADERS
    before = after = b""
    if (text := given.get("content_type")) is not None:
        flags |= _CONTENT_TYPE
        before = _shorts.get(text) or _short(text)
    if (text := given.get("content_encoding")) is not None:
        flags |= _CONTENT_ENCODING
        before += _shorts.get(text) or _short(text)
    if (mode := given.get("delivery_mode")) is not None:
        if type(mode) is not int or not 0 <= mode < 256:
            raise UnsupportedMessageError
        flags |= _DELIVERY_MODE
        after = bytes((mode,))
    if (text := given.get("correlation_id")) is not None:
        flags |= _CORRELATION_ID
        after += _shorts.get(text) or _short(text)
    if (text := given.get("message_id")) is not None:
        flags |= _MESSAGE_ID
        after += _shorts.get(text) or _short(text)
    return b"".join((pack(">H", flags), before, header_table(message.headers), after))


class FrameWriter:
    """Writes messages for one channel.

    Args:
        channel: the channel's number.
        frame_max: bytes of a frame at most, as agreed on with the broker.
    """

    def __init__(self, channel: int, frame_max: int) -> None:
        self._channel = channel
        self._largest = frame_max - 8
        self._methods: dict[tuple[str, str, bool], bytes] = {}

    def frames(self, message: Message, *, mandatory: bool) -> bytes | None:
        """Write the frames of a publish; ``None`` where they are left to py-amqp."""
        body = message.body
        if type(body) is not bytes:
            return None
        try:
            way = (message.exchange, message.routing_key, mandatory)
            method = self._methods.get(way) or self._method(way)
            content = properties(message)
        except (UnsupportedMessageError, TypeError):
            return None
        size, length = len(content), len(body)
        # The method's frame is a little longer than its arguments, which py-amqp counts.
        if len(method) + size + length + _OVERHEAD > self._largest:
            return None
        header = _HEADER_FRAME(_HEADER, self._channel, 12 + size, Basic.CLASS_ID, 0, length)
        if not length:
            return b"".join((method, header, content, _END))
        return b"".join(
            (
                method, header, content, _END, _FRAME(_BODY, self._channel, length), body, _END
            )
        )  # fmt: skip

    def _method(self, way: tuple[str, str, bool]) -> bytes:
        exchange, routing_key, mandatory = way
        _short(exchange), _short(routing_key)  # else py-amqp says what is wrong with them
        arguments = dumps("Bssbb", (0, exchange, routing_key, mandatory, False))
        payload = pack(">HH", *Basic.Publish) + arguments
        method: bytes = _FRAME(_METHOD, self._channel, len(payload)) + payload + _END
        if len(self._methods) >= _REMEMBERED:
            self._methods.clear()
        self._methods[way] = method
        return method
