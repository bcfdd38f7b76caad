"""Read a queue in batches of raw messages: nothing is decompressed, decoded or trusted.

The mirror and ``events_recover`` use it. The caller acknowledges; RabbitMQ delivers messages
without an acknowledgement again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from amqp import exceptions as amqp_errors
from celery import Celery

from ..callables import nothing
from ..conf import Settings
from ..exceptions import BrokerUnavailableError, TopologyError
from ..message.types import Delivered, Received
from ..reasons import Reason
from . import connection
from .delivery_reader import DeliveryReader, decode
from .queue_depth import queue_depth

#: Seconds between heartbeats; after two without one the connection counts as lost.
HEARTBEAT: Final = 20
#: Bytes of bodies after which a batch is complete.
BATCH_BYTES: Final = 32 * 1024 * 1024
#: Seconds without a further message after which a batch is complete.
LULL: Final = 0.05
#: Seconds between polls of ``stop``.
POLL_INTERVAL: Final = 0.2
#: Factor by which batches grow, from one message to the full size, so that a message that kills the
#: process does not hold back those before it. The prefetch count grows too, until two batches have
#: BATCH_BYTES each: messages that are sent ahead occupy memory.
GROWTH: Final = 4

_ERRORS = (amqp_errors.AMQPError, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Messages that were read together, and the delivery tag of the last one."""

    messages: list[Received]
    last: int


class BatchReader:
    """A connection that consumes one queue.

    Args:
        size: largest number of messages in a batch; the prefetch count is at most twice that.

    Raises (from every method):
        BrokerUnavailableError: there is no connection, it is lost, or the queue was deleted. What
            is not acknowledged is delivered again.
        TopologyError: the queue does not exist.
    """

    #: Rejects a delivery to a consumer that was cancelled.
    requeue: Callable[[int], object] | None = None

    def __init__(self, app: Celery, queue: str, settings: Settings, *, size: int) -> None:
        self.queue = queue
        self.size = size
        # Delivery tags and messages that are in no batch yet, and the bytes of their bodies.
        self._waiting: list[tuple[int, Received]] = []
        self._bytes = 0
        # All messages of all batches have been acknowledged so far.
        self._whole = True
        self._cancelled = False
        self._lost = False
        self._window = 1
        self._tag = ""
        # For connecting, and for any single read or write.
        timeout = settings.confirm_timeout
        self._connection = connection.connect(app, timeout=timeout, heartbeat=HEARTBEAT)
        try:
            self._amqp = self._connection.connection
            self._channel = self._amqp.channel()
            self._deliveries = DeliveryReader(self._channel, self.requeue)
            self._channel.queue_declare(queue, passive=True)
            self._consume()
        except amqp_errors.NotFound as exc:
            self.close()
            raise TopologyError(
                f"there is no queue {queue!r}; run `manage.py events_declare`"
            ) from exc
        except _ERRORS as exc:
            self._lost = True
            self.close()
            error = f"{type(exc).__name__}: {exc}"
            raise BrokerUnavailableError(Reason("channel-refused", error=error)) from exc

    def batch(self, *, wait: float, stop: Callable[[], bool] = nothing) -> Batch | None:
        """Return the next batch, or ``None`` if no message arrives within *wait* seconds."""
        deadline = time.monotonic() + wait
        try:
            while len(self._waiting) < self._window and self._bytes < BATCH_BYTES and not stop():
                self._amqp.heartbeat_tick()
                left = deadline - time.monotonic()
                left = LULL if self._waiting else min(POLL_INTERVAL, left)
                if left <= 0:
                    break
                frames = self._deliveries.frames
                try:
                    # drain_events restarts its time-out with each part of an answer.
                    self._amqp.blocking_read(left)
                    # A part of a large message counts as activity, a heartbeat does not.
                    if self._deliveries.frames > frames:
                        deadline = time.monotonic() + wait
                except TimeoutError:
                    if self._waiting:
                        break
                if self._cancelled:
                    self._lost = True
                    raise BrokerUnavailableError(
                        Reason("consumer-cancelled", queue=repr(self.queue))
                    )
            taken, self._waiting = self._waiting[: self._window], self._waiting[self._window :]
            if not taken:
                return None
            messages = [message for _, message in taken]
            size = sum(len(message.body) for message in messages)
            self._bytes -= size
            self._adapt(len(messages), size)
        except _ERRORS as exc:
            raise self._gone(exc) from exc
        return Batch(messages=messages, last=taken[-1][0])

    def ack(self, batch: Batch, places: Collection[int]) -> None:
        """Acknowledge messages of a batch, by their index."""
        self._whole = self._whole and len(places) == len(batch.messages)
        try:
            if self._whole:
                self._channel.basic_ack(batch.last, multiple=True)
                return
            # The channel has one consumer, so its delivery tags have no gaps.
            first = batch.last - len(batch.messages) + 1
            for place in places:
                self._channel.basic_ack(first + place)
            if len(places) < len(batch.messages) and not self._waiting:
                # What is left may use up the prefetch count; that of a new consumer leaves it out.
                self._consume()
        except _ERRORS as exc:
            raise self._gone(exc) from exc

    def ready(self) -> int:
        """Return the number of messages that are ready, or were read and are in no batch yet."""
        try:
            return queue_depth(self._channel, self.queue).ready + len(self._waiting)
        except _ERRORS as exc:
            raise self._gone(exc) from exc

    def close(self) -> None:
        """Close the connection."""
        with suppress(Exception):
            if not self._lost:
                # The consumer first, since its answer comes when the queue has applied the acks:
                # those that RabbitMQ holds back (worker.acks.IN_FLIGHT) it forgets when the channel
                # closes. With a handshake: closing a socket with unread data can lose acks.
                self._channel.basic_cancel(self._tag)
                self._channel.close()
        connection.close_socket(self._connection)

    def _gone(self, exc: Exception) -> BrokerUnavailableError:
        self._lost = True
        error, remedy = f"{type(exc).__name__}: {exc}", Reason("remedy-retry")
        return BrokerUnavailableError(Reason("connection-lost", error=error, remedy=remedy))

    def _consume(self) -> None:
        """Consume the queue with the present prefetch count, in place of a consumer before."""
        if self._tag:
            self._channel.basic_cancel(self._tag)
        # A prefetch count applies to consumers that are started afterwards.
        self._channel.basic_qos(0, 2 * self._window, False)
        self._tag = self._deliveries.consume(
            self.queue, self._take, on_cancel=self._on_cancel, **self._options()
        )

    def _adapt(self, count: int, size: int) -> None:
        """Adapt the batch size and prefetch count to the size of the last messages."""
        fits = max(1, BATCH_BYTES * count // max(size, 1))
        window = min(self.size, fits, self._window * (GROWTH if count == self._window else 1))
        if window < self._window // 2 or window >= min(self.size, 2 * self._window) > self._window:
            self._window = window
            self._consume()

    def _options(self) -> dict[str, Any]:
        """Return further options of the next consumer."""
        return {}

    def _take(self, number: int, delivered: Delivered) -> None:
        self._keep(number, decode(delivered))

    def _keep(self, number: int, received: Received) -> None:
        self._waiting.append((number, received))
        self._bytes += len(received.body)

    def _on_cancel(self, _tag: str) -> None:
        self._cancelled = True
