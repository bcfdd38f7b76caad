"""The outbox under whatever publishers, relays, RabbitMQ, time and operators do, in any order.

Publishers and relays are simulated processes (:mod:`tests.simulated`) that run the package's code
against RabbitMQ and a database, and stop at each effect.
``AMQP_EVENTS_FUZZ=500`` looks for longer, at random.
"""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import pytest
from django.db import connections, transaction
from django.db.models import F
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from django_amqp_events import publish_event, service_loop
from django_amqp_events.archive import retention
from django_amqp_events.backoff import Backoff
from django_amqp_events.broker import confirms
from django_amqp_events.conf import get_settings
from django_amqp_events.databases import clock
from django_amqp_events.exceptions import BrokerUnavailableError
from django_amqp_events.message.types import Message
from django_amqp_events.models import OutboxEvent
from django_amqp_events.publish import direct_publisher, outbox, outbox_rows, publisher, relay
from django_amqp_events.publish.direct_publisher import CommittedRows, DirectPublisher
from django_amqp_events.publish.pending import Pending
from django_amqp_events.publish.relay import OutboxChannel, Relay
from tests.archive_rows import Clock
from tests.conftest import EACH, Database, Vhost
from tests.simulated import Died, Process, Shifted, acting, effect, running
from tests.stateful import TIMEOUT, examples, without_disk

from .. import wire as wire_module
from ..relaying import ALIAS, table
from ..wire import Wire

NAMES = {
    "good": "shop.order.created",
    # No queue is bound for it.
    "unrouted": "shop.nobody",
    # One of its queues is full, and refuses it.
    "nacked": "shop.full",
    # RabbitMQ's frames are too small for its headers.
    "large": "shop.order.created",
    # RabbitMQ closes the channel over it.
    "astray": "shop.order.created",
}
#: Kinds of events that RabbitMQ refuses whatever an operator does.
REFUSED = {"large", "astray"}
MESSAGES = st.sampled_from(["good", "good", "good", *NAMES])
#: What a transaction does: events that it publishes, and nested blocks that are kept or not.
BLOCKS = st.recursive(
    st.lists(MESSAGES, min_size=1, max_size=3),
    lambda inner: st.lists(st.tuples(st.booleans(), inner) | MESSAGES, max_size=3),
    max_leaves=4,
)
which_one = st.integers(0, 9)
#: Where a process stops.
UNTIL = st.sampled_from(
    [
        None,
        "after claim",
        "published",
        "after publish",
        "after delete_confirmed",
        "before record_failures",
        "before release",
        "after renew",
    ]
)


