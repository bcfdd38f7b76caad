"""Batches: selection, run, pause and end, with a scripted broker."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import DatabaseError, OperationalError
from django.db.models import Count

from django_amqp_events import conf, service_loop
from django_amqp_events.archive import eligibility, replay, retention, tables
from django_amqp_events.archive import states as event_states
from django_amqp_events.archive.batches import batch_states, preview, runner
from django_amqp_events.archive.batches.runner import Runner
from django_amqp_events.declare.registry import get_registry
from django_amqp_events.exceptions import (
    BrokerUnavailableError,
    ExchangeMissingError,
    PublishError,
    PublishTimeoutError,
    UnroutableError,
)
from django_amqp_events.message.types import Message
from django_amqp_events.models import (
    ArchiveAction,
    ArchivedEvent,
    Replay,
    ReplayBatch,
    ReplayBatchAction,
    SearchValue,
    State,
)
from django_amqp_events.publish import publisher
from django_amqp_events.reasons import Reason
from tests import archive_rows
from tests.archive_rows import NOW, Clock
from tests.commands import run_command
from tests.conftest import ONE, Replicas, routed_by
from tests.doubles import broker as broker_double
from tests.services import BILLING

pytestmark = pytest.mark.usefixtures("archive_database")
#: Of what the runner decides, whatever database its rows are in.


@pytest.fixture(autouse=True)
def billing(settings: Any, archive_database: Any) -> Any:
    settings.AMQP_EVENTS = {**BILLING, "MAX_BODY": 1000}
    return settings


@dataclass
class Broker(broker_double.Broker):
    """A broker whose handlers do what *report* says."""

    report: Callable[[Message], Replay.State | None] = lambda message: None
    before: Callable[[], object] = bool

    def publish(
        self, messages: Sequence[Message], *, mandatory: bool
    ) -> Sequence[PublishError | None]:
        self.before()
        answers = super().publish(messages, mandatory=mandatory)
        for message, answer in zip(messages, answers, strict=True):
            if answer is None and (outcome := self.report(message)) is not None:
                end(UUID(str(message.headers["event-replay-id"])), outcome)
        return answers

    @property
    def ids(self) -> list[str]:
        return [str(each.headers["event-id"]) for each in self.messages]


def supersede(message: Message) -> None:
    """Store that the handler of a replay was not called."""
    replay_id = UUID(str(message.headers["event-replay-id"]))
    event_states.finish({replay_id: NOW}, superseded={replay_id}, now=tables.clock())


def end(replay_id: UUID, outcome: Replay.State) -> None:
    """Store the outcome of a replay as the mirror does."""
    if outcome == Replay.State.SUCCEEDED:
        event_states.finish({replay_id: NOW}, now=tables.clock())
    else:
        event_states.failed_again({replay_id: NOW}, now=tables.clock())
        event = Replay.objects.get(pk=replay_id).event_id
        row = tables.rows().get(pk=event)
        row.state, row.version = State.ARCHIVED, row.version + 1
        row.save()


@pytest.fixture(autouse=True)
def broker(monkeypatch: pytest.MonkeyPatch, billing: Any) -> Broker:
    made = Broker()
    monkeypatch.setattr(publisher, "backend", lambda settings: made)
    return made


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made, real = Clock(step=0.1), tables.clock
    began = made.at
    monkeypatch.setattr(runner, "time", made)
    monkeypatch.setattr(service_loop, "time", made)
    monkeypatch.setattr(tables, "clock", lambda: real() + timedelta(seconds=made.at - began))
    return made


def make(number: int = 1, state: State = State.ARCHIVED, **fields: Any) -> ArchivedEvent:
    at = NOW + timedelta(seconds=number)
    return archive_rows.make(number, state, at=at, **{"version": 3, **fields})


def freeze(found: Any = None, **more: Any) -> ReplayBatch:
    found = tables.rows().filter(state=State.ARCHIVED) if found is None else found
    return batch_states.freeze(found, by="ada", **more)


def started(number: int = 3, **more: Any) -> ReplayBatch:
    for each in range(number):
        make(each)
    batch = freeze()
    assert batch_states.start(batch.pk, by="ada", **{"reason": "fixed", "threshold": None, **more})
    return batch


def run(until: Callable[[], bool] = bool, limit: float = 600.0, **more: Any) -> Runner:
    """Run until no batch runs; or until that is so, or so many seconds (of the clock) are over."""
    clock: Any = vars(runner)["time"]
    over = clock.monotonic() + limit
    made = Runner(
        settings=conf.get_settings(),
        stop=lambda: until() or clock.monotonic() > over,
        **{"tell": lambda text: None, **more},
    )
    made.run(until_done=True)
    return made


def again(batch: ReplayBatch) -> ReplayBatch:
    return batch_states.rows().get(pk=batch.pk)


def states(batch: ReplayBatch) -> dict[str, int]:
    return dict(Counter(batch_states.events(batch.pk).values_list("state", flat=True)))


def done(batch: ReplayBatch) -> list[tuple[str, str]]:
    found = ReplayBatchAction.objects.filter(batch=batch)
    return [(each.action, each.by) for each in found]


SUCCEED = Replay.State.SUCCEEDED
FAIL = Replay.State.FAILED


# -- freezing -----------------------------------------------------------------------------


def querysets() -> dict[str, tuple[Any, set[int]]]:
    """Return querysets of every shape, and the numbers of the events that they match."""
    rows = tables.rows()
    newest = rows.order_by("-last_failed_at")
    first, last = rows.filter(event_id="order-0").order_by(), rows.filter(event_id="order-4")
    by_value = rows.filter(search_values__path__in=["a", "b"])
    return {
        "all": (rows, {0, 1, 2, 3, 4}),
        "nothing": (rows.none(), set()),
        "slice": (newest[:2], {3, 4}),
        "part": (newest[1:3], {2, 3}),
        "join": (by_value, {0, 1}),
        "slice of a join": (by_value.order_by("-last_failed_at").distinct()[:1], {1}),
        "slice of a union": (first.union(last.order_by()).order_by("-event_id")[:1], {4}),
        "only": (last.only("pk"), {4}),
        "aggregate": (rows.annotate(found=Count("search_values")).filter(found=2), {0, 1}),
        "subquery": (rows.filter(pk__in=first.values("pk")), {0}),
    }


def test_any_queryset_can_be_frozen() -> None:
    events = [make(number) for number in range(5)]
    for event in events[:2]:
        for path in "ab":
            SearchValue.objects.create(event=event, path=path, value="1")
    for name, (found, numbers) in querysets().items():
        batch = freeze(found)
        if not numbers:
            assert (batch.total, batch_states.rows().filter(pk=batch.pk).count()) == (0, 0)
            continue
        rows = batch_states.events(batch.pk).order_by("position")
        names = list(rows.values_list("event__event_id", flat=True))
        assert names == [f"order-{number}" for number in sorted(numbers)], name
        assert list(rows.values_list("position", flat=True)) == [*range(1, 1 + len(numbers))]
        assert batch.total == batch.pending == len(numbers)


@ONE
def test_invalid_options_are_refused() -> None:
    make()
    batch = freeze()
    values: dict[str, Any]
    for values in (
        {"reason": "  "},
        {"reason": "x" * 1_001},
        {"rate": 0},
        {"rate": -1},
        {"rate": float("nan")},
        {"rate": 1e9},
        {"canary": 0},
        {"threshold": 0},
        {"threshold": 101},
    ):
        with pytest.raises(ValueError, match=r"a batch needs|it is|more than 1000"):
            batch_states.start(batch.pk, by="ada", **({"reason": "fixed"} | values))
        assert again(batch).state == "draft"


# -- the dry run --------------------------------------------------------------------------


def test_preview_shows_routes_and_skipped_events() -> None:
    for number in range(3):
        make(number)
    make(3, handler="send_bill")
    make(4, handler="book", queue="billing.book")
    changed = make(5)
    make(6, handler="gone")
    make(7, handler="", name="shop.order.created", queue="billing.send_invoice")
    deleted = make(8)
    batch = freeze(tables.rows())
    tables.rows().filter(pk=changed.pk).update(version=4, state=State.DISCARDED)
    tables.rows().filter(pk=deleted.pk).delete()
    plan = preview.preview_batch(again(batch))
    assert {each["handler"]: each["events"] for each in plan["handlers"]} == {
        "send_invoice": 5,
        "book": 1,
    }
    assert plan["eligible"] == 6
    assert plan["undecided"] == 0
    whys = {str(Reason.from_json(each["why"])): each["count"] for each in plan["skipped"]}
    assert list(whys.values()) == [1, 1], whys
    for part in (
        "another user or tab changed it first; its state is now discarded",
        "there is no handler 'gone'",
    ):
        assert [why for why in whys if part in why], part
    assert again(batch).plan == plan
    # It changes nothing.
    assert states(batch) == {"pending": 8}
    assert batch_states.count(batch.pk)["pending"] == again(batch).total - 1


# -- running ------------------------------------------------------------------------------


def test_a_batch_is_published_and_its_outcomes_end_it(broker: Broker) -> None:
    broker.report = lambda message: FAIL if message.headers["event-id"] == "order-1" else SUCCEED
    batch = started(4)
    skipped = tables.rows().get(event_id="order-3")
    event_states.discard({skipped.pk: 3}, by="bob", reason="a test", now=NOW)
    made = run()
    found = again(batch)
    assert sorted(broker.ids) == ["order-0", "order-1", "order-2"]
    assert made.published == 3
    assert (found.state, found.note) == ("done", None)
    assert (found.succeeded, found.failed, found.skipped, found.total) == (2, 1, 1, 4)
    assert found.runner is None
    (left,) = batch_states.skipped_by_reason(batch.pk)
    assert (left.state, left.count) == ("skipped", 1)
    assert "discarded" in str(left.why)
    assert done(batch)[-1] == ("finish", "")
    replays = event_states.replays().order_by("event__event_id")
    assert [(each.requested_by, each.reason) for each in replays] == [("ada", "fixed")] * 3
    audit = ArchiveAction.objects.filter(action="replay")
    assert {each.batch_id for each in audit} == {batch.pk}


@ONE
@pytest.mark.parametrize("canary", [None, 2])
def test_runners_that_restart_wait_no_longer(clock: Clock, canary: int | None) -> None:
    batch = started(4, canary=canary)
    began, clock.step = clock.at, 20
    while again(batch).state == "running" and clock.at < began + 10_000:
        run(limit=200)
    patience = eligibility.patience(*get_registry().handlers.values())
    assert clock.at - began < patience.total_seconds() + 300
    found = again(batch)
    assert found.state == ("done" if canary is None else "paused")
    assert found.note == Reason(
        "outcomes-missing" if canary is None else "canary-silent", count=canary or 4
    )


@ONE
def test_a_runner_does_not_pause_what_a_user_has_resumed(broker: Broker) -> None:
    """Its canary has failed, and before it says so, a user resumes the batch nevertheless."""
    broker.report = lambda message: FAIL
    batch = started(3, canary=1)
    run()
    batch_states.resume(batch.pk, by="ada")
    stale = Runner(settings=conf.get_settings())
    assert not batch_states.pause(batch.pk, by="", note="late", runner=stale.id)
    assert again(batch).state == "running"


@ONE
def test_a_slow_batch_does_not_hold_up_another(broker: Broker, clock: Clock) -> None:
    broker.report = lambda message: SUCCEED
    slow = started(10, rate=0.1)
    for number in range(100, 110):
        make(number, handler="book", queue="billing.book")
    quick = freeze(tables.rows().filter(handler="book"))
    batch_states.start(quick.pk, by="ada", reason="fixed")
    began = clock.at
    run(until=lambda: again(quick).state == "done")
    assert clock.at - began < 10
    assert again(slow).state == "running"


# -- pausing ------------------------------------------------------------------------------


def test_failure_threshold_pauses_and_resets_on_resume(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(runner, "CHUNK", 5)
    broker.report = lambda message: FAIL
    # A second passes between two chunks, so that each is followed by a look.
    broker.before = lambda: clock.sleep(1)
    batch = started(25, threshold=20)
    run()
    found = again(batch)
    assert (found.state, found.note) == ("paused", Reason("failures", failed=10, of=10))
    assert len(broker.ids) == 10
    assert done(batch)[-1] == ("pause", "")
    batch_states.resume(batch.pk, by="ada")
    run()
    assert again(batch).state == "paused"
    assert len(broker.ids) == 20
    broker.report = lambda message: SUCCEED
    batch_states.resume(batch.pk, by="ada")
    run()
    assert again(batch).state == "done"


@ONE
def test_failed_canary_pauses_the_batch(broker: Broker) -> None:
    outcomes = iter([SUCCEED, FAIL, SUCCEED])
    broker.report = lambda message: next(outcomes, SUCCEED)
    batch = started(8, canary=3)
    run()
    found = again(batch)
    assert found.state == "paused"
    assert str(found.note).startswith("1 of the first 3 events did not succeed")
    assert len(broker.ids) == 3
    batch_states.resume(batch.pk, by="ada")
    run()
    assert len(broker.ids) == 8
    assert again(batch).state == "done"


@ONE
def test_skipped_events_are_no_canary(broker: Broker) -> None:
    broker.report = lambda message: SUCCEED
    batch = started(6, canary=2)
    for row in tables.rows().filter(event_id__in=["order-0", "order-1"]):
        event_states.discard({row.pk: 3}, by="bob", reason="a test", now=NOW)
    run()
    assert sorted(broker.ids) == ["order-2", "order-3", "order-4", "order-5"]
    assert states(batch) == {"skipped": 2, "succeeded": 4}


@ONE
def test_a_superseded_replay_is_no_canary(broker: Broker, billing: Any) -> None:
    """Its handler has not run, so it does not tell whether the others would fail."""
    outcomes: Iterator[Any] = iter([supersede, supersede, FAIL])

    def report(message: Message) -> Any:
        outcome = next(outcomes)
        if outcome != supersede:
            return outcome
        supersede(message)
        return None

    broker.report = report
    batch = started(8, canary=1)
    run()
    assert [len(window) for window in broker.windows] == [1, 1, 1]
    assert (again(batch).state, states(batch)["pending"]) == ("paused", 5)


# -- a refusing or unreachable broker -----------------------------------------------------


@ONE
@pytest.mark.parametrize("kind", [BrokerUnavailableError, ExchangeMissingError])
def test_a_batch_waits_while_nothing_can_be_published(
    broker: Broker, clock: Clock, kind: type[PublishError]
) -> None:
    batch = started(4)
    broker.answer = lambda message: kind("it is gone")
    began, clock.step = clock.at, 5

    def stop() -> bool:
        if clock.at > began + 300:
            found = again(batch)
            assert (found.state, states(batch)) == ("running", {"pending": 4})
            assert "it is gone" in str(found.note)
            assert len(broker.windows) < 12, "it is tried once a minute"
            broker.answer, broker.report = lambda message: None, lambda message: SUCCEED
        return clock.at > began + 300

    run(until=stop, limit=1000)
    run()
    assert (again(batch).state, again(batch).note) == ("done", None)
    assert states(batch) == {"succeeded": 4}


@ONE
def test_a_broker_that_confirms_nothing_pauses_the_batch(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that stops may leave the first chunk without confirms."""
    monkeypatch.setattr(runner, "CHUNK", 10)
    broker.answer = lambda message: PublishTimeoutError("no confirm")
    batch = started(30)
    run()
    assert again(batch).state == "paused"
    assert "no confirm" in str(again(batch).note)
    assert states(batch) == {"unconfirmed": 20, "pending": 10}


