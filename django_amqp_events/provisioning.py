"""Compare what a service declares with what is on the broker, and bring the two together.

The functions behind ``events_declare`` and ``events_status``, and what a worker does about its
topology when it starts. Two ways of seeing:

* **plain AMQP** (always there): existence and arguments of every declared exchange and queue.
  It can neither see bindings nor what is left over, and says ``unknown``.
* **the management API** (``MANAGEMENT_URL``): exact, bindings, policies and left-overs included.

How arguments are read without changing anything: RabbitMQ compares the arguments of a queue that
exists before it validates those of one that does not (rabbit_amqqueue.erl, ``declare`` and
``assert_args_equivalence``). A redeclare that carries one more argument, invalid and meaningless
for these queue types, is therefore answered with ok (identical), with "inequivalent arg"
(different) or with "invalid arg" (missing), and can never create a queue.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import amqp
from amqp import exceptions as amqp_errors
from celery import Celery
from kombu import Connection

from . import broker
from .conf import Settings
from .exceptions import (
    BrokerRequirementError,
    BrokerUnavailableError,
    TopologyDriftError,
    TopologyError,
)
from .topology import Binding, Exchange, Names, Queue, Role, Topology

logger = logging.getLogger(__name__)

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
_REMEDY: Final = "run manage.py events_declare"

State = Literal["ok", "missing", "different", "stale", "unknown"]
Kind = Literal["exchange", "queue", "binding"]
Action = Literal["declare", "bind", "unbind", "delete", "recreate", "drain"]
T = TypeVar("T")


# -- what was seen ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One argument that is something else on the broker; texts, ``none`` where it is not set."""

    argument: str
    declared: str
    found: str

    def __str__(self) -> str:
        return f"{self.argument} is {self.found}, declared is {self.declared}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One exchange, queue or binding and its state.

    Attributes:
        entity: as declared; as found on the broker where it is stale.
        state: ``ok``; ``missing``; ``different`` (see *differences*); ``stale``: it belongs to
            this service and is not declared any more; ``unknown``: it could not be seen.
        differences: over plain AMQP only the first one, RabbitMQ tells no more.
        note: a sentence for a person, or ``""``.
    """

    entity: Exchange | Queue | Binding
    state: State
    differences: tuple[Difference, ...] = ()
    note: str = ""

    @property
    def kind(self) -> Kind:
        if isinstance(self.entity, Exchange):
            return "exchange"
        return "queue" if isinstance(self.entity, Queue) else "binding"

    @property
    def name(self) -> str:
        """The entity's name; for a binding ``exchange → queue [routing key]``."""
        if isinstance(self.entity, Binding):
            key = f" [{self.entity.routing_key}]" if self.entity.routing_key else ""
            return f"{self.entity.exchange} → {self.entity.queue}{key}"
        return self.entity.name

    @property
    def role(self) -> Role | None:
        return None if isinstance(self.entity, Binding) else self.entity.role

    def __str__(self) -> str:
        details = "; ".join([*map(str, self.differences), *([self.note] if self.note else [])])
        return f"{self.kind} {self.name}: {self.state}{f' ({details})' if details else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Something about the broker itself, or a policy, that is wrong or cannot be seen.

    Attributes:
        severity: ``error`` where nothing may be declared before it is put right.
    """

    severity: Literal["error", "unknown"]
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What is on the broker beside what is declared.

    Attributes:
        items: exchanges, queues, bindings in the order in which they are declared, then
            what is stale.
        exact: the management API was read, so bindings and left-overs are known.
        version: of RabbitMQ, as it says itself.
    """

    topology: Topology
    items: tuple[Item, ...]
    troubles: tuple[Trouble, ...] = ()
    exact: bool = False
    version: str = ""
    vhost: str = "/"

    def having(self, *states: State) -> tuple[Item, ...]:
        """Return the items in one of *states*."""
        return tuple(item for item in self.items if item.state in states)

    @property
    def errors(self) -> tuple[Trouble, ...]:
        return tuple(trouble for trouble in self.troubles if trouble.severity == "error")

    @property
    def drifted(self) -> bool:
        """Something is missing, different, stale or refused."""
        return bool(self.errors or self.having("missing", "different", "stale"))

    @property
    def unknown(self) -> bool:
        """Something could not be seen."""
        return bool(self.having("unknown")) or any(
            trouble.severity == "unknown" for trouble in self.troubles
        )

    @property
    def result(self) -> Literal["identical", "drift", "unknown"]:
        if self.drifted:
            return "drift"
        return "unknown" if self.unknown else "identical"

    def lines(self, *states: State) -> list[str]:
        """Describe the troubles that are errors, and the items in one of *states*."""
        return [str(trouble) for trouble in self.errors] + [
            str(item) for item in self.having(*states)
        ]


