"""Declaring and asking over plain AMQP.

How arguments are read without changing anything: RabbitMQ compares the arguments of a queue that
exists before it validates those of one that does not (rabbit_channel.erl, ``queue.declare``;
rabbit_amqqueue.erl, ``assert_equivalence`` and ``check_declare_arguments``). A redeclare that
carries one more argument, invalid and meaningless for these queue types, is therefore answered
with ok (identical), with "inequivalent arg" (different) or with "invalid arg" (missing), and can
never create a queue. tests/integration/broker/test_topology.py pins it.

A service has thousands of queues and bindings, so requests are sent ahead of their answers. A
channel is answered in order; what it refuses closes it, and RabbitMQ ignores what comes after that
(rabbit_channel.erl, ``handle_method`` of a closing channel): requests behind a refused one are not
carried out, and are sent again. tests/integration/broker/test_topology.py pins that too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import amqp
from amqp import exceptions as amqp_errors
from amqp import spec
from celery import Celery
from kombu import Connection

from ...conf import Settings
from ...exceptions import BrokerUnavailableError
from .. import connection
from ..topology import (
    Binding,
    Exchange,
    Names,
    Queue,
)
from .drift import BrokerProblem, Difference, Item

#: Oldest broker whose quorum queues dead-letter at least once.
MINIMUM_VERSION: Final = (3, 10)
#: From here on the feature flags are always enabled.
FLAGS_REQUIRED_VERSION: Final = (3, 12)
#: Seconds without an answer to one declare or bind; a cluster may elect a leader in between.
ANSWER_TIMEOUT: Final = 60.0
#: Requests that may wait for their answers; few enough that both ends' buffers take them.
AHEAD: Final = 64

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
    """Messages ready and consumers, as a passive declare reports them."""

    ready: int
    consumers: int


@dataclass(frozen=True, slots=True)
class Request:
    """A method as py-amqp writes it, and the method that answers it."""

    method: tuple[int, int]
    format: str
    arguments: tuple[Any, ...]
    answer: tuple[int, int]


def to_declare(entity: Exchange | Queue, extra: Mapping[str, Any] | None = None) -> Request:
    """Declare an exchange or a queue: durable, never exclusive, never auto-deleted."""
    arguments = {**entity.arguments, **(extra or {})}
    if isinstance(entity, Exchange):
        return _exchange_declare(entity.name, entity.type, arguments=arguments)
    return _queue_declare(entity.name, arguments=arguments)


def _queue_declare(
    name: str, *, passive: bool = False, arguments: Mapping[str, Any] | None = None
) -> Request:
    flags = (passive, True, False, False, False)  # durable, exclusive, auto-delete, no wait
    return Request(
        spec.Queue.Declare,
        "BsbbbbbF",
        (0, name, *flags, dict(arguments or {})),
        spec.Queue.DeclareOk,
    )


def _exchange_declare(
    name: str, kind: str, *, passive: bool = False, arguments: Mapping[str, Any] | None = None
) -> Request:
    flags = (passive, True, False, False, False)  # durable, auto-delete, internal, no wait
    return Request(
        spec.Exchange.Declare,
        "BssbbbbbF",
        (0, name, kind, *flags, dict(arguments or {})),
        spec.Exchange.DeclareOk,
    )


def to_bind(wanted: Binding, arguments: Mapping[str, Any] | None = None) -> Request:
    """Bind a queue; nothing happens where it is bound already."""
    ends = (wanted.queue, wanted.exchange, wanted.routing_key)
    return Request(
        spec.Queue.Bind, "BsssbF", (0, *ends, False, dict(arguments or {})), spec.Queue.BindOk
    )


def to_unbind(found: Binding, arguments: Mapping[str, Any] | None = None) -> Request:
    """Remove a binding; nothing happens where it is not there."""
    ends = (found.queue, found.exchange, found.routing_key)
    return Request(
        spec.Queue.Unbind, "BsssF", (0, *ends, dict(arguments or {})), spec.Queue.UnbindOk
    )


def _comparing(entity: Exchange | Queue) -> tuple[Request, ...]:
    """Return what shows whether an entity is as declared, and creates none."""
    if isinstance(entity, Queue):
        return (to_declare(entity, _GUARD),)
    # The type is not looked at. Where this one is refused the other is not carried out.
    return (_exchange_declare(entity.name, "direct", passive=True), to_declare(entity))


class Amqp:
    """A connection for declaring and asking; each refusal costs its channel.

    Raises (from every method):
        BrokerUnavailableError: the connection broke, or no answer came.
    """

    def __init__(self, conn: Connection) -> None:
        self.vhost: str = conn.virtual_host or "/"
        self._amqp: amqp.Connection = conn.connection
        self._channel: amqp.Channel | None = None
        self._ahead = AHEAD
        with suppress(AttributeError):
            self._amqp.transport.sock.settimeout(ANSWER_TIMEOUT)

    @property
    def server(self) -> Mapping[str, Any]:
        """Return the broker's product, version and capabilities."""
        return self._amqp.server_properties or {}

    def call(self, function: Callable[[amqp.Channel], T]) -> T:
        """Run *function* on a channel that is reused until the broker closes it.

        Raises:
            amqp.exceptions.ChannelError: what was asked is refused.
        """
        with self._opened() as channel:
            return function(channel)

    @contextmanager
    def _opened(self) -> Iterator[amqp.Channel]:
        channel = self._channel
        try:
            if channel is None:
                channel = self._channel = self._amqp.channel()
            yield channel
        except amqp_errors.ChannelError:
            # py-amqp reopens a closed channel by itself; a fresh one has no past.
            self._channel = None
            if channel is not None:
                with suppress(amqp_errors.ChannelError):
                    channel.close()
            raise
        except (OSError, amqp_errors.ConnectionError) as exc:
            raise BrokerUnavailableError(
                f"the connection to RabbitMQ (vhost {self.vhost!r}) broke: "
                f"{type(exc).__name__}: {exc}; check the broker, then repeat"
            ) from exc

    def ask(self, requests: Sequence[Request]) -> Iterator[None]:
        """Carry out requests in order, sent ahead of their answers; yield at each answer.

        Raises:
            amqp.exceptions.ChannelError: the one after those that were answered is refused;
                neither it nor any after it was carried out.
        """
        sent = answered = 0
        with self._opened() as channel:
            try:
                for request in requests:
                    for ahead in requests[sent : answered + self._ahead]:
                        channel.send_method(ahead.method, ahead.format, ahead.arguments)
                        sent += 1
                    channel.wait(request.answer)
                    answered += 1
                    self._ahead = min(2 * self._ahead, AHEAD)
                    yield
            finally:
                if sent > answered:
                    # Answers are under way that nobody waits for. And where one request is
                    # refused others will be: what was sent behind it was for nothing.
                    self._channel, self._ahead = None, 1

    def carry_out(self, request: Request) -> None:
        for _ in self.ask([request]):
            pass

    def declare_queue(self, queue: Queue) -> None:
        self.carry_out(to_declare(queue))

    def bind(self, wanted: Binding, arguments: Mapping[str, Any] | None = None) -> None:
        self.carry_out(to_bind(wanted, arguments))

    def unbind(self, found: Binding, arguments: Mapping[str, Any] | None = None) -> None:
        self.carry_out(to_unbind(found, arguments))

    def depth(self, name: str) -> Depth | None:
        """Return how many messages are ready and how many consume; ``None`` without the queue."""
        try:
            answer = self.call(lambda channel: channel.queue_declare(name, passive=True))
        except amqp_errors.NotFound:
            return None
        return Depth(answer.message_count, answer.consumer_count)

    def exchange_exists(self, name: str) -> bool:
        try:
            self.carry_out(_exchange_declare(name, "direct", passive=True))
        except amqp_errors.NotFound:
            return False
        return True

    def inspect(self, entities: Sequence[Exchange | Queue]) -> list[Item]:
        """Compare arguments, and the types of exchanges; nothing is created.

        There is no guard for exchanges: one that somebody deletes between the question whether
        it exists and the redeclare right behind it comes back, as it is declared.
        """
        asked = [(number, ask) for number, each in enumerate(entities) for ask in _comparing(each)]
        items: list[Item] = []
        done = 0
        while done < len(asked):
            try:
                for _ in self.ask([request for _, request in asked[done:]]):
                    done += 1
            except amqp_errors.ChannelError as exc:
                number, request = asked[done]
                items += [Item(entity=each, state="ok") for each in entities[len(items) : number]]
                items.append(self._refused(entities[number], request, exc))
                while done < len(asked) and asked[done][0] == number:
                    done += 1
        return items + [Item(entity=each, state="ok") for each in entities[len(items) :]]

    def _refused(
        self, entity: Exchange | Queue, request: Request, exc: amqp_errors.ChannelError
    ) -> Item:
        if isinstance(entity, Queue):
            return self._refused_queue(entity, exc)
        if request == _comparing(entity)[0]:
            if isinstance(exc, amqp_errors.NotFound):
                return Item(entity=entity, state="missing")
            if isinstance(exc, amqp_errors.AccessRefused):
                return self._unreadable(entity, None)
            raise exc
        return self._refused_redeclare(entity, exc)

    def _refused_queue(self, queue: Queue, exc: amqp_errors.ChannelError) -> Item:
        if isinstance(exc, amqp_errors.ResourceLocked):
            difference = Difference(argument="exclusive", declared="false", found="true")
            return Item(entity=queue, state="different", differences=(difference,))
        if isinstance(exc, amqp_errors.AccessRefused):
            return self._unreadable(queue, self._exists(queue.name))
        if not isinstance(exc, amqp_errors.PreconditionFailed):
            raise exc
        found = _difference(exc)
        if found is not None:
            return Item(entity=queue, state="different", differences=(found,))
        if not self._exists(queue.name):
            return Item(entity=queue, state="missing")
        # A broker that validates first, against what was read of 3.10: ask without the guard.
        try:
            self.declare_queue(queue)
        except amqp_errors.ChannelError as again:
            return self._refused_redeclare(queue, again)
        return Item(entity=queue, state="ok")

    def _exists(self, name: str) -> bool | None:
        try:
            return self.depth(name) is not None
        except amqp_errors.ResourceLocked:
            return True
        except amqp_errors.AccessRefused:
            return None

    def _refused_redeclare(self, entity: Exchange | Queue, exc: amqp_errors.ChannelError) -> Item:
        if isinstance(exc, amqp_errors.AccessRefused):
            return self._unreadable(entity, True)
        if not isinstance(exc, amqp_errors.PreconditionFailed):
            raise exc
        difference = _difference(exc)
        if difference is None:
            return Item(entity=entity, state="different", note=exc.reply_text)
        return Item(entity=entity, state="different", differences=(difference,))

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
    with connection.connection(app, timeout=settings.confirm_timeout) as conn:
        yield Amqp(conn)


# -- what the broker must be able to do ---------------------------------------------------


def version_of(server: Mapping[str, Any]) -> tuple[int, ...]:
    """Return RabbitMQ's version as numbers; ``()`` where the broker is something else."""
    if server.get("product") != "RabbitMQ":
        return ()
    return tuple(int(part) for part in re.findall(r"\d+", str(server.get("version", "")))[:3])


def requirements(
    session: Amqp, names: Names, *, queue_type: str = "quorum"
) -> tuple[BrokerProblem, ...]:
    """Return what the broker lacks that the guarantees need.

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
            BrokerProblem(
                severity="error",
                message=f"the broker is {product} {version}, not RabbitMQ",
                remedy="use RabbitMQ 3.10 or newer: delays and dead letters rest on what it does",
            ),
        )
    if numbers < MINIMUM_VERSION:
        return (
            BrokerProblem(
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
                BrokerProblem(
                    severity="unknown",
                    message=f"whether RabbitMQ {version} has the feature flag {flag} enabled "
                    f"cannot be seen with this user's permissions",
                    remedy=f"ask its administrator: rabbitmqctl list_feature_flags, {flag}",
                )
            )
        elif not enabled:
            troubles.append(
                BrokerProblem(
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