class Publisher(Process):
    """A process that publishes events.

    Attributes:
        fate: when it publishes what it commits: ``now``, ``later``, or never, as it ``dies``.
        commits: what it has committed and not published.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fate = "now"
        self.commits: list[Pending] = []
        self.direct = Direct(wire_module.app, get_settings())
        self.direct.process = self


class Direct(DirectPublisher):
    """A direct publisher whose thread is one of a simulated process."""

    process: Publisher

    def _enqueue(self, commit: CommittedRows) -> str:
        before, self.process.busy = self.process.busy, True
        if why := super()._enqueue(commit):
            self.process.busy = before
        return why

    def _run(self) -> None:
        self.process.run(super()._run)

    def _retry_unrecorded(self) -> None:
        super()._retry_unrecorded()
        if not self._backlog:
            self.process.set_busy(False)


class Committed(Pending):
    """Rows that are published when their process says so."""

    def __call__(self) -> None:
        process = running()
        assert isinstance(process, Publisher)
        if process.fate == "dies":
            raise Died
        if process.fate == "later":
            process.fate = "now"
            process.commits.append(self)
        else:
            super().__call__()


class Relaying(Process):
    """A process that is a relay."""

    def __init__(self) -> None:
        super().__init__()
        self.terminated = False
        self.relay = Relay(
            app=wire_module.app,
            settings=get_settings(),
            alias=ALIAS,
            size=4,
            tell=lambda text: None,
            stop=lambda: self.terminated,
        )


class Ledger:
    """What the processes have done, written down beside the package.

    Attributes:
        kinds: of each event that was published, in transactions that were kept or not.
        committed: those that must arrive.
        confirmed: those that RabbitMQ has confirmed.
        sent: how often each may have reached RabbitMQ.
        pruned: those that an operator has discarded, and that were deleted.
    """

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        self.committed: set[str] = set()
        self.confirmed: set[str] = set()
        self.sent: Counter[str] = Counter()
        self.pruned: set[str] = set()
        # By process and event: the claim, and the end of its lease by the clock of the process.
        self.leases: dict[tuple[Process, str], tuple[str, float]] = {}
        # What was published under a lease.
        self.once: set[tuple[Process, str, float]] = set()


class Outbox(RuleBasedStateMachine):
    """Three publishers, up to three relays, an operator, RabbitMQ and time."""

    wire: ClassVar[Wire]
    clock: ClassVar[Shifted]
    ledger: ClassVar[Ledger]

    @initialize(left=st.lists(MESSAGES, min_size=2, max_size=7))
    def begin(self, left: list[str]) -> None:
        """Begin with events of a process that died after their commit."""
        table()._raw_delete(ALIAS)
        type(self).ledger = Ledger()
        self.clock.ahead = 0.0
        self.publishers: dict[int, Publisher] = {}
        self.relays: list[Relaying] = []
        self.rows = 0
        self.bind()
        self.wire.channel.queue_purge(self.wire.queue)
        self.commit(0, left, kept=True, fate="dies", until=None)
        self.wait(65)

    # -- publishers

    @rule(
        who=st.integers(0, 2),
        block=BLOCKS,
        kept=st.sampled_from([True, True, False]),
        fate=st.sampled_from(["now", "later", "dies"]),
        until=UNTIL,
    )
    def commit(self, who: int, block: list[Any], kept: bool, fate: str, until: str | None) -> None:
        process = self.publishers.get(who)
        if process is None:
            process = self.publishers[who] = Publisher()
        self.prepare(process, until)
        process.fate = fate
        written: list[str] = []
        with acting(process):
            try:
                with suppress(LookupError), transaction.atomic(using=ALIAS):
                    self.perform(process, block, written)
                    if not kept:
                        raise LookupError
            except Died:
                process.die()
                del self.publishers[who]
            process.fate = "now"
            if kept:
                self.ledger.committed.update(written)
            process.settle()

    def prepare(self, process: Publisher, until: str | None) -> None:
        """Let a process stop at an effect; its committing thread does not wait for that."""
        if process.at is None:
            process.until = until
        process.direct.prompt = process.until is None and process.at is None

    def perform(self, process: Publisher, block: list[Any], written: list[str]) -> None:
        for each in block:
            if isinstance(each, str):
                written.append(self.publish(process, each))
                continue
            kept, inner = each
            inside: list[str] = []
            with suppress(LookupError), transaction.atomic(using=ALIAS):
                self.perform(process, inner, inside)
                if not kept:
                    raise LookupError
            written += inside if kept else []

    def publish(self, process: Publisher, kind: str) -> str:
        began = self.clock.monotonic()
        event_id = publish_event(NAMES[kind], {})
        self.ledger.kinds[event_id] = kind
        lease = outbox_rows.PUBLISHER, began + outbox_rows.LEASE
        self.ledger.leases[process, event_id] = lease
        if kind in REFUSED:
            commit = connections[ALIAS].run_on_commit[-1][1]
            assert isinstance(commit, Committed)
            commit.rows[-1] = spoilt = replace(
                commit.rows[-1], message=spoil(commit.rows[-1].message, kind)
            )
            stored = {"headers": spoilt.message.headers, "properties": spoilt.message.properties}
            table().filter(pk=spoilt.id).update(
                envelope=json.dumps(stored), exchange=spoilt.message.exchange
            )
        return event_id

    @rule(who=st.integers(0, 2), until=UNTIL)
    def publish_later(self, who: int, until: str | None) -> None:
        process = self.publishers.get(who)
        if process is None or not process.commits:
            return
        self.prepare(process, until)
        with acting(process):
            process.commits.pop(0)()
            process.settle()

    @rule(who=st.integers(0, 2))
    def end_publisher(self, who: int) -> None:
        process = self.publishers.get(who)
        if process is None or process.at is not None:
            return
        process.until = None
        with acting(process):
            process.direct.close(10)
            for commit in process.commits:
                commit()
        process.die()
        del self.publishers[who]

    # -- relays

    @rule(now=st.booleans(), until=UNTIL)
    def start_relay(self, now: bool, until: str | None) -> None:
        if not self.rows or len(self.relays) == 3:
            return
        process = Relaying()
        process.relay.now = now
        process.start(lambda: process.relay.run(until_empty=True), until)
        if process.busy:
            self.relays.append(process)
        else:
            process.die()

    # -- processes that have stopped at an effect. Not by preconditions: how far a process has come
    # depends on RabbitMQ too, and the rules that may follow must not.

    @rule(which=which_one, until=UNTIL)
    def resume(self, which: int, until: str | None) -> None:
        for process in self.stopped(which):
            process.resume(until)

    @rule(which=which_one)
    def terminate(self, which: int) -> None:
        """Let a relay end, as SIGTERM does."""
        for process in self.stopped(which):
            if isinstance(process, Relaying):
                process.terminated = True
                process.resume()

    @rule(which=which_one)
    def kill(self, which: int) -> None:
        for process in self.stopped(which):
            self.kill_process(process)

    @rule(which=which_one, until=UNTIL)
    def cut(self, which: int, until: str | None) -> None:
        """Cut a connection to RabbitMQ, before or after the process has its confirms."""
        for process in self.stopped(which):
            transport: Any = channel_of(process)._transport
            if transport is not None and transport.sock is not None:
                with suppress(OSError):
                    transport.sock.shutdown(socket.SHUT_RDWR)
            process.resume(until)

    def stopped(self, which: int) -> Iterator[Process]:
        """Yield one of the processes that wait at an effect, if there are any."""
        found = [each for each in (*self.relays, *self.publishers.values()) if each.at is not None]
        if found:
            yield found[which % len(found)]
        for process in [each for each in self.relays if not each.busy]:
            self.relays.remove(process)
            process.die()

    def kill_process(self, process: Process) -> None:
        process.die()
        channel = channel_of(process)
        channel.close()
        self.relays = [each for each in self.relays if each is not process]
        self.publishers = {
            who: each for who, each in self.publishers.items() if each is not process
        }

    # -- time, RabbitMQ and the operator

    @rule(seconds=st.sampled_from([7, 35, 65, 700, 25_000]))
    def wait(self, seconds: float) -> None:
        self.clock.ahead += seconds
        passed = timedelta(seconds=seconds)
        table().update(
            **{name: F(name) - passed for name in ("created_at", "due_at", "discarded_at")}
        )

    @rule(bound=st.booleans())
    def change_bindings(self, bound: bool) -> None:
        if bound:
            self.bind()
        else:
            self.wire.channel.queue_unbind(self.wire.queue, self.wire.exchange, NAMES["good"])

    def bind(self, *names: str) -> None:
        for name in (NAMES["good"], NAMES["nacked"], *names):
            self.wire.channel.queue_bind(self.wire.queue, self.wire.exchange, name)

    which = st.lists(st.integers(0, 9), max_size=3)

    @rule(which=which, what=st.sampled_from(["discard", "restore"]))
    def decide(self, which: list[int], what: str) -> None:
        rows = list(table())
        chosen = [rows[number % len(rows)] for number in which if rows]
        leased = {row.pk: outbox.row_state(row, clock(ALIAS)) == "held" for row in chosen}
        changed = getattr(outbox, what)([row.pk for row in chosen], alias=ALIAS)
        assert changed <= len({pk for pk, held in leased.items() if not held})

    @rule()
    def prune(self) -> None:
        discarded = set(
            table().filter(discarded_at__isnull=False).values_list("event_id", flat=True)
        )
        retention.prune({"outbox": 600.0}, service="shop")
        left = set(table().values_list("event_id", flat=True))
        self.ledger.pruned |= discarded - left

    # -- what holds

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "relays"):
            return
        rows = {row.event_id: row for row in table().defer(*OutboxEvent.LARGE)}
        self.rows = len(rows)
        assert rows.keys() <= self.ledger.committed, "a row that was rolled back"
        lost = self.ledger.committed - rows.keys() - self.ledger.confirmed - self.ledger.pruned
        assert not lost, "events without a row that RabbitMQ has not confirmed"
        now = clock(ALIAS)
        states = Counter(outbox.row_state(row, now) for row in rows.values())
        status = outbox.count_pending(ALIAS, "shop")
        assert status.total == len(rows) - states["discarded"]
        assert (status.held, status.overdue) == (states["held"], states["overdue"])
        kept = [row for row in rows.values() if row.discarded_at is None]
        assert status.failing == sum(row.attempts > 0 for row in kept)
        assert (status.error is not None) == bool(status.failing)
        for row in rows.values():
            assert (row.error is not None) == (row.attempts > 0)
            assert row.discarded_at is None or row.claim is None

    def teardown(self) -> None:
        if not hasattr(self, "relays"):
            return
        for process in (*self.relays, *self.publishers.values()):
            self.kill_process(process)
        self.bind(NAMES["unrouted"])
        self.wire.channel.queue_unbind(
            f"{self.wire.exchange}.full", self.wire.exchange, NAMES["nacked"]
        )
        try:
            self.end()
        finally:
            self.wire.channel.queue_unbind(self.wire.queue, self.wire.exchange, NAMES["unrouted"])
            self.wire.channel.queue_bind(
                f"{self.wire.exchange}.full", self.wire.exchange, NAMES["nacked"]
            )

    def end(self) -> None:
        """Let one relay run until all leases and delays are over."""
        for _ in range(4):
            self.wait(25_000)
            process = Relaying()
            process.start(partial(process.relay.run, until_empty=True))
            process.die()
            self.holds()
            pending = table().filter(discarded_at__isnull=True).values_list("event_id", flat=True)
            if all(self.ledger.kinds[each] in REFUSED for each in pending):
                break
        copies = Counter(self.wire.ids())
        ledger = self.ledger
        left = {row.event_id: row for row in table()}
        discarded = {row.event_id for row in left.values() if row.discarded_at is not None}
        refused = {each for each in ledger.committed if ledger.kinds[each] in REFUSED}
        assert left.keys() == discarded | (refused - ledger.pruned)
        assert all(left[each].error is not None for each in left.keys() - discarded)
        owed = ledger.committed - discarded - refused - ledger.pruned
        assert owed <= copies.keys(), "lost"
        assert copies.keys() <= ledger.committed - refused, "never committed, or refused"
        more = {each: count for each, count in copies.items() if count > ledger.sent[each]}
        assert not more, "more copies than were published"


def spoil(message: Message, kind: str) -> Message:
    if kind == "astray":
        return replace(message, exchange="there-is-none")
    long = {f"h{number}": "x" * 30_000 for number in range(6)}
    return replace(message, headers={**message.headers, **long})


def channel_of(process: Process) -> OutboxChannel:
    if isinstance(process, Relaying):
        return process.relay._channel
    assert isinstance(process, Publisher)
    return process.direct._channel


# -- watching the package -------------------------------------------------------------------------


def watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write down claims, leases, publishes and answers."""
    claim, renew = outbox_rows.claim, outbox_rows.renew
    publish, before_read = OutboxChannel.publish, OutboxChannel._before_read

    def claiming(*args: Any, **options: Any) -> Any:
        since = Outbox.clock.monotonic()
        rows = claim(*args, **options)
        for row in rows:
            assert row.claim is not None
            lease = row.claim, since + outbox_rows.LEASE
            Outbox.ledger.leases[process_here(), row.message.event_id] = lease
        return rows

    def renewing(alias: str, held: Any) -> None:
        since = Outbox.clock.monotonic()
        renew(alias, held)
        for row in held:
            key = process_here(), row.message.event_id
            if key in Outbox.ledger.leases and Outbox.ledger.leases[key][1] > since:
                lease = Outbox.ledger.leases[key][0], since + outbox_rows.LEASE
                Outbox.ledger.leases[key] = lease

    def ending(name: str) -> Callable[..., None]:
        """Write down that leases end with a call, whose second argument is rows or answers."""
        real = getattr(outbox_rows, name)

        def end(alias: str, held: Any, **options: Any) -> None:
            real(alias, held, **options)
            for each in held:
                row = getattr(each, "row", each)
                Outbox.ledger.leases.pop((process_here(), row.message.event_id), None)

        return end

    def publishing(self: OutboxChannel, messages: Any, **options: Any) -> Any:
        process, ledger = process_here(), Outbox.ledger
        claims = dict(
            table()
            .filter(event_id__in=[message.event_id for message in messages])
            .values_list("event_id", "claim")
        )
        for message in messages:
            key = process, message.event_id
            claim, end = ledger.leases.get(key, ("", 0.0))
            if isinstance(process, Publisher):
                assert end > Outbox.clock.monotonic(), "published after its lease"
            now = Outbox.clock.monotonic()
            if end > now and message.event_id in claims:
                assert claims[message.event_id] == claim, "another process has claimed it"
            others = [
                other
                for (other, event_id), (_, until) in ledger.leases.items()
                if event_id == message.event_id and until > now
                if other is not process and not other.dead
            ]
            assert not others, "two processes with a valid lease"
            ledger.sent[message.event_id] += 1
        answers = publish(self, messages, **options)
        for message, error in zip(messages, answers, strict=True):
            if isinstance(error, BrokerUnavailableError):
                ledger.sent[message.event_id] -= 1
                continue
            if error is None:
                ledger.confirmed.add(message.event_id)
            once = process, message.event_id, ledger.leases.get((process, message.event_id), 0)
            assert once not in ledger.once, "published twice in one lease"
            ledger.once.add(once)  # type: ignore[arg-type]
        return answers

    def reading(self: OutboxChannel) -> None:
        # What was published may be confirmed, and the process does not know it yet.
        process_here().stop_at("published")
        before_read(self)

    monkeypatch.setattr(outbox_rows, "claim", claiming)
    monkeypatch.setattr(outbox_rows, "renew", renewing)
    for name in ("release", "delete_confirmed", "record_failures"):
        monkeypatch.setattr(outbox_rows, name, ending(name))

    def telling(*args: Any, **options: Any) -> Any:
        try:
            return publishing(*args, **options)
        except AssertionError as exc:
            # The thread of a direct publisher logs any exception.
            process_here().raised = exc
            raise

    monkeypatch.setattr(OutboxChannel, "publish", telling)
    monkeypatch.setattr(OutboxChannel, "_before_read", reading)
    for name in ("claim", "renew", "release", "delete_confirmed", "record_failures"):
        effect(monkeypatch, outbox_rows, name)
    effect(monkeypatch, OutboxChannel, "publish")