# -- plain AMQP ---------------------------------------------------------------------------


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

    def bind(self, binding: Binding) -> None:
        self.call(
            lambda channel: channel.queue_bind(binding.queue, binding.exchange, binding.routing_key)
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


def _check_requirements(app: Celery, settings: Settings, names: Names) -> tuple[Trouble, ...]:
    with session(app, settings) as asking:
        return requirements(asking, names, queue_type=settings.queue_type)


# -- inspect ------------------------------------------------------------------------------


def inspect(app: Celery, settings: Settings, topology: Topology) -> Report:
    """Compare what is declared with what is on the broker; nothing is changed.

    Raises:
        BrokerUnavailableError: no connection, or it broke.
    """
    troubles = _check_requirements(app, settings, topology.names)
    with session(app, settings) as amqp_session:
        items = [
            *(amqp_session.inspect_exchange(exchange) for exchange in topology.exchanges),
            *(amqp_session.inspect_queue(queue) for queue in topology.queues),
        ]
        states = {(item.kind, item.name): item.state for item in items}
        for binding in topology.bindings:
            gone = "missing" in (
                states["queue", binding.queue],
                states["exchange", binding.exchange],
            )
            items.append(
                Item(entity=binding, state="missing")
                if gone
                else Item(
                    entity=binding,
                    state="unknown",
                    note="plain AMQP cannot see bindings; set MANAGEMENT_URL",
                )
            )
        return Report(
            topology=topology,
            items=tuple(items),
            troubles=troubles,
            version=str(amqp_session.server.get("version", "")),
            vhost=amqp_session.vhost,
        )


# -- plan and apply -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One change, or one that may be none (a binding that plain AMQP cannot see)."""

    action: Action
    item: Item

    def __str__(self) -> str:
        return f"{self.action} {self.item.kind} {self.item.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What would be done.

    Attributes:
        refusals: what RabbitMQ would refuse, or must not be done; with any of them nothing
            is done at all.
    """

    report: Report
    steps: tuple[Step, ...] = ()
    refusals: tuple[str, ...] = ()


def plan(report: Report) -> Plan:
    """Decide what to do about a report. Pure."""
    steps = [
        Step(action="bind" if item.kind == "binding" else "declare", item=item)
        for item in report.items
        if item.state == "missing" or (item.state == "unknown" and item.kind == "binding")
    ]
    refusals = [str(trouble) for trouble in report.errors]
    refusals += [f"{item}; {_immutable(item)}" for item in report.having("different")]
    return Plan(report=report, steps=tuple(steps), refusals=tuple(refusals))


def _immutable(item: Item) -> str:
    if item.role == "events":
        return (
            "other services share this exchange, so it is not ours to delete: choose another "
            'AMQP_EVENTS["EXCHANGE"], or agree with them'
        )
    return (
        "arguments cannot be changed: let it run empty, then run manage.py events_declare "
        "--recreate-empty, or restore the setting that it was declared with"
    )


Progress = Callable[[Step, int, int], None]


def apply(app: Celery, settings: Settings, plan: Plan, *, progress: Progress | None = None) -> None:
    """Carry out a plan.

    Args:
        progress: called after each step with the step, its number and the number of steps.

    Raises:
        TopologyDriftError: the plan has refusals; nothing was changed.
        TopologyError: the broker refused a step; those before it are done.
        BrokerUnavailableError: no connection, or it broke.
    """
    if plan.refusals:
        raise TopologyDriftError("nothing was changed: " + _joined(plan.refusals))
    if not plan.steps:
        return
    with session(app, settings) as amqp_session:
        for number, step in enumerate(_ordered(plan), 1):
            try:
                _carry_out(amqp_session, step)
            except amqp_errors.ChannelError as exc:
                raise TopologyError(
                    f"RabbitMQ refused to {step}: {exc.reply_text}; {_permission_hint(exc)}"
                ) from exc
            if progress is not None:
                progress(step, number, len(plan.steps))


def _ordered(plan: Plan) -> list[Step]:
    # Bindings to the shared exchange come last: the first event that they bring finds its way
    # back, its graveyard and its archive.
    events = plan.report.topology.names.events

    def rank(step: Step) -> int:
        if isinstance(step.item.entity, Binding):
            return 3 if step.item.entity.exchange == events else 2
        return 0 if step.item.kind == "exchange" else 1

    return sorted(plan.steps, key=rank)


def _carry_out(amqp_session: Amqp, step: Step) -> None:
    entity = step.item.entity
    if isinstance(entity, Exchange):
        amqp_session.declare_exchange(entity)
    elif isinstance(entity, Queue):
        amqp_session.declare_queue(entity)
    else:
        amqp_session.bind(entity)


def _permission_hint(exc: amqp_errors.ChannelError) -> str:
    if isinstance(exc, amqp_errors.AccessRefused):
        return (
            "give this user the configure, write and read permissions, or have somebody else "
            'declare and set AMQP_EVENTS["TOPOLOGY"] to "external"'
        )
    return f"look at the broker's log, then {_REMEDY} again"


def _joined(lines: tuple[str, ...] | list[str], limit: int = 20) -> str:
    shown = [*lines[:limit], *([f"… and {len(lines) - limit} more"] if len(lines) > limit else [])]
    return "".join(f"\n  - {line}" for line in shown)


# -- what a worker does -------------------------------------------------------------------


def verify(app: Celery, settings: Settings, topology: Topology) -> Report:
    """Make sure that the broker has what is declared; plain AMQP only, and nothing is changed.

    What this user may not see is tolerated: with ``TOPOLOGY = "external"`` in silence, else with
    a warning in the log.

    Raises:
        TopologyDriftError: exchanges or queues are missing or different; each is named.
        BrokerRequirementError: the broker lacks a version or feature flag.
        BrokerUnavailableError: no connection, or it broke.
    """
    report = inspect(app, settings, topology)
    if report.errors:
        raise BrokerRequirementError("; ".join(str(trouble) for trouble in report.errors))
    lines = [str(item) for item in report.having("missing", "different") if item.kind != "binding"]
    if lines:
        raise TopologyDriftError(
            f"the topology of service {settings.service!r} does not fit on vhost "
            f"{report.vhost!r}; {_REMEDY}:{_joined(lines)}"
        )
    unseen = [item for item in report.having("unknown") if item.kind != "binding"]
    if unseen and settings.topology != "external":
        logger.warning(
            "%d exchanges and queues of service %r could not be compared, the first: %s; "
            'give the user configure permission, or set AMQP_EVENTS["TOPOLOGY"] to "external"',
            len(unseen),
            settings.service,
            unseen[0],
        )
    return report


def declare(
    app: Celery, settings: Settings, topology: Topology, *, progress: Progress | None = None
) -> Report:
    """Declare what is missing, over plain AMQP; what is different is refused beforehand.

    Returns:
        the report from before.

    Raises:
        TopologyDriftError: something is different; nothing was changed.
        TopologyError, BrokerUnavailableError: as :func:`apply`.
    """
    report = inspect(app, settings, topology)
    apply(app, settings, plan(report), progress=progress)
    return report


def prepare(app: Celery, settings: Settings, topology: Topology) -> Report:
    """Do what ``TOPOLOGY`` says when a worker starts; errors as :func:`verify`, :func:`declare`."""
    if settings.topology == "auto":
        return declare(app, settings, topology)
    return verify(app, settings, topology)
