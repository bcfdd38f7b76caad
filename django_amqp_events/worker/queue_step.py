"""Consume queues in a Celery worker, on a channel beside Celery's own."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection
from functools import partial
from itertools import count
from typing import Any, Final

from amqp import spec
from amqp.exceptions import AccessRefused, NotFound
from celery import bootsteps
from kombu import Queue
from kombu.message import Message as KombuMessage

from ..backoff import Backoff
from ..broker.delivery_reader import DeliveryReader
from ..broker.reply_texts import names_queue
from ..callables import nothing
from ..message.types import Received
from . import signal_wakeup
from .acks import Acks
from .celery_internals import list_queues, shutdown_requested

logger = logging.getLogger(__name__)

#: The largest prefetch count that AMQP can express.
MAX_PREFETCH: Final = 65535
#: Seconds between two writes of acks while a pool stops.
FLUSH_SECONDS: Final = 0.5
#: Delays before a missing queue is checked again.
MISSING_BACKOFF: Final = Backoff(1.0, 30.0)


class QueueStep(bootsteps.StartStopStep):
    """The base of the bootsteps for events and for other queues; users subclass the latter,
    :class:`~django_amqp_events.worker.consumer_step.AMQPConsumerStep`.

    Consuming begins when the event loop runs: deliveries that arrive during ``start()``, while
    later steps wait for their channels, would crash the worker. ``stop()`` only cancels the
    consumers, so that deliveries in progress can be acked while the pool stops; ``shutdown()``
    closes the channel. A missing queue is checked again until it exists, while the others are
    consumed.
    """

    # Control too, for a fixed order: otherwise the error that a worker without permissions reports
    # would vary.
    requires: Any = (
        "celery.worker.consumer.tasks:Tasks",
        "celery.worker.consumer.control:Control",
    )
    #: Names of the queues.
    queues: Collection[str] = ()
    #: Whether no other step may consume in the same worker.
    alone: bool = False
    #: What the queues contain and how to get a missing one, for logs.
    contents: str = "messages"
    remedy: str = "Declare it"

    acks: Acks

    def __init__(self, c: Any, **kwargs: Any) -> None:
        self.c = c
        self.call_soon = signal_wakeup.call_soon(c)
        self.channel: Any = None
        self._deliveries: Any = None
        self._probe: Any = None
        self._connection: Any = None
        self._tags: dict[str, str] = {}
        self._numbers = count(1)
        #: Queues that are not consumed for now, by choice.
        self.paused: set[str] = set()
        # The prefetch count of the channel, for new consumers.
        self._qos = 0
        # The consumers that were cancelled last, from which RabbitMQ may have sent something.
        self._cancelled_tags: dict[str, str] = {}
        self._pending: deque[str] = deque()
        # Missing queues, and how often each was checked.
        self._missing: dict[str, int] = {}
        # Queues that were found to exist, so that they are not checked.
        self._known_to_exist: set[str] = set()
        # Queues that this worker may not consume.
        self._refused: set[str] = set()
        self._before_lost = c.on_connection_error_after_connected
        c.on_connection_error_after_connected = self._lost
        self._stopping = False
        list_queues(c, self.active_queues)
        super().__init__(c, **kwargs)

    @property
    def title(self) -> str:
        """What consumes, for logs."""
        return type(self).__name__

    @property
    def prefetch_count(self) -> int:
        """Prefetch count of each queue."""
        raise NotImplementedError

    def count_of(self, queue: str) -> int:
        """Return the prefetch count of a queue that is about to be consumed, 0 for not now."""
        return self.prefetch_count

    def on_delivery(self, received: Received, message: KombuMessage) -> None:
        """Handle a delivery in the main thread, and ack or reject *message*, now or later.

        It must not block: the worker's event loop waits for it.
        """
        raise NotImplementedError

    def active_queues(self) -> list[Queue]:
        """Return the queues that this step consumes now, for ``inspect active_queues``."""
        return [Queue(name) for name in sorted(self._tags)]

    # -- start and stop -------------------------------------------------------------------

    def start(self, c: Any) -> None:
        self.channel = self._probe = None
        self._tags.clear()
        self.paused.clear()
        self._cancelled_tags.clear()
        self._missing.clear()
        self._pending.clear()
        self._stopping = False
        self._connection = c.connection
        if self.queues:
            c.call_soon(self._open, c.connection)

    def flush(self) -> None:
        """Write the acks and rejects that are ready."""

    def stop(self, c: Any) -> None:
        self._stopping = True
        self._known_to_exist.clear()
        channel = self.channel
        if channel is None or channel.connection is None or c.connection is None:
            return
        if c.blueprint.state != bootsteps.RUN:
            # The event loop has ended. A prefork pool that stops runs its timers.
            c.timer.call_repeatedly(FLUSH_SECONDS, self.flush)
        tags = list(self._tags.values())
        self._tags.clear()
        try:
            for tag in tags[:-1]:
                channel.basic_cancel(tag, nowait=True)
            if tags:
                channel.basic_cancel(tags[-1])
        except (*c.connection_errors, *c.channel_errors) as exc:
            logger.info("the consumers end with their connection, not before: %r", exc)

    def terminate(self, c: Any) -> None:
        self.stop(c)

    def shutdown(self, c: Any) -> None:
        channel, self.channel = self.channel, None
        if channel is not None and channel.connection is not None:
            self.acks.wait_until_applied()
            try:
                channel.close()
            except (*c.connection_errors, *c.channel_errors) as exc:
                logger.info("the channel could not be closed: %r", exc)

    @property
    def _is_stopping(self) -> bool:
        """Whether no further run may begin.

        Celery's other steps stop first. While they wait for RabbitMQ's answers, further deliveries
        arrive, which a solo worker would run.
        """
        return self._stopping or shutdown_requested()

    def _warn_of_channel_errors(self, c: Any) -> None:
        if not c.app.conf.broker_channel_error_retry:
            logger.warning(
                "This worker exits when RabbitMQ closes a channel, such as after a consumer "
                "timeout. Set broker_channel_error_retry to True, or use `manage.py events_worker`."
            )

    # -- consuming ------------------------------------------------------------------------

    def _open(self, connection: Any) -> None:
        if self._stale(connection) or self.channel is not None:
            return
        self.channel = connection.channel()
        self._deliveries = DeliveryReader(self.channel, self._requeue)
        self._opened()
        # Not global: RabbitMQ 4.3 refuses that.
        self._qos = self.prefetch_count
        self.channel.basic_qos(0, self._qos, False)
        self._pending.extend(sorted(self.queues))
        logger.info(
            "%s: consuming %d queue%s, prefetch count %d each: %s",
            self.title,
            len(self.queues),
            "" if len(self.queues) == 1 else "s",
            self.prefetch_count,
            ", ".join(self._pending),
        )
        self._next(connection)

    def _opened(self) -> None:
        """Called when the channel is open, before anything is consumed."""

    def _stale(self, connection: Any) -> bool:
        return self._stopping or self._connection is not connection

    def _next(self, connection: Any) -> None:
        """Consume one queue and schedule the next, so that ordinary tasks run in between."""
        if self._stale(connection) or not self._pending:
            return
        queue = self._pending.popleft()
        if queue in self.queues and queue not in self._tags:
            self._consume(connection, queue)
        if self._pending:
            # Not call_soon, which runs after the next poll: in an idle worker a second or more
            # for each queue.
            self.c.timer.call_after(0, self._turn, (connection,))

    def _turn(self, connection: Any) -> None:
        """Call :meth:`_next` from a timer, which swallows the error of a closed channel."""
        try:
            self._next(connection)
        except self.c.channel_errors as exc:
            self.c.call_soon(reraise, exc)

    def _consume(self, connection: Any, queue: str) -> None:
        if queue in self._known_to_exist:
            self._known_to_exist.discard(queue)
        elif problem := self._problem(connection, queue):
            self._retry_later(connection, queue, problem)
            return
        if self._missing.pop(queue, None) is not None:
            logger.info("queue %r exists now, consuming it", queue)
        self._start_consumer(connection, queue)

    def _start_consumer(self, connection: Any, queue: str) -> None:
        count = self.count_of(queue)
        if not count:
            self.paused.add(queue)
            return
        self.paused.discard(queue)
        if count != self._qos:
            # Without waiting for the answer, since deliveries would arrive meanwhile.
            self._qos = count
            self.channel.send_method(spec.Basic.Qos, "lBb", (0, count, False))
        # The number keeps cut tags different.
        tag = self._tags[queue] = f"{next(self._numbers)}:{self.c.hostname}:{queue}"[:60]
        self._deliveries.consume(
            queue,
            self._receive,
            consumer_tag=tag,
            on_cancel=partial(self._cancelled, connection, queue),
            # If RabbitMQ refuses, it closes the channel.
            nowait=True,
        )

    def consumes(self, queue: str) -> bool:
        return queue in self._tags

    def pause(self, queue: str) -> None:
        """Cancel the consumer of a queue; what RabbitMQ has delivered meanwhile is requeued."""
        self.channel.callbacks.pop(self._cancel(queue), None)
        self.paused.add(queue)

    def resume(self, queue: str) -> None:
        """Consume a queue again, if it still exists."""
        self.paused.discard(queue)
        self._pending.append(queue)
        self._turn(self._connection)

    def renew(self, queue: str) -> None:
        """Replace the consumer of a queue by one with its current prefetch count.

        RabbitMQ requeues what is on its way to the old one, and counts it as a delivery (ran on
        3.10).
        """
        self._cancel(queue)
        self._start_consumer(self._connection, queue)

    def _cancel(self, queue: str) -> str:
        """Cancel the consumer of a queue, and return its tag; forget the one before it."""
        tag = self._tags.pop(queue)
        self.channel.basic_cancel(tag, nowait=True)
        before = self._cancelled_tags.get(queue, "")
        self.channel.callbacks.pop(before, None)
        self.channel.cancel_callbacks.pop(before, None)
        self._cancelled_tags[queue] = tag
        return tag

    def _requeue(self, number: int) -> None:
        """Requeue a delivery of a cancelled consumer."""
        message = KombuMessage(channel=self.channel, delivery_tag=number)
        self.acks.received(message)
        self.acks.reject(message)

    def _problem(self, connection: Any, queue: str) -> str:
        """Return why a queue cannot be consumed; checked on a channel that an error may close."""
        if self._probe is None or self._probe.connection is None:
            self._probe = connection.channel()
        try:
            self._probe.queue_declare(queue, passive=True)
            if queue in self._refused:
                self._try_to_read(queue)
        except NotFound as exc:
            if exc.method_sig != spec.Queue.Declare:
                raise  # RabbitMQ closed the consuming channel meanwhile; Celery reconnects
            # py-amqp has opened the probe's channel again.
            return f"is missing, so its {self.contents} are not handled. {self.remedy}"
        except AccessRefused as exc:
            if not names_queue(exc, queue):
                raise
            return (
                f"cannot be consumed, so its {self.contents} are not handled: {exc.reply_text}. "
                f"Give this user the read permission"
            )
        return ""

    def _try_to_read(self, queue: str) -> None:
        """Consume for a moment; RabbitMQ requeues a delivery when the channel closes."""
        self._probe.basic_qos(0, 1, False)
        self._probe.basic_cancel(self._probe.basic_consume(queue, callback=nothing))
        self._probe.close()
        self._probe = None
        self._refused.discard(queue)

    def _lost(self, exc: Exception) -> None:
        """Record a queue that this worker may not consume; its refusal closes the channel.

        Otherwise each attempt would redeliver the messages of the other queues, up to the delivery
        limit.
        """
        self._before_lost(exc)
        if isinstance(exc, AccessRefused) and exc.method_sig == spec.Basic.Consume:
            self._refused |= {queue for queue in self.queues if names_queue(exc, queue)}

    def _retry_later(self, connection: Any, queue: str, problem: str) -> None:
        checks = self._missing.get(queue, 0)
        self._missing[queue] = checks + 1
        wait = MISSING_BACKOFF.delay(checks)
        logger.error("queue %r %s. The next check is in %g s.", queue, problem, wait)
        self._soon(connection, queue, wait)

    def _soon(self, connection: Any, queue: str, wait: float) -> None:
        def again() -> None:
            if not self._stale(connection):
                self._pending.append(queue)
                self._turn(connection)

        self.c.timer.call_after(wait, again)

    def _cancelled(self, connection: Any, queue: str, consumer_tag: str) -> None:
        """Consume a queue again: it was deleted, or its consumer exceeded the consumer timeout."""
        if self._tags.get(queue) != consumer_tag:
            return
        del self._tags[queue]
        logger.warning("RabbitMQ cancelled the consumer of %r; consuming it again", queue)
        self._soon(connection, queue, MISSING_BACKOFF.first)

    def _receive(self, number: int, received: Received) -> None:
        message = KombuMessage(channel=self.channel, delivery_tag=number)
        self.acks.received(message)
        if self._is_stopping:
            return  # unsettled, so RabbitMQ delivers it again when the channel closes
        self.on_delivery(received, message)


def reraise(exc: BaseException) -> None:
    raise exc