def process_here() -> Process:
    process = running()
    assert process is not None
    return process


@pytest.fixture
def machine(
    vhost: Vhost, archive_database: Database, monkeypatch: pytest.MonkeyPatch
) -> Iterator[type[Outbox]]:
    keys = {"PUBLISH": "outbox", "DATABASE": ALIAS, "UNROUTED": "hold"}
    with Wire.on(vhost.url, **keys) as wire:
        wire.channel.queue_delete(wire.queue)
        wire.declare(wire.queue, **{"x-queue-type": "classic"})
        full = f"{wire.exchange}.full"
        wire.declare(full, NAMES["nacked"], **{"x-max-length": 0, "x-overflow": "reject-publish"})
        Outbox.wire, Outbox.clock = wire, Shifted()
        monkeypatch.setattr(service_loop, "time", Clock(step=0.1))
        for module in (direct_publisher, relay, confirms):
            monkeypatch.setattr(module, "time", Outbox.clock)
        monkeypatch.setattr(direct_publisher, "CONFIRM_WAIT_SECONDS", 30.0)
        monkeypatch.setattr(direct_publisher, "BACKOFF", Backoff(0.01, 0.01))
        monkeypatch.setattr(publisher, "time", Outbox.clock)
        monkeypatch.setattr(publisher, "Pending", Committed)
        monkeypatch.setattr(publisher, "get_direct_publisher", direct_publisher_here)
        watch(monkeypatch)
        yield Outbox


def direct_publisher_here(_settings: Any) -> DirectPublisher:
    process = running()
    assert isinstance(process, Publisher)
    return process.direct


@EACH
@pytest.mark.timeout(TIMEOUT)
def test_whatever_happens_in_whatever_order(
    machine: type[Outbox], archive_database: Database, request: pytest.FixtureRequest
) -> None:
    without_disk(archive_database)
    run_state_machine_as_test(machine, settings=examples(request, 10, 20))
