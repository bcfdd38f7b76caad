"""Ack and reject the deliveries of the worker's consuming channel."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

from amqp.exceptions import RecoverableConnectionError
from kombu.message import Message

logger = logging.getLogger(__name__)

#: Acks and rejects of a channel for one quorum queue that RabbitMQ passes on before the queue has
#: applied them. It holds back the others, and forgets those when the channel closes: their
#: deliveries come again (``soft_limit`` of rabbit_fifo_client.erl; ran on 3.10, 4.0 and 4.3).
IN_FLIGHT: Final = 32
#: Seconds in which a queue that is not overloaded has applied them.
APPLIED_SECONDS: Final = 0.5


def is_lost(message: Message) -> bool:
    """Return True if the channel of a message is closed, so that RabbitMQ delivers it again."""
    return message.channel is None or message.channel.connection is None


class Acks:
    """Write acks and rejects, one frame for each; used in one thread at a time.

    Args:
        errors: connection errors that an ack on a lost channel may raise.
    """

    #: How many events a thread, or a solo worker, may leave unacked when it starts its next run.
    ahead = 0

    def __init__(self, errors: tuple[type[BaseException], ...]) -> None:
        self._errors = errors
        self._channel: Any = None
        self._last = 0
        # When the last acks and rejects were written.
        self._written: deque[float] = deque(maxlen=IN_FLIGHT)

    def received(self, message: Message) -> None:
        """Record a delivery, before anything else is done with it.

        Raises:
            RecoverableConnectionError: the channel was closed and opened again, which shows in a
                repeated delivery tag. Acks of earlier deliveries would ack others; Celery has to
                connect again.
        """
        if message.channel is not self._channel:
            self._channel, self._last = message.channel, 0
        elif message.delivery_tag <= self._last:
            raise RecoverableConnectionError("the consuming channel was closed and opened again")
        self._last = message.delivery_tag

    def ack(self, messages: Iterable[Message]) -> None:
        """Ack deliveries.

        Raises:
            BrokenPipeError: the connection is lost; Celery connects again.
        """
        for message in messages:
            message.ack_log_error(logger, self._errors)
            self._count()

    def reject(self, message: Message, *, requeue: bool = True) -> None:
        """Requeue a delivery, or dead-letter it."""
        message.reject_log_error(logger, self._errors, requeue=requeue)
        self._count()

    def wait_until_applied(self) -> None:
        """Wait, before the channel closes, if RabbitMQ may hold back acks; it does not tell."""
        if (
            len(self._written) == IN_FLIGHT
            and self._written[0] + APPLIED_SECONDS > time.monotonic()
        ):
            time.sleep(APPLIED_SECONDS)

    def _count(self, frames: int = 1) -> None:
        self._written.extend([time.monotonic()] * frames)
