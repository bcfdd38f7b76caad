"""The consumer step: takes deliveries from the handlers' queues and gives them to Celery."""

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
from celery.worker import state
from kombu.message import Message as KombuMessage

from ..broker.connection import abandon
from ..broker.delivery_headers import Frames
from ..broker.fast.frame_reader import Inbound
from ..broker.provisioning import startup
from ..broker.topology import Names, Topology, build
from ..conf import Settings, get_settings
from ..context import ReceivedEvent
from ..declare.registry import Handler, Registry, get_registry
from ..exceptions import AmqpEventsError
from ..message.messages import Payload, Progress, Received
from .cold_shutdown import ColdShutdown
from .dispatch import HOLDABLE, Dispatcher, celery_headers
from .fast.chunks import Chunks
from .outgoing import Copies
from .request import Delivery, EventMessage
from .settlement import Settler
from .verdict import REQUEUE, Verdict

logger = logging.getLogger(__name__)

#: Seconds between looks at a queue that is missing: doubled from the first to the last.
MISSING_BACKOFF: Final = (1.0, 30.0)
#: Seconds that a warm shutdown waits for copies that are not confirmed yet.
DRAIN_TIMEOUT: Final = 20.0


class EventStep(bootsteps.StartStopStep):
    """Consumes the queues of this service's handlers beside Celery's own.

    It starts consuming when the event loop runs: in ``start()`` deliveries would arrive while
    later steps wait for their channels, and crash the worker. ``stop()`` only cancels, so that
    what is in hand can still be acked while the pool drains; ``shutdown()`` closes the channel.
    """

    # Control too: what needs only Tasks starts in any order, and what a worker says and does that
    # may use nothing on this vhost would be one thing today and another tomorrow.
    requires = (
        "celery.worker.consumer.tasks:Tasks",
        "celery.worker.consumer.control:Control",
    )
    label = "AMQP events"

    #: Queues to consume, ``None`` for those of all handlers; set by ``bootstrap``.
    selected: frozenset[str] | None = None
    excluded: frozenset[str] = frozenset()
    #: Why this worker's pool can handle no events; such a worker has no queues of ours.
    unsupported: str = ""

    settler_class: type[Settler] = Settler
    #: Each event goes to the pool alone.
    alone: bool = False

    settings: Settings
    registry: Registry
    names: Names
    queues: set[str]
    dispatcher: Dispatcher
    settler: Settler
    frames: Frames
    chunks: Chunks | None = None
    inbound: Inbound | None = None

    def __init__(self, c: Any, **kwargs: Any) -> None:
        self.c = c
        self._prepared = False
        self.channel: Any = None
        self._probe: Any = None
        self._connection: Any = None
        self._tags: dict[str, str] = {}
        self._numbers = count(1)
        self._pending: deque[str] = deque()
        self._missing: dict[str, float] = {}
        # Queues that were seen when the topology was met, and need not be looked for.
        self._met: set[str] = set()
        # Queues that this worker was not let consume.
        self._refused: set[str] = set()
        self._before_lost = c.on_connection_error_after_connected
        c.on_connection_error_after_connected = self._lost
        self._stopping = False
        super().__init__(c, **kwargs)

    # -- life -----------------------------------------------------------------------------

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
        self._leave_inbound()
        if self.chunks is not None:
            self.chunks.begin()
        if self.queues:
            c.call_soon(self._open, c.connection)

    @classmethod
    def known(cls, settings: Settings, registry: Registry) -> set[str]:
        """Return the queues that are this step's business."""
        return set(registry.by_queue())

    @staticmethod
    def home(names: Names) -> str:
        """Return the queue that retries come back to, ``""`` for that of their handlers."""
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
            logger.info("this worker consumes no handler's queue, as its -Q and -X say")
        if self.queues:
            if not c.app.conf.broker_channel_error_retry:
                logger.warning(
                    "broker_channel_error_retry is not set: this worker exits when RabbitMQ closes "
                    "a channel, such as after a consumer timeout. Set it to True, or use "
                    "`manage.py events_worker`"
                )
            self._meet_topology(c, topology)
        self.settler = self.settler_class(
            app=c.app,
            settings=self.settings,
            copies=Copies(
                settings=self.settings,
                names=self.names,
                delays=topology.delays,
                worker=c.hostname,
                home=self.home(self.names),
            ),
            call_soon=c.call_soon,
            errors=c.connection_errors,
        )
        if c.hub is not None:
            self.settler.runs_in(c.pool)
        if "chunks" in self.settings.fast_paths and not self.alone and Chunks.possible(c):
            self.chunks = Chunks(c)
        self._take_over_remote_control(c)
        self._prepared = True

    def _meet_topology(self, c: Any, topology: Topology) -> None:
        """Do what ``TOPOLOGY`` says; a worker on a topology that does not fit would lose events."""
        try:
            report = startup.prepare(c.app, self.settings, topology)
        except AmqpEventsError as exc:
            if self.settings.topology == "external":
                # Somebody else declares; a queue that is missing is looked for again and again.
                logger.warning("%s", exc)
                return
            logger.critical("this worker does not start: %s", exc)
            raise WorkerShutdown(1) from exc
        self._met = self.queues - {item.name for item in report.having("unknown")}

    def stop(self, c: Any) -> None:
        self._stopping = True
        self._met.clear()
        if self.chunks is not None:
            self.chunks.let_go()
        if self._prepared:
            self.settler.end()
        channel, connection = self.channel, c.connection
        # After a lost connection the event loop has no next turn before there is another.
        ColdShutdown.go_on()
        if connection is None:
            self._leave_task_events(c)
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
            logger.info("consumers not cancelled, the channel is gone: %s", exc)

    terminate = stop

    @staticmethod
    def _leave_task_events(c: Any) -> None:
        """Give up the connection of Celery's task events after ours was lost.

        Celery says goodbye there before it makes a new one, and waits for ever for the answer
        of a broker that is gone without a word (celery/worker/consumer/events.py).
        """
        dispatcher = c.event_dispatcher
        if dispatcher is not None and dispatcher.connection is not None:
            abandon(dispatcher.connection)

    def _leave_inbound(self) -> None:
        if self.inbound is not None:
            self.inbound.close()
            self.inbound = None

    def shutdown(self, c: Any) -> None:
        self._leave_inbound()
        if self.chunks is not None:
            self.chunks.read_reports()
        if self._prepared and not self.settler.drain(DRAIN_TIMEOUT):
            logger.warning(
                "shut down before every copy was confirmed; the broker delivers those events again"
            )
        channel, self.channel = self.channel, None
        if channel is not None and channel.connection is not None:
            try:
                channel.close()
            except (*c.connection_errors, *c.channel_errors) as exc:
                logger.info("channel not closed, it is gone: %s", exc)

    # -- consuming ------------------------------------------------------------------------

    def _open(self, connection: Any) -> None:
        if self._stale(connection) or self.channel is not None:
            return
        self.channel = connection.channel()
        # The body is kept byte for byte; decoding it is our own business.
        self.channel.auto_decode = False
        fast_paths = self.settings.fast_paths
        self.frames = Frames(self.channel, quick="frames" in fast_paths)
        if "reads" in fast_paths and Inbound.possible(self.channel):
            self.inbound = Inbound(
                self.channel,
                self.frames,
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
        """Unsettled deliveries per queue: small, so that a dying worker touches few innocents."""
        budget = self.c.initial_prefetch_count or 4 * max(1, self.c.pool.num_processes)
        return max(1, int(budget) // max(1, len(self.queues)))

    def _stale(self, connection: Any) -> bool:
        return self._stopping or self._connection is not connection

    def _next(self, connection: Any) -> None:
        """Start consuming one queue, then come back for the next: ordinary tasks go on between."""
        if self._stale(connection) or not self._pending:
            return
        queue = self._pending.popleft()
        if queue in self.queues and queue not in self._tags:
            self._consume(connection, queue)
        if self._pending:
            # By the timer: what call_soon adds while the loop runs such calls waits until the
            # poll after them ends, a second or more for each queue in an idle worker.
            self.c.timer.call_after(0, self._turn, (connection,))

    def _turn(self, connection: Any) -> None:
        """Go on from a timer. A timer swallows what the worker has to see: a refused channel."""
        try:
            self._next(connection)
        except self.c.channel_errors as exc:
            self.c.call_soon(_raise, exc)

    def _consume(self, connection: Any, queue: str) -> None:
        if queue in self._met:
            self._met.discard(queue)
        elif why := self._trouble(connection, queue):
            self._retry_later(connection, queue, why)
            return
        # Number first: long names that are cut must not meet.
        tag = self._tags[queue] = f"{next(self._numbers)}:{self.c.hostname}:{queue}"[:60]
        self.channel.basic_consume(
            queue,
            consumer_tag=tag,
            callback=partial(self._receive, queue),
            on_cancel=partial(self._cancelled, connection, queue),
            # A refusal closes the channel, with or without an answer that is waited for.
            nowait=True,
        )
        if self._missing.pop(queue, None) is not None:
            logger.info("queue %r is there, consuming it", queue)

    def _trouble(self, connection: Any, queue: str) -> str:
        """Look for a queue on a channel of its own, which an error closes; say what is wrong."""
        if self._probe is None or self._probe.connection is None:
            self._probe = connection.channel()
        try:
            self._probe.queue_declare(queue, passive=True)
            if queue in self._refused:
                self._try_to_read(queue)
        except NotFound as exc:
            if exc.method_sig != spec.Queue.Declare:
                # Not the answer: the consuming channel was closed. Celery begins anew.
                raise
            # py-amqp has opened the probe's channel again.
            return "is missing; its events are not handled. Run `manage.py events_declare`"
        except AccessRefused as exc:
            if f"'{queue}'" not in exc.reply_text:
                raise
            return (
                f"cannot be consumed; its events are not handled. RabbitMQ says: {exc.reply_text}. "
                f"Give this user the read permission"
            )
        return ""

    def _try_to_read(self, queue: str) -> None:
        """Consume for a moment; what may have come goes back when the channel closes."""
        self._probe.basic_qos(0, 1, False)
        self._probe.basic_cancel(self._probe.basic_consume(queue, callback=bool))
        self._probe.close()
        self._probe = None
        self._refused.discard(queue)

    def _lost(self, exc: Exception) -> None:
        """Remember a queue that RabbitMQ refused, and with it the channel of all queues.

        Each time the others would be delivered anew, until they are taken for poison.
        """
        self._before_lost(exc)
        if not self._prepared or not isinstance(exc, AccessRefused):
            return
        if exc.method_sig == spec.Basic.Consume:
            self._refused |= {queue for queue in self.queues if f"'{queue}'" in exc.reply_text}

    def _retry_later(self, connection: Any, queue: str, why: str) -> None:
        first, last = MISSING_BACKOFF
        wait = min(self._missing.get(queue, first / 2) * 2, last)
        self._missing[queue] = wait
        logger.error("queue %r %s; looking again in %g s", queue, why, wait)
        self._soon(connection, queue, wait)

    def _soon(self, connection: Any, queue: str, wait: float) -> None:
        def again() -> None:
            if not self._stale(connection):
                self._pending.append(queue)
                self._turn(connection)

        self.c.timer.call_after(wait, again)

    def _cancelled(self, connection: Any, queue: str, consumer_tag: str) -> None:
        """The broker cancelled a consumer: the queue was deleted, or its timeout passed."""
        self._tags.pop(queue, None)
        logger.warning("RabbitMQ cancelled the consumer of %r; consuming it again", queue)
        self._soon(connection, queue, MISSING_BACKOFF[0])

    # -- remote control -------------------------------------------------------------------

    def _take_over_remote_control(self, c: Any) -> None:
        """Answer ``add_consumer`` and ``cancel_consumer`` for our queues ourselves.

        Celery would declare a queue of that name with arguments of its own: 406, and the
        connection is lost.
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
            logger.info("consuming %r, as remote control asked", queue)
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
                # Not waiting: remote control swallows what is raised here, such as that the broker
                # has closed the channel, and the worker would consume nothing any more.
                self.channel.basic_cancel(tag, nowait=True)
            logger.info("no longer consuming %r, as remote control asked", queue)

        c.add_task_queue = add_task_queue
        c.cancel_task_queue = cancel_task_queue

    # -- deliveries -----------------------------------------------------------------------

    @property
    def _ends(self) -> bool:
        """Whether no run may begin any more.

        Celery's other steps stop before this one, and while they wait for the broker's answers
        what has come before those is delivered: a solo worker would run it all.
        """
        return self._stopping or state.should_stop is not None or state.should_terminate is not None

    def _receive(self, queue: str, raw: Any) -> None:
        info = raw.delivery_info
        message = KombuMessage(
            channel=self.channel, delivery_tag=raw.delivery_tag, delivery_info=info
        )
        self.settler.acks.came(message)
        if self._ends:
            return  # unsettled, so the broker has it again when the channel closes
        properties, unreadable = self.frames.properties()
        headers = properties.pop("application_headers", None)
        body = raw.body
        received = Received(
            queue=queue,
            exchange=info.get("exchange", ""),
            routing_key=info.get("routing_key", ""),
            body=body.encode() if isinstance(body, str) else bytes(body),
            headers=headers if isinstance(headers, dict) else {},
            properties=properties,
            redelivered=bool(info.get("redelivered")),
            unreadable=unreadable,
        )
        delivery = Delivery(received=received, message=message, settler=self.settler)
        self._guarded(delivery, self._dispatch, delivery)

    def _guarded(self, delivery: Delivery, step: Callable[..., None], *args: Any) -> None:
        """Take a step with a delivery, which a bug of ours must not lose nor stop the worker.

        The broker delivers it again, and past the limit it is isolated in the graveyard.
        """
        try:
            step(*args)
        except Exception:
            logger.exception("a delivery from %r was not dispatched", delivery.received.queue)
            self.settler.settle(delivery, REQUEUE)

    def _dispatch(self, delivery: Delivery) -> None:
        event, progress, handler, payload = self.dispatcher.read(delivery.received)
        delivery.event, delivery.progress, delivery.handler = event, progress, handler
        if isinstance(payload, Verdict):
            self.settler.settle(delivery, payload)
            return
        event, handler = delivery.known
        remaining = delivery.remaining(datetime.now(UTC))
        if remaining > HOLDABLE:
            self.settler.postpone(delivery)
        elif remaining > 0:
            step = (self._handle, delivery, event, progress, handler, payload)
            self.c.timer.call_after(remaining, self._guarded, (delivery, *step))
        else:
            self._handle(delivery, event, progress, handler, payload)

    def _handle(
        self,
        delivery: Delivery,
        event: ReceivedEvent,
        progress: Progress,
        handler: Handler,
        payload: Payload,
    ) -> None:
        if self._ends or delivery.lost:
            return  # held until it was due, and meanwhile given back to the broker
        received = delivery.received
        if received.exchange == self.names.events and not received.redelivered:
            delivery.chunks = self.chunks
        clean = EventMessage.rebuilt(
            delivery,
            headers=celery_headers(event, progress, handler, payload, len(received.body)),
            delivery_info={
                "exchange": received.exchange,
                "routing_key": received.routing_key,
                "redelivered": received.redelivered,
            },
        )
        self.c.strategies[handler.name](
            clean,
            [list(payload.args), dict(payload.kwargs), {}],
            # Celery's ways to answer: ours goes by verdicts, and never asks for them.
            noop,
            noop,
            self.c.on_task_message,
        )

    def info(self, c: Any) -> dict[str, Any]:
        """What ``inspect stats`` shows."""
        return {
            "amqp_events": {
                "queues": sorted(self._tags),
                "missing": sorted(self._missing),
                "prefetch_count": self.prefetch_count if self._prepared else None,
                "reads": self.inbound is not None,
                "chunks": self.chunks.handed if self.chunks is not None else None,
            }
        }


def _raise(exc: BaseException) -> None:
    raise exc