@ONE
@pytest.mark.parametrize("limit", [600.0, 1.5])
def test_ten_unroutable_events_pause_the_batch(broker: Broker, limit: float) -> None:
    batch = started(16, rate=4)
    broker.answer = lambda message: UnroutableError("no queue is bound")
    while again(batch).state == ReplayBatch.State.RUNNING:
        run(limit=limit)
    found = again(batch)
    assert found.state == "paused"
    assert "no queue is bound" in str(found.note)
    assert (found.returned, found.pending) == (12, 4)
    (left,) = batch_states.skipped_by_reason(batch.pk)
    assert (left.state, left.count, str(left.why)) == ("returned", 12, "no queue is bound")


@ONE
def test_unconfirmed_event_is_not_retried_automatically(broker: Broker) -> None:
    batch = started(3)
    broker.report = lambda message: SUCCEED
    broker.answer = lambda message: (
        PublishTimeoutError("no confirm") if message.headers["event-id"] == "order-1" else None
    )
    run()
    assert sorted(broker.ids) == ["order-0", "order-1", "order-2"]
    assert states(batch) == {"succeeded": 2, "unconfirmed": 1}
    assert again(batch).state == "done"
    assert batch_states.awaiting_outcomes("billing") == [batch.pk]
    # It was on its way, and reports.
    end(Replay.objects.get(event__event_id="order-1").pk, SUCCEED)
    assert states(batch) == {"succeeded": 3}


