"""The worker's half on the in-memory broker: the real worker's code, without a worker."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from django.db import DatabaseError, connections, transaction

from ..broker.connection import celery_app, current_celery_app
from ..broker.topology import Names, Topology, build
from ..conf import Settings, get_settings
from ..context import ReceivedEvent
from ..declare.registry import Registry, get_registry
from ..exceptions import AmqpEventsError, Malformed, PublishError
from ..message import archive_message, decoding
from ..message.archive_message import Archived, Outcome
from ..message.types import Message, Payload, Received
from ..publish.publisher import PendingPublish
from ..worker.dispatch import (
    HOLDABLE,
    Dispatcher,
    Reading,
    celery_headers,
    delivery_info,
)
from ..worker.outgoing import OutgoingMessages, announce
from ..worker.task import register, utc_now
from ..worker.tracing import trace_here
from ..worker.verdict import Verdict
from .broker import Clock, MemoryBroker, Stored

logger = logging.getLogger(__name__)

#: Runs of handlers after which events are taken to go round without end.
RUN_LIMIT: Final = 10_000
#: The same for ``inline``, where one publish would wait for them.
INLINE_RUN_LIMIT: Final = 1_000
#: Failed events that ``inline`` keeps.
INLINE_KEEPS: Final = 1_000


class EndlessEventsError(AmqpEventsError):
    """Handlers keep publishing events, or retrying, without end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """An event that waits for its next attempt.

    Attributes:
        attempt: the attempt that is to come.
        due_at: when it is due, aware.
        exception: what the last attempt raised: class name and first line.
        payload: its arguments by name, ``None`` where the body cannot be read.
    """

    handler: str
    event: ReceivedEvent
    attempt: int
    due_at: datetime | None
    exception: str = ""
    payload: dict[str, Any] | None = field(default=None)


@dataclass(frozen=True, slots=True)
class _World:
    """The registry and topology of the settings."""

    settings: Settings
    registry: Registry
    topology: Topology
    dispatcher: Dispatcher
    copies: OutgoingMessages

    @classmethod
    def of(cls, settings: Settings, registry: Registry, worker: str) -> _World:
        names = Names.of(settings)
        topology = build(settings, registry)
        return cls(
            settings,
            registry,
            topology,
            Dispatcher(settings, registry, names),
            OutgoingMessages(settings=settings, names=names, delays=topology.delays, worker=worker),
        )


