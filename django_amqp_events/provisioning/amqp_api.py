"""Declaring and asking over plain AMQP.

How arguments are read without changing anything: RabbitMQ compares the arguments of a queue that
exists before it validates those of one that does not (rabbit_channel.erl, ``queue.declare``;
rabbit_amqqueue.erl, ``assert_equivalence`` and ``check_declare_arguments``). A redeclare that
carries one more argument, invalid and meaningless for these queue types, is therefore answered
with ok (identical), with "inequivalent arg" (different) or with "invalid arg" (missing), and can
never create a queue. tests/integration/test_topology.py pins it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import amqp
from amqp import exceptions as amqp_errors
from celery import Celery
from kombu import Connection

from .. import broker
from ..conf import Settings
from ..exceptions import BrokerUnavailableError
from ..topology import Binding, Exchange, Names, Queue
from .drift import Difference, Item, Trouble

#: Oldest broker whose quorum queues dead-letter at least once.
MINIMUM_VERSION: Final = (3, 10)
#: From here on the feature flags are always enabled.
FLAGS_REQUIRED_VERSION: Final = (3, 12)
#: Seconds without an answer to one declare or bind; a cluster may elect a leader in between.
ANSWER_TIMEOUT: Final = 60.0

# An argument of streams; for other queues it is validated only when a queue is created.
_GUARD: Final = {"x-max-age": "never-created"}
_INEQUIVALENT = re.compile(
    r"inequivalent arg '(?P<argument>[^']+)' for .*: "
    r"received (?P<declared>.*?) but current is (?P<found>.*)$",
    re.DOTALL,
)
_VALUE = re.compile(r"^(?:the value )?'(?P<value>.*?)'(?: of type '\w+')?$", re.DOTALL)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Depth:
    """What a passive declare tells: messages that are ready, and consumers."""

    ready: int
    consumers: int


class Amqp:
    """A connection for declaring and asking; each refusal costs its channel.

    Raises (from every method):
        BrokerUnavailableError: the connection broke, or no answer came.
    """

    def __init__(self, conn: Connection) -> None:
        self.vhost: str = conn.virtual_host or "/"
        self._amqp: amqp.Connection = conn.connection
        self._channel: amqp.Channel | None = None
        with suppress(AttributeError):
            self._amqp.transport.sock.settimeout(ANSWER_TIMEOUT)

    @property
    def server(self) -> Mapping[str, Any]:
        """What the broker says about itself."""
        return self._amqp.server_properties or {}

    def call(self, function: Callable[[amqp.Channel], T]) -> T:
        """Run *function* on a channel that is reused until the broker closes it.

        Raises:
            amqp.exceptions.ChannelError: what was asked is refused.
        """
        try:
            if self._channel is None:
                self._channel = self._amqp.channel()
            return function(self._channel)
        except amqp_errors.ChannelError:
            # py-amqp reopens a closed channel by itself; a fresh one has no past.
            channel, self._channel = self._channel, None
            if channel is not None:
                with suppress(amqp_errors.ChannelError):
                    channel.close()
            raise
        except (OSError, amqp_errors.ConnectionError) as exc:
            raise BrokerUnavailableError(
                f"the connection to RabbitMQ (vhost {self.vhost!r}) broke: "
                f"{type(exc).__name__}: {exc}; check the broker, then repeat"
            ) from exc

    def declare_queue(self, queue: Queue, extra: Mapping[str, Any] | None = None) -> None:
        self.call(
            lambda channel: channel.queue_declare(
                queue.name,
                durable=True,
                exclusive=False,
                auto_delete=False,
                arguments={**queue.arguments, **(extra or {})},
            )
        )

    def declare_exchange(self, exchange: Exchange) -> None:
        self.call(
            lambda channel: channel.exchange_declare(
                exchange.name,
                exchange.type,
                durable=True,
                auto_delete=False,
                arguments=dict(exchange.arguments),
            )
        )

    def bind(self, binding: Binding, arguments: Mapping[str, Any] | None = None) -> None:
        self.call(
            lambda channel: channel.queue_bind(
                binding.queue,
                binding.exchange,
                binding.routing_key,
                arguments=dict(arguments or {}),
            )
        )

    def unbind(self, binding: Binding, arguments: Mapping[str, Any] | None = None) -> None:
        """Remove a binding; nothing happens where it is not there."""
        self.call(
            lambda channel: channel.queue_unbind(
                binding.queue,
                binding.exchange,
                binding.routing_key,
                arguments=dict(arguments or {}),
            )
        )

    def depth(self, name: str) -> Depth | None:
        """Return how many messages are ready and how many consume; ``None`` without the queue."""
        try:
            answer = self.call(lambda channel: channel.queue_declare(name, passive=True))
        except amqp_errors.NotFound:
            return None
        return Depth(answer.message_count, answer.consumer_count)

    def exchange_exists(self, name: str) -> bool:
        try:
            # The type is not looked at.
            self.call(lambda channel: channel.exchange_declare(name, "direct", passive=True))
        except amqp_errors.NotFound:
            return False
        return True

    def inspect_queue(self, queue: Queue) -> Item:
        """Compare a queue's arguments; nothing is created."""
        try:
            self.declare_queue(queue, _GUARD)
        except amqp_errors.PreconditionFailed as exc:
            difference = _difference(exc)
            if difference is not None:
                return Item(entity=queue, state="different", differences=(difference,))
        except amqp_errors.ResourceLocked:
            difference = Difference(argument="exclusive", declared="false", found="true")
            return Item(entity=queue, state="different", differences=(difference,))
        except amqp_errors.AccessRefused:
            return self._unreadable(queue, self._exists(queue.name))
        else:
            return Item(entity=queue, state="ok")
        if not self._exists(queue.name):
            return Item(entity=queue, state="missing")
        # A broker that validates first, against what was read of 3.10: ask without the guard.
        return self._redeclare(queue, self.declare_queue)

    def inspect_exchange(self, exchange: Exchange) -> Item:
        """Compare an exchange's type and arguments.

        There is no guard for exchanges: one that somebody deletes between the question whether
        it exists and the redeclare comes back, as it is declared.
        """
        try:
            exists = self.exchange_exists(exchange.name)
        except amqp_errors.AccessRefused:
            return self._unreadable(exchange, None)
        if not exists:
            return Item(entity=exchange, state="missing")
        return self._redeclare(exchange, self.declare_exchange)

    def _exists(self, name: str) -> bool | None:
        try:
            return self.depth(name) is not None
        except amqp_errors.ResourceLocked:
            return True
        except amqp_errors.AccessRefused:
            return None

    def _redeclare(self, entity: Any, declare: Callable[[Any], None]) -> Item:
        try:
            declare(entity)
        except amqp_errors.PreconditionFailed as exc:
            difference = _difference(exc)
            if difference is None:
                return Item(entity=entity, state="different", note=exc.reply_text)
            return Item(entity=entity, state="different", differences=(difference,))
        except amqp_errors.AccessRefused:
            return self._unreadable(entity, True)
        return Item(entity=entity, state="ok")

    @staticmethod
    def _unreadable(entity: Exchange | Queue, exists: bool | None) -> Item:
        if exists is False:
            return Item(entity=entity, state="missing")
        what = "it exists, but its arguments" if exists else "it"
        return Item(
            entity=entity,
            state="unknown",
            note=f"{what} cannot be read: this user has no configure permission on the name",
        )


