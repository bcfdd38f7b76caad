"""Consume the handlers' queues beside Celery's own, and give each delivery to Celery as a task."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from textwrap import shorten
from time import monotonic
from typing import Any, Final

from celery.concurrency.prefork import TaskPool as PreforkPool
from celery.concurrency.solo import TaskPool as SoloPool
from celery.exceptions import WorkerShutdown
from celery.utils.functional import noop
from kombu import Exchange, Queue
from kombu.message import Message as KombuMessage

from .. import liveness
from ..broker.frame_reader import FrameReader
from ..broker.provisioning import startup
from ..broker.topology import Names, Topology, build
from ..conf import Settings, get_settings
from ..declare.registry import Registry, get_registry
from ..exceptions import AmqpEventsError
from ..message.types import Payload, Received
from . import fast_paths
from .celery_internals import ProcessSemaphore, state
from .cold_shutdown import ColdShutdown
from .dispatch import HOLD_SECONDS, Delivery, Dispatcher
from .intake import Intake
from .outgoing import OutgoingMessages
from .queue_step import MAX_PREFETCH, QueueStep, reraise
from .request import Chunking, EventMessage, continue_runs
from .settlement import Settler
from .verdict import REQUEUE, Verdict

logger = logging.getLogger(__name__)

#: Seconds that a warm shutdown waits for messages that are not confirmed yet.
DRAIN_TIMEOUT: Final = 20.0
#: Seconds between turns of the event loop that ``events_health`` can see.
TURN_SECONDS: Final = 5.0


class EventStep(QueueStep):
    """A bootstep that consumes the queues of this service's handlers."""

    label = "AMQP events"
    contents = "events"
    remedy = "Run `manage.py events_declare`"

    # Set by ``bootstrap``.
    #: Queues to consume, ``None`` for those of all handlers.
    selected: frozenset[str] | None = None
    excluded: frozenset[str] = frozenset()
    #: Why this worker's pool cannot handle events, if so.
    unsupported: str = ""

    settler_class: type[Settler] = Settler
    queues: set[str]
    settler: Settler
    chunks: Chunking | None = None
    intake: Intake | None = None
    inbound: FrameReader | None = None
    _timers: tuple[Any, ...] = ()

    def __init__(self, c: Any, **kwargs: Any) -> None:
        self._prepared = False
        self.queues = set()
        self.why_unused: dict[str, str] = {}
        self.part = liveness.Part(
            name="reaper" if self.alone else "worker", problem=self._not_ready
        )
        liveness.parts.append(self.part)
        super().__init__(c, **kwargs)

    # -- start and stop -------------------------------------------------------------------

    def start(self, c: Any) -> None:
        if not self._prepared:
            self._prepare(c)
        self.settler.begin()
        self._close_inbound()
        if self.chunks is not None:
            self.chunks.begin()
        if isinstance(c.pool, PreforkPool):
            continue_runs()
        super().start(c)
        self.part.turn()
        self._timers = (c.timer.call_repeatedly(TURN_SECONDS, self.part.turn),)
        if self.intake is not None:
            self.intake.begin()
            self._timers += (c.timer.call_repeatedly(self.intake.interval, self._adapt),)

    def _not_ready(self) -> str:
        """Return why this worker is not ready, ``""`` if it is; called in a thread."""
        if self.part.turned is None:
            return "it is not connected to RabbitMQ: check the broker, and the worker's log"
        if isinstance(self.c.pool, SoloPool) and state.active_requests:
            self.part.turn()  # the handler runs in the loop
        if missing := sorted(self._missing):
            return f"queue {missing[0]} is missing or cannot be read. {self.remedy}"
        if len(self._tags) + len(self.paused) < len(self.queues):
            return "it does not consume all of its queues yet"
        return ""

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
            logger.warning(
                "this worker handles no events, because -Q and -X exclude the handlers' queues "
                "(%s). Start another for them: `manage.py events_worker`.",
                shorten(", ".join(sorted(known)), 200, placeholder=" …"),
            )
        if self.queues:
            self._warn_of_channel_errors(c)
            self._check_topology(c, topology)
        self.why_unused = fast_paths.why_unused(self.settings, c)
        self.settler = self.settler_class(
            app=c.app,
            outgoing=OutgoingMessages(
                settings=self.settings,
                names=self.names,
                delays=topology.delays,
                worker=c.hostname,
                home=self.home(self.names),
            ),
            acks=fast_paths.acks(self.why_unused, c.connection_errors),
            call_soon=self.call_soon,
        )
        self.acks = self.settler.acks
        if c.hub is not None:
            self.settler.runs_in(c.pool)
        ProcessSemaphore.replace(c.controller)
        self.chunks = fast_paths.event_chunks(self.why_unused, c)
        if not self.alone:
            self.intake = Intake(
                self,
                self.registry,
                self.settings.consumer_timeout,
                partial(self.call_soon, self._adapt),
            )
            self.settler.on_ended = self.intake.ended
        self._arguments = {queue.name: dict(queue.arguments) for queue in topology.queues}
        self._patterns = {
            name: [pattern for handler in handlers for pattern in handler.bindings]
            for name, handlers in self.registry.by_queue().items()
        }
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

    def flush(self) -> None:
        self.settler.flush()

    def stop(self, c: Any) -> None:
        self._stopping = True
        for timer in self._timers:
            timer.cancel()
        self.part.turned = None
        if self.chunks is not None:
            self.chunks.stop()
        if self._prepared:
            self.settler.end()
        # After a lost connection the event loop does not run until there is another.
        ColdShutdown.begin_waiting()
        super().stop(c)

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
        super().shutdown(c)

    # -- consuming ------------------------------------------------------------------------

    def _opened(self) -> None:
        self.why_unused = fast_paths.why_unused(self.settings, self.c)
        if not self.why_unused["reads"]:
            several = not isinstance(self.c.pool, SoloPool)
            try:
                self.inbound = FrameReader(self.channel, hub=self.c.hub, several=several)
            except OSError as exc:
                self.why_unused["reads"] = f"no pipe can be opened: {exc}"
                logger.warning("the fast path 'reads' is not used: %s", self.why_unused["reads"])

    @property
    def title(self) -> str:
        return f"service {self.settings.service}"

    @property
    def prefetch_count(self) -> int:
        """Highest prefetch count of a queue; small, so that a killed worker redelivers few."""
        budget = self.c.initial_prefetch_count or 4 * max(1, self.c.pool.num_processes)
        return min(max(1, int(budget) // max(1, len(self.queues))), MAX_PREFETCH)

    def count_of(self, queue: str) -> int:
        if self.intake is None:
            return self.prefetch_count
        return min(self.intake.count(queue), MAX_PREFETCH)

    def _adapt(self) -> None:
        if self.intake is not None:
            self._change(self.intake.turn)

    def _change(self, change: Callable[..., None], *args: Any) -> None:
        """Change the consumers, and handle errors: a timer and other callers cannot."""
        if self.channel is None or self._is_stopping:
            return
        try:
            change(*args)
        except (*self.c.connection_errors, *self.c.channel_errors) as exc:
            self.c.call_soon(reraise, exc)
        except Exception:
            logger.exception("cannot adapt the prefetch counts; the worker keeps the present ones")

    # -- remote control -------------------------------------------------------------------

    def active_queues(self) -> list[Queue]:
        return [
            Queue(
                name,
                Exchange(self.names.events, "topic"),
                routing_key=next(iter(self._patterns.get(name, ())), ""),
                queue_arguments=self._arguments.get(name),
            )
            for name in sorted({*self._tags, *self.paused})
        ]

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
            self.paused.discard(queue)
            self._missing.pop(queue, None)
            tag = self._tags.pop(queue, None)
            if tag is not None:
                # An answer might be an error, which remote control swallows: RabbitMQ has closed
                # the channel, and the worker would stop consuming.
                self.channel.basic_cancel(tag, nowait=True)
            logger.info("no longer consuming %r by remote control", queue)

        c.add_task_queue = add_task_queue
        c.cancel_task_queue = cancel_task_queue

    # -- deliveries -----------------------------------------------------------------------

    def on_delivery(self, received: Received, message: KombuMessage) -> None:
        if self.intake is not None:
            self.intake.received(received)
        self._guarded(self._dispatch, Delivery(received=received, message=message))

    def _guarded(self, step: Callable[..., None], delivery: Delivery, *args: Any) -> None:
        """Call *step*; requeue the delivery if a bug of ours raises.

        Past the delivery limit RabbitMQ moves it to the graveyard.
        """
        try:
            step(delivery, *args)
        except Exception:
            logger.exception(
                "a delivery from %r could not be read; it is requeued",
                delivery.received.queue,
                extra=delivery.log_fields,
            )
            self.settler.settle(delivery, REQUEUE)

    def _dispatch(self, delivery: Delivery) -> None:
        payload = self.dispatcher.read(delivery)
        if isinstance(payload, Verdict):
            self.settler.settle(delivery, payload)
            return
        remaining = delivery.remaining(datetime.now(UTC))
        if remaining > HOLD_SECONDS:
            self.settler.postpone(delivery)
        elif remaining > 0:
            held = (self._handle, delivery, payload)
            self.c.timer.call_after(remaining, self._guarded, held)
        else:
            self._handle(delivery, payload)

    def _handle(self, delivery: Delivery, payload: Payload) -> None:
        # Celery's handler of SIGQUIT reads deliveries while a solo worker runs another event.
        if self._is_stopping or delivery.lost or self.settler.runs_event:
            return  # RabbitMQ delivers it again
        received = delivery.received
        fresh = received.exchange == self.names.events and not received.redelivered
        message = EventMessage(delivery, payload, self.settler, self.chunks if fresh else None)
        headers = message.headers
        began = monotonic()
        self.c.strategies[headers["task"]](
            message,
            [headers["args"], headers["kwargs"], {}],
            # Celery's ack and reject; a verdict settles an event.
            noop,
            noop,
            self.c.on_task_message,
        )
        if self.intake is not None:
            self._change(self.intake.handed_over, delivery, monotonic() - began)

    def info(self, c: Any) -> dict[str, Any]:
        """Return the step's part of ``inspect stats``."""
        return {
            "amqp_events": {
                "queues": sorted({*self._tags, *self.paused}),
                "missing": sorted(self._missing),
                "paused": sorted(self.paused),
                "prefetch_count": self.prefetch_count if self._prepared else None,
                "prefetch_counts": {
                    queue: [0 if queue in self.paused else window.count, window.why]
                    for queue, window in sorted(self.intake.windows.items())
                    if queue in self.queues
                }
                if self.intake is not None
                else None,
                "fast_paths": {path: why or "used" for path, why in self.why_unused.items()},
                "chunks": self.chunks.submitted if self.chunks is not None else None,
            }
        }
