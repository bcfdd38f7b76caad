"""The intake against a model of a worker and its broker, in simulated time."""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from celery.worker import state
from kombu.utils import limits

from django_amqp_events.worker import intake
from django_amqp_events.worker.dispatch import Delivery
from django_amqp_events.worker.request import EventRequest

#: RabbitMQ's consumer timeout in seconds.
TIMEOUT = 60.0
#: Runs in seconds: longer than an event may wait, and short ones.
LONG, MIDDLE, SHORT = 20.0, 0.05, 0.001


@dataclass(eq=False)
class Event:
    queue: str
    seconds: float
    deliveries: int = 0
    waited: float = 0.0
    started: float | None = None


class Request(EventRequest):
    task: Any = SimpleNamespace(time_limit=None, soft_time_limit=None)

    def __init__(self, model: Model, event: Event, tag: str) -> None:
        self.model, self.event, self.tag, self.name = model, event, tag, event.queue
        message: Any = SimpleNamespace(channel=SimpleNamespace(connection=1))
        received: Any = SimpleNamespace(queue=event.queue)
        self.delivery = Delivery(received=received, message=message, since=model.now)
        self.id = str(id(self))

    def release(self) -> bool:
        if not self.delivery.begin():
            return False
        state.task_ready(self)
        self.model.settle(self, ack=False)
        return True


class Model:
    """A worker whose intake is tested, which is its step as well, and its broker."""

    def __init__(self, processes: int, runs: dict[str, list[float]]) -> None:
        self.now = 0.0
        self.calls: list[tuple[float, int, Callable[[], object]]] = []
        self.numbers = count()
        self.processes = processes
        self.events = [Event(queue, run) for queue, listed in runs.items() for run in listed]
        self.ready = {queue: deque(e for e in self.events if e.queue == queue) for queue in runs}
        #: Consumers by tag: prefetch count, unacknowledged events.
        self.consumers: dict[str, list[int]] = {}
        self.tags: dict[str, str] = {}
        self.waiting: deque[Request] = deque()
        self.running: set[Request] = set()
        self.left = len(self.events)
        self.queues, self.paused = set(runs), set[str]()
        self.buckets: dict[str, Any] = {}
        self.c = SimpleNamespace(
            controller=SimpleNamespace(
                max_concurrency=processes,
                prefetch_multiplier=4,
                time_limit=None,
                soft_time_limit=None,
            ),
            pool=SimpleNamespace(num_processes=processes),
            initial_prefetch_count=processes * 4,
            disable_rate_limits=False,
            task_buckets=self.buckets,
        )
        handlers: Any = {name: SimpleNamespace(name=name, queue=name) for name in runs}
        registry: Any = SimpleNamespace(
            by_queue=lambda: {name: [handler] for name, handler in handlers.items()}
        )
        step: Any = self
        self.intake = intake.Intake(step, registry, TIMEOUT, self.turn_soon)

    def later(self, seconds: float, call: Callable[[], object]) -> None:
        heapq.heappush(self.calls, (self.now + seconds, next(self.numbers), call))

    def turn_soon(self) -> None:
        self.later(0, self.intake.turn)

    def run(self, seconds: float) -> None:
        def turn() -> None:
            self.intake.turn()
            self.later(self.intake.interval, turn)

        for queue in sorted(self.queues):
            self.resume(queue)
        turn()
        while self.left and self.now < seconds:
            self.now, _, call = heapq.heappop(self.calls)
            call()

    # -- the step

    def consumes(self, queue: str) -> bool:
        return queue in self.tags

    def pause(self, queue: str) -> None:
        self.consumers[self.tags.pop(queue)][0] = 0
        self.paused.add(queue)

    def renew(self, queue: str) -> None:
        self.pause(queue)
        self.resume(queue)

    def resume(self, queue: str) -> None:
        number = self.intake.count(queue)
        if not number:
            self.paused.add(queue)
            return
        self.paused.discard(queue)
        tag = self.tags[queue] = f"{queue}:{next(self.numbers)}"
        self.consumers[tag] = [number, 0]
        self.later(0.001, lambda: self.deliver(queue))

    # -- the broker

    def deliver(self, queue: str) -> None:
        tag = self.tags.get(queue, "")
        while self.ready[queue] and tag and self.consumers[tag][1] < self.consumers[tag][0]:
            event = self.ready[queue].popleft()
            event.deliveries += 1
            self.consumers[tag][1] += 1
            received: Any = SimpleNamespace(
                queue=queue, body=b"", delivery_count=event.deliveries - 1
            )
            self.intake.received(received)
            request = Request(self, event, tag)
            if queue in self.buckets:
                self.buckets[queue].add((request, 1))
                self.use(self.buckets[queue])
            else:
                self.reserve(request)
            self.intake.handed_over(request.delivery, 0.0)
            tag = self.tags.get(queue, "")

    def settle(self, request: Request, *, ack: bool) -> None:
        def settled() -> None:
            self.consumers[request.tag][1] -= 1
            if not ack:
                self.ready[request.name].appendleft(request.event)
            self.deliver(request.name)

        self.later(0.001, settled)

    # -- the worker

    def use(self, bucket: Any) -> None:
        while bucket.contents:
            if not bucket.can_consume(1):
                self.later(max(1e-6, bucket.expected_time(1)), lambda: self.use(bucket))
                return
            self.reserve(bucket.pop()[0])

    def reserve(self, request: Request) -> None:
        state.task_reserved(request)
        self.waiting.append(request)
        self.begin()

    def begin(self) -> None:
        while self.waiting and len(self.running) < self.processes:
            request = self.waiting.popleft()
            if not request.delivery.begin():
                continue
            event, request.began = request.event, self.now
            event.started = self.now
            event.waited = self.now - request.delivery.since
            state.task_accepted(request)
            self.running.add(request)
            self.later(event.seconds, partial(self.end, request))

    def end(self, request: Request) -> None:
        self.running.discard(request)
        self.left -= 1
        state.task_ready(request)
        self.intake.ended(request.name, request.event.seconds)
        self.settle(request, ack=True)
        self.begin()


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Model]]:
    made: list[Model] = []

    def make(processes: int, runs: dict[str, list[float]]) -> Model:
        for held in (state.reserved_requests, state.active_requests, state.requests):
            held.clear()
        made[:] = [Model(processes, runs)]
        return made[0]

    for module in (intake, limits):
        monkeypatch.setattr(module, "monotonic", lambda: made[0].now if made else 0.0)
    yield make
    for held in (state.reserved_requests, state.active_requests, state.requests):
        held.clear()


