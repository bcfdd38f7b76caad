"""A base for bootsteps that consume any queue with plain AMQP; docs/consumers.md is its guide."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final, Literal

from celery.exceptions import Reject
from django.db import close_old_connections
from kombu.message import Message as KombuMessage

from ..backoff import Backoff
from ..callables import deferred, unrun
from ..conf import load
from ..declare.declarations import dotted
from ..declare.registry import get_registry
from ..exceptions import ConfigurationError
from ..message.types import Received
from .acks import Acks, is_lost
from .celery_internals import state
from .queue_step import MAX_PREFETCH, QueueStep

logger = logging.getLogger(__name__)

#: Pauses before a message is requeued, since RabbitMQ delivers it again at once.
PAUSE: Final = Backoff(1.0, 30.0)
#: Seconds between two checks of a warm shutdown: for acks, heartbeats and a cold shutdown.
STOP_CHECK: Final = 0.5
#: Length in bytes of the longest name of a queue that AMQP can express.
MAX_QUEUE_NAME: Final = 255

Settlement = Literal["ack", "requeue", "reject"]


class AMQPConsumerStep(QueueStep):
    """A bootstep that passes the messages of some queues to :meth:`handle`.

    Subclass it, and add the class to the Celery app::

        class Orders(AMQPConsumerStep):
            queues = ["erp.orders"]

            def handle(self, message):
                order = json.loads(message.body)


        app.steps["consumer"].add(Orders)

    A message is acknowledged when :meth:`handle` has returned. If it raises ``celery.exceptions``'
    ``Reject(reason, requeue=…)``, the exception decides; after any other exception
    :attr:`requeue_on_error` does. Delivery is at least once: a message is delivered again if its
    worker dies or loses its connection before the acknowledgement.

    The queues are not declared. A missing one is reported, and checked again until it exists.
    """

    #: Names of the queues.
    queues: Collection[str] = ()
    #: Number of messages that a worker holds unacknowledged, for each queue.
    prefetch_count: int = 4
    #: Number of threads that call :meth:`handle`. With one, the messages of a queue are handled in
    #: their order.
    concurrency: int = 1
    #: What happens to a message after an exception. ``True``: it is requeued after a pause of 1 to
    #: 30 seconds. ``False``: it is rejected; RabbitMQ moves it to the queue's dead letter exchange,
    #: or deletes it if the queue has none.
    requeue_on_error: bool = True

    def handle(self, message: Received) -> None:
        """Handle a message, in a thread of this step.

        The thread may block, use the database and publish events.

        Raises:
            celery.exceptions.Reject: reject the message; with ``requeue=True``, requeue it.
        """
        raise NotImplementedError

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if kind := deferred(cls.handle):
            raise ConfigurationError(
                f"{dotted(cls)}.handle is {kind}, so its body would never run. Write an ordinary "
                f"method; asgiref's async_to_sync calls async code"
            )

    def __init__(self, c: Any, **kwargs: Any) -> None:
        if mistake := self._mistake(c):
            raise SystemExit(f"django_amqp_events: this worker does not start: {mistake}")
        self.acks = Acks(c.connection_errors)
        self._errors = c.connection_errors
        self._waiting: SimpleQueue[tuple[Received, KombuMessage]] = SimpleQueue()
        self._done: deque[tuple[KombuMessage, Settlement]] = deque()
        self._flushing = threading.Lock()
        self._threads: list[threading.Thread] = []
        # Messages that handle() runs for, guarded by the condition.
        self._running = 0
        self._progress = threading.Condition()
        # Ends the pauses before a requeue.
        self._ended = threading.Event()
        super().__init__(c, **kwargs)
        self._warn_of_channel_errors(c)

    def include_if(self, c: Any) -> bool:
        """Return True if this worker consumes; a reaper runs nothing else, since it may be killed.

        Override it to choose workers, by ``c.hostname`` for instance.
        """
        return not any(
            isinstance(step, type) and issubclass(step, QueueStep) and step.alone
            for step in c.app.steps["consumer"]
        )

    def _mistake(self, c: Any) -> str:
        """Return what is wrong with the class, ``""`` if nothing is."""
        name = self.name  # module and class
        if not isinstance(self.queues, (list, tuple, set, frozenset)) or not self.queues:
            return f'{name}.queues is {self.queues!r}. Set it to a list: queues = ["erp.orders"].'
        for queue in self.queues:
            if not isinstance(queue, str) or not 0 < len(queue.encode()) <= MAX_QUEUE_NAME:
                return f"{name}.queues contains {queue!r:.80}, which is not the name of a queue."
        for option, highest in (("prefetch_count", MAX_PREFETCH), ("concurrency", 1000)):
            value = getattr(self, option)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= highest:
                return f"{name}.{option} is {value!r:.80}. Set it to a number from 1 to {highest}."
        if type(self).handle is AMQPConsumerStep.handle:
            return f"{name} has no method handle(self, message). Define it."
        if c.hub is None:
            return f"{name} needs Celery's event loop. Use --pool prefork, threads or solo."
        if theirs := sorted(set(self.queues) & set(c.app.amqp.queues.consume_from)):
            return (
                f"Celery consumes {', '.join(theirs)} too, and rejects messages that are no tasks. "
                f"Remove the queue from task_queues and -Q, or from {name}.queues."
            )
        if load()[0].service and (ours := set(self.queues) & set(get_registry().by_queue())):
            return (
                f"{', '.join(sorted(ours))} in {name}.queues belongs to a handler, which would "
                f"miss events. Let another handler receive the events instead."
            )
        return ""

    # -- start and stop -------------------------------------------------------------------

    def start(self, c: Any) -> None:
        self._ended.clear()
        super().start(c)
        while len(self._threads) < self.concurrency:
            name = f"{self.title}-{len(self._threads) + 1}"
            # A daemon: a cold shutdown does not wait for it.
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self, c: Any) -> None:
        super().stop(c)
        self._ended.set()

    def shutdown(self, c: Any) -> None:
        """Wait for the messages in progress, write their acks and close the channel.

        As with Celery's tasks, a warm shutdown waits without limit and a cold one does not.
        """
        while self._wait(STOP_CHECK) and state.should_terminate is None:
            self._flush_at_last()
        self._flush_at_last()
        if self._running:
            logger.warning(
                "%s: shut down with messages in progress (%d); RabbitMQ delivers them again",
                self.title,
                self._running,
            )
        super().shutdown(c)

    def _flush_at_last(self) -> None:
        with suppress(*self._errors):
            self.flush()
            if self.channel is not None and self.channel.connection is not None:
                # Celery's event loop, which sends heartbeats, has ended.
                self.channel.connection.send_heartbeat()

    def _wait(self, seconds: float) -> int:
        """Wait until no message is in progress, or for some seconds; return how many are."""
        with self._progress:
            self._progress.wait_for(lambda: not self._running, seconds)
            return self._running

    # -- deliveries -----------------------------------------------------------------------

    def on_delivery(self, received: Received, message: KombuMessage) -> None:
        self._waiting.put((received, message))

    def _run(self) -> None:
        """Handle messages, in a thread."""
        failures = 0
        while True:
            received, message = self._waiting.get()
            with self._progress:
                if self._is_stopping or is_lost(message):
                    continue  # RabbitMQ delivers it again
                self._running += 1
            try:
                settlement = self._handle(received)
                failures = failures + 1 if settlement == "requeue" else 0
                if failures:
                    self._ended.wait(PAUSE.delay(failures - 1))
                self._done.append((message, settlement))
                self.call_soon(self.flush)
            finally:
                with self._progress:
                    self._running -= 1
                    self._progress.notify_all()

    def _handle(self, received: Received) -> Settlement:
        requeue = self.requeue_on_error
        try:
            close_old_connections()
            try:
                # A user's method may return what has yet to run.
                result: Any = self.handle(received)  # type: ignore[func-returns-value]
                if result is not None and (what := unrun(result)):
                    raise TypeError(f"handle() returned {what}, so its body may not have run")
            finally:
                close_old_connections()
        except Reject as exc:
            requeue = bool(exc.requeue)
            with suppress(Exception):  # a filter of logging may raise, and would end the thread
                logger.warning("%s: %s", self._outcome(received, requeue=requeue), exc.reason)
        except BaseException:  # SystemExit too, or the message would stay unacknowledged
            with suppress(Exception):
                logger.exception("%s", self._outcome(received, requeue=requeue))
        else:
            return "ack"
        return "requeue" if requeue else "reject"

    def _outcome(self, received: Received, *, requeue: bool) -> str:
        what = "it is requeued after a pause" if requeue else "it is rejected"
        id_ = received.properties.get("message_id")
        message = f"message {id_!r:.80}" if id_ else "a message"
        return f"{self.title} failed to handle {message} of {received.queue!r}; {what}"

    def flush(self) -> None:
        """Write the acks and rejects that are ready.

        In the main thread, or in Celery's timer thread while the pool stops, whose end Celery does
        not wait for.
        """
        with self._flushing:
            while self._done:
                message, settlement = self._done.popleft()
                if is_lost(message):
                    logger.info(
                        "%s: the connection was lost before a message was settled; RabbitMQ "
                        "delivers it again",
                        self.title,
                    )
                elif settlement == "ack":
                    self.acks.ack((message,))
                else:
                    self.acks.reject(message, requeue=settlement == "requeue")

    def info(self, c: Any) -> dict[str, Any]:
        """Return the step's part of ``inspect stats``."""
        return {
            self.name: {
                "queues": sorted(self._tags),
                "missing": sorted(self._missing),
                "prefetch_count": self.prefetch_count,
                "running": self._running,
            }
        }