class MemoryBackend:
    """An in-memory broker with a worker that runs on demand.

    Time stands still until :meth:`advance` moves it. Handlers run as in a worker, but for time
    limits and rate limits, which are not enforced, and results, which are not stored.

    Args:
        clock: its time; a clock of its own by default, which starts at the present.
    """

    #: Name of the worker, in handlers' requests, histories and archive.
    worker: str = "memory"
    #: Log the traceback of what is archived; Celery logs it as well, where it has a handler.
    log_tracebacks: bool = False

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        self.settings = settings
        self.clock = clock or Clock()
        self.broker = MemoryBroker(self.clock)
        self._lock = threading.RLock()
        self._world: _World | None = None
        self._held: list[tuple[datetime, Stored]] = []
        self._pending: list[PendingPublish] = []

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

    def watch(self, pending: PendingPublish) -> None:
        """Remember what waits for a commit that a TestCase never makes; see :meth:`run`."""
        if pending.connection is not None:
            with self._lock:
                self._pending.append(pending)

    def _commit(self) -> None:
        """Publish what waits for nothing but the transaction of Django's TestCase."""
        with self._lock:
            waiting = [item for item in self._pending if item.waiting]
            ready = [item for item in waiting if _only_test_case_holds(item)]
            self._pending = [item for item in waiting if item not in ready]
        for item in ready:
            item()

    # -- handling -------------------------------------------------------------------------

    def run(self, limit: int = RUN_LIMIT) -> int:
        """Handle what is ready until nothing is.

        Events that wait for the commit of Django's ``TestCase``, which never comes, are
        published first; those inside a transaction of the test's own wait for its end.

        Args:
            limit: deliveries after which it gives up.

        Returns:
            the number of deliveries that were handled.

        Raises:
            EndlessEventsError: handlers keep publishing events that are ready at once.
        """
        count = 0
        while True:
            self._commit()
            world = self._current()
            stored = self._next(world)
            if stored is None:
                return count
            if count >= limit:
                self.broker.reject(stored, requeue=True)
                raise EndlessEventsError(
                    f"{count} deliveries were handled and more are ready; look for a handler that "
                    f"publishes the event that it handles"
                )
            count += 1
            self._handle(world, stored)

    def advance(self, seconds: float) -> int:
        """Move the clock on, stopping at each time when something is due, and handle it there.

        Returns:
            the number of deliveries that were handled.
        """
        return self._run_until(self.now() + timedelta(seconds=seconds))

    def _run_until(self, target: datetime) -> int:
        count = self.run()
        while (due := self._next_due()) is not None and due <= target:
            self.clock.move_to(due)
            count += self.run()
        self.clock.move_to(target)
        return count

    def _next_due(self) -> datetime | None:
        times = [moment for moment, _ in self._held]
        expiry = self.broker.next_expiry()
        return min([*times, *([expiry] if expiry else [])], default=None)

    def _next(self, world: _World) -> Stored | None:
        with self._lock:
            self.broker.expire()
            for item in sorted(self._held, key=lambda item: item[0]):
                if item[0] <= self.now():
                    self._held.remove(item)
                    return item[1]
            return self.broker.take(world.registry.by_queue())

    def _current(self) -> _World:
        """Return what is declared now; a change of settings or handlers is declared anew."""
        settings, registry = get_settings(), get_registry()
        with self._lock:
            world = self._world
            if world is None or world.settings is not settings or world.registry is not registry:
                world = self._world = _World.of(settings, registry, self.worker)
                self.broker.declare(world.topology)
            return world

    def _handle(self, world: _World, stored: Stored) -> None:
        try:
            self._dispatch(world, stored)
        except BaseException:
            # As when a worker dies: the broker has it again.
            self.broker.reject(stored, requeue=True)
            raise

    def _dispatch(self, world: _World, stored: Stored) -> None:
        """Read, run and settle one delivery, as worker.consumer and worker.settlement do."""
        reading = Reading(received=stored.received())
        payload = world.dispatcher.read(reading)
        if isinstance(payload, Verdict):
            self._settle(world, stored, reading, payload)
            return
        remaining = reading.remaining(self.now())
        if remaining > HOLDABLE:
            self._copy(world.copies.postponed(reading, self.now()))
        elif remaining > 0:
            with self._lock:
                self._held.append((self.now() + timedelta(seconds=remaining), stored))
        else:
            self._settle(world, stored, reading, self._run_handler(world, reading, payload))

    def _run_handler(self, world: _World, reading: Reading, payload: Payload) -> Verdict:
        _, handler = reading.known
        # Without a broker any app will do, also the one that Celery makes by itself.
        app = celery_app(world.settings) if world.settings.celery_app else current_celery_app()
        register(app, {handler.name: handler})
        request = {
            **celery_headers(reading, payload),
            "delivery_info": delivery_info(reading.received),
            "hostname": self.worker,
        }
        with _savepoints():
            return trace_here(app.tasks[handler.name], request, now=self.now)

    def _settle(self, world: _World, stored: Stored, reading: Reading, verdict: Verdict) -> None:
        if verdict.kind == "requeue":
            self.broker.reject(stored, requeue=True)
            return
        message = world.copies.build(reading, verdict, self.now())
        if message is not None:
            self._copy(message)
        announce(world.settings.service, reading, verdict, with_traceback=self.log_tracebacks)

    def _copy(self, message: Message) -> None:
        error = self.broker.publish(message, mandatory=True)
        if error is not None:
            raise error

    # -- looking --------------------------------------------------------------------------

    @property
    def archived(self) -> list[Archived]:
        """Events that ended in the archive, oldest first."""
        return [item for item in self._archive() if isinstance(item, Archived)]

    @property
    def outcomes(self) -> list[Outcome]:
        """Replays that ended well, oldest first."""
        return [item for item in self._archive() if isinstance(item, Outcome)]

    def _archive(self) -> Iterator[Archived | Outcome]:
        for received, _ in self.broker.peek(self._current().topology.names.archive):
            yield archive_message.read(received)

    @property
    def waiting(self) -> list[Waiting]:
        """Events that wait for their next attempt, the first due first."""
        world = self._current()
        found = []
        for queue in world.topology.queues:
            if queue.role == "delay":
                for received, _ in self.broker.peek(queue.name):
                    event, progress = decoding.identify(received, trusted=True)
                    last = progress.history[-1] if progress.history else {}
                    exception = ": ".join(
                        filter(None, (last.get("exception"), last.get("message")))
                    )
                    found.append(
                        Waiting(
                            handler=progress.handler or "",
                            event=event,
                            attempt=progress.attempt,
                            due_at=progress.due_at,
                            exception=exception,
                            payload=_payload(world, received),
                        )
                    )
        return sorted(found, key=lambda item: item.due_at or self.now())

    @property
    def depths(self) -> dict[str, int]:
        """Return the number of messages per queue, without empty queues."""
        return self.broker.depths()

    def clear(self) -> None:
        """Drop all events, those waiting for a commit included; the clock keeps its time."""
        with self._lock:
            self._held.clear()
            self._pending.clear()
            self.broker.clear()


