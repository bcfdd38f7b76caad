"""Handle events from the in-memory broker with the code of the real worker."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import uuid4

from django.db import connections

from ..broker import history
from ..conf import get_settings
from ..context import ReceivedEvent
from ..coroutines import has_event_loop
from ..databases import user_code
from ..declare.patterns import pattern_matches
from ..declare.registry import get_registry
from ..exceptions import AmqpEventsError, ConfigurationError, Malformed, PublishError
from ..logs import get_logger
from ..message import archive_message, decoding, encoding
from ..message.archive_message import Archived, Outcome
from ..message.text import counted
from ..message.types import Message, Received
from ..publish.pending import Backend, Pending
from ..worker.outgoing import ANNOUNCED, announce, needs_message
from ..worker.pool_job import Engine
from ..worker.reading import Reading
from ..worker.task import utc_now
from ..worker.verdict import Verdict
from .broker import Clock, MemoryBroker, Stored

logger = get_logger(__name__)

#: Deliveries after which a run is considered endless.
RUN_LIMIT: Final = 10_000
#: The same for ``inline``, where a publish waits for them.
INLINE_RUN_LIMIT: Final = 1_000
#: Failed events that ``inline`` keeps.
INLINE_KEEPS: Final = 1_000


class EndlessEventsError(AmqpEventsError):
    """Handlers keep publishing events, or retrying, without end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """An event that waits for its next attempt.

    Attributes:
        attempt: number of that attempt.
        exception: class and first line of what the last attempt raised.
        payload: arguments by name, ``None`` if the body is unreadable.
    """

    handler: str
    event: ReceivedEvent
    attempt: int
    due_at: datetime | None
    exception: str = ""
    payload: dict[str, Any] | None = None


