"""Decode the properties of an ordinary event in a third of py-amqp's time.

Anything else than texts, whole numbers and booleans is left to py-amqp. Encoding:
https://www.rabbitmq.com/resources/specs/amqp0-9-1.pdf, 4.2.5 and 4.2.6.
"""

from __future__ import annotations

import struct
from typing import Any, Final

#: Flags of properties that an event has, in their order in a content header.
_TEXTS_BEFORE: Final = ((0x8000, "content_type"), (0x4000, "content_encoding"))
_HEADERS: Final = 0x2000
_BYTES: Final = ((0x1000, "delivery_mode"), (0x0800, "priority"))
_TEXTS_AFTER: Final = ((0x0400, "correlation_id"), (0x0200, "reply_to"), (0x0080, "message_id"))
_OTHERS: Final = 0x0100 | 0x007F

_TEXT: Final = ord("S")
_BOOLEAN: Final = ord("t")
#: As py-amqp reads them.
_NUMBERS: Final = {
    ord("I"): struct.Struct(">i"),
    ord("l"): struct.Struct(">q"),
    ord("L"): struct.Struct(">q"),
}
_unpack_short: Final = struct.Struct(">H").unpack_from
_unpack_long: Final = struct.Struct(">I").unpack_from


def quick_properties(header: bytes, at: int) -> dict[str, Any] | None:
    """Decode the properties that begin at the byte *at* of a content header.

    Returns:
        what py-amqp's ``decode_properties_basic`` returns, or ``None`` if that is to decode them.
    """
    try:
        (flags,) = _unpack_short(header, at)
        if flags & _OTHERS:
            return None
        properties: dict[str, Any] = {}
        at += 2
        for flag, name in _TEXTS_BEFORE:
            if flags & flag:
                properties[name], at = _short_text(header, at)
        if flags & _HEADERS:
            end = at + 4 + _unpack_long(header, at)[0]
            headers = _table(header, at + 4, end)
            if headers is None:
                return None
            properties["application_headers"], at = headers, end
        for flag, name in _BYTES:
            if flags & flag:
                properties[name] = header[at]
                at += 1
        for flag, name in _TEXTS_AFTER:
            if flags & flag:
                properties[name], at = _short_text(header, at)
    except (IndexError, UnicodeDecodeError, struct.error):
        return None
    return properties if at == len(header) else None


def _table(header: bytes, at: int, end: int) -> dict[str, Any] | None:
    table: dict[str, Any] = {}
    while at < end:
        start = at + 1
        at = start + header[at]
        key = header[start:at].decode()
        kind = header[at]
        if kind == _TEXT:
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
