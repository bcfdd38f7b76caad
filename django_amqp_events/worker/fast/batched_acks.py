"""Ack several deliveries with one frame.

``basic.ack`` with ``multiple`` covers every unsettled delivery up to its tag, so it is written only
up to the first delivery that is still open. RabbitMQ numbers the deliveries of a channel from 1, so
a delivery that was never received shows as a gap and counts as open.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from struct import Struct
from typing import Final

from amqp.exceptions import RecoverableConnectionError
from kombu.message import Message

from ..acks import Acks

logger = logging.getLogger(__name__)

#: A frame with basic.ack: type, channel, size, class, method, delivery tag, multiple, end of frame.
#: https://www.rabbitmq.com/resources/specs/amqp0-9-1.pdf, 2.3.5 and 4.2.3
_ACK: Final = Struct(">BHIHHQBB")


def _ack(channel: int, tag: int, *, multiple: bool) -> bytes:
    return _ACK.pack(1, channel, 13, 60, 80, tag, multiple, 0xCE)


class BatchedAcks(Acks):
    """Write all acks that are ready at once, as few frames as possible."""

    ahead = 8

    def __init__(self, errors: tuple[type[BaseException], ...]) -> None:
        super().__init__(errors)
        # Unsettled delivery tags in order; a dict, because a set has no order.
        self._open: dict[int, None] = {}

    def received(self, message: Message) -> None:
        if message.channel is not self._channel:
            self._open.clear()
        before = self._last if message.channel is self._channel else 0
        super().received(message)
        self._open.update(dict.fromkeys(range(before + 1, message.delivery_tag + 1)))

    def ack(self, messages: Iterable[Message]) -> None:
        ready: dict[int, Message] = {}
        for message in messages:
            if message.channel is self._channel:
                ready[message.delivery_tag] = message
            else:
                super().ack([message])
        if ready:
            self._write(ready)

    def _write(self, ready: dict[int, Message]) -> None:
        channel = self._channel
        first_open = next((tag for tag in self._open if tag not in ready), self._last + 1)
        covered = [tag for tag in ready if tag < first_open]
        try:
            connection, number = channel.connection, channel.channel_id
            if connection is None:
                raise RecoverableConnectionError("connection already closed")
            frames = [_ack(number, max(covered), multiple=len(covered) > 1)] if covered else []
            frames += [_ack(number, tag, multiple=False) for tag in ready if tag > first_open]
            connection.transport.write(b"".join(frames))
            # py-amqp counts frames here, for its heartbeats.
            connection.bytes_sent += len(frames)
            self._count(len(frames))
        except BrokenPipeError:
            logger.critical("could not ack %d deliveries", len(ready), exc_info=True)
            raise
        except self._errors:
            logger.critical("could not ack %d deliveries", len(ready), exc_info=True)
        for tag in ready:
            self._open.pop(tag, None)

    def reject(self, message: Message, *, requeue: bool = True) -> None:
        super().reject(message, requeue=requeue)
        if message.channel is self._channel:
            self._open.pop(message.delivery_tag, None)