@ONE
@pytest.mark.parametrize(("limit", "paused"), [(600.0, False), (10.0, False), (10.0, True)])
def test_a_rate_is_kept_whatever_happens_between(
    broker: Broker, clock: Clock, monkeypatch: pytest.MonkeyPatch, limit: float, paused: bool
) -> None:
    """A lease that is shorter, runners that restart, pauses."""
    monkeypatch.setattr(runner, "LEASE", 1.0)
    times: list[float] = []
    broker.before = lambda: times.append(clock.at)
    broker.report = lambda message: SUCCEED
    batch = started(3, rate=batch_states.RATES[0])
    while again(batch).state == ReplayBatch.State.RUNNING:
        run(limit=limit)
        if paused and batch_states.pause(batch.pk, by="ada"):
            batch_states.resume(batch.pk, by="ada")
    waits = [after - before for before, after in itertools.pairwise(times)]
    assert len(waits) == 2
    # Real time passes as well.
    assert min(waits) >= 0.5 / batch_states.RATES[0]


@ONE
def test_a_later_batch_publishes_an_unconfirmed_event_under_the_same_id(broker: Broker) -> None:
    broker.answer = lambda message: PublishTimeoutError("no confirm")
    first = started(2)
    run()
    alone, both = tables.rows().order_by("event_id")
    broker.answer = lambda message: None
    assert replay.replay({alone.pk: alone.version}, by="bob").published == [alone.pk]
    second = freeze()
    batch_states.start(second.pk, by="ada", reason="again")
    broker.report = lambda message: SUCCEED
    run()
    ids = [message.headers["event-replay-id"] for window in broker.windows for message in window]
    assert len(ids) == 4
    assert len(set(ids)) == 2, "each keeps its id"
    # A replay belongs to the batch that has claimed it last.
    assert states(first) == {"published": 1}
    batch_states.count(first.pk)
    assert again(first).deleted == 1
    assert states(second) == {"succeeded": 1}
    moved = batch_states.events(second.pk).get()
    assert (moved.event_id, moved.number, moved.publishes) == (both.pk, 1, 2)
    assert [*batch_states.skipped_by_reason(first.pk)] == []


