"""RabbitMQ's routing, delays and dead letters in memory, as far as our topology uses them.

tests/contract checks each rule here and on RabbitMQ.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from ..broker.topology import (
    Binding,
    Exchange,
    Queue,
    Topology,
)
from ..declare.patterns import pattern_matches
from ..exceptions import ExchangeMissingError, PublishError, UnroutableError
from ..message.types import Message, Received

Death = Literal["expired", "rejected", "delivery_limit", "maxlen"]


class Clock:
    """A clock that moves only by :meth:`move_to`, from *start* or the present."""

    def __init__(self, start: datetime | None = None) -> None:
        self._now = start or datetime.now(UTC)

    def now(self) -> datetime:
        """Return the time, aware."""
        return self._now

    def move_to(self, moment: datetime) -> None:
        """Move to *moment*, unless it is in the past."""
        self._now = max(self._now, moment)


@dataclass(slots=True, eq=False)
class Stored:
    """A message in a queue.

    Attributes:
        sequence: order of arrival over all queues.
        expires_at: when the time to live of the queue or message ends.
    """

    queue: str
    message: Message
    sequence: int
    expires_at: datetime | None = None
    delivery_count: int = 0

    def received(self) -> Received:
        """Return the message as a consumer receives it."""
        headers = dict(self.message.headers)
        if self.delivery_count:
            headers["x-delivery-count"] = self.delivery_count
        return Received(
            queue=self.queue,
            exchange=self.message.exchange,
            routing_key=self.message.routing_key,
            body=self.message.body,
            headers=headers,
            properties=dict(self.message.properties),
            redelivered=self.delivery_count > 0,
        )


@dataclass(slots=True, eq=False)
class _Queue:
    definition: Queue
    ready: deque[Stored] = field(default_factory=deque)
    #: Dead letters without a route, which the strategy at-least-once keeps until there is one.
    stuck: list[tuple[Stored, Death]] = field(default_factory=list)

    def argument(self, name: str) -> Any:
        return self.definition.arguments.get(name)


class MemoryBroker:
    """Exchanges, bindings and queues with their messages; thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._lock = threading.RLock()
        self._exchanges: dict[str, Exchange] = {}
        self._queues: dict[str, _Queue] = {}
        self._bindings: list[Binding] = []
        self._sequence = itertools.count(1)

    def declare(self, topology: Topology) -> None:
        """Declare a topology: keep messages, remove bindings that it does not have."""
        with self._lock:
            self._exchanges = {exchange.name: exchange for exchange in topology.exchanges}
            for definition in topology.queues:
                known = self._queues.get(definition.name)
                if known is None:
                    self._queues[definition.name] = _Queue(definition)
                else:
                    known.definition = definition
            self._bindings = list(topology.bindings)

    def clear(self) -> None:
        """Drop every message."""
        with self._lock:
            for queue in self._queues.values():
                queue.ready.clear()
                queue.stuck.clear()

    # -- publishing -----------------------------------------------------------------------

    def publish(self, message: Message, *, mandatory: bool) -> PublishError | None:
        """Route a message; return the publisher's error, or ``None``."""
        ids = {"event_id": message.event_id, "event_name": message.name}
        what = f"{message.name or message.routing_key!r} ({message.event_id or 'no id'})"
        with self._lock:
            if message.exchange and message.exchange not in self._exchanges:
                return ExchangeMissingError(
                    f"no exchange {message.exchange!r}: {what} was not published", **ids
                )
            queues = self._route(message.exchange, message.routing_key)
            for queue in queues:
                self._store(queue, message)
        if not queues and mandatory:
            return UnroutableError(
                f"no queue is bound for {what} (exchange {message.exchange!r}, routing key "
                f"{message.routing_key!r}); this service has no handler for it",
                **ids,
            )
        return None

    def _route(self, exchange: str, key: str) -> list[str]:
        """Return the queues of a message, each once."""
        if not exchange:
            return [key] if key in self._queues else []
        definition = self._exchanges.get(exchange)
        if definition is None:
            return []
        found = dict.fromkeys(
            binding.queue
            for binding in self._bindings
            if binding.exchange == exchange and _matches(definition.type, binding.routing_key, key)
        )
        alternate = definition.arguments.get("alternate-exchange")
        if not found and alternate:
            return self._route(alternate, key)
        return list(found)

    def _store(self, queue: str, message: Message) -> None:
        held = self._queues[queue]
        limits = [held.argument("x-message-ttl"), message.properties.get("expiration")]
        ttl = min((int(limit) for limit in limits if limit is not None), default=None)
        expires_at = None if ttl is None else self.clock.now() + timedelta(milliseconds=ttl)
        held.ready.append(Stored(queue, message, next(self._sequence), expires_at))
        most = held.argument("x-max-length")
        while most is not None and len(held.ready) > most:
            self._die(held, held.ready.popleft(), "maxlen")

    # -- consuming ------------------------------------------------------------------------

    def take(self, queues: Iterable[str]) -> Stored | None:
        """Return and remove the oldest ready message of some queues."""
        with self._lock:
            found = [self._queues[name] for name in queues if name in self._queues]
            heads = [queue.ready for queue in found if queue.ready]
            return min(heads, key=lambda ready: ready[0].sequence).popleft() if heads else None

    def reject(self, stored: Stored, *, requeue: bool) -> None:
        """Requeue or dead-letter a message; a delivery limit of N means N + 1 deliveries."""
        with self._lock:
            queue = self._queues[stored.queue]
            if not requeue:
                self._die(queue, stored, "rejected")
                return
            stored.delivery_count += 1
            limit = queue.argument("x-delivery-limit")
            if limit is not None and stored.delivery_count > limit:
                self._die(queue, stored, "delivery_limit")
            else:
                queue.ready.appendleft(stored)

    # -- time and death -------------------------------------------------------------------

    def expire(self) -> None:
        """Dead-letter expired messages, in the order of their expiry."""
        with self._lock:
            for queue in self._queues.values():
                stuck, queue.stuck = queue.stuck, []
                for stored, death in stuck:
                    self._die(queue, stored, death)
            while (first := min(self._expiring(), key=_expiry, default=None)) is not None:
                if _expiry(first)[0] > self.clock.now():
                    return
                queue = self._queues[first.queue]
                queue.ready.popleft()
                self._die(queue, first, "expired")

    def next_expiry(self) -> datetime | None:
        """Return when the next message expires."""
        with self._lock:
            first = min(self._expiring(), key=_expiry, default=None)
            return first.expires_at if first else None

    def _expiring(self) -> Iterator[Stored]:
        # As in a quorum queue, only the head can expire.
        for queue in self._queues.values():
            if queue.ready and queue.ready[0].expires_at is not None:
                yield queue.ready[0]

    def _die(self, queue: _Queue, stored: Stored, death: Death) -> None:
        exchange = queue.argument("x-dead-letter-exchange")
        if exchange is None:
            return
        key = queue.argument("x-dead-letter-routing-key")
        key = stored.message.routing_key if key is None else key
        targets = self._route(exchange, key)
        if not targets:
            if queue.argument("x-dead-letter-strategy") == "at-least-once":
                queue.stuck.append((stored, death))
            return
        for target in targets:
            self._store(
                target,
                Message(
                    exchange=exchange,
                    routing_key=key,
                    body=stored.message.body,
                    headers=_with_death(stored, death, self.clock.now()),
                    properties={
                        name: value
                        for name, value in stored.message.properties.items()
                        if name != "expiration"
                    },
                ),
            )

    # -- inspecting -----------------------------------------------------------------------

    def peek(self, queue: str) -> list[Received]:
        """Return a queue's messages, oldest first."""
        with self._lock:
            held = self._queues.get(queue)
            return [item.received() for item in held.ready] if held else []

    def depths(self) -> dict[str, int]:
        """Return the number of messages per queue, without empty queues."""
        with self._lock:
            return {
                name: count
                for name, queue in self._queues.items()
                if (count := len(queue.ready) + len(queue.stuck))
            }


