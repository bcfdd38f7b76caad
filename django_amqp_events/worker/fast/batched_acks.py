"""Acks of the deliveries of one channel, many in one frame where that is the same.

An ack of many covers every delivery up to its tag that nobody has answered yet. So it is used only
up to the first delivery that is still open, and whatever the broker has numbered counts as open
until it is answered here: RabbitMQ numbers the deliveries of a channel 1, 2, 3 and so on, so one
that never came this far shows as a gap.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from struct import Struct
from typing import Any, Final

from amqp.exceptions import RecoverableConnectionError
from kombu.message import Message

logger = logging.getLogger(__name__)

#: A frame with basic.ack: type, channel, size, class, method, delivery tag, multiple, end of frame.
#: https://www.rabbitmq.com/resources/specs/amqp0-9-1.pdf, 2.3.5 and 4.2.3
_ACK: Final = Struct(">BHIHHQBB")


def _ack(channel: int, tag: int, *, multiple: bool) -> bytes:
    return _ACK.pack(1, channel, 13, 60, 80, tag, multiple, 0xCE)


class Acks:
    """What is open on the worker's consuming channel, and its answers; in the main thread only.

    Args:
        together: whether to ack many in one frame.
        errors: connection errors that an ack on a lost channel may raise.
    """

    def __init__(self, *, together: bool, errors: tuple[type[BaseException], ...]) -> None:
        self._together = together
        self._errors = errors
        self._channel: Any = None
        self._last = 0
        # A dict for its order, which is that of the tags.
        self._open: dict[int, None] = {}

    def came(self, message: Message) -> None:
        """Note a delivery, before anything else is done with it.

        Raises:
            RecoverableConnectionError: its number was there before; Celery connects anew.
        """
        if message.channel is not self._channel:
            self._channel, self._last = message.channel, 0
            self._open.clear()
        elif message.delivery_tag <= self._last:
            # Somebody has swallowed that the broker closed the channel. py-amqp has opened it
            # again, and an ack of what is in hand would be one of another delivery.
            raise RecoverableConnectionError("the consuming channel was closed and opened again")
        for tag in range(self._last + 1, message.delivery_tag + 1):
            self._open[tag] = None
        self._last = max(self._last, message.delivery_tag)

    def ack(self, messages: Sequence[Message]) -> None:
        """Ack deliveries; what came on a channel before this one each by itself.

        Raises:
            BrokenPipeError: the connection is lost; Celery connects anew.
        """
        left: dict[int, Message] = {}
        for message in messages:
            if message.channel is self._channel:
                left[message.delivery_tag] = message
            else:
                message.ack_log_error(logger, self._errors)
        if self._together and left:
            self._write(left)
            return
        for tag, message in left.items():
            message.ack_log_error(logger, self._errors)
            self._open.pop(tag, None)

    def _write(self, left: dict[int, Message]) -> None:
        """Write all acks at once: one of many as far as nothing else is open, and the rest."""
        channel = self._channel
        still_open = next((tag for tag in self._open if tag not in left), self._last + 1)
        covered = [tag for tag in left if tag < still_open]
        try:
            connection, number = channel.connection, channel.channel_id
            if connection is None:
                raise RecoverableConnectionError("connection already closed")
            frames = [_ack(number, max(covered), multiple=len(covered) > 1)] if covered else []
            frames += [_ack(number, tag, multiple=False) for tag in left if tag > still_open]
            connection.transport.write(b"".join(frames))
            connection.bytes_sent += len(frames)  # frames, in fact: for the heartbeats
        except BrokenPipeError:
            logger.critical("could not ack %d deliveries", len(left), exc_info=True)
            raise
        except self._errors:
            logger.critical("could not ack %d deliveries", len(left), exc_info=True)
        for tag in left:
            self._open.pop(tag, None)

    def reject(self, message: Message) -> None:
        """Give a delivery back to the broker."""
        message.reject_log_error(logger, self._errors, requeue=True)
        if message.channel is self._channel:
            self._open.pop(message.delivery_tag, None)


class Answers(Message):
    """Stands for all answers that are ready, in a callback of the worker's event loop.

    While it joins a pool that shuts down, Celery calls nothing of its loop but what has this form,
    the ack of a message (``celery.concurrency.prefork._is_ack_callback``).
    """

    def __init__(self, write: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._write = write

    def ack_log_error(self, *args: Any, **kwargs: Any) -> None:
        self._write()