@ONE
def test_outcomes_that_are_recorded_together_count_by_the_time_of_their_runs(
    broker: Broker,
) -> None:
    batch = started(120)
    run(until=lambda: len(broker.messages) == 120)
    replays = [UUID(str(message.headers["event-replay-id"])) for message in broker.messages]
    ends = {pk: NOW + timedelta(seconds=number) for number, pk in enumerate(replays)}
    failed = {pk: ends[pk] for pk in replays[::2]}
    # As the mirror does.
    event_states.failed_again(failed, now=NOW)
    event_states.finish({pk: ends[pk] for pk in replays[1::2]}, now=NOW)
    batch_states.rows().update(resumed_at=NOW)
    assert batch_states.failures(again(batch)) == (25, 50)
    # A superseded one has not run.
    ran_not = {pk: ends[pk] for pk in replays[101::2]}
    event_states.finish(ran_not, superseded=set(ran_not), now=NOW)
    assert batch_states.failures(again(batch)) == (30, 50)


@pytest.mark.parametrize("end", [batch_states.cancel, batch_states.pause])
@ONE
def test_a_batch_is_counted_although_its_runner_has_died(end: Callable[..., bool]) -> None:
    batch = started(2)
    batch_states.count(batch.pk)
    batch_states.events(batch.pk).update(state=Replay.State.PUBLISHED)
    assert batch_states.awaiting_outcomes("billing") == []
    assert end(batch.pk, by="ada")
    assert batch_states.awaiting_outcomes("billing") == [batch.pk]
    assert batch_states.count(batch.pk)["published"] == 2
    batch_states.events(batch.pk).update(state=Replay.State.SUCCEEDED)
    batch_states.count(batch.pk)
    assert batch_states.awaiting_outcomes("billing") == []


