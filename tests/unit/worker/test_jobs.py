"""Handing deliveries to the pool, and settling them: each is settled once, whatever happens."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from django_amqp_events.backoff import Backoff
from django_amqp_events.broker.topology import Names
from django_amqp_events.conf import Settings
from django_amqp_events.declare.registry import build
from django_amqp_events.message.types import Delivered
from django_amqp_events.testing import override_events
from django_amqp_events.worker import jobs, pool_job
from django_amqp_events.worker.celery_internals import state
from django_amqp_events.worker.delivery import Delivery, Item
from django_amqp_events.worker.jobs import Jobs
from django_amqp_events.worker.pool_job import Outcome
from django_amqp_events.worker.prefetch import JOB_EVENTS, Durations
from django_amqp_events.worker.reading import Dispatcher, Reading
from django_amqp_events.worker.verdict import HANDLED, POSTPONE, Verdict
from tests.doubles.consumer import consumer

#: Seconds.
CONSUMER_TIMEOUT = 1800.0
RETRY = Verdict(kind="retry")
SETTINGS = Settings(service="billing")
DISPATCHER = Dispatcher(SETTINGS, build(SETTINGS), Names.of(SETTINGS))


class Acks:
    """The settlements of one connection."""

    def __init__(self) -> None:
        self.lost = False
        self.acked: list[int] = []
        self.requeued: list[int] = []

    def ack(self, tags: list[int]) -> None:
        self.acked += tags

    def requeue(self, tags: list[int]) -> None:
        self.requeued += tags


class World:
    """A worker's jobs, its pool, and what becomes of the deliveries."""

    def __init__(self, processes: int = 2, **controller: Any) -> None:
        self.c = consumer(processes, **controller)
        self.pool = self.c.pool
        self.acks = Acks()
        self.lost: list[tuple[list[Delivery], float | None]] = []
        self.jobs = Jobs(
            self.c,
            consumer_timeout=CONSUMER_TIMEOUT,
            size=JOB_EVENTS,
            wake=self.wake,
            on_lost=self.on_lost,
        )
        self.jobs.begin()
        self.given: list[Delivery] = []

    def wake(self) -> None:
        self.jobs.settle_ended()

    def on_lost(self, deliveries: list[Delivery], exceeded: float | None, _error: str) -> None:
        self.lost.append((deliveries, exceeded))
        if exceeded is None:
            self.jobs.requeue(deliveries)
            return
        for delivery in deliveries:
            self.jobs.settle(delivery, delivery.item._replace(exceeded=exceeded))

    def deliver(
        self, queue: str = "a", *, redelivered: bool = False, exchange: str = "events",
        since: float = 0, body: bytes = b"", **task: Any,
    ) -> Delivery:  # fmt: skip
        limits = {"time_limit": None, "soft_time_limit": None, "rate_limit": None}
        delivery = Delivery(
            Item(Delivered(queue, exchange, "key", redelivered, b"", body)),
            len(self.given) + 1,
            self.acks,  # type: ignore[arg-type]
            DISPATCHER,
            SimpleNamespace(name=queue),  # type: ignore[arg-type]
            SimpleNamespace(name=queue, send_events=True, **{**limits, **task}),
            since or time.monotonic(),
        )
        self.given.append(delivery)
        self.jobs.add(delivery)
        return delivery

    def quick(self, *queues: str) -> None:
        for queue in queues:
            self.jobs.backlog.durations.ended(queue, 0.0001)

    @property
    def sizes(self) -> list[int]:
        return [len(job.items) for job in self.pool.jobs]


@pytest.fixture(autouse=True)
def fresh_state() -> None:
    state.reset_state()


def handled(number: int) -> list[Outcome]:
    return [Outcome("ack", 0.001)] * number


def test_a_slow_handlers_events_have_a_job_each() -> None:
    world = World()
    for _ in range(5):
        world.deliver()
    assert world.sizes == [1, 1]
    world.pool.end(world.pool.jobs[0], [Outcome("ack", 5.0)])
    assert world.sizes == [1, 1]
    assert world.acks.acked == [1]


def test_quick_events_share_jobs_and_processes() -> None:
    world = World()
    world.quick("a")
    for _ in range(42):
        world.deliver()
    assert world.sizes == [1, 1], "no one waits for others"
    for _ in range(2):
        world.pool.end(world.pool.jobs[0], handled(1))
    assert world.sizes == [16, 16]