def _payload(world: _World, received: Received) -> dict[str, Any] | None:
    try:
        return dict(decoding.decode(received, world.settings.max_body).kwargs)
    except Malformed:
        return None


def _only_test_case_holds(pending: PendingPublish) -> bool:
    """Return True if *pending* waits only for transactions of Django's TestCase."""
    connection = pending.connection
    # Django marks TestCase's transactions to tell them from the test's own (durable=True).
    blocks: list[Any] = getattr(connection, "atomic_blocks", [])
    marked = sum(1 for block in blocks if getattr(block, "_from_testcase", False))
    if connection is None or not marked:
        return False
    # The outermost transaction has no savepoint.
    own = set(connection.savepoint_ids[marked - 1 :])
    return any(
        entry[1] is pending and own.isdisjoint(entry[0]) for entry in connection.run_on_commit
    )


@contextmanager
def _savepoints() -> Iterator[None]:
    """Give a handler a savepoint in each transaction that is open around it.

    In a worker none is: a database error breaks the handler's own transaction and nothing
    else. Without this it would break the test's, or the publisher's.
    """
    with suppress(DatabaseError), ExitStack() as stack:
        for connection in connections.all(initialized_only=True):
            if connection.in_atomic_block:
                stack.enter_context(transaction.atomic(using=connection.alias))
        yield


class _Inline(MemoryBackend):
    """One publish of the inline backend, with its own broker and clock."""

    worker = "inline"
    log_tracebacks = True

    def run_to_the_end(self) -> None:
        count = 0
        while True:
            count += self.run(max(1, INLINE_RUN_LIMIT - count))
            due = self._next_due()
            if due is None:
                return
            if count >= INLINE_RUN_LIMIT:
                raise EndlessEventsError(
                    f"{count} deliveries were handled and {len(self.waiting)} more events wait for "
                    f"a retry; they are dropped"
                )
            self.clock.move_to(due)


_session: ContextVar[_Inline | None] = ContextVar("amqp_events_inline", default=None)


class InlineBackend:
    """Runs this service's handlers in the process that publishes, before the publish returns.

    For development without a broker. A failed handler is retried at once, as often as its
    policy says, with the due times that it would have had; what finally fails is logged with
    its traceback and kept in :attr:`failed`. Nothing that a handler raises reaches the publisher,
    and handlers of other services are not there.

    An event that a handler publishes is handled after that handler. Called where an event loop
    runs, the handlers run in a thread while the loop stands still; ``apublish`` does better.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        #: What finally failed in this process, the newest last.
        self.failed: deque[Archived] = deque(maxlen=INLINE_KEEPS)

    def now(self) -> datetime:
        """Return the present, or the pretended time of the handler that runs."""
        session = _session.get()
        return session.now() if session is not None else utc_now()

    def publish(
        self, messages: Sequence[Message], *, mandatory: bool
    ) -> Sequence[PublishError | None]:
        """Accept *messages* and handle them."""
        session = _session.get()
        if session is not None:
            session.publish(messages, mandatory=False)
        elif _in_event_loop():
            _in_a_thread(lambda: self._handle(messages))
        else:
            self._handle(messages)
        return [None] * len(messages)

    def _handle(self, messages: Sequence[Message]) -> None:
        session = _Inline(self.settings)
        token = _session.set(session)
        try:
            session.publish(messages, mandatory=False)
            session.run_to_the_end()
        except EndlessEventsError as exc:
            logger.error("inline events stopped: %s", exc)  # noqa: TRY400 - where says nothing
        finally:
            _session.reset(token)
            self.failed.extend(session.archived)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _in_a_thread(work: Callable[[], None]) -> None:
    context = copy_context()
    errors: list[BaseException] = []

    def target() -> None:
        try:
            context.run(work)
        except BaseException as exc:  # noqa: BLE001 - raised again where it was called
            errors.append(exc)
        finally:
            connections.close_all()

    thread = threading.Thread(target=target, name="amqp-events-inline")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
