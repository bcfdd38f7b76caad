"""The topology of a service as plain data: all names and arguments.

docs/topology.md has the reason and source of every rule; tests/integration/broker/test_topology.py
tests on a real broker what they depend on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final, Literal

from ..conf import HistorySettings, Settings
from ..declare.registry import Handler, Registry
from ..declare.retry_policy import MINIMUM_DELAY

#: A delivery limit that is never reached. ``-1`` would dead-letter at once on RabbitMQ 3.10, and
#: the default is 20 on 4.x.
NO_LIMIT: Final = 2**31 - 1
#: A limit of N means N + 1 deliveries.
DELIVERY_LIMIT: Final = 5
# RabbitMQ 4.3 keeps the delivery count of a dead letter, so the limits along the chain grow.
GRAVEYARD_LIMIT: Final = 8
DEAD_LIMIT: Final = 11
#: Delay queues that every service has, in seconds: powers of two.
POWER_DELAYS: Final = tuple(MINIMUM_DELAY << power for power in range(13))

#: RabbitMQ deletes whole segments of a stream, in bytes; a small stream has smaller ones.
SEGMENT_BYTES: Final = 100_000_000
SEGMENTS: Final = 4

Role = Literal["events", "handler", "delay", "return", "replay", "archive", "graveyard", "dead",
               "abyss", "history"]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """An exchange; all are durable and never auto-deleted."""

    name: str
    type: Literal["topic", "direct", "fanout"]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    role: Role = "events"


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """A queue; all are durable, never exclusive, never auto-deleted."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    role: Role = "handler"


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A binding from an exchange to a queue; ours have no arguments."""

    exchange: str
    queue: str
    routing_key: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Names:
    """Names of a service's entities: with a colon for infrastructure, without for handlers."""

    prefix: str
    service: str
    events: str

    @classmethod
    def of(cls, settings: Settings) -> Names:
        return cls(settings.prefix, settings.service, settings.prefix + settings.exchange)

    def infrastructure(self, what: str) -> str:
        return f"{self.prefix}{self.service}:{what}"

    @property
    def handlers(self) -> str:
        """Return the prefix of all handler queues and keys."""
        return f"{self.prefix}{self.service}."

    @property
    def return_(self) -> str:
        return self.infrastructure("return")

    @property
    def replay(self) -> str:
        return self.infrastructure("replay")

    @property
    def archive(self) -> str:
        return self.infrastructure("archive")

    @property
    def graveyard(self) -> str:
        return self.infrastructure("graveyard")

    @property
    def dead(self) -> str:
        return self.infrastructure("dead")

    @property
    def abyss(self) -> str:
        return self.infrastructure("abyss")

    @property
    def history(self) -> str:
        """Return the name of the stream of all past events, which services share."""
        return f"{self.events}:history"

    @property
    def bindings(self) -> str:
        """Return the name of the stream that records when handlers' queues were bound."""
        return self.infrastructure("bindings")

    @property
    def lock(self) -> str:
        """Return the name of the exclusive queue of the process that records bindings."""
        return self.infrastructure("lock")

    def window(self, queue: str) -> str:
        """Return the name of the temporary exchange, and queue, while a queue is bound."""
        return self.infrastructure(f"window.{sha256(queue.encode()).hexdigest()[:40]}")

    @property
    def probe(self) -> str:
        """Return the name of a stream that no RabbitMQ can create."""
        return self.infrastructure("probe.stream")

    def delay(self, seconds: int) -> str:
        """Return the name of the exchange and queue for a delay.

        It contains the time to live: arguments are immutable, so another delay needs another queue.
        """
        return self.infrastructure(f"delay.{seconds}s")

    def is_window(self, name: str) -> bool:
        """Return True if an exchange or queue exists only while a handler's queue is bound."""
        return name.startswith(self.infrastructure("window."))

    def is_delay(self, name: str) -> bool:
        """Return True if an exchange or queue is for a delay, whether it is declared or not."""
        return name.startswith(self.infrastructure("delay."))


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Everything that a service declares, in the order in which it is declared."""

    names: Names
    exchanges: tuple[Exchange, ...]
    queues: tuple[Queue, ...]
    bindings: tuple[Binding, ...]
    delays: tuple[int, ...]


def delays(registry: Registry) -> tuple[int, ...]:
    """Return all delays that have a queue, in seconds, ascending.

    Powers of two reach any delay in several hops. Each delay of a policy has its own queue, so that
    one hop is enough for the declared backoff.
    """
    policies = {handler.policy for handler in registry.handlers.values()}
    exact = {delay for policy in policies for delay in policy.distinct_delays()}
    return tuple(sorted(exact.union(POWER_DELAYS)))


def build(settings: Settings, registry: Registry) -> Topology:
    """Describe the topology of this service."""
    names, all_delays = Names.of(settings), delays(registry)
    exchanges, queues = _infrastructure_exchanges(names), _infrastructure_queues(names, settings)
    bindings = [Binding(exchange=queue.name, queue=queue.name) for queue in queues]
    bindings.append(
        Binding(exchange=names.return_, queue=names.graveyard, routing_key=names.graveyard)
    )
    if settings.history is not None:
        # Bound first, so that it has every event of the handlers' queues.
        queues += _history_queues(names, settings.history)
        exchanges.append(Exchange(name=names.bindings, type="fanout", role="history"))
        bindings.append(Binding(exchange=names.bindings, queue=names.bindings))
        bindings.append(Binding(exchange=names.events, queue=names.history, routing_key="#"))
    for queue, handlers in registry.by_queue().items():
        arguments = _arguments(
            settings,
            delivery_limit=DELIVERY_LIMIT,
            dead_letter_exchange=names.graveyard,
            dead_letter_routing_key=queue,
        )
        queues.append(Queue(name=queue, arguments=arguments, role="handler"))
        for handler in handlers:
            bindings.extend(_handler_bindings(names, handler))
    for seconds in all_delays:
        name = names.delay(seconds)
        arguments = _arguments(
            settings, message_ttl=seconds * 1000, dead_letter_exchange=names.return_
        )
        exchanges.append(Exchange(name=name, type="fanout", role="delay"))
        queues.append(Queue(name=name, arguments=arguments, role="delay"))
        bindings.append(Binding(exchange=name, queue=name))
    return Topology(
        names=names,
        exchanges=tuple(exchanges),
        queues=tuple(queues),
        bindings=tuple(bindings),
        delays=all_delays,
    )


def _arguments(settings: Settings, **given: Any) -> dict[str, Any]:
    """Return the arguments of a queue, without those that are None."""
    quorum = settings.queue_type == "quorum"
    arguments: dict[str, Any] = {"x-queue-type": settings.queue_type}
    for key, value in given.items():
        if value is not None and (quorum or key != "delivery_limit"):
            arguments["x-" + key.replace("_", "-")] = value
    # At-least-once dead-lettering needs a quorum queue, the strategy and reject-publish together;
    # otherwise RabbitMQ falls back to at-most-once with a log line.
    if quorum and "x-dead-letter-exchange" in arguments:
        arguments["x-dead-letter-strategy"] = "at-least-once"
        arguments["x-overflow"] = "reject-publish"
    return arguments


def _infrastructure_exchanges(names: Names) -> list[Exchange]:
    return [
        Exchange(name=names.events, type="topic", role="events"),
        Exchange(name=names.archive, type="fanout", role="archive"),
        Exchange(name=names.graveyard, type="fanout", role="graveyard"),
        Exchange(name=names.dead, type="fanout", role="dead"),
        Exchange(name=names.abyss, type="fanout", role="abyss"),
        Exchange(
            name=names.return_,
            type="direct",
            # A delayed event whose handler was removed is archived. Otherwise it would block the
            # dead-letter worker, whose prefetch count is 32.
            arguments={"alternate-exchange": names.archive},
            role="return",
        ),
        Exchange(name=names.replay, type="direct", role="replay"),
    ]


def _infrastructure_queues(names: Names, settings: Settings) -> list[Queue]:
    """Return the archive and the queues of poison messages, each with an exchange of its name."""
    ttl, max_length = settings.archive.ttl, settings.archive.max_length
    archive = _arguments(
        settings,
        delivery_limit=NO_LIMIT,
        message_ttl=None if ttl is None else round(ttl * 1000),
        max_length=max_length,
        overflow=None if max_length is None else "drop-head",
    )
    abyss = _arguments(settings, delivery_limit=NO_LIMIT)
    dead = _arguments(settings, delivery_limit=DEAD_LIMIT, dead_letter_exchange=names.abyss)
    graveyard = _arguments(
        settings, delivery_limit=GRAVEYARD_LIMIT, dead_letter_exchange=names.dead
    )
    return [
        Queue(name=names.archive, arguments=archive, role="archive"),
        Queue(name=names.abyss, arguments=abyss, role="abyss"),
        Queue(name=names.dead, arguments=dead, role="dead"),
        Queue(name=names.graveyard, arguments=graveyard, role="graveyard"),
    ]


def _history_queues(names: Names, history: HistorySettings) -> list[Queue]:
    """Return the stream of past events, and the one of bindings, which is small and never cut."""
    arguments: dict[str, Any] = {"x-queue-type": "stream"}
    segment = SEGMENT_BYTES
    if history.max_age is not None:
        days, rest = divmod(round(history.max_age), 86_400)
        arguments["x-max-age"] = f"{round(history.max_age)}s" if rest else f"{days}D"
    if history.max_bytes is not None:
        arguments["x-max-length-bytes"] = history.max_bytes
        segment = min(segment, history.max_bytes // SEGMENTS)
    arguments["x-stream-max-segment-size-bytes"] = segment
    return [
        Queue(name=names.history, arguments=arguments, role="history"),
        Queue(name=names.bindings, arguments={"x-queue-type": "stream"}, role="history"),
    ]


def _handler_bindings(names: Names, handler: Handler) -> list[Binding]:
    return [
        *(
            Binding(exchange=names.events, queue=handler.queue, routing_key=pattern)
            for pattern in handler.bindings
        ),
        Binding(exchange=names.return_, queue=handler.queue, routing_key=handler.key),
        Binding(exchange=names.replay, queue=handler.queue, routing_key=handler.key),
    ]
