"""The archive under whatever operators, runners, mirrors, workers, RabbitMQ and time do.

Operators, sweeps and batch runners are simulated processes (:mod:`tests.simulated`) that run the
package's code against RabbitMQ and a database, and stop at each effect.
``AMQP_EVENTS_FUZZ=500`` looks for longer, at random.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, ClassVar
from uuid import UUID

import amqp
import pytest
from django.db.models import F, Q
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from django_amqp_events import conf, databases, service_loop
from django_amqp_events.archive import eligibility, replay, retention, states, tables
from django_amqp_events.archive.batches import batch_states, runner
from django_amqp_events.archive.batches.runner import Runner
from django_amqp_events.archive.groups import failure_groups, group_counts
from django_amqp_events.broker.confirms import ConfirmChannel
from django_amqp_events.broker.publisher_pool import PublisherPool
from django_amqp_events.message.types import Message
from django_amqp_events.models import (
    ArchiveAction,
    ArchivedEvent,
    ArchivedFailure,
    FailureGroup,
    Replay,
    ReplayBatch,
    ReplayBatchAction,
    Revision,
    SearchValue,
    State,
)
from tests.archive_rows import Clock
from tests.conftest import EACH, Database, Vhost
from tests.event_messages import taken
from tests.simulated import Process, Shifted, effect, running
from tests.stateful import TIMEOUT, examples, without_disk

from ..archiving import FAILURE, archived, outcome, received, store
from ..conftest import Service
from ..wire import close_pools

QUEUE = "billing.send_invoice"
ARCHIVE = "billing:archive"
EVENTS = 4
#: Seconds for which settled events and ended batches are kept.
KEPT = 50_000.0
#: Where a process stops.
UNTIL = st.sampled_from(
    [
        None,
        None,
        "after claim",
        "after reclaim",
        "published",
        "after publish",
        "after published",
        "before returned",
        "after lease",
        "before skip",
    ]
)
#: From what a decision leads to what, besides the state that a row keeps.
LEGAL = {
    State.ARCHIVED: {State.QUEUED, State.REPLAYING, State.SUCCEEDED, State.DISCARDED},
    State.QUEUED: {State.ARCHIVED, State.REPLAYING, State.SUCCEEDED},
    State.REPLAYING: {State.ARCHIVED, State.QUEUED, State.SUCCEEDED, State.DISCARDED},
    State.SUCCEEDED: set(),
    State.DISCARDED: {State.ARCHIVED, State.REPLAYING},
}
#: The actions on a batch, by its state.
BATCHES = {
    "": {"freeze": "draft"},
    "draft": {"start": "running", "cancel": "deleted"},
    "running": {"pause": "paused", "cancel": "cancelled", "finish": "done"},
    "paused": {"resume": "running", "cancel": "cancelled"},
}


class Acting(Process):
    """A process of an operator, a sweep or a runner; *channel* is its last one to RabbitMQ."""

    channel: ConfirmChannel | None = None


class Ledger:
    """What was done, written down beside the package.

    Attributes:
        decisions: how often each action was decided on each event.
        sent: how often each replay may have reached RabbitMQ.
        settled: replays of which the mirror has stored a success.
        failed: events of which the archive queue has had a failure.
        pruned: events, by id, that were deleted.
    """

    def __init__(self) -> None:
        self.decisions: Counter[tuple[UUID, str]] = Counter()
        self.sent: Counter[str] = Counter()
        self.settled: set[UUID] = set()
        self.failed: set[str] = set()
        self.pruned: set[str] = set()


class Archive(RuleBasedStateMachine):
    """Four events, two operators with pages of their own age, and what is around them."""

    service: ClassVar[Service]
    clock: ClassVar[Shifted]
    ledger: ClassVar[Ledger]
    channel: ClassVar[amqp.Channel]
    reporter: ClassVar[ConfirmChannel]

    @initialize(failed=st.lists(st.integers(0, EVENTS - 1), min_size=2, max_size=6))
    def begin(self, failed: list[int]) -> None:
        for model in (
            ArchiveAction,
            ArchivedFailure,
            Replay,
            Revision,
            SearchValue,
            ReplayBatchAction,
            ReplayBatch,
            ArchivedEvent,
            FailureGroup,
        ):
            rows: Any = model.objects.using(tables.database()).all()
            rows._raw_delete(rows.db)
        self.channel.queue_purge(QUEUE)
        self.channel.queue_purge(ARCHIVE)
        type(self).ledger = Ledger()
        self.clock.ahead = 0.0
        self.processes: list[Acting] = []
        self.pages: dict[str, dict[UUID, int]] = {"ada": {}, "bob": {}}
        self.reports: list[Callable[[], Message]] = []
        self.before: dict[UUID, ArchivedEvent] = {}
        self.actions: list[tuple[Any, ...]] = []
        self.batches: list[UUID] = []
        self.open = False
        self.route(bound=True)
        for number in failed:
            self.fail(number, "TaxError")
        self.mirror(dies=False)
        self.look("ada")
        self.look("bob")

    # -- workers

    @rule(number=st.integers(0, EVENTS - 1), error=st.sampled_from(["TaxError", "NoAddress"]))
    def fail(self, number: int, error: str) -> None:
        """A handler fails for good, outside of any replay."""
        at = self.clock.now()
        event_id = f"order-{number}"
        self.ledger.failed.add(event_id)
        self.report(
            lambda: archived(
                received(event_id), at=at, failure=replace(FAILURE, exception=f"billing.{error}")
            )
        )

    @rule(ends=st.sampled_from(["succeeded", "failed", "both"]), acks=st.booleans())
    def handle(self, ends: str, acks: bool) -> None:
        """A worker handles a replay; *both* if it dies after the first run."""
        message = self.channel.basic_get(QUEUE)
        if message is None:
            return
        headers = message.headers
        replay_id, event_id = str(headers["event-replay-id"]), str(headers["event-id"])
        at = self.clock.now()
        if ends != "succeeded":
            body = bytes(message.body)
            self.report(
                lambda: archived(
                    received(event_id, body=body), attempt=2, replay_id=replay_id, at=at
                )
            )
        if ends != "failed":
            row = ArchivedEvent(
                event_id=event_id,
                name="shop.order.created",
                source="shop",
                service="billing",
                handler="send_invoice",
            )
            self.report(lambda: outcome(row, replay_id, at=at))
        if acks:
            self.channel.basic_ack(message.delivery_tag)
        else:
            self.channel.basic_reject(message.delivery_tag, requeue=True)

    @rule(which=st.integers(0, 19))
    def repeat(self, which: int) -> None:
        """The message of a worker that died before its ack comes once more, and late."""
        if self.reports:
            self.report(self.reports[which % len(self.reports)])

    def report(self, make: Callable[[], Message]) -> None:
        if make not in self.reports:
            self.reports.append(make)
        assert self.reporter.publish([make()], mandatory=True) == [None]

    # -- the mirror

    @rule(dies=st.booleans())
    def mirror(self, dies: bool) -> None:
        """Store what the archive queue has; if the mirror dies before its acks, it comes again."""
        messages = []
        while (message := self.channel.basic_get(ARCHIVE)) is not None:
            messages.append(message)
        if not messages:
            return
        store([taken(message, ARCHIVE) for message in messages])
        for message in messages:
            if dies:
                self.channel.basic_reject(message.delivery_tag, requeue=True)
            else:
                self.channel.basic_ack(message.delivery_tag)

    @rule(until=UNTIL)
    def sweep(self, until: str | None) -> None:
        """Publish again what dead processes have left."""
        self.start(replay.resume, until)

    # -- operators

    who = st.sampled_from(["ada", "bob"])
    which = st.sets(st.integers(0, EVENTS - 1), min_size=1)

    @rule(who=who)
    def look(self, who: str) -> None:
        """An operator opens the list; what follows is decided by it, however old it is."""
        self.pages[who] = dict(tables.rows().order_by("event_id").values_list("pk", "version"))

    def seen(self, who: str, which: set[int]) -> dict[UUID, int]:
        return {
            pk: version
            for number, (pk, version) in enumerate(self.pages[who].items())
            if number in which
        }

    @rule(who=who, which=which, force=st.booleans(), until=UNTIL)
    def replay(self, who: str, which: set[int], force: bool, until: str | None) -> None:
        seen = self.seen(who, which)
        self.start(lambda: replay.replay(seen, by=who, reason="fixed", force=force), until)

    @rule(who=who, which=which, number=st.integers(8, 9), until=UNTIL)
    def edit(self, who: str, which: set[int], number: int, until: str | None) -> None:
        seen = self.seen(who, which)
        for pk, version in list(seen.items())[:1]:
            edit = partial(replay.edit, pk, version, {"order_id": number})
            self.start(partial(edit, by=who, reason="a number"), until)

    @rule(
        who=who,
        which=which,
        what=st.sampled_from([eligibility.DISCARD, eligibility.RESOLVE, eligibility.RESTORE]),
    )
    def decide(self, who: str, which: set[int], what: eligibility.Rule) -> None:
        replay.decide(self.seen(who, which), what, by=who, reason="a test")

    @rule(which=which)
    def decide_after_the_other(self, which: set[int]) -> None:
        """A page shows the state that an event has again, but not its version."""
        self.look("ada")
        self.look("bob")
        self.decide("bob", which, eligibility.DISCARD)
        self.look("bob")
        self.decide("bob", which, eligibility.RESTORE)
        self.decide("ada", which, eligibility.DISCARD)

    @rule(which=which)
    def handle_the_older_replay(self, which: set[int]) -> None:
        """The first replay of an event succeeds while a forced one is in progress."""
        for force in (False, True):
            self.look("ada")
            self.replay("ada", which, force=force, until=None)
            self.wait(100_000)
        self.handle("succeeded", acks=True)
        self.mirror(dies=False)

    # -- batches

    @rule(who=who, start=st.booleans(), canary=st.sampled_from([None, 1]))
    def freeze(self, who: str, start: bool, canary: int | None) -> None:
        batch = batch_states.freeze(tables.rows().filter(state=State.ARCHIVED), by=who)
        if not batch.total:
            return
        self.batches.append(batch.pk)
        if start:
            assert batch_states.start(batch.pk, by=who, reason="fixed", canary=canary)

    @rule(
        who=who,
        which=st.integers(0, 9),
        what=st.sampled_from(["start", "pause", "resume", "cancel"]),
    )
    def press(self, who: str, which: int, what: str) -> None:
        if not self.batches:
            return
        batch = self.batches[which % len(self.batches)]
        options = {"reason": "fixed"} if what == "start" else {}
        before = batch_states.rows().filter(pk=batch).first()
        done = getattr(batch_states, what)(batch, by=who, **options)
        assert done == (before is not None and what in BATCHES.get(before.state, {}))

    @rule(seconds=st.sampled_from([2.0, 8.0, 100.0]), until=UNTIL)
    def run(self, seconds: float, until: str | None) -> None:
        """Let a runner run for so long, by its own clock."""
        clock = vars(runner)["time"]
        end = clock.monotonic() + seconds
        running = Runner(
            settings=conf.get_settings(),
            tell=lambda text: None,
            stop=lambda: clock.monotonic() > end,
        )
        self.start(lambda: running.run(until_done=True), until)

    # -- processes

    def start(self, work: Callable[[], object], until: str | None) -> None:
        if len(self.processes) == 3:
            return
        process = Acting()
        process.start(work, until)
        if process.busy:
            self.processes.append(process)

    @rule(which=st.integers(0, 9), until=UNTIL)
    def resume(self, which: int, until: str | None) -> None:
        for process in self.stopped(which):
            process.resume(until)

    @rule(which=st.integers(0, 9))
    def kill(self, which: int) -> None:
        for process in self.stopped(which):
            process.die()

    @rule(which=st.integers(0, 9), until=UNTIL)
    def cut(self, which: int, until: str | None) -> None:
        """Cut a connection to RabbitMQ, before or after the process has its confirms."""
        for process in self.stopped(which):
            transport: Any = process.channel and process.channel._transport
            if transport is not None and transport.sock is not None:
                with suppress(OSError):
                    transport.sock.shutdown(socket.SHUT_RDWR)
            process.resume(until)

    def stopped(self, which: int) -> Iterator[Acting]:
        """Yield a process that waits at an effect, if there is one."""
        if self.processes:
            yield self.processes[which % len(self.processes)]
        self.processes = [process for process in self.processes if process.busy]

    # -- RabbitMQ, time, and pruning

    @rule(bound=st.booleans())
    def route(self, bound: bool) -> None:
        act = self.channel.queue_bind if bound else self.channel.queue_unbind
        [binding] = [
            binding
            for binding in self.service.topology.bindings
            if binding.exchange == self.service.names.replay and binding.queue == QUEUE
        ]
        act(QUEUE, binding.exchange, binding.routing_key)

    @rule(seconds=st.sampled_from([7, 100, 10_000, 100_000]))
    def wait(self, seconds: float) -> None:
        self.clock.ahead += seconds

    @rule(ages=st.sets(st.sampled_from(["succeeded", "discarded", "archived", "batches"])))
    def prune(self, ages: set[str]) -> None:
        rows = {row.pk: row for row in tables.rows()}
        now = self.clock.now()
        kept = now - timedelta(seconds=KEPT)
        open_batches = set(
            batch_states.rows()
            .filter(~Q(state__in=("done", "cancelled")))
            .values_list("pk", "created_at")
        )
        retention.prune(dict.fromkeys(ages, KEPT), service="billing", now=now)
        gone = rows.keys() - set(tables.rows().values_list("pk", flat=True))
        for pk in gone:
            assert rows[pk].state in ages
            assert rows[pk].state_since < kept
            self.ledger.pruned.add(rows[pk].event_id)
        assert gone == {
            pk for pk, row in rows.items() if row.state in ages and row.state_since < kept
        }
        left = set(batch_states.rows().values_list("pk", flat=True))
        for pk, created in open_batches:
            assert pk in left or created < now - timedelta(seconds=batch_states.DRAFT_SECONDS)
        self.batches = [pk for pk in self.batches if pk in left]
        self.before = {pk: row for pk, row in self.before.items() if pk not in gone}
        self.actions = [each for each in self.actions if each[1] not in gone]
        for pk, action in list(self.ledger.decisions):
            if pk in gone:
                del self.ledger.decisions[pk, action]

    # -- what holds

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "processes"):
            return
        rows = {row.pk: row for row in tables.rows().defer(*ArchivedEvent.LARGE)}
        replays: dict[UUID, list[Replay]] = {pk: [] for pk in rows}
        found = list(Replay.objects.using(tables.database()).order_by("number"))
        for each in found:
            if each.number is not None:
                replays[each.event_id].append(each)
        for pk, row in rows.items():
            self.check(row, replays[pk])
            if (before := self.before.get(pk)) is not None:
                self.compare(before, row)
        self.before = rows
        self.check_replays(rows, found)
        self.check_audit(found)
        self.check_batches(found)
        self.check_groups(rows)

    def check(self, row: ArchivedEvent, replays: list[Replay]) -> None:
        assert [replay.number for replay in replays] == list(range(1, row.replays + 1))
        current = replays[-1].state if replays else None
        assert all(replay.state != "queued" for replay in replays[:-1])
        unsure = current == "unconfirmed" and row.state == State.ARCHIVED
        assert row.unconfirmed == unsure, (row.state, current)
        wanted = {State.QUEUED: "queued", State.REPLAYING: "published"}
        if row.state in wanted:
            assert current == wanted[State(row.state)]
        elif row.state == State.SUCCEEDED:
            assert current == "succeeded"

    def compare(self, before: ArchivedEvent, row: ArchivedEvent) -> None:
        assert row.version >= before.version
        names = ("state", "state_since", "replays", "unconfirmed", "error", "attempts")
        if any(getattr(before, name) != getattr(row, name) for name in names):
            assert row.version > before.version
        if row.state != before.state and row.version == before.version + 1:
            assert row.state in LEGAL[State(before.state)], (before.state, row.state)
        if before.state == State.SUCCEEDED:
            assert row.state == State.SUCCEEDED
        assert row.attempts >= before.attempts

    def check_replays(self, rows: dict[UUID, ArchivedEvent], replays: list[Replay]) -> None:
        for pk, row in rows.items():
            numbers = [each.number or 0 for each in replays if each.event_id == pk]
            assert row.replays == max(numbers, default=0), "what was not published counts"
        for each in replays:
            assert self.ledger.sent[str(each.pk)] <= each.publishes, "more often than claimed"
            if each.pk in self.ledger.settled:
                assert each.state == "succeeded"
            if each.number is None:
                assert each.state in ("pending", "skipped", "returned"), each.state
            if each.state == "published":
                assert self.ledger.sent[str(each.pk)]

    def check_audit(self, replays: list[Replay]) -> None:
        actions = list(
            ArchiveAction.objects.using(tables.database())
            .order_by("pk")
            .values_list("pk", "event_id", "action", "by", "reason", "replay_id", "at")
        )
        assert actions[: len(self.actions)] == self.actions, "the history has changed"
        self.actions = actions
        decided = Counter((each[1], each[2]) for each in actions if each[5] is None)
        assert decided == self.ledger.decisions, "not one record for each decision"
        published = Counter(each[5] for each in actions)
        for each in replays:
            least = each.number is not None and each.state != "queued"
            assert least <= published[each.pk] <= each.publishes * (each.number is not None)

    def check_batches(self, replays: list[Replay]) -> None:
        of_batch: dict[UUID, list[Replay]] = {}
        for each in replays:
            if each.batch_id is not None:
                of_batch.setdefault(each.batch_id, []).append(each)
        batches = {batch.pk: batch for batch in batch_states.rows()}
        assert of_batch.keys() <= batches.keys()
        actions: dict[UUID, list[str]] = {pk: [] for pk in batches}
        for pk, action in (
            ReplayBatchAction.objects.using(tables.database())
            .order_by("pk")
            .values_list("batch_id", "action")
        ):
            actions[pk].append(action)
        for pk, batch in batches.items():
            rows = of_batch.get(pk, [])
            state = ""
            for action in actions[pk]:
                state = BATCHES[state][action]
            assert state == batch.state
            positions = [each.position for each in rows]
            assert len(set(positions)) == len(positions)
            assert set(positions) <= set(range(1, batch.total + 1))
            assert len({each.event_id for each in rows}) == len(rows)
            assert self.ledger.pruned or len(rows) == batch.total
            if batch.state == "done":
                assert not [each for each in rows if each.state in ("pending", "queued")]
            if batch.state != "running":
                assert batch.runner is None

    def check_groups(self, rows: dict[UUID, ArchivedEvent]) -> None:
        known = set(failure_groups.groups().values_list("pk", flat=True))
        for row in rows.values():
            assert row.group_id == failure_groups.group_of(row).pk
            assert row.group_id in known, "its group does not exist"

    # -- the end

    def teardown(self) -> None:
        if not hasattr(self, "processes"):
            return
        for process in self.processes:
            process.die()
        self.route(bound=True)
        for batch in self.batches:
            batch_states.resume(batch, by="ada")
        for _ in range(20):
            self.clock.ahead += 200
            self.processes = []
            self.sweep(None)
            self.run(30.0, None)
            while self.channel.queue_declare(QUEUE, passive=True).message_count:
                self.handle("succeeded", acks=True)
            self.mirror(dies=False)
            if not tables.rows().filter(state__in=(State.QUEUED, State.REPLAYING)).exists() and (
                not batch_states.running("billing")
            ):
                break
        self.holds()
        rows = {row.event_id: row for row in tables.rows()}
        assert self.ledger.failed <= rows.keys() | self.ledger.pruned, "lost"
        open_rows = [row for row in rows.values() if row.state in group_counts.IN_PROGRESS]
        assert not open_rows, "a replay without an end"
        assert not batch_states.running("billing")
        for pk, total in batch_states.rows().values_list("pk", "total"):
            counts = batch_states.count(pk)
            assert sum(counts.values()) <= total
            assert not counts["queued"]
        assert not self.channel.queue_declare(ARCHIVE, passive=True).message_count


# -- watching the package -------------------------------------------------------------------------


def watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write down claims, decisions, publishes and outcomes."""
    claim, finish = states.claim, states.finish
    publish, before_read = PublisherPool.publish, ConfirmChannel._before_read

    def claiming(seen: dict[UUID, int], **options: Any) -> Any:
        unconfirmed = dict(
            states.replays()
            .filter(event__in=list(seen), number=F("event__replays"), state="unconfirmed")
            .values_list("event_id", "pk")
        )
        claimed = claim(seen, **options)
        for each in claimed:
            pk = each.event.pk
            assert each.event.version == seen[pk] + 1, "decided by an old page"
            assert each.pk == unconfirmed.get(pk, each.pk), "it may run twice"
        assert len({each.event.pk for each in claimed}) == len(claimed)
        return claimed

    def deciding(real: Callable[..., list[UUID]]) -> Callable[..., list[UUID]]:
        def decide(seen: dict[UUID, int], **options: Any) -> list[UUID]:
            done = real(seen, **options)
            for pk, version in tables.rows().filter(pk__in=done).values_list("pk", "version"):
                Archive.ledger.decisions[pk, real.__name__] += 1
                assert version == seen[pk] + 1, "decided by an old page"
            return done

        return decide

    def finishing(ends: dict[UUID, datetime], **options: Any) -> int:
        known = finish(ends, **options)
        Archive.ledger.settled |= ends.keys()
        return known

    def publishing(self: PublisherPool, messages: Any, **options: Any) -> Any:
        for message in messages:
            Archive.ledger.sent[str(message.headers["event-replay-id"])] += 1
        return publish(self, messages, **options)

    def reading(self: ConfirmChannel) -> None:
        if isinstance(process := running(), Acting):
            process.channel = self
            process.stop_at("published")
        before_read(self)

    monkeypatch.setattr(states, "claim", claiming)
    for decision, real in list(replay._DECISIONS.items()):
        monkeypatch.setitem(replay._DECISIONS, decision, deciding(real))
    monkeypatch.setattr(states, "finish", finishing)
    monkeypatch.setattr(PublisherPool, "publish", publishing)
    monkeypatch.setattr(ConfirmChannel, "_before_read", reading)
    for name in ("claim", "reclaim", "published", "returned"):
        effect(monkeypatch, states, name)
    effect(monkeypatch, PublisherPool, "publish")
    for name in ("lease", "skip"):
        effect(monkeypatch, batch_states, name)


@pytest.fixture
def machine(
    service: Callable[..., Service],
    fresh_vhost: Vhost,
    archive_database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[type[Archive]]:
    billing = service(
        fresh_vhost,
        HANDLERS={"send_invoice": ["shop.order.created"]},
        EDITING=True,
    )
    billing.import_topology()
    close_pools()
    Archive.service, Archive.clock = billing, Shifted()
    Archive.channel = billing.channel()
    Archive.channel.auto_decode = False
    Archive.reporter = ConfirmChannel(billing.app, timeout=20)
    real = databases.clock
    monkeypatch.setattr(
        tables,
        "clock",
        lambda: real(tables.database()) + timedelta(seconds=Archive.clock.ahead),
    )
    quick = Clock(step=0.1)
    monkeypatch.setattr(runner, "time", quick)
    monkeypatch.setattr(service_loop, "time", quick)
    watch(monkeypatch)
    yield Archive
    Archive.reporter.leave()
    close_pools()


@EACH
@pytest.mark.timeout(TIMEOUT)
def test_whatever_happens_in_whatever_order(
    machine: type[Archive], archive_database: Database, request: pytest.FixtureRequest
) -> None:
    without_disk(archive_database)
    run_state_machine_as_test(machine, settings=examples(request, 5, 10))