@ONE
@pytest.mark.parametrize(
    ("error", "state", "note"),
    [
        (RuntimeError("a mistake"), "paused", "RuntimeError: a mistake"),
        # Such as a statement that is longer than the database takes.
        (DatabaseError("no\nrow"), "running", "waiting to retry: DatabaseError: no"),
    ],
)
def test_an_error_of_one_batch_does_not_stop_the_others(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, error: Exception, state: str, note: str
) -> None:
    broker.report = lambda message: SUCCEED
    bad = started(2)
    for number in range(10, 12):
        make(number, handler="book", queue="billing.book")
    good = freeze(tables.rows().filter(handler="book"))
    batch_states.start(good.pk, by="ada", reason="fixed")
    real = batch_states.next_events

    def next_of(pk: UUID, limit: int) -> dict[UUID, int]:
        if pk == bad.pk:
            raise error
        return real(pk, limit)

    monkeypatch.setattr(batch_states, "next_events", next_of)
    run(until=lambda: again(good).state == "done")
    assert (again(bad).state, str(again(bad).note)) == (state, note)


@ONE
@pytest.mark.parametrize("function", ["lease", "renew"])
def test_an_outage_of_the_database_is_waited_for_and_reported_once(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    broker.report = lambda message: SUCCEED
    batch = started(2)
    real, calls = getattr(batch_states, function), Counter[str]()

    def flaky(*args: Any) -> Any:
        calls["n"] += 1
        if calls["n"] < 4:
            raise OperationalError("the connection is lost")
        return real(*args)

    monkeypatch.setattr(batch_states, function, flaky)
    told: list[str] = []
    run(tell=told.append)
    assert again(batch).state == "done"
    said = [line for line in told if line.startswith("running batches")]
    assert ["paused" in line for line in said] == [True, False]
    assert said[-1] == "running batches has resumed"


@ONE
def test_how_much_of_a_range_is_read() -> None:
    for end, read, percent in ((9, 0, 0), (9, 5, 50), (9, 10, 100), (-1, 0, 100)):
        batch = ReplayBatch(backfill={"begin": 0, "end": end}, next_offset=read)
        assert batch.percent_read == percent


# -- leases -------------------------------------------------------------------------------


def test_a_batch_has_one_runner_until_its_lease_is_over() -> None:
    batch = started(2)
    one, two = uuid4(), uuid4()
    assert batch_states.lease("billing", one, 60) == [batch.pk]
    assert batch_states.lease("billing", two, 60) == []
    assert batch_states.renew(batch.pk, two, 60) is None
    assert batch_states.renew(batch.pk, one, -1) is not None
    assert batch_states.lease("billing", two, 60) == [batch.pk]
    assert batch_states.renew(batch.pk, one, 60) is None
    assert not batch_states.finish(batch.pk, one)
    assert batch_states.release(two) == 1
    assert batch_states.lease("shipping", one, 60) == []
    assert batch_states.lease("billing", one, 60) == [batch.pk]


@ONE
def test_a_command_does_not_ask_a_replica() -> None:
    batch = started()
    with routed_by(Replicas()):
        code, out, _ = run_command("events_batches", "pause", str(batch.pk))
    assert code == 0
    assert f"{batch.pk} paused" in out


# -- deleting -----------------------------------------------------------------------------


def test_old_batches_are_pruned_and_the_audit_stays(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_states, "ROWS_PER_DELETE", 2)
    broker.report = lambda message: SUCCEED
    old, fresh, draft = started(5), freeze(tables.rows()), freeze(tables.rows())
    run()
    long_ago = datetime.now(UTC) - timedelta(days=100)
    batch_states.rows().filter(pk=old.pk).update(finished_at=long_ago)
    batch_states.rows().filter(pk=draft.pk).update(created_at=long_ago)
    ages = {"batches": 90 * 86_400}
    assert retention.due(ages, service="billing").total == 2
    # A draft, the oldest here, is never deleted in part.
    stopped = retention.prune(ages, service="billing", stop=iter((False, True)).__next__)
    assert stopped.counts["batches"] == 1
    pruned = retention.prune(ages, service="billing")
    assert pruned.counts["batches"] == pruned.total == 1
    assert [batch.pk for batch in batch_states.rows()] == [fresh.pk]
    # The replays are the history of their events.
    made = Replay.objects.filter(batch=None)
    assert set(made.values_list("state", flat=True)) == {Replay.State.SUCCEEDED}
    assert made.count() == 5
    assert set(Replay.objects.exclude(batch=None).values_list("batch", flat=True)) == {fresh.pk}
    assert set(ArchiveAction.objects.values_list("batch_id", flat=True)) == {old.pk}
    assert retention.prune({"batches": None}, service="billing").total == 0


@ONE
def test_the_numbers_of_a_batch_outlive_its_events(broker: Broker) -> None:
    """Its replays do not: they are deleted with their events, however these are deleted."""
    broker.report = lambda message: SUCCEED
    batch = started(3)
    run()
    late = Replay.objects.latest("position")
    tables.rows().get(pk=late.event_id).delete()
    assert retention.prune({State.SUCCEEDED: 0.0}, service="billing").total == 2
    assert not Replay.objects.exists()
    assert event_states.finish({late.pk: NOW}, now=NOW) == 0, "its outcome is read again"
    assert (again(batch).succeeded, again(batch).deleted) == (3, 0)
    assert not any(batch_states.count(batch.pk).values())
    assert (again(batch).deleted, again(batch).through) == (3, 3)


@ONE
def test_outcomes_are_awaited_from_when_the_mirror_published(broker: Broker, clock: Clock) -> None:
    """The process died after its claim, and no mirror ran for a day."""
    batch = started(1)
    handlers = dict.fromkeys(batch_states.next_events(batch.pk, 10), "send_invoice")
    event_states.claim(
        batch_states.next_events(batch.pk, 10), handlers=handlers, by="ada", reason="",
        now=tables.clock(), batch=batch.pk,
    )  # fmt: skip
    clock.at += 86_400 + 3600
    assert replay.resume() == 1
    run(limit=60)
    assert again(batch).state == "running", again(batch).note
