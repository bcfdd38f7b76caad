"""Declare and compare exchanges, queues and bindings over plain AMQP.

How arguments are compared without changing anything: RabbitMQ compares the arguments of an
existing queue before it validates those of a missing one (rabbit_channel.erl, ``queue.declare``;
rabbit_amqqueue.erl, ``assert_equivalence`` and ``check_declare_arguments``). A redeclare with one
more argument, which is invalid and has no meaning for these queue types, is therefore answered
with ok (identical), "inequivalent arg" (different) or "invalid arg" (missing), and can never
create a queue. tests/integration/broker/test_topology.py pins this.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

import amqp
from amqp import exceptions as amqp_errors
from celery import Celery
from kombu import Connection

from ...conf import Settings
from ...exceptions import BrokerUnavailableError, TopologyError
from ...reasons import Reason
from .. import connection, reply_texts
from ..queue_depth import Depth, queue_depth
from ..topology import (
    Binding,
    Exchange,
    Names,
    Queue,
)
from .drift import BrokerProblem, Item

#: Oldest release whose quorum queues dead-letter at least once.
MINIMUM_VERSION: Final = (3, 10)
#: Oldest release whose feature flags are always enabled.
FLAGS_REQUIRED_VERSION: Final = (3, 12)
#: Seconds to wait for the answer to one request; a cluster may elect a leader in between.
ANSWER_TIMEOUT: Final = 60.0
#: Seconds to wait for another process that records bindings, which takes about ten seconds.
LOCK_TIMEOUT: Final = 60.0
LOCK_PAUSE: Final = 0.5

#: What is different with an alternate exchange of the shared exchange.
ALTERNATE: Final = (
    "it has an alternate exchange, which gets the events that no queue is bound for: UNROUTED has "
    "no effect"
)
# An argument of streams, which RabbitMQ validates for other queues only when it creates one.
_GUARD: Final = {"x-max-age": "never-created"}
# The same for streams.
_STREAM_GUARD: Final = {"x-message-ttl": "never-created"}
#: Arguments of a stream that say where it is stored.
_PLACING: Final = frozenset({"x-initial-cluster-size", "x-queue-leader-locator"})
T = TypeVar("T")
#: What is asked of the broker on a channel.
Request = Callable[[amqp.Channel], object]


def to_declare(entity: Exchange | Queue, extra: Mapping[str, Any] | None = None) -> Request:
    """Return the request that declares an exchange or queue: durable, never auto-deleted."""
    options = {
        "durable": True,
        "auto_delete": False,
        "arguments": {**entity.arguments, **(extra or {})},
    }
    if isinstance(entity, Exchange):
        kind = entity.type
        return lambda channel: channel.exchange_declare(entity.name, kind, **options)
    return lambda channel: channel.queue_declare(entity.name, **options)


def to_bind(wanted: Binding) -> Request:
    """Return the request that binds a queue; an existing binding stays."""
    return lambda channel: channel.queue_bind(*_route(wanted))


def to_unbind(binding: Binding) -> Request:
    """Return the request that removes a binding, if it exists."""
    return lambda channel: channel.queue_unbind(*_route(binding))


def _route(binding: Binding) -> tuple[str, str, str, bool, dict[str, Any]]:
    arguments = dict(binding.arguments)
    return binding.queue, binding.exchange, binding.routing_key, False, arguments


class Amqp:
    """A connection for declaring and comparing; each refusal closes its channel.

    Raises (from every method):
        BrokerUnavailableError: the connection broke, or there was no answer in time.
    """

    def __init__(self, conn: Connection) -> None:
        self.vhost: str = conn.virtual_host or "/"
        self._connection = conn
        self._amqp: amqp.Connection = conn.connection
        self._channel: amqp.Channel | None = None
        self._amqp.transport.sock.settimeout(ANSWER_TIMEOUT)

    @property
    def server(self) -> Mapping[str, Any]:
        """The broker's product, version and capabilities."""
        return self._amqp.server_properties or {}

    def call(self, function: Callable[[amqp.Channel], T]) -> T:
        """Run *function* on a channel that is reused until the broker closes it.

        Raises:
            amqp.exceptions.ChannelError: the broker refused the request.
        """
        channel = self._channel
        try:
            if channel is None:
                channel = self._channel = self._amqp.channel()
            return function(channel)
        except amqp_errors.ChannelError:
            # py-amqp would reopen the channel, with answers to earlier requests.
            self._channel = None
            if channel is not None:
                with suppress(amqp_errors.ChannelError):
                    channel.close()
            raise
        except (OSError, amqp_errors.ConnectionError) as exc:
            error = f"{type(exc).__name__}: {exc}"
            remedy = connection.login_refusal(exc) or Reason("remedy-retry")
            raise BrokerUnavailableError(
                Reason("connection-lost", error=error, remedy=remedy)
            ) from exc

    def ask_workers(self, app: Celery, timeout: float) -> dict[str, dict[str, Any]]:
        """Return the statistics of all workers on the vhost, by name, through remote control.

        No worker is asked if the project has turned remote control off: its user may lack the
        permissions, and RabbitMQ logs each refusal.

        Args:
            timeout: seconds to wait for the next answer.

        Raises:
            amqp.exceptions.ChannelError: the broker refused the request.
        """
        if not app.conf.worker_enable_remote_control:
            return {}
        mailbox = app.control.mailbox(self._connection)
        # The pool's connection would stay open.
        mailbox.producer_pool = None
        answers = self.call(
            lambda channel: mailbox.multi_call("stats", timeout=timeout, channel=channel)
        )
        return {name: reply for answer in answers or () for name, reply in answer.items()}

    def carry_out(self, *requests: Request) -> None:
        for request in requests:
            self.call(request)

    def lock(self, name: str) -> None:
        """Take a lock: an exclusive queue, which no other connection can declare until this closes.

        Raises:
            TopologyError: another process has held it for :data:`LOCK_TIMEOUT` seconds.
        """
        end = time.monotonic() + LOCK_TIMEOUT
        while True:
            try:
                self.call(lambda channel: channel.queue_declare(name, exclusive=True))
            except amqp_errors.ResourceLocked as exc:
                if time.monotonic() > end:
                    raise TopologyError(
                        f"another events_declare, or a worker with TOPOLOGY 'auto', holds the "
                        f"queue {name}; run `manage.py events_declare` again when it has ended"
                    ) from exc
            else:
                return
            time.sleep(LOCK_PAUSE)

    def depth(self, name: str) -> Depth | None:
        """Return a queue's ready messages and consumers; ``None`` if it does not exist."""
        try:
            return self.call(lambda channel: queue_depth(channel, name))
        except amqp_errors.NotFound:
            return None

    def exchange_exists(self, name: str) -> bool:
        try:
            # A passive declare ignores the type.
            self.call(
                lambda channel: channel.exchange_declare(
                    name, "direct", passive=True, auto_delete=False
                )
            )
        except amqp_errors.NotFound:
            return False
        return True

    def inspect(self, entities: Sequence[Exchange | Queue]) -> list[Item]:
        """Compare arguments, and the types of exchanges; nothing is created.

        There is no guard for exchanges: one that is deleted between the passive declare and the
        redeclare right behind it is created again, as declared.
        """
        return [
            self._inspect_queue(entity)
            if isinstance(entity, Queue)
            else self._inspect_exchange(entity)
            for entity in entities
        ]

    def _inspect_exchange(self, exchange: Exchange) -> Item:
        try:
            if not self.exchange_exists(exchange.name):
                return Item(entity=exchange, state="missing")
        except amqp_errors.AccessRefused:
            return _unreadable(exchange, None)
        return self._redeclare(exchange)

    def _inspect_queue(self, queue: Queue) -> Item:
        try:
            self.call(to_declare(queue, _STREAM_GUARD if queue.role == "history" else _GUARD))
        except amqp_errors.ChannelError as exc:
            return self._refused_queue(queue, exc)
        return Item(entity=queue, state="ok")

    def _redeclare(self, entity: Exchange | Queue) -> Item:
        try:
            self.call(to_declare(entity))
        except amqp_errors.ChannelError as exc:
            return _refused_redeclare(entity, exc)
        return Item(entity=entity, state="ok")

    def _refused_queue(self, queue: Queue, exc: amqp_errors.ChannelError) -> Item:
        if isinstance(exc, amqp_errors.ResourceLocked):
            difference = reply_texts.Difference(
                argument="exclusive", declared="false", found="true"
            )
            return Item(entity=queue, state="different", differences=(difference,))
        if isinstance(exc, amqp_errors.AccessRefused):
            return _unreadable(queue, self._exists(queue.name))
        if not isinstance(exc, amqp_errors.PreconditionFailed):
            raise exc
        if reply_texts.inequivalent(exc) is not None:
            return _refused_redeclare(queue, exc)
        if not self._exists(queue.name):
            return Item(entity=queue, state="missing")
        # A release that validates first, unlike 3.10: compare without the guard.
        return self._redeclare(queue)

    def _exists(self, name: str) -> bool | None:
        try:
            return self.depth(name) is not None
        except amqp_errors.ResourceLocked:
            return True
        except amqp_errors.AccessRefused:
            return None