@pytest.mark.parametrize(
    ("processes", "runs"),
    [
        (1, {"a": [LONG] * 12, "b": [SHORT] * 30}),
        (2, {"b": [LONG] * 16, "a": [SHORT] * 30}),
        (2, {"a": [LONG] * 4, "b": [MIDDLE] * 8000}),
        (2, {f"q{number}": [LONG] * 4 for number in range(8)}),
        (2, {"a": [SHORT] + [LONG] * 5, "b": [SHORT] * 2 + [LONG]}),
        (2, {"a": ([MIDDLE] * 9 + [LONG]) * 4, "b": [MIDDLE] * 100}),
        (4, {"a": [LONG] * 16, "b": [SHORT] * 3}),
        (2, {"a": ([MIDDLE] * 3 + [5.0]) * 60}),
        (2, {"a": ([MIDDLE] * 3 + [5.0]) * 40, "b": [2.0] * 80}),
        (4, {"a": [2.0] * 60, "b": [2.0] * 60}),
    ],
)
def test_every_queue_has_its_turn_and_no_event_is_requeued_often(
    processes: int, runs: dict[str, list[float]], model: Callable[..., Model]
) -> None:
    worker = model(processes, runs)
    work = sum(event.seconds for event in worker.events)
    worker.run(10 * work)
    assert not worker.left
    assert worker.now < 1.1 * work / processes + 2 * LONG, "no process is idle"
    # Seven end in the graveyard.
    assert max(event.deliveries for event in worker.events) <= 4
    assert max(event.waited + event.seconds for event in worker.events) < TIMEOUT
    for queue in runs:
        starts = sorted(e.started or 0.0 for e in worker.events if e.queue == queue)
        longest = max(after - before for before, after in pairwise([0.0, *starts]))
        assert longest <= (len(runs) + 1) * LONG + 5