def _matches(kind: str, pattern: str, key: str) -> bool:
    if kind == "fanout":
        return True
    return pattern == key if kind == "direct" else pattern_matches(pattern, key)


def _expiry(stored: Stored) -> tuple[datetime, int]:
    return stored.expires_at or datetime.max.replace(tzinfo=UTC), stored.sequence


def _with_death(stored: Stored, death: Death, now: datetime) -> dict[str, Any]:
    """Return a message's headers with the death history that RabbitMQ keeps."""
    message = stored.message
    headers = dict(message.headers)
    deaths = [dict(entry) for entry in headers.get("x-death") or ()]
    entry = next(
        (e for e in deaths if e["queue"] == stored.queue and e["reason"] == death), None
    ) or {
        "count": 0,
        "reason": death,
        "queue": stored.queue,
        "time": now,
        "exchange": message.exchange,
        "routing-keys": [message.routing_key],
    }
    entry["count"] += 1
    headers["x-death"] = [entry, *(other for other in deaths if other is not entry)]
    headers.setdefault("x-first-death-exchange", message.exchange)
    headers.setdefault("x-first-death-queue", stored.queue)
    headers.setdefault("x-first-death-reason", death)
    if stored.delivery_count:
        headers["x-delivery-count"] = stored.delivery_count
    return headers