def _refused_redeclare(entity: Exchange | Queue, exc: amqp_errors.ChannelError) -> Item:
    if isinstance(exc, amqp_errors.AccessRefused):
        return _unreadable(entity, True)
    if not isinstance(exc, amqp_errors.PreconditionFailed):
        raise exc
    argument = reply_texts.inequivalent(exc)
    if argument is None:
        return Item(entity=entity, state="different", note=exc.reply_text)
    # RabbitMQ compares all that matters before it, and other services own the exchange too.
    if entity.role == "events" and argument.argument == "alternate-exchange":
        return Item(entity=entity, state="ok", note=ALTERNATE)
    # Its owner may have placed its members; other services share it.
    if entity.role == "history" and argument.argument in _PLACING:
        return Item(entity=entity, state="ok", note=str(argument))
    return Item(entity=entity, state="different", differences=(argument,))


def _unreadable(entity: Exchange | Queue, exists: bool | None) -> Item:
    if exists is False:
        return Item(entity=entity, state="missing")
    what = "it exists, but its arguments" if exists else "it"
    return Item(
        entity=entity,
        state="unknown",
        note=f"{what} cannot be read: this user has no configure permission on the name",
    )


@contextmanager
def session(app: Celery, settings: Settings, **transport_options: Any) -> Iterator[Amqp]:
    """Open a connection for declaring and comparing, for a block."""
    timeout = settings.confirm_timeout
    with connection.connection(app, timeout=timeout, **transport_options) as conn:
        yield Amqp(conn)