def _difference(exc: amqp_errors.PreconditionFailed) -> Difference | None:
    match = _INEQUIVALENT.search(exc.reply_text or "")
    if match is None:
        return None

    def plain(text: str) -> str:
        value = _VALUE.match(text)
        return value["value"] if value else text

    return Difference(
        argument=match["argument"], declared=plain(match["declared"]), found=plain(match["found"])
    )


@contextmanager
def session(app: Celery, settings: Settings) -> Iterator[Amqp]:
    """Open a connection for declaring and asking, for the time of a block."""
    with broker.connection(app, timeout=settings.confirm_timeout) as conn:
        yield Amqp(conn)


# -- what the broker must be able to do ---------------------------------------------------


def version_of(server: Mapping[str, Any]) -> tuple[int, ...]:
    """Return RabbitMQ's version as numbers; ``()`` where the broker is something else."""
    if server.get("product") != "RabbitMQ":
        return ()
    return tuple(int(part) for part in re.findall(r"\d+", str(server.get("version", "")))[:3])


def requirements(session: Amqp, names: Names, *, queue_type: str = "quorum") -> tuple[Trouble, ...]:
    """Say what the broker lacks that nothing-is-lost rests on.

    Before 3.12 at-least-once dead-lettering needs the feature flag ``stream_queue``: without it
    a queue silently loses what its dead-letter target does not take. Whether it is enabled is
    asked by declaring a stream that RabbitMQ can never create (streams are not exclusive): with
    the flag the answer is a refused property, without it an internal error that closes the
    connection of its own on which it is asked.
    """
    product = session.server.get("product", "an unknown broker")
    version = str(session.server.get("version", ""))
    numbers = version_of(session.server)
    if not numbers:
        return (
            Trouble(
                severity="error",
                message=f"the broker is {product} {version}, not RabbitMQ",
                remedy="use RabbitMQ 3.10 or newer: delays and dead letters rest on what it does",
            ),
        )
    if numbers < MINIMUM_VERSION:
        return (
            Trouble(
                severity="error",
                message=f"RabbitMQ {version} is older than 3.10, whose quorum queues were the "
                f"first to dead-letter at least once",
                remedy="upgrade it",
            ),
        )
    if numbers >= FLAGS_REQUIRED_VERSION or queue_type != "quorum":
        return ()
    troubles = []
    for kind, flag in (("quorum", "quorum_queue"), ("stream", "stream_queue")):
        enabled = _flag_enabled(session, f"{names.infrastructure('probe')}.{kind}", kind)
        if enabled is None:
            troubles.append(
                Trouble(
                    severity="unknown",
                    message=f"whether RabbitMQ {version} has the feature flag {flag} enabled "
                    f"cannot be seen with this user's permissions",
                    remedy=f"ask its administrator: rabbitmqctl list_feature_flags, {flag}",
                )
            )
        elif not enabled:
            troubles.append(
                Trouble(
                    severity="error",
                    message=f"RabbitMQ {version} has the feature flag {flag} disabled, without "
                    f"which dead letters can be lost",
                    remedy=f"run rabbitmqctl enable_feature_flag {flag}",
                )
            )
            # The question has cost the connection.
            break
    return tuple(troubles)


def _flag_enabled(session: Amqp, probe: str, queue_type: str) -> bool | None:
    try:
        session.call(
            lambda channel: channel.queue_declare(
                probe,
                durable=False,
                exclusive=True,
                auto_delete=False,
                arguments={"x-queue-type": queue_type},
            )
        )
    except amqp_errors.PreconditionFailed as exc:
        return "invalid property" in (exc.reply_text or "") or None
    except amqp_errors.ChannelError:
        return None
    except BrokerUnavailableError as exc:
        if isinstance(exc.__cause__, amqp_errors.InternalError):
            return False
        raise
    return None
