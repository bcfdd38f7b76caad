"""Encode messages as the frames of ``basic.publish``.

The bytes are those of py-amqp's ``Channel.basic_publish``, which can write only one message at a
time. Frames: https://www.rabbitmq.com/resources/specs/amqp0-9-1.pdf, 4.2.
"""

from __future__ import annotations

from struct import pack
from typing import Final

import amqp
from amqp.serialization import dumps
from amqp.spec import Basic

from ..message.fitting import fitted
from ..message.types import Message

_METHOD, _HEADER, _BODY, _END = 1, 2, 3, b"\xce"
#: Bytes of a frame beside its payload.
_OVERHEAD: Final = 8
#: Room for the frame and the fixed part of a content header.
HEADER_OVERHEAD: Final = 64
#: Name, type and flag of each property, in the order of AMQP.
_PROPERTIES: Final = tuple(
    (name, kind, 0x8000 >> position)
    for position, (name, kind) in enumerate(amqp.Message.PROPERTIES)
)


class HeadersTooLong(ValueError):
    """The headers of a message take *size* bytes, and its frame has *room* for them."""

    def __init__(self, *, size: int, room: int) -> None:
        super().__init__(f"its headers take {size} bytes, and RabbitMQ's frame_max leaves {room}")
        self.size, self.room = size, room


def publish_frames(message: Message, *, channel: int, frame_max: int, mandatory: bool) -> bytes:
    """Return the frames that publish a message, whose headers are cut if it is a copy of ours.

    Args:
        channel: number of the channel.
        frame_max: largest frame in bytes, as negotiated with RabbitMQ.

    Raises:
        HeadersTooLong: headers and properties do not fit in a frame, for which RabbitMQ would close
            the connection.
        Exception: py-amqp cannot encode a value; one of ``connection.AMQP_ERRORS``.
    """
    route = (0, message.exchange, message.routing_key, mandatory, False)
    method = pack(">HH", *Basic.Publish) + dumps("Bssbb", route)
    properties = _properties(message)
    if (excess := len(properties) + HEADER_OVERHEAD - frame_max) > 0:
        size = len(dumps("F", [message.headers]))
        smaller = fitted(message, size - excess)
        if smaller is not None:
            properties = _properties(smaller)
        if len(properties) + HEADER_OVERHEAD > frame_max:
            raise HeadersTooLong(size=size, room=size - excess)
    body, part = message.body, frame_max - _OVERHEAD
    header = pack(">HHQ", Basic.CLASS_ID, 0, len(body)) + properties
    return b"".join(
        [
            _frame(_METHOD, channel, method),
            _frame(_HEADER, channel, header),
            *(_frame(_BODY, channel, body[at : at + part]) for at in range(0, len(body), part)),
        ]
    )


def _properties(message: Message) -> bytes:
    values = {**message.properties, "application_headers": message.headers}
    given = [declared for declared in _PROPERTIES if values.get(declared[0]) is not None]
    kinds = "".join(kind for _, kind, _ in given)
    flags = sum(flag for *_, flag in given)
    return pack(">H", flags) + bytes(dumps(kinds, [values[name] for name, *_ in given]))


def _frame(kind: int, channel: int, payload: bytes) -> bytes:
    return pack(">BHI", kind, channel, len(payload)) + payload + _END
