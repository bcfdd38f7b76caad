"""Ack and reject the deliveries of the worker's consuming channel."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from amqp.exceptions import RecoverableConnectionError
from kombu.message import Message

logger = logging.getLogger(__name__)


def is_lost(message: Message) -> bool:
    """Return True if the channel of a message is closed, so that RabbitMQ delivers it again."""
    return message.channel is None or message.channel.connection is None


class Acks:
    """Write acks and rejects, one frame for each; used in the main thread only.

    Args:
        errors: connection errors that an ack on a lost channel may raise.
    """

    def __init__(self, errors: tuple[type[BaseException], ...]) -> None:
        self._errors = errors
        self._channel: Any = None
        self._last = 0

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

    def reject(self, message: Message) -> None:
        """Requeue a delivery."""
        message.reject_log_error(logger, self._errors, requeue=True)