class MemoryBackend(Backend):
    """An in-memory broker with a worker that runs on demand.

    Time stands still until :meth:`advance`. Handlers run as in a worker, but without time limits,
    rate limits and results.

    Args:
        clock: starts at the present by default.
    """

    #: Worker name in requests, histories and the archive.
    worker: str = "memory"

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.broker = MemoryBroker(self.clock)
        self._lock = threading.RLock()
        self._world: Engine | None = None
        #: Handlers and ids of the events that backfills have given.
        self._given: set[tuple[str, str]] = set()

    def now(self) -> datetime:
        """Return the time of the clock."""
        return self.clock.now()

    # -- publishing -----------------------------------------------------------------------

    def publish(
        self, messages: Sequence[Message], *, mandatory: bool
    ) -> Sequence[PublishError | None]:
        """Route messages to queues; no handler runs before :meth:`run` or :meth:`advance`."""
        self._current()
        return [self.broker.publish(message, mandatory=mandatory) for message in messages]

    def _commit(self) -> None:
        """Publish events that wait only for the transaction of Django's TestCase."""
        for connection in connections.all(initialized_only=True):
            # Django marks TestCase's transactions to tell them from the test's own (durable=True).
            marked = [
                block
                for block in connection.atomic_blocks
                if getattr(block, "_from_testcase", False)
            ]
            if not marked:
                continue
            # The outermost transaction has no savepoint.
            own = set(connection.savepoint_ids[len(marked) - 1 :])
            for within, callback, *_ in list(connection.run_on_commit):
                ours = isinstance(callback, Pending) and callback.backend is self
                if ours and own.isdisjoint(within):
                    callback()

    # -- handling -------------------------------------------------------------------------

    def run(self, limit: int = RUN_LIMIT) -> int:
        """Handle events until none is ready.

        Events that wait for the commit of Django's ``TestCase``, which never happens, are published
        first; those in a transaction of the test itself wait for its end.

        Args:
            limit: maximum number of deliveries.

        Returns:
            the number of deliveries.

        Raises:
            EndlessEventsError: more events are ready after *limit* deliveries.
        """
        count = 0
        while True:
            self._commit()
            world = self._current()
            stored = self._next(world)
            if stored is None:
                return count
            if count >= limit:
                self.broker.requeue(stored)
                raise EndlessEventsError(
                    f"{count} deliveries were handled and more are ready; a handler may publish "
                    f"the event that it handles"
                )
            count += 1
            try:
                self._dispatch(world, stored)
            except BaseException:
                # As when a worker dies.
                self.broker.requeue(stored)
                raise

    def advance(self, seconds: float) -> int:
        """Move the clock, and handle each event when it is due; return the number of deliveries."""
        target = self.now() + timedelta(seconds=seconds)
        count = self.run()
        while (due := self.broker.next_expiry()) is not None and due <= target:
            self.clock.move_to(due)
            count += self.run()
        self.clock.move_to(max(target, self.now()))
        return count

    def _next(self, world: Engine) -> Stored | None:
        with self._lock:
            self.broker.expire()
            return self.broker.take(world.registry.by_queue())

    def _current(self) -> Engine:
        """Return what is declared; declare it again after a change of settings or handlers."""
        settings, registry = get_settings(), get_registry()
        with self._lock:
            world = self._world
            if world is None or world.settings is not settings or world.registry is not registry:
                world = self._world = Engine(settings, registry, self.worker)
                self.broker.declare(world.topology)
            return world

    def _dispatch(self, world: Engine, stored: Stored) -> None:
        """Handle and settle one delivery, as a pool process does."""
        reading = world.dispatcher.open(stored.received())
        # In a worker no transaction is open. Here, there may be that of the test or publisher.
        with user_code():
            verdict = world.decide(reading, now=self.now, wait=self._pass_time, eager=True)
        self._settle(world, stored, reading, verdict)

    def _pass_time(self, seconds: float) -> None:
        self.clock.move_to(self.now() + timedelta(seconds=seconds))

    def _settle(self, world: Engine, stored: Stored, reading: Reading, verdict: Verdict) -> None:
        if verdict.kind == "requeue":
            self.broker.requeue(stored)
            return
        if needs_message(reading, verdict):
            message = world.message(reading, verdict, self.now())
            if error := self.broker.publish(message, mandatory=True):
                raise error
        if verdict.kind not in ANNOUNCED:
            return
        try:
            announce(world.settings.service, reading, verdict)
        except (Exception, SystemExit):
            # As in a worker: what is settled must not run again.
            logger.exception("%s is settled, but was not announced", reading.title)

    def backfill(self, handler: str, events: str = "#", *, again: bool = False) -> int:
        """Give past events to a handler, as ``events_backfill`` does; :meth:`run` handles them.

        Args:
            handler: its name.
            events: a name or a topic pattern.
            again: include what its queue has received.

        Returns:
            the number of events.

        Raises:
            ConfigurationError: there is no ``HISTORY``, or no such handler.
        """
        world = self._current()
        names, target = world.topology.names, world.registry.handlers.get(handler)
        stream = history.require(world.settings)
        if target is None:
            raise ConfigurationError(f"there is no handler {handler!r}")
        count = 0
        for received, known in self.broker.history(stream, target.queue, names.events):
            key = received.routing_key
            wanted = pattern_matches(events, key) and any(
                pattern_matches(pattern, key) for pattern in target.bindings
            )
            if not wanted or (known and not again):
                continue
            event, _ = decoding.identify(received, trusted=False)
            if (handler, event.id) in self._given and not again:
                continue
            self._given.add((handler, event.id))
            message = encoding.retry_message(
                received,
                replace(event, replay_forced=again),
                exchange=names.replay,
                routing_key=target.key,
                service=world.settings.service,
                handler=handler,
                replay_id=str(uuid4()),
            )
            self.broker.publish(message, mandatory=True)
            count += 1
        return count

    # -- inspecting -----------------------------------------------------------------------

    @property
    def archived(self) -> list[Archived]:
        """Archived events, oldest first."""
        return [item for item in self._archive() if isinstance(item, Archived)]

    @property
    def outcomes(self) -> list[Outcome]:
        """Outcomes of replays that succeeded, oldest first."""
        return [item for item in self._archive() if isinstance(item, Outcome)]

    def _archive(self) -> Iterator[Archived | Outcome]:
        for received in self.broker.peek(self._current().topology.names.archive):
            yield archive_message.read(received)

    @property
    def waiting(self) -> list[Waiting]:
        """Events that wait for their next attempt, the first due first."""
        world = self._current()
        delays = [queue.name for queue in world.topology.queues if queue.role == "delay"]
        items = [
            _waiting(world, message) for queue in delays for message in self.broker.peek(queue)
        ]
        return sorted(items, key=lambda item: item.due_at or self.now())

    @property
    def depths(self) -> dict[str, int]:
        """Return the number of messages per queue, without empty queues."""
        return self.broker.depths()

    def clear(self) -> None:
        """Drop all events in the queues; keep the time."""
        self.broker.clear()


