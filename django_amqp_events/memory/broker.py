"""RabbitMQ's routing, delays and dead letters in memory, as far as our topology uses them.

tests/contract checks each rule here and on RabbitMQ.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from ..broker.publish_errors import build_error, unroutable_error
from ..broker.topology import (
    Binding,
    Exchange,
    Queue,
    Topology,
)
from ..declare.patterns import pattern_matches
from ..exceptions import ExchangeMissingError, PublishError
from ..message.types import Message, Received


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
        #: The number of messages when a binding was declared first.
        self._bound: dict[Binding, int] = {}
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
            now = next(self._sequence)
            for binding in topology.bindings:
                self._bound.setdefault(binding, now)

    def clear(self) -> None:
        """Drop every message."""
        with self._lock:
            for queue in self._queues.values():
                queue.ready.clear()

    # -- publishing -----------------------------------------------------------------------

    def publish(self, message: Message, *, mandatory: bool) -> PublishError | None:
        """Route a message; return the publisher's error, or ``None``."""
        with self._lock:
            if message.exchange and message.exchange not in self._exchanges:
                reply = f"there is no exchange {message.exchange!r}"
                return build_error(ExchangeMissingError, message, "exchange-missing", reply=reply)
            queues = self._route(message.exchange, message.routing_key)
            for queue in queues:
                self._store(queue, message)
        if not queues and mandatory:
            return unroutable_error(message)
        return None

    def _route(self, exchange: str, key: str) -> list[str]:
        """Return the queues of a message, each once."""
        if not exchange:
            return [key] if key in self._queues else []
        definition = self._exchanges.get(exchange)
        if definition is None:
            return []
        receivers = dict.fromkeys(
            binding.queue
            for binding in self._bindings
            if binding.exchange == exchange and _matches(definition.type, binding.routing_key, key)
        )
        alternate = definition.arguments.get("alternate-exchange")
        if not receivers and alternate:
            return self._route(alternate, key)
        return list(receivers)

    def _store(self, queue: str, message: Message) -> None:
        held = self._queues[queue]
        ttl = held.argument("x-message-ttl")
        expires_at = None if ttl is None else self.clock.now() + timedelta(milliseconds=ttl)
        held.ready.append(Stored(queue, message, next(self._sequence), expires_at))

    # -- consuming ------------------------------------------------------------------------

    def take(self, queues: Iterable[str]) -> Stored | None:
        """Return and remove the oldest ready message of some queues."""
        with self._lock:
            existing = [self._queues[name] for name in queues if name in self._queues]
            heads = [queue.ready for queue in existing if queue.ready]
            return min(heads, key=lambda ready: ready[0].sequence).popleft() if heads else None

    def requeue(self, stored: Stored) -> None:
        """Requeue a message; a delivery limit of N means N + 1 deliveries."""
        with self._lock:
            queue = self._queues[stored.queue]
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
            while (first := self._first_to_expire()) and first[0] <= self.clock.now():
                queue = self._queues[first[2]]
                self._die(queue, queue.ready.popleft(), "expired")

    def next_expiry(self) -> datetime | None:
        """Return when the next message expires."""
        with self._lock:
            first = self._first_to_expire()
            return first[0] if first else None

    def _first_to_expire(self) -> tuple[datetime, int, str] | None:
        """Return its time, sequence and queue; as in a quorum queue, only a head can expire."""
        heads = [queue.ready[0] for queue in self._queues.values() if queue.ready]
        return min(
            ((head.expires_at, head.sequence, head.queue) for head in heads if head.expires_at),
            default=None,
        )

    def _die(self, queue: _Queue, stored: Stored, reason: str) -> None:
        """Route a message to the dead letter exchange of its queue, if it has one."""
        exchange = queue.argument("x-dead-letter-exchange")
        if exchange is None:
            return
        message = stored.message
        key = queue.argument("x-dead-letter-routing-key") or message.routing_key
        death = {
            "count": 1,
            "reason": reason,
            "queue": stored.queue,
            "time": self.clock.now(),
            "exchange": message.exchange,
            "routing-keys": [message.routing_key],
        }
        deaths = [death, *message.headers.get("x-death", ())]
        headers = {**message.headers, "x-death": deaths}
        dead = replace(message, exchange=exchange, routing_key=key, headers=headers)
        for target in self._route(exchange, key):
            self._store(target, dead)

    # -- inspecting -----------------------------------------------------------------------

    def peek(self, queue: str) -> list[Received]:
        """Return a queue's messages, oldest first."""
        with self._lock:
            held = self._queues.get(queue)
            return [item.received() for item in held.ready] if held else []

    def history(self, stream: str, queue: str, events: str) -> list[tuple[Received, bool]]:
        """Return the messages of a stream, and which of them a queue has received since bound."""
        with self._lock:
            held = self._queues.get(stream)
            bound = [
                (binding.routing_key, since)
                for binding, since in self._bound.items()
                if (binding.exchange, binding.queue) == (events, queue)
            ]
            return [
                (
                    stored.received(),
                    any(
                        since < stored.sequence and pattern_matches(key, stored.message.routing_key)
                        for key, since in bound
                    ),
                )
                for stored in (held.ready if held else ())
            ]

    def depths(self) -> dict[str, int]:
        """Return the number of messages per queue, without empty queues and the history."""
        with self._lock:
            return {
                name: len(queue.ready)
                for name, queue in self._queues.items()
                if queue.ready and queue.definition.role != "history"
            }


def _matches(kind: str, pattern: str, key: str) -> bool:
    if kind == "fanout":
        return True
    return pattern == key if kind == "direct" else pattern_matches(pattern, key)
