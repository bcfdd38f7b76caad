"""Read one queue in batches, raw: nothing is decompressed, decoded or trusted.

For whatever empties a queue outside of a worker: the mirror, ``events_recover``. Nothing is acked
before whoever called says so, and what is not acked is delivered again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from amqp import exceptions as amqp_errors
from amqp import spec
from celery import Celery

from ..exceptions import BrokerUnavailableError, TopologyError
from ..message.types import Received
from . import amqp_internals, connection
from .delivery_headers import HeaderReader
from .fast.frame_reader import FrameReader

#: Seconds between heartbeats: a broker that is gone without a word is noticed after two.
HEARTBEAT: Final = 20
#: Bytes of bodies after which a batch is complete. What the broker has sent beyond stays unread.
BATCH_BYTES: Final = 32 * 1024 * 1024
#: Seconds without a further message after which a batch is complete.
LULL: Final = 0.05
#: A batch has one message at first and so many times as many each time, up to its size: one that
#: kills the process does not keep those before it from being done. The prefetch count goes along,
#: and ends where two batches have BATCH_BYTES each: what RabbitMQ sends ahead lies in its memory.
GROWTH: Final = 4
#: Seconds that the last acks have to arrive.
GOODBYE: Final = 5.0

_ERRORS = (amqp_errors.AMQPError, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Messages that were read together, and what acks them all.

    Attributes:
        last: delivery tag of the last one.
    """

    messages: list[Received]
    last: int


class BatchReader:
    """A connection that consumes one queue.

    Args:
        size: messages in a batch at most; twice as many are on the way at most.
        timeout: seconds for connecting, and for any single read or write.
        fast_paths: which of :data:`django_amqp_events.conf.FAST_PATHS` are taken.

    Raises:
        BrokerUnavailableError: no connection.
        TopologyError: there is no such queue.
    """

    def __init__(
        self,
        app: Celery,
        queue: str,
        *,
        size: int,
        timeout: float,
        fast_paths: Collection[str] = (),
    ) -> None:
        self.queue = queue
        self.size = size
        self._raw: list[tuple[Any, dict[str, Any], str]] = []
        self._bytes = 0
        self._cancelled = False
        self._lost = False
        self._window = 1
        self._tag = ""
        self._connection = connection.connect(app, timeout=timeout, heartbeat=HEARTBEAT)
        try:
            self._amqp = self._connection.connection
            self._channel = self._amqp.channel()
            # It decodes text bodies otherwise.
            self._channel.auto_decode = False
            self._frames = HeaderReader(self._channel)
            if "reads" in fast_paths and amqp_internals.can_read_frames():
                FrameReader(self._channel, self._frames)
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
            raise BrokerUnavailableError(
                f"RabbitMQ gave no channel for {queue!r}: {type(exc).__name__}: {exc}"
            ) from exc

    def batch(self, *, wait: float, stop: Callable[[], bool] = bool) -> Batch | None:
        """Return the next batch, or ``None`` where nothing came within *wait* seconds.

        Raises:
            BrokerUnavailableError: the connection is lost, or the queue was deleted; what is
                not acked is delivered again.
        """
        deadline = time.monotonic() + wait
        try:
            while len(self._raw) < self._window and self._bytes < BATCH_BYTES and not stop():
                self._amqp.heartbeat_tick()
                left = LULL if self._raw else min(1.0, deadline - time.monotonic())
                if left <= 0:
                    break
                try:
                    # Not drain_events, which begins its time-out anew with every half of an answer.
                    self._amqp.blocking_read(left)
                    # A part of a large message is no silence.
                    deadline = time.monotonic() + wait
                except TimeoutError:
                    if self._raw:
                        break
                if self._cancelled:
                    self._lost = True
                    raise BrokerUnavailableError(
                        f"RabbitMQ cancelled the consumer of {self.queue!r}: was it deleted?"
                    )
            raw, self._raw = self._raw[: self._window], self._raw[self._window :]
            if not raw:
                return None
            self._adapt(len(raw), sum(len(message.body or b"") for message, *_ in raw))
        except _ERRORS as exc:
            raise self._gone(exc) from exc
        self._bytes = sum(len(message.body or b"") for message, *_ in self._raw)
        return Batch(
            messages=[self._received(*entry) for entry in raw], last=raw[-1][0].delivery_tag
        )

    def ack(self, batch: Batch, only: Iterable[int] | None = None) -> None:
        """Ack everything up to the end of a batch.

        Args:
            only: ack these of the batch instead, by their place in it.

        Raises:
            BrokerUnavailableError: the connection is lost; the batch is delivered again.
        """
        try:
            if only is None:
                self._channel.basic_ack(batch.last, multiple=True)
                return
            # One consumer has the channel, which counts its deliveries.
            first = batch.last - len(batch.messages) + 1
            for place in only:
                self._channel.basic_ack(first + place)
        except _ERRORS as exc:
            raise self._gone(exc) from exc

    def ready(self) -> int:
        """Return how many messages wait in the queue, without those that are on their way here.

        Raises:
            BrokerUnavailableError: the connection is lost.
        """
        try:
            answer = self._channel.queue_declare(self.queue, passive=True)
        except _ERRORS as exc:
            raise self._gone(exc) from exc
        return int(answer.message_count) + len(self._raw)

    def close(self) -> None:
        """Give the connection up; what is not acked is delivered again."""
        with suppress(Exception):
            if not self._lost:
                self._say_goodbye()
        connection.close_socket(self._connection)

    def _say_goodbye(self) -> None:
        """Close the channel by handshake: closing the socket with unread data can lose acks."""
        end = time.monotonic() + GOODBYE
        # Reply code, text, and the method that it is about: none.
        self._channel.send_method(spec.Channel.Close, "BsBB", (200, "", 0, 0))
        self._channel.is_closing = True
        while self._channel.connection is not None and (left := end - time.monotonic()) > 0:
            self._amqp.blocking_read(left)

    def _gone(self, exc: Exception) -> BrokerUnavailableError:
        self._lost = True
        return BrokerUnavailableError(
            f"the connection to RabbitMQ is lost: {type(exc).__name__}: {exc}"
        )

    def _consume(self) -> None:
        # A prefetch count is a consumer's, from its beginning.
        self._channel.basic_qos(0, 2 * self._window, False)
        self._tag = self._channel.basic_consume(
            self.queue, callback=self._take, on_cancel=self._on_cancel
        )

    def _adapt(self, count: int, size: int) -> None:
        """Adapt the prefetch count to the size of the last messages."""
        fits = max(1, BATCH_BYTES * count // max(size, 1))
        window = min(self.size, fits, self._window * (GROWTH if count == self._window else 1))
        if window < self._window // 2 or window >= min(self.size, 2 * self._window) > self._window:
            self._window = window
            self._channel.basic_cancel(self._tag)
            self._consume()

    def _take(self, message: Any) -> None:
        self._raw.append((message, *self._frames.properties()))
        self._bytes += len(message.body or b"")

    def _on_cancel(self, _tag: str) -> None:
        self._cancelled = True

    def _received(self, raw: Any, properties: dict[str, Any], unreadable: str) -> Received:
        info = raw.delivery_info
        headers = properties.pop("application_headers", None)
        body = raw.body or b""
        return Received(
            queue=self.queue,
            exchange=info.get("exchange", ""),
            routing_key=info.get("routing_key", ""),
            body=body.encode() if isinstance(body, str) else bytes(body),
            headers=headers if isinstance(headers, dict) else {},
            properties=properties,
            redelivered=bool(info.get("redelivered")),
            unreadable=unreadable,
        )