def version_of(server: Mapping[str, Any]) -> tuple[int, ...]:
    """Return RabbitMQ's version as numbers; ``()`` if the broker is another product."""
    if server.get("product") != "RabbitMQ":
        return ()
    return tuple(int(part) for part in re.findall(r"\d+", str(server.get("version", "")))[:3])


def missing_requirement(
    session: Amqp, names: Names, *, queue_type: str = "quorum"
) -> BrokerProblem | None:
    """Return what the broker lacks for the guarantees.

    Before 3.12, at-least-once dead-lettering needs the feature flag ``stream_queue``: without it
    a queue silently loses what its dead-letter target does not accept. The probe declares a stream
    that RabbitMQ can never create (streams are not exclusive). With the flag, the answer is a
    refused property; without it, an internal error that closes the connection.
    """
    version = str(session.server.get("version", ""))
    numbers = version_of(session.server)
    if not numbers:
        product = session.server.get("product", "an unknown broker")
        return BrokerProblem(
            message=f"the broker is {product} {version}, not RabbitMQ",
            remedy="use RabbitMQ 3.10 or newer, whose delays and dead letters are needed",
        )
    if numbers < MINIMUM_VERSION:
        return BrokerProblem(
            message=f"RabbitMQ {version} is older than 3.10, the first release whose quorum queues "
            f"dead-letter at least once",
            remedy="upgrade it",
        )
    if numbers >= FLAGS_REQUIRED_VERSION or queue_type != "quorum":
        return None
    enabled = _streams_enabled(session, names.probe)
    if enabled is None:
        return BrokerProblem(
            severity="unknown",
            message=f"this user's permissions do not show whether RabbitMQ {version} has the "
            f"feature flag stream_queue enabled",
            remedy="run rabbitmqctl list_feature_flags",
        )
    if not enabled:
        return BrokerProblem(
            message=f"RabbitMQ {version} has the feature flag stream_queue disabled, so dead "
            f"letters can be lost",
            remedy="run rabbitmqctl enable_feature_flag stream_queue",
        )
    return None


def _streams_enabled(session: Amqp, probe: str) -> bool | None:
    try:
        session.call(
            lambda channel: channel.queue_declare(
                probe,
                durable=False,
                exclusive=True,
                auto_delete=False,
                arguments={"x-queue-type": "stream"},
            )
        )
    except amqp_errors.PreconditionFailed as exc:
        return reply_texts.is_invalid_property(exc) or None
    except amqp_errors.ChannelError:
        return None
    except BrokerUnavailableError as exc:
        if isinstance(exc.__cause__, amqp_errors.InternalError):
            return False
        raise
    return None