@pytest.mark.parametrize(
    "alone",
    [
        {"redelivered": True},
        {"time_limit": 5},
        {"soft_time_limit": 5},
        {"rate_limit": "1000/s"},
    ],
    ids=str,
)
def test_what_runs_alone(alone: dict[str, Any]) -> None:
    world = World(1)
    world.quick("a")
    for number in range(12):
        world.deliver(**(alone if number == 6 else {}))
    sizes = []
    while world.pool.jobs:
        [job] = world.pool.jobs
        sizes.append(len(job.items))
        world.pool.accept(job)
        world.pool.end(job, handled(len(job.items)))
        time.sleep(0.002)
        world.c.timer.advance(1)
    assert sizes == [1, 5, 1, 5]


@pytest.mark.parametrize("option", ["max_tasks_per_child", "time_limit", "soft_time_limit"])
def test_workers_whose_events_run_alone(option: str) -> None:
    world = World(1, **{option: 50})
    world.quick("a")
    for _ in range(3):
        world.deliver()
    world.pool.end(world.pool.jobs[0], handled(1))
    assert world.sizes == [1]


def test_what_a_job_did_not_begin_is_handed_out_again_in_order() -> None:
    world = World(1)
    world.quick("a")
    for _ in range(9):
        world.deliver()
    world.pool.end(world.pool.jobs[0], handled(1))
    assert world.sizes == [8]
    world.pool.end(world.pool.jobs[0], handled(3))
    assert world.acks.acked == [1, 2, 3, 4]
    sizes = []
    while world.pool.jobs:
        sizes += world.sizes
        world.pool.end(world.pool.jobs[0], handled(sizes[-1]))
    assert sizes == [5]
    assert world.acks.acked == list(range(1, 10))


def test_the_verdict_of_a_limited_run_is_carried_out_by_a_job_of_its_own() -> None:
    """The limit would end the publish."""
    world = World(1, time_limit=60)
    world.deliver()
    world.pool.end(world.pool.jobs[0], [Outcome("publish", 0.1, RETRY)])
    [job] = world.pool.jobs
    assert job.items[0].verdict == RETRY
    assert job.timeout == CONSUMER_TIMEOUT * 5 / 6, "the worker's own limit is no longer"