def _waiting(world: Engine, received: Received) -> Waiting:
    event, progress = decoding.identify(received, trusted=True)
    last = progress.history[-1] if progress.history else {}
    try:
        payload = dict(decoding.decode(received, world.settings.max_body).kwargs)
    except Malformed:
        payload = None
    return Waiting(
        handler=progress.handler or "",
        event=event,
        attempt=progress.attempt,
        due_at=progress.due_at,
        exception=": ".join(filter(None, (last.get("exception"), last.get("message")))),
        payload=payload,
    )


class _Inline(MemoryBackend):
    """The broker, clock and worker of one inline publish."""

    worker = "inline"

    def run_all(self) -> None:
        """Handle events, and retries at once, until none is left."""
        count = 0
        while True:
            count += self.run(max(1, INLINE_RUN_LIMIT - count))
            due = self.broker.next_expiry()
            if due is None:
                if dead := self.depths.get(self._current().topology.names.graveyard):
                    # They end with this publish, and there is no reaper.
                    logger.error(
                        "dropped %s that handlers have requeued at each delivery",
                        counted(dead, "event"),
                    )
                return
            if count >= INLINE_RUN_LIMIT:
                raise EndlessEventsError(
                    f"{count} deliveries were handled; {len(self.waiting)} events that wait for a "
                    f"retry are dropped"
                )
            self.clock.move_to(due)


_session: ContextVar[_Inline | None] = ContextVar("amqp_events_inline", default=None)


class InlineBackend(Backend):
    """Runs this service's handlers before the publish returns, for development without RabbitMQ.

    A failed handler is retried at once, with the due times of its policy. Archived events are
    logged with their traceback and kept in :attr:`failed`; no handler's error reaches the
    publisher. Handlers of other services do not run.

    An event that a handler publishes is handled after that handler.
    """

    def __init__(self) -> None:
        #: The last archived events of this process, the newest last.
        self.failed: deque[Archived] = deque(maxlen=INLINE_KEEPS)

    def now(self) -> datetime:
        """Return the present, or the simulated time of the running handler."""
        session = _session.get()
        return session.now() if session is not None else utc_now()

    def publish(
        self, messages: Sequence[Message], *, mandatory: bool
    ) -> Sequence[PublishError | None]:
        """Accept *messages* and handle them.

        Raises:
            ConfigurationError: this thread has an event loop.
        """
        session = _session.get()
        if session is not None:
            session.publish(messages, mandatory=False)
        elif has_event_loop():
            raise ConfigurationError(
                "the backend 'inline' runs handlers in the thread that publishes, and this one has "
                "an event loop; publish with apublish()"
            )
        else:
            self._handle(messages)
        return [None] * len(messages)

    def _handle(self, messages: Sequence[Message]) -> None:
        session = _Inline()
        token = _session.set(session)
        try:
            session.publish(messages, mandatory=False)
            session.run_all()
        except EndlessEventsError as exc:
            logger.error("inline events stopped: %s", exc)  # noqa: TRY400 - the place does not matter
        finally:
            _session.reset(token)
            self.failed.extend(session.archived)
