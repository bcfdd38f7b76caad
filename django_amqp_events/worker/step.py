"""Consume the handlers' queues beside Celery's own, and hand each delivery to the pool."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from textwrap import shorten
from time import monotonic, sleep
from typing import Any, Final

from amqp import spec
from amqp.exceptions import AccessRefused, NotFound
from celery import bootsteps
from celery.exceptions import WorkerShutdown

from .. import liveness
from ..backoff import Backoff
from ..broker.delivery_reader import DeliveryReader
from ..broker.provisioning import startup
from ..broker.reply_texts import names_queue
from ..broker.topology import Names, build
from ..conf import Settings, get_settings
from ..declare.registry import Handler, Registry, get_registry
from ..exceptions import AmqpEventsError
from ..logs import LoopRecords, get_logger
from ..message.text import counted
from ..message.types import Delivered, event_key
from . import remote_control
from .acks import Acks
from .celery_internals import shutdown_requested, state
from .delivery import Delivery, Item
from .jobs import Jobs
from .prefetch import JOB_EVENTS, Window, window
from .reading import Dispatcher
from .wakeup import Wakeup

logger = get_logger(__name__)

#: Delays before a missing queue is checked again.
MISSING_BACKOFF: Final = Backoff(1.0, 30.0)
#: Seconds between turns of the event loop that ``events_health`` can see.
TURN_SECONDS: Final = 5.0
#: Seconds between two looks for pool processes that have ended.
PROCESS_SECONDS: Final = 0.25
#: Longest time in seconds between two decisions on prefetch counts, and its part of the time that
#: an event may wait.
ADAPT_SECONDS, ADAPT_PART = 1.0, 1 / 4
#: Factor of the time that an event may wait, for which a queue is slow after one has waited longer.
STUCK: Final = 2.0
#: Seconds between checks for ended threads.
POLL_SECONDS: Final = 0.2


class EventStep(bootsteps.StartStopStep):
    """A bootstep that consumes the queues of this service's handlers.

    Consuming begins when the event loop runs: deliveries that arrive during ``start()``, while
    later steps wait for their channels, would crash the worker. ``stop()`` cancels the consumers
    and gives back what the pool does not have, so that the others can be acked while the pool
    stops; ``shutdown()`` closes the channel. A missing queue is checked again until it exists,
    while the others are consumed.
    """

    # Control too, for a fixed order: otherwise the error that a worker without permissions reports
    # would vary.
    requires: Any = (
        "celery.worker.consumer.tasks:Tasks",
        "celery.worker.consumer.control:Control",
    )
    label = "AMQP events"
    remedy = "Run `manage.py events_declare`"

    # Set by ``bootstrap``.
    #: Queues to consume, ``None`` for those of all handlers.
    selected: frozenset[str] | None = None
    excluded: frozenset[str] = frozenset()
    #: Why this worker's pool cannot handle events, if so.
    unsupported: str = ""
    #: Whether each event runs alone, with nothing in advance.
    alone = False

    queues: set[str]
    jobs: Jobs
    channel: Any = None

    def __init__(self, c: Any, **kwargs: Any) -> None:
        self.c = c
        self.queues = set()
        self._prepared = False
        self._records: LoopRecords | None = None
        self._stopping = False
        self._connection: Any = None
        self._probe: Any = None
        self._timers: tuple[Any, ...] = ()
        self._tags: dict[str, str] = {}
        self._numbers = count(1)
        # The consumers that were cancelled last, from which RabbitMQ may have sent something.
        self._cancelled_tags: dict[str, str] = {}
        #: The prefetch counts of consumed queues.
        self.windows: dict[str, Window] = {}
        #: Queues that are not consumed until a process is free; a dict, because a set has no order.
        self.paused: dict[str, None] = {}
        # Until when (monotonic) a queue is slow whose events have waited for too long.
        self._stuck_until: dict[str, float] = {}
        # When (monotonic) the next paused queue may be consumed again.
        self._next_resume = 0.0
        # Missing queues, and how often each was checked.
        self._missing: dict[str, int] = {}
        # The timers after which queues are consumed.
        self._waits: dict[str, Any] = {}
        # Queues that were found to exist, so that they are not checked.
        self._known_to_exist: set[str] = set()
        # Queues that this worker may not consume.
        self._refused: set[str] = set()
        self._before_lost = c.on_connection_error_after_connected
        c.on_connection_error_after_connected = self._lost
        self.part = liveness.Part("reaper" if self.alone else "worker", self._not_ready)
        self.part.rest()
        super().__init__(c, **kwargs)

    @classmethod
    def known(cls, settings: Settings, registry: Registry) -> set[str]:
        """Return the queues that this step may consume."""
        return set(registry.by_queue())

    # -- start and stop -------------------------------------------------------------------

    def start(self, c: Any) -> None:
        if not self._prepared:
            self._prepare(c)
        self.channel = self._probe = None
        for states in (self._tags, self._cancelled_tags, self.windows, self.paused, self._missing):
            states.clear()
        self._stopping = False
        self._connection = c.connection
        self.jobs.begin()
        self._interval = min(ADAPT_SECONDS, self.jobs.wait * ADAPT_PART)
        # A solo worker's loop stands still while a handler runs.
        turn = self.part.rest if self.jobs.runs_in_loop else self.part.turn
        self._timers = (
            c.timer.call_repeatedly(TURN_SECONDS, turn),
            c.timer.call_repeatedly(self._interval, self._changing, (self._adapt,)),
            # Celery notices the end of a process by a pipe, which the kernel closes before the
            # process can be waited for (``do_exit()``: ``exit_files()``, then ``exit_notify()``).
            # If it looks in between, which is frequent, it looks again only after five seconds.
            c.timer.call_repeatedly(PROCESS_SECONDS, c.pool.maintain_pool),
        )
        turn()
        c.call_soon(self._loop_runs)

    def _prepare(self, c: Any) -> None:
        self.settings, self.registry = get_settings(), get_registry()
        self.names = Names.of(self.settings)
        known = self.known(self.settings, self.registry)
        wanted = known if self.selected is None else known & self.selected
        self.queues = set(wanted - self.excluded)
        self.dispatcher = Dispatcher(self.settings, self.registry, self.names)
        self._handlers = self.registry.by_queue()
        if known and not self.queues:
            logger.warning(
                "this worker handles no events, because -Q and -X exclude the handlers' queues "
                "(%s). Start another for them: `manage.py events_worker`.",
                shorten(", ".join(sorted(known)), 200, placeholder=" …"),
            )
        if self.queues:
            self._check_topology(c)
        self.wakeup = Wakeup(self._woken)
        self.jobs = Jobs(
            c,
            consumer_timeout=self.settings.consumer_timeout,
            size=1 if self.alone else JOB_EVENTS,
            wake=self.wakeup.wake,
            on_lost=self.on_lost,
        )
        if not self.alone:
            self.jobs.on_change = partial(c.timer.call_after, 0, self._changing, (self._adapt,))
        remote_control.replace(self)
        if not self.jobs.inline:
            self._records = LoopRecords()
            self._records.start()
        self._prepared = True

    def _check_topology(self, c: Any) -> None:
        """Check or declare the topology, as ``TOPOLOGY`` says; a wrong one would lose events."""
        topology = build(self.settings, self.registry)
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

    def _loop_runs(self) -> None:
        self.wakeup.register(self.c.hub)
        self.jobs.loop_runs()
        # Celery's handler may have ended the pool before the first turn.
        if self.queues and not self._is_stopping:
            self.open()

    def _woken(self) -> None:
        if self.jobs.stop_signals.waiting:
            self.jobs.stop_by_signal()
        if not self._stopping:
            self._read_arrived()
            self.jobs.settle_ended()

    def _read_arrived(self) -> None:
        """Read the deliveries that have arrived; Celery reads one message in each turn.

        So a thread or solo worker, which has no line of requests, knows how many share a job.
        """
        with suppress(TimeoutError, BlockingIOError):
            while self.jobs.has_room and not self._is_stopping:
                self._connection.drain_events(timeout=0)
            return
        self.jobs.unread_since = None

    def _not_ready(self) -> str:
        """Return why this worker is not ready, ``""`` if it is."""
        if not self._timers:
            return "it is not connected to RabbitMQ: check the broker, and the worker's log"
        if missing := sorted(self._missing):
            return f"queue {missing[0]} is missing or cannot be read. {self.remedy}"
        if self._refused:
            return f"it may not consume {min(self._refused)}: give its user the read permission"
        if len(self._tags) + len(self.paused) < len(self.queues):
            return "it does not consume all of its queues yet"
        return ""

    def stop(self, c: Any) -> None:
        self._stopping = True
        self._known_to_exist.clear()
        for timer in self._timers:
            timer.cancel()
        self._timers = ()
        self.part.rest()
        if self._prepared:
            self.jobs.stopping = True
            self.jobs.stop_signals.loop_ended()
        channel = self.channel
        if channel is None or channel.connection is None or c.connection is None:
            return
        tags = list(self._tags.values())
        self._tags.clear()
        try:
            for tag in tags[:-1]:
                channel.basic_cancel(tag, nowait=True)
            if tags:
                channel.basic_cancel(tags[-1])
            self.jobs.stop()
            # Celery sends no heartbeats while it waits for threads, so RabbitMQ would close the
            # connection. Nothing is read: ordinary tasks would begin.
            while shutdown_requested() and self.jobs.in_threads:
                sleep(POLL_SECONDS)
                c.connection.connection.send_heartbeat()
                self.jobs.settle_ended()
        except (*c.connection_errors, *c.channel_errors) as exc:
            logger.info("the consumers end with their connection, not before: %r", exc)

    def terminate(self, c: Any) -> None:
        self.stop(c)

    def shutdown(self, c: Any) -> None:
        if self._prepared:
            self.wakeup.close()
        self._close(c)
        if self._records is not None:
            self._records.stop()

    def _close(self, c: Any) -> None:
        """Settle what the pool has returned, and close the channel."""
        channel, self.channel = self.channel, None
        if channel is None or channel.connection is None:
            return
        if not self.jobs.finish(publish=state.should_terminate is None):
            logger.warning(
                "shut down before all messages were confirmed; RabbitMQ delivers their events again"
            )
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

    # -- consuming ------------------------------------------------------------------------

    def open(self) -> None:
        """Open the channel and consume the queues."""
        if self._stopping or self.channel is not None:
            return
        self.channel = self._connection.channel()
        self.acks = Acks(self.channel, (*self.c.connection_errors, *self.c.channel_errors))
        self._deliveries = DeliveryReader(self.channel, self._requeue)
        queues = sorted(self.queues - self._refused)
        logger.info(
            "service %s: consuming %s: %s",
            self.settings.service,
            counted(len(queues), "queue"),
            ", ".join(queues),
        )
        for queue in queues:
            self._consume(queue)

    def _stale(self, connection: Any) -> bool:
        return self._stopping or self._connection is not connection

    def consume(self, queue: str) -> None:
        """Consume a queue, if it exists."""
        self._changing(self._consume, queue)

    def _changing(self, change: Callable[..., None], *args: Any) -> None:
        """Change the consumers, and handle errors: a timer swallows that of a closed channel."""
        if self.channel is None or self._is_stopping:
            return
        try:
            change(*args)
        except (*self.c.connection_errors, *self.c.channel_errors) as exc:
            self.c.call_soon(reraise, exc)
        except Exception:
            logger.exception("cannot adapt the prefetch counts; the worker keeps the present ones")

    def _consume(self, queue: str) -> None:
        if queue not in self.queues or queue in self._tags:
            return
        if queue in self._known_to_exist:
            self._known_to_exist.discard(queue)
        elif problem := self._problem(queue):
            self._retry_later(queue, problem)
            return
        if self._missing.pop(queue, None) is not None:
            logger.info("queue %r exists now, consuming it", queue)
        self._start_consumer(queue)

    def _start_consumer(self, queue: str) -> None:
        self._refused.discard(queue)
        decided = self.windows[queue] = self.window(queue)
        self.paused.pop(queue, None)
        # Not global, which RabbitMQ 4.3 refuses; a count applies to consumers that are started
        # afterwards. Without waiting for the answer, since deliveries would arrive meanwhile.
        self.channel.send_method(spec.Basic.Qos, "lBb", (0, decided.count, False))
        # The number keeps cut tags different.
        tag = self._tags[queue] = f"{next(self._numbers)}:{self.c.hostname}:{queue}"[:60]
        self._deliveries.consume(
            queue,
            self._receive,
            consumer_tag=tag,
            on_cancel=partial(self._cancelled, queue),
            # If RabbitMQ refuses, it closes the channel.
            nowait=True,
        )

    def cancel(self, queue: str) -> None:
        """Cancel the consumer of a queue; what RabbitMQ has delivered meanwhile is handled."""
        tag = self._tags.pop(queue, None)
        if tag is not None:
            # An answer might be an error, which remote control swallows: RabbitMQ has closed the
            # channel, and the worker would stop consuming.
            self.channel.basic_cancel(tag, nowait=True)
            # RabbitMQ has sent all events of the one before.
            former, self._cancelled_tags[queue] = self._cancelled_tags.get(queue, ""), tag
            self.channel.callbacks.pop(former, None)
            self.channel.cancel_callbacks.pop(former, None)

    def forget(self, queue: str) -> None:
        """Consume a queue no longer, until remote control adds it again."""
        self.queues.discard(queue)
        self.paused.pop(queue, None)
        self._missing.pop(queue, None)
        self._refused.discard(queue)
        self.cancel(queue)

    def _requeue(self, tag: int) -> None:
        """Requeue a delivery of a cancelled consumer."""
        self.acks.received(tag)
        self.acks.requeue([tag])

    def _problem(self, queue: str) -> str:
        """Return why a queue cannot be consumed; checked on a channel that an error may close."""
        if self._probe is None or self._probe.connection is None:
            self._probe = self._connection.channel()
        try:
            self._probe.queue_declare(queue, passive=True)
        except NotFound as exc:
            if exc.method_sig != spec.Queue.Declare:
                raise  # RabbitMQ closed the consuming channel meanwhile; Celery reconnects
            # py-amqp has opened the probe's channel again.
            return f"is missing, so its events are not handled. {self.remedy}"
        return ""

    def _lost(self, exc: Exception) -> None:
        """Leave out a queue that this worker may not consume; its refusal closes the channel.

        Each attempt would redeliver the messages of the other queues, up to the delivery limit.
        """
        if self._prepared:
            self.jobs.stopping = True  # Celery clears the pool's line before it calls stop()
        self._before_lost(exc)
        if isinstance(exc, AccessRefused) and exc.method_sig == spec.Basic.Consume:
            for queue in [queue for queue in self.queues if names_queue(exc, queue)]:
                logger.error(
                    "queue %r cannot be consumed, so this worker does not handle its events: %s. "
                    "Give this user the read permission, and restart the worker, or add the queue "
                    "by remote control",
                    queue,
                    exc.reply_text,
                )
                self._refused.add(queue)

    def _retry_later(self, queue: str, problem: str) -> None:
        checks = self._missing.get(queue, 0)
        self._missing[queue] = checks + 1
        self.paused.pop(queue, None)
        wait = MISSING_BACKOFF.delay(checks)
        logger.error("queue %r %s. The next check is in %g s.", queue, problem, wait)
        self._soon(queue, wait)

    def _soon(self, queue: str, wait: float) -> None:
        connection = self._connection

        def again() -> None:
            if not self._stale(connection):
                self.consume(queue)

        if queue in self._waits:
            self._waits[queue].cancel()  # such as after add_consumer for a missing queue
        self._waits[queue] = self.c.timer.call_after(wait, again)

    def _cancelled(self, queue: str, consumer_tag: str) -> None:
        """Consume a queue again: it was deleted, or its consumer exceeded the consumer timeout."""
        if self._tags.get(queue) != consumer_tag:
            return
        del self._tags[queue]
        logger.warning("RabbitMQ cancelled the consumer of %r; consuming it again", queue)
        self._soon(queue, MISSING_BACKOFF.first)

    # -- prefetch counts ------------------------------------------------------------------

    def window(self, queue: str) -> Window:
        """Return the prefetch count of a queue, as its handlers run now."""
        worker, durations = self.c.controller, self.jobs.backlog.durations
        names = [handler.name for handler in self._handlers.get(queue, ())]
        rates = [rate for name in names if (rate := self.jobs.backlog.rate(self.c.app.tasks[name]))]
        return window(
            processes=max(self.jobs.processes, getattr(worker, "max_concurrency", 0) or 0),
            multiplier=worker.prefetch_multiplier,
            quick=bool(names) and all(map(durations.is_quick, names)),
            seconds=max((durations.average.get(name, 0.0) for name in names), default=0.0),
            rate=min(rates, default=0.0),
            wait=self.jobs.wait,
            stuck=monotonic() < self._stuck_until.get(queue, 0.0),
        )

    def _adapt(self) -> None:
        """Consume queues with their present counts, and give back what waits for too long."""
        late = self.jobs.give_back_late()
        for queue in late:
            self._stuck_until[queue] = monotonic() + STUCK * self.jobs.wait
        if late:
            logger.warning(
                "requeued %d events of %s that had waited too long for a free process or a rate "
                "limit; the worker consumes again when a process is free. If this repeats, run "
                "long handlers and tasks in a worker of their own",
                late.total(),
                ", ".join(sorted(late)),
            )
        for queue, before in tuple(self.windows.items()):
            decided = self.window(queue)
            if queue not in self._tags or decided == before:
                continue
            if decided.why == "slow":
                self._pause(queue)
                continue
            # RabbitMQ requeues what it has sent to the old one meanwhile, and counts a delivery.
            self.cancel(queue)
            self._start_consumer(queue)
        self.jobs.request()

    def _pause(self, queue: str) -> None:
        if queue in self._tags:
            self.cancel(queue)
            self.paused[queue] = None
            self.jobs.on_free = self._resume

    def _resume(self) -> None:
        """Consume the queue that has been paused longest, since a process is free."""
        if not self.paused:
            self.jobs.on_free = None
        backlog = self.jobs.backlog
        first = {queue: backlog.first(queue) for queue in self.paused}
        if any(delivery and not backlog.rate(delivery.task) for delivery in first.values()):
            return  # the process is for one of these
        free = [queue for queue, delivery in first.items() if delivery is None]
        # Before that, another queue's event has yet to arrive, or that queue is empty.
        if free and monotonic() >= self._next_resume:
            self._next_resume = monotonic() + self._interval
            # If it still exists; not here, where a job has just ended.
            self.c.timer.call_after(0, self.consume, (free[0],))

    # -- deliveries -----------------------------------------------------------------------

    def _receive(self, tag: int, delivered: Delivered) -> None:
        self.acks.received(tag)
        if self._is_stopping:
            return  # unsettled, so RabbitMQ delivers it again when the channel closes
        if self.windows[delivered.queue].why == "slow":
            self._next_resume = 0.0
            self._pause(delivered.queue)
        handler = self.handler_of(delivered)
        task = self.c.app.tasks[handler.name] if handler is not None else None
        since = self.jobs.unread_since or monotonic()
        self.received(
            Delivery(Item(delivered), tag, self.acks, self.dispatcher, handler, task, since)
        )

    def received(self, delivery: Delivery) -> None:
        self.jobs.add(delivery)

    def handler_of(self, delivered: Delivered) -> Handler | None:
        """Return the handler of a delivery by its route; a pool process looks closer."""
        handlers = self._handlers.get(delivered.queue, ())
        if len(handlers) == 1:
            return handlers[0]
        key = event_key(delivered.routing_key)
        if delivered.exchange in (self.names.return_, self.names.replay):
            return next((handler for handler in handlers if handler.key == key), None)
        return self.dispatcher.find(delivered.queue, key)

    def on_lost(self, deliveries: list[Delivery], exceeded: float | None, error: str) -> None:
        """Settle deliveries whose process ended without an outcome; each runs alone next time."""
        if exceeded is None:
            self.jobs.requeue(deliveries)
            return
        for delivery in deliveries:
            self.jobs.settle(delivery, delivery.item._replace(exceeded=exceeded))

    def info(self, c: Any) -> dict[str, Any]:
        """Return the step's part of ``inspect stats``."""
        return {
            "amqp_events": {
                "queues": sorted({*self._tags, *self.paused}),
                "missing": sorted(self._missing),
                "paused": sorted(self.paused),
                "prefetch_counts": {
                    queue: [0 if queue in self.paused else decided.count, decided.why]
                    for queue, decided in sorted(self.windows.items())
                    if queue in self.queues
                },
            }
        }


def reraise(exc: BaseException) -> None:
    raise exc