def test_one_process_repeats_publishes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may wait for its confirm in vain, while the others run the events of other queues."""
    monkeypatch.setattr(jobs, "UNCONFIRMED_BACKOFF", Backoff(0.0, 0.0))
    world = World(3)
    for _ in range(3):
        world.deliver("a")
    for job in [*world.pool.jobs]:
        world.pool.end(job, [Outcome("publish", 0.1, RETRY, "no confirm", True)])
    for _ in range(3):
        world.deliver("b")
    repeats = [job for job in world.pool.jobs if not job.items[0].runs]
    assert len(repeats) == 1
    assert len(world.pool.jobs) == 3
    world.pool.end(repeats[0], [Outcome("ack")])
    assert len([job for job in world.pool.jobs if not job.items[0].runs]) == 1


def test_turns_count_the_time_of_a_publish() -> None:
    """RabbitMQ does not confirm the retries of one queue, and each occupies a process for 10 s."""
    world = World(1)
    for queue in "aaabbb":
        world.deliver(queue)
    job = world.pool.jobs[0]
    job.callbacks["accept_callback"](1, time.monotonic() - 10)
    world.pool.end(job, [Outcome("publish", 0.001, RETRY, "no confirm", True)])
    taken = ""
    for _ in range(3):
        job = world.pool.jobs[0]
        taken += job.items[0].delivered.queue
        job.callbacks["accept_callback"](1, time.monotonic())
        world.pool.end(job, handled(1))
    assert taken == "bbb"


def test_a_bug_in_one_event_keeps_the_outcomes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(self: pool_job.Engine, reading: Reading, **_: Any) -> Verdict:
        if reading.received.body == b"bug":
            raise MemoryError
        return HANDLED

    monkeypatch.setattr(pool_job.Engine, "decide", decide)
    fine, bug = (Item(Delivered("a", "events", "key", False, b"", body)) for body in (b"", b"bug"))
    options = pool_job.JobOptions(worker="w")
    with override_events():
        outcomes = pool_job.run_job(options, [fine, fine, bug, fine])
        assert not isinstance(outcomes, str)
        assert [outcome.kind for outcome in outcomes] == ["ack", "ack"]
        assert pool_job.run_job(options, [bug, fine]) == "MemoryError: "


def test_a_job_of_several_events_fits_into_a_pipe() -> None:
    """A worker that stops while it writes the rest of a job would wait for the process."""
    world = World(1)
    world.quick("a")
    for _ in range(8):
        world.deliver(body=b"x" * 10_000)
    world.pool.end(world.pool.jobs[0], handled(1))
    assert world.sizes == [3]


def test_a_process_that_is_released_twice_gets_one_job() -> None:
    """billiard releases it when its job ends and again when it exits."""
    world = World(1)
    for _ in range(4):
        world.deliver()
    for _ in range(3):
        world.pool.end(world.pool.jobs[0], [Outcome("ack", 1.0)])
        world.c.controller.semaphore.release()
        assert len(world.jobs.running) == 1


def test_a_bug_in_a_settlement_requeues_the_events(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1)
    world.deliver()

    def fails(*_: Any) -> None:
        raise RuntimeError("a logging filter")

    monkeypatch.setattr(Durations, "ended", fails)
    world.pool.end(world.pool.jobs[0], handled(1))
    assert world.acks.requeued == [1]


def test_a_rate_limit_holds_back_no_other_handler_of_its_queue() -> None:
    world = World(3)
    first = world.deliver(rate_limit="1/m")
    world.deliver(rate_limit="1/m")
    other = world.deliver()
    other.handler = SimpleNamespace(name="other")  # type: ignore[assignment]
    world.jobs.request()
    items = [job.items[0] for job in world.pool.jobs]
    assert items == [first.item, other.item]


def test_an_event_that_is_not_due_yet_uses_no_rate_limit() -> None:
    world = World(4)
    for _ in range(4):
        world.deliver(rate_limit="1/m")
    world.jobs.request()
    [job] = world.pool.jobs
    world.pool.end(job, [Outcome("published", None, POSTPONE)])
    assert [job.items[0] for job in world.pool.jobs] == [world.given[1].item]
    for _ in range(2):
        world.jobs.backlog.not_run(world.given[1])
    world.jobs.request()
    assert [job.items[0] for job in world.pool.jobs] == [each.item for each in world.given[1:3]]


class Machine(RuleBasedStateMachine):
    """Random deliveries, outcomes, deaths and lost connections."""

    @initialize(processes=st.integers(1, 4))
    def begin(self, processes: int) -> None:
        state.reset_state()
        self.world = World(processes)
        self.old: list[Acks] = []

    @rule(
        queue=st.sampled_from(["a", "b", "c"]),
        number=st.integers(1, 20),
        redelivered=st.booleans(),
    )
    def deliver(self, queue: str, number: int, redelivered: bool) -> None:
        for _ in range(number):
            self.world.deliver(queue, redelivered=redelivered)

    @precondition(lambda self: self.world.pool.jobs)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.world.pool.jobs))
        self.world.pool.accept(job)
        begun = data.draw(st.integers(1, len(job.items)))
        kinds = [
            Outcome("ack", 0.001),
            Outcome("ack", 5.0),
            Outcome("ack", 0.001, HANDLED),
            Outcome("requeue", 0.001),
            Outcome("publish", 0.001, RETRY),
            Outcome("publish", 0.001, RETRY, "no"),
        ]
        self.world.pool.end(job, [data.draw(st.sampled_from(kinds)) for _ in range(begun)])

    @precondition(lambda self: self.world.pool.jobs)
    @rule(data=st.data(), exceeded=st.sampled_from([None, 3.0]))
    def lose(self, data: st.DataObject, exceeded: float | None) -> None:
        self.world.pool.lose(data.draw(st.sampled_from(self.world.pool.jobs)), exceeded)

    @precondition(lambda self: self.world.pool.jobs)
    @rule()
    def fail(self) -> None:
        self.world.pool.end(self.world.pool.jobs[0], "a bug")

    @rule()
    def pass_time(self) -> None:
        self.world.c.timer.advance(60)

    @rule()
    def lose_connection(self) -> None:
        world = self.world
        world.acks.lost = True
        self.old.append(world.acks)
        world.acks = Acks()
        world.c.controller.semaphore.clear()
        world.given.clear()
        world.jobs.begin()

    @invariant()
    def each_is_settled_once(self) -> None:
        world = self.world
        settled = world.acks.acked + world.acks.requeued
        assert len(settled) == len(set(settled))
        held = {one for one in world.given if not one.acknowledged}
        assert {one.tag for one in held} == {one.tag for one in world.given} - set(settled)
        known = set(world.jobs.backlog)
        running = {one for job in world.jobs.running for one in job.deliveries}
        unpublished = {one for _, one in world.jobs._unpublished}
        assert held <= known | running | unpublished
        assert not known & running

    @invariant()
    def no_process_is_idle_while_events_wait(self) -> None:
        world = self.world
        if self.old:
            return  # Celery's semaphore counts no job of a lost connection
        assert len(world.jobs.running) <= world.pool.processes
        if world.jobs.backlog:
            assert len(world.pool.jobs) == world.pool.processes

    def teardown(self) -> None:
        """Whatever happened, everything is settled in the end."""
        world = self.world
        for _ in range(1000):
            if not world.pool.jobs:
                break
            job = world.pool.jobs[0]
            world.pool.end(job, [Outcome("ack", 0.001)] * len(job.items))
        assert not world.jobs.backlog
        assert not world.jobs.running
        state.reset_state()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
