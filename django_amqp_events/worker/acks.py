"""Ack and requeue the deliveries of the worker's consuming channel."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from typing import Any, Final

from amqp.exceptions import RecoverableConnectionError

from ..logs import get_logger

logger = get_logger(__name__)

#: Acks and rejects of a channel for one quorum queue that RabbitMQ passes on before the queue has
#: applied them. It holds back the others, and forgets those when the channel closes: their
#: deliveries come again (``soft_limit`` of rabbit_fifo_client.erl; ran on 3.10, 4.0 and 4.3).
IN_FLIGHT: Final = 32
#: Seconds in which a queue that is not overloaded has applied them.
APPLIED_SECONDS: Final = 0.5


class Acks:
    """Write acks and rejects on one channel, in the main thread.

    Args:
        errors: what py-amqp raises when the connection is lost. It is not raised here: Celery finds
            the lost connection, and RabbitMQ delivers again.
    """

    def __init__(self, channel: Any, errors: tuple[type[BaseException], ...]) -> None:
        self.channel = channel
        self._errors = errors
        self._last = 0
        # Unsettled delivery tags in order; a dict, because a set has no order.
        self._open: dict[int, None] = {}
        # When the last acks and rejects were written.
        self._written: deque[float] = deque(maxlen=IN_FLIGHT)

    @property
    def lost(self) -> bool:
        """Whether the channel is closed, so that RabbitMQ delivers everything again."""
        return self.channel.connection is None

    def received(self, tag: int) -> None:
        """Record a delivery, before anything else is done with it.

        Raises:
            RecoverableConnectionError: the channel was closed and opened again, which shows in a
                repeated delivery tag. Acks of earlier deliveries would ack others; Celery has to
                connect again.
        """
        if tag <= self._last:
            raise RecoverableConnectionError("the consuming channel was closed and opened again")
        self._last = tag
        self._open[tag] = None

    def ack(self, tags: Collection[int]) -> None:
        """Ack deliveries: with one frame those before which no other is open."""
        ready = {tag for tag in tags if tag in self._open}
        first_open = next((tag for tag in self._open if tag not in ready), self._last + 1)
        covered = [tag for tag in ready if tag < first_open]
        if covered:
            self._write(self.channel.basic_ack, max(covered), multiple=len(covered) > 1)
        for tag in ready.difference(covered):
            self._write(self.channel.basic_ack, tag)
        for tag in ready:
            del self._open[tag]

    def requeue(self, tags: Collection[int]) -> None:
        for tag in tags:
            if tag in self._open:
                del self._open[tag]
                self._write(self.channel.basic_reject, tag, requeue=True)

    def _write(self, method: Any, tag: int, **options: bool) -> None:
        if self.lost:
            return
        try:
            method(tag, **options)
        except self._errors as exc:
            logger.info("a delivery could not be settled, so RabbitMQ delivers it again: %r", exc)
        self._written.append(time.monotonic())

    def wait_until_applied(self) -> None:
        """Wait, before the channel closes, if RabbitMQ may hold back acks; it does not tell."""
        if (
            len(self._written) == IN_FLIGHT
            and self._written[0] + APPLIED_SECONDS > time.monotonic()
        ):
            time.sleep(APPLIED_SECONDS)