def test_a_rate_limit_that_is_lowered_while_events_arrive(model: Callable[..., Model]) -> None:
    """What waits for the new one is requeued before the consumer timeout."""
    worker = model(16, {"a": [SHORT] * 5000})
    worker.later(0.1, lambda: worker.buckets.update(a=limits.TokenBucket(0.11)))
    worker.run(4 * TIMEOUT)
    started = [event for event in worker.events if event.started is not None]
    assert max(event.waited for event in started) < TIMEOUT
    assert max(event.deliveries for event in worker.events) == 2
    assert len(worker.buckets["a"].contents) <= 1


@pytest.mark.parametrize("long", ["a", "z"], ids=["long first", "long last"])
@pytest.mark.parametrize("processes", [2, 3, 4, 8])
@pytest.mark.parametrize("queues", [1, 2])
@pytest.mark.parametrize("seconds", [1.5, 5.0])
def test_short_events_do_not_wait_for_long_ones(
    processes: int, long: str, queues: int, seconds: float, model: Callable[..., Model]
) -> None:
    """Of a backlog of both; and long ones occupy all processes when no short ones are left."""
    number = 10 * processes
    runs = {f"{long}{queue}": [seconds] * (number // queues) for queue in range(queues)}
    runs |= {"m": [SHORT] * 1800, "n": [MIDDLE] * 180}
    worker = model(processes, runs)
    worker.run(1000)
    assert not worker.left
    others = [event for event in worker.events if event.seconds < 1]
    work = sum(event.seconds for event in others)
    # The first long events are not known to be long, and may take all processes twice.
    assert max(event.started or 0.0 for event in others) <= work + 3 * seconds
    total = sum(event.seconds for event in worker.events)
    assert worker.now <= total / processes + 2 * seconds + intake.SHORT_SECONDS


@pytest.mark.parametrize("what", ["idle", "paused", "reserved", "rate limit", "recent", "changed"])
def test_an_idle_worker_decides_nothing(
    what: str, model: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn of a thousand queues takes 10 ms. What waits has a deadline, and is looked at."""
    worker = model(2, {"a": [SHORT] * 40})
    worker.run(100)
    turns: list[float] = []
    monkeypatch.setattr(worker.intake, "_adapt", lambda: turns.append(worker.now))
    worker.now += intake.CALM_SECONDS + 1
    match what:
        case "paused":
            worker.paused.add("a")
        case "reserved":
            state.task_reserved(Request(worker, Event("a", SHORT), "tag"))
        case "rate limit":
            worker.buckets["a"] = limits.TokenBucket(0.1)
        case "recent":
            worker.intake.ended("a", SHORT)
        case "changed":
            worker.intake.received(SimpleNamespace(queue="a", body=b"", delivery_count=0))  # type: ignore[arg-type]
    worker.intake.turn()
    assert bool(turns) is (what != "idle")


def test_many_handlers_do_not_slow_a_worker_down(model: Callable[..., Model]) -> None:
    """A worker of a thousand handlers once took minutes for the first event of each."""

    def calls_for_each(handlers: int) -> float:
        worker, calls = model(2, {f"q{number}": [SHORT] for number in range(handlers)}), count()
        sys.setprofile(lambda _frame, kind, _arg: kind == "call" and next(calls))
        try:
            worker.run(100)
        finally:
            sys.setprofile(None)
        assert not worker.left
        return next(calls) / handlers

    # Each turn looks at every queue; it was fifty times as many.
    assert calls_for_each(500) < 8 * calls_for_each(50)
