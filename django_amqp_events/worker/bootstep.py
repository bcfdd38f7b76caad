"""Consume the handlers' queues beside Celery's own, and give each delivery to Celery as a task."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from itertools import count
from typing import Any, Final

from amqp import spec
from amqp.exceptions import AccessRefused, NotFound
from celery import bootsteps
from celery.concurrency.solo import TaskPool as SoloPool
from celery.exceptions import WorkerShutdown
from celery.utils.functional import noop
from kombu.message import Message as KombuMessage

from ..backoff import Backoff
from ..broker import amqp_internals
from ..broker.connection import close_socket
from ..broker.delivery_headers import HeaderReader
from ..broker.frame_reader import FrameReader
from ..broker.provisioning import startup
from ..broker.topology import Names, Topology, build
from ..conf import Settings, get_settings
from ..declare.registry import Registry, get_registry
from ..exceptions import AmqpEventsError
from ..message.types import Payload
from . import fast_paths
from .celery_internals import shutdown_requested
from .cold_shutdown import ColdShutdown
from .dispatch import HOLDABLE, Delivery, Dispatcher
from .outgoing import OutgoingMessages
from .request import Chunking, EventMessage
from .settlement import Settler
from .verdict import REQUEUE, Verdict

logger = logging.getLogger(__name__)

#: Delays before a missing queue is checked again.
MISSING_BACKOFF: Final = Backoff(1.0, 30.0)
#: Seconds that a warm shutdown waits for messages that are not confirmed yet.
DRAIN_TIMEOUT: Final = 20.0


class EventStep(bootsteps.StartStopStep):
    """A bootstep that consumes the queues of this service's handlers.

    Consuming begins when the event loop runs: deliveries that arrive during ``start()``, while
    later steps wait for their channels, would crash the worker. ``stop()`` only cancels the
    consumers, so that running events can be acked while the pool stops; ``shutdown()`` closes the
    channel.
    """

    # Control too, for a fixed order: otherwise the error that a worker without permissions reports
    # would vary.
    requires = (
        "celery.worker.consumer.tasks:Tasks",
        "celery.worker.consumer.control:Control",
    )
    label = "AMQP events"

    # Set by ``bootstrap``.
    #: Queues to consume, ``None`` for those of all handlers.
    selected: frozenset[str] | None = None
    excluded: frozenset[str] = frozenset()
    #: Why this worker's pool cannot handle events, if so.
    unsupported: str = ""

    settler_class: type[Settler] = Settler
    #: Whether each event goes to the pool alone.
    alone: bool = False

    settler: Settler
    chunks: Chunking | None = None
    inbound: FrameReader | None = None

    def __init__(self, c: Any, **kwargs: Any) -> None:
        self.c = c
        self._prepared = False
        self.channel: Any = None
        self._probe: Any = None
        self._connection: Any = None
        self._tags: dict[str, str] = {}
        self._numbers = count(1)
        self._pending: deque[str] = deque()
        # Missing queues, and how often each was checked.
        self._missing: dict[str, int] = {}
        # Queues that the check of the topology has found.
        self._known_to_exist: set[str] = set()
        # Queues that this worker may not consume.
        self._refused: set[str] = set()
        self._before_lost = c.on_connection_error_after_connected
        c.on_connection_error_after_connected = self._lost
        self._stopping = False
        super().__init__(c, **kwargs)

    # -- start and stop -------------------------------------------------------------------

    def start(self, c: Any) -> None:
        if not self._prepared:
            self._prepare(c)
        self.settler.begin()
        self.channel = self._probe = None
        self._tags.clear()
        self._missing.clear()
        self._pending.clear()
        self._stopping = False
        self._connection = c.connection
        self._close_inbound()
        if self.chunks is not None:
            self.chunks.begin()
        if self.queues:
            c.call_soon(self._open, c.connection)

    @classmethod
    def known(cls, settings: Settings, registry: Registry) -> set[str]:
        """Return the queues that this step may consume."""
        return set(registry.by_queue())

    @staticmethod
    def home(names: Names) -> str:
        """Return the queue to which retries return, ``""`` for the queue of their handler."""
        return ""

    def _prepare(self, c: Any) -> None:
        self.settings = get_settings()
        self.registry = get_registry()
        self.names = Names.of(self.settings)
        topology = build(self.settings, self.registry)
        known = self.known(self.settings, self.registry)
        wanted = known if self.selected is None else known & self.selected
        self.queues = set(wanted - self.excluded)
        self.dispatcher = Dispatcher(self.settings, self.registry, self.names)
        if known and not self.queues:
            logger.info("this worker consumes no handler's queue, because of its options -Q and -X")
        if self.queues:
            if not c.app.conf.broker_channel_error_retry:
                logger.warning(
                    "This worker exits when RabbitMQ closes a channel, such as after a consumer "
                    "timeout. Set broker_channel_error_retry to True, or use "
                    "`manage.py events_worker`."
                )
            self._check_topology(c, topology)
        self.settler = self.settler_class(
            app=c.app,
            outgoing=OutgoingMessages(
                settings=self.settings,
                names=self.names,
                delays=topology.delays,
                worker=c.hostname,
                home=self.home(self.names),
            ),
            acks=fast_paths.acks(self.settings, c.connection_errors),
            call_soon=c.call_soon,
        )
        if c.hub is not None:
            self.settler.runs_in(c.pool)
        if not self.alone:
            self.chunks = fast_paths.event_chunks(self.settings, c)
        self._replace_remote_control(c)
        self._prepared = True

    def _check_topology(self, c: Any, topology: Topology) -> None:
        """Check or declare the topology, as ``TOPOLOGY`` says; a wrong one would lose events."""
        try:
            report = startup.prepare(c.app, self.settings, topology)
        except AmqpEventsError as exc:
            if self.settings.topology == "external":
                # A missing queue is checked again until it exists.
                logger.warning("%s", exc)
                return
            logger.critical("this worker does not start: %s", exc)
            raise WorkerShutdown(1) from exc
        self._known_to_exist = self.queues - {item.name for item in report.having("unknown")}

    def stop(self, c: Any) -> None:
        self._stopping = True
        self._known_to_exist.clear()
        if self.chunks is not None:
            self.chunks.stop()
        if self._prepared:
            self.settler.end()
        channel, connection = self.channel, c.connection
        # After a lost connection the event loop does not run until there is another.
        ColdShutdown.begin_waiting()
        events = c.event_dispatcher
        if connection is None and events is not None and events.connection is not None:
            # Celery closes it before it opens a new one, and waits without limit for an answer of
            # an unreachable broker (celery/worker/consumer/events.py).
            close_socket(events.connection)
        if channel is None or channel.connection is None or connection is None:
            return
        tags = list(self._tags.values())
        self._tags.clear()
        try:
            for tag in tags[:-1]:
                channel.basic_cancel(tag, nowait=True)
            if tags:
                channel.basic_cancel(tags[-1])
        except (*c.connection_errors, *c.channel_errors) as exc:
            logger.info("the consumers were not cancelled, because the channel is closed: %s", exc)

    terminate = stop

    def _close_inbound(self) -> None:
        if self.inbound is not None:
            self.inbound.close()
            self.inbound = None

    def shutdown(self, c: Any) -> None:
        self._close_inbound()
        if self.chunks is not None:
            self.chunks.read_reports()
        if self._prepared and not self.settler.drain(DRAIN_TIMEOUT):
            logger.warning(
                "shut down before all messages were confirmed; RabbitMQ delivers their events again"
            )
        channel, self.channel = self.channel, None
        if channel is not None and channel.connection is not None:
            try:
                channel.close()
            except (*c.connection_errors, *c.channel_errors) as exc:
                logger.info("the channel was closed already: %s", exc)

    # -- consuming ------------------------------------------------------------------------

    def _open(self, connection: Any) -> None:
        if self._stale(connection) or self.channel is not None:
            return
        self.channel = connection.channel()
        self.frames = HeaderReader(self.channel)
        if "reads" in self.settings.fast_paths and amqp_internals.can_read_frames():
            self.inbound = FrameReader(
                self.channel,
                hub=self.c.hub,
                several=not isinstance(self.c.pool, SoloPool),
            )
        self.channel.basic_qos(0, self.prefetch_count, False)
        self._pending.extend(sorted(self.queues))
        logger.info(
            "service %s: consuming %d queue%s, prefetch count %d each: %s",
            self.settings.service,
            len(self.queues),
            "" if len(self.queues) == 1 else "s",
            self.prefetch_count,
            ", ".join(self._pending),
        )
        self._next(connection)

    @property
    def prefetch_count(self) -> int:
        """Prefetch count of each queue; small, so that a killed worker redelivers few events."""
        budget = self.c.initial_prefetch_count or 4 * max(1, self.c.pool.num_processes)
        return max(1, int(budget) // max(1, len(self.queues)))

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
            self.c.call_soon(_raise, exc)

    def _consume(self, connection: Any, queue: str) -> None:
        if queue in self._known_to_exist:
            self._known_to_exist.discard(queue)
        elif problem := self._problem(connection, queue):
            self._retry_later(connection, queue, problem)
            return
        # The number keeps cut tags different.
        tag = self._tags[queue] = f"{next(self._numbers)}:{self.c.hostname}:{queue}"[:60]
        self.channel.basic_consume(
            queue,
            consumer_tag=tag,
            callback=partial(self._receive, queue),
            on_cancel=partial(self._cancelled, connection, queue),
            # If RabbitMQ refuses, it closes the channel.
            nowait=True,
        )
        if self._missing.pop(queue, None) is not None:
            logger.info("queue %r exists now, consuming it", queue)

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
            return "is missing, so its events are not handled. Run `manage.py events_declare`"
        except AccessRefused as exc:
            if f"'{queue}'" not in exc.reply_text:
                raise
            return (
                f"cannot be consumed, so its events are not handled: {exc.reply_text}. "
                f"Give this user the read permission"
            )
        return ""

    def _try_to_read(self, queue: str) -> None:
        """Consume for a moment; RabbitMQ requeues a delivery when the channel closes."""
        self._probe.basic_qos(0, 1, False)
        self._probe.basic_cancel(self._probe.basic_consume(queue, callback=bool))
        self._probe.close()
        self._probe = None
        self._refused.discard(queue)

    def _lost(self, exc: Exception) -> None:
        """Record a queue that this worker may not consume; its refusal closes the channel.

        Otherwise each attempt would redeliver the events of the other queues, up to the delivery
        limit.
        """
        self._before_lost(exc)
        if not self._prepared or not isinstance(exc, AccessRefused):
            return
        if exc.method_sig == spec.Basic.Consume:
            self._refused |= {queue for queue in self.queues if f"'{queue}'" in exc.reply_text}

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
        self._tags.pop(queue, None)
        logger.warning("RabbitMQ cancelled the consumer of %r; consuming it again", queue)
        self._soon(connection, queue, MISSING_BACKOFF.first)

    # -- remote control -------------------------------------------------------------------

    def _replace_remote_control(self, c: Any) -> None:
        """Handle ``add_consumer`` and ``cancel_consumer`` of remote control for our queues.

        Celery would declare the queue with arguments of its own. RabbitMQ refuses that with 406,
        and Celery connects again.
        """
        add, cancel = c.add_task_queue, c.cancel_task_queue
        known = self.known(self.settings, self.registry)

        def add_task_queue(queue: str, *args: Any, **kwargs: Any) -> None:
            if queue not in known:
                add(queue, *args, **kwargs)
                return
            if self.unsupported:
                logger.error("not consuming %r: %s", queue, self.unsupported)
                return
            self.queues.add(queue)
            logger.info("consuming %r by remote control", queue)
            if self.channel is None:
                c.call_soon(self._open, self._connection)
            else:
                self._pending.append(queue)
                self._turn(self._connection)

        def cancel_task_queue(queue: str) -> None:
            if queue not in known:
                cancel(queue)
                return
            self.queues.discard(queue)
            tag = self._tags.pop(queue, None)
            if tag is not None:
                # An answer might be an error, which remote control swallows: RabbitMQ has closed
                # the channel, and the worker would stop consuming.
                self.channel.basic_cancel(tag, nowait=True)
            logger.info("no longer consuming %r by remote control", queue)

        c.add_task_queue = add_task_queue
        c.cancel_task_queue = cancel_task_queue

    # -- deliveries -----------------------------------------------------------------------

    @property
    def _is_stopping(self) -> bool:
        """Whether no run may begin any more.

        Celery's other steps stop first. While they wait for RabbitMQ's answers, further deliveries
        arrive, which a solo worker would run.
        """
        return self._stopping or shutdown_requested()

    def _receive(self, queue: str, raw: Any) -> None:
        message = KombuMessage(
            channel=self.channel,
            delivery_tag=raw.delivery_tag,
            delivery_info=raw.delivery_info,
        )
        self.settler.acks.received(message)
        if self._is_stopping:
            return  # unsettled, so RabbitMQ delivers it again when the channel closes
        delivery = Delivery(received=self.frames.received(queue, raw), message=message)
        self._guarded(self._dispatch, delivery)

    def _guarded(self, step: Callable[..., None], delivery: Delivery, *args: Any) -> None:
        """Call *step*; requeue the delivery if a bug of ours raises.

        Past the delivery limit RabbitMQ moves it to the graveyard.
        """
        try:
            step(delivery, *args)
        except Exception:
            logger.exception(
                "a delivery from %r could not be read; it is requeued", delivery.received.queue
            )
            self.settler.settle(delivery, REQUEUE)

    def _dispatch(self, delivery: Delivery) -> None:
        payload = self.dispatcher.read(delivery)
        if isinstance(payload, Verdict):
            self.settler.settle(delivery, payload)
            return
        remaining = delivery.remaining(datetime.now(UTC))
        if remaining > HOLDABLE:
            self.settler.postpone(delivery)
        elif remaining > 0:
            held = (self._handle, delivery, payload)
            self.c.timer.call_after(remaining, self._guarded, held)
        else:
            self._handle(delivery, payload)

    def _handle(self, delivery: Delivery, payload: Payload) -> None:
        if self._is_stopping or delivery.lost:
            return  # RabbitMQ delivers it again
        received = delivery.received
        fresh = received.exchange == self.names.events and not received.redelivered
        message = EventMessage(delivery, payload, self.settler, self.chunks if fresh else None)
        headers = message.headers
        self.c.strategies[headers["task"]](
            message,
            [headers["args"], headers["kwargs"], {}],
            # Celery's ack and reject; a verdict settles an event.
            noop,
            noop,
            self.c.on_task_message,
        )

    def info(self, c: Any) -> dict[str, Any]:
        """Return the step's part of ``inspect stats``."""
        return {
            "amqp_events": {
                "queues": sorted(self._tags),
                "missing": sorted(self._missing),
                "prefetch_count": self.prefetch_count if self._prepared else None,
                "reads": self.inbound is not None,
                "chunks": self.chunks.submitted if self.chunks is not None else None,
            }
        }


def _raise(exc: BaseException) -> None:
    raise exc
