"""When events are handed to the pool; what becomes of them there is in the acceptance tests."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery.worker import state
from kombu.asynchronous.semaphore import LaxBoundedSemaphore

from django_amqp_events.message.types import Received
from django_amqp_events.worker.dispatch import Delivery
from django_amqp_events.worker.fast import chunk_pipes, chunks
from django_amqp_events.worker.fast.chunk_pipes import MAX_EVENTS, NO_TOKENS
from django_amqp_events.worker.fast.chunks import (
    JOB_SECONDS,
    MAX_DELAY,
    REPORT_INTERVAL,
    SLOW_RUN,
    Chunks,
)
from django_amqp_events.worker.verdict import HANDLED, Verdict

OPEN = SimpleNamespace(connection=True)
RECEIVED = Received(
    queue="q", exchange="events", routing_key="a.b", body=b"", headers={}, properties={}
)


class Clock:
    """The worker's time, which a test moves. Handlers take none of it, on no machine."""

    def __init__(self) -> None:
        self.now = 1.0

    def monotonic(self) -> float:
        return self.now

    @staticmethod
    def perf_counter() -> float:
        return 0.0


class Worker:
    """A consumer whose pool has two processes, and takes jobs without running them."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Any]] = []
        self.jobs: list[list[str]] = []
        self.told: list[Any] = []
        self.numbers: list[int] = []
        self.tokens: list[int] = []
        self.accepted: list[Any] = []
        self.handled: list[str] = []
        self.lost: list[str] = []
        self.failed: list[Any] = []
        self.refuse = False
        self.marks: list[int] = []
        # More than the processes, unless a test takes some: there is always one for a job.
        self.slots = LaxBoundedSemaphore(1000)
        self.consumer = SimpleNamespace(
            timer=SimpleNamespace(call_after=lambda after, call: self.timers.append((after, call))),
            pool=SimpleNamespace(num_processes=2, apply_async=self._take),
            controller=SimpleNamespace(
                semaphore=self.slots,
            ),
        )
        self.chunks = Chunks(self.consumer)
        self.chunks.begin()

    def _take(self, _run: Any, args: tuple[int, int, int, list[str]], callback: Any,
              accept_callback: Any, error_callback: Any, **_: Any) -> Any:  # fmt: skip
        if self.refuse:
            self.refuse = False
            raise RecursionError("cannot be pickled")
        number, tokens, mark, jobs = args
        self.marks.append(mark)
        self.failed.append(error_callback)
        self.numbers.append(number)
        self.tokens.append(tokens)
        self.jobs.append(jobs)
        self.told.append(callback)
        self.accepted.append(accept_callback)
        return SimpleNamespace  # whatever can be referred to weakly

    def add(self, name: str) -> None:
        self.chunks.add(
            SimpleNamespace(  # type: ignore[arg-type]
                name=name,
                id=name,
                job=name,
                delivery=Delivery(received=RECEIVED, message=SimpleNamespace(channel=OPEN)),
                revoked=lambda: False,
                on_accepted=lambda _pid, _since: None,
                on_success=lambda _verdict: self.handled.append(name),
                on_failure=lambda _info: self.lost.append(name),
                terminates_when_accepted=False,
                keep_running=lambda: None,
            )
        )

    def turn(self) -> list[float]:
        """Fire the timers that are set; return after how many seconds each was wanted."""
        due, self.timers = self.timers, []
        for _, call in due:
            call()
        return [after for after, _ in due if after != REPORT_INTERVAL]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(chunks, "time", clock)
    return clock


@pytest.fixture
def pipes(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tokens: list[tuple[int, int]] = []
    monkeypatch.setattr(chunk_pipes, "_reports", (-1, -1))
    monkeypatch.setattr(chunk_pipes, "tokens", tokens)
    chunk_pipes.open_pipes(2)
    # The tests are both: the worker's main process, and one of its pool.
    monkeypatch.setattr(chunk_pipes, "main_process", os.getppid())
    yield
    for reading, writing in (*tokens, chunk_pipes._reports):
        os.close(reading)
        os.close(writing)


@pytest.fixture
def worker(pipes: None) -> Worker:
    """One that knows "fast", and has something under way in one of its processes."""
    worker = Worker()
    worker.add("fast")
    worker.turn()
    worker.told.pop()((1, None, JOB_SECONDS / 10))
    worker.add("slow")
    worker.turn()
    assert worker.jobs == [["fast"], ["slow"]]
    return worker


def test_cheap_events_wait_for_more_but_not_for_slow_ones(worker: Worker) -> None:
    worker.add("slow")
    worker.turn()
    worker.add("fast")
    worker.turn()
    assert worker.jobs[2:] == [["slow"]]
    assert worker.turn() == [MAX_DELAY]
    assert worker.jobs[3:] == [["fast"]]


def test_fair_share_of_deliveries_does_not_wait(worker: Worker) -> None:
    """Otherwise a process is idle while the broker waits for acks."""
    worker.add("fast")
    worker.turn()
    assert worker.jobs[2:] == [["fast"]]


def test_expensive_events_do_not_wait(worker: Worker) -> None:
    for _ in range(20):
        worker.add("fast")
    worker.turn()
    assert len(worker.jobs) > 2


def test_no_chunk_has_more_than_it_may(worker: Worker) -> None:
    worker.told.pop()((1, None, JOB_SECONDS / 1000))
    for _ in range(20 * MAX_EVENTS):
        worker.add("slow")
    worker.turn()
    assert {len(jobs) for jobs in worker.jobs[2:]} <= set(range(1, MAX_EVENTS + 1))


def test_after_a_lost_connection_nothing_is_under_way(worker: Worker) -> None:
    """Of a job that no process had begun the pool says nothing any more."""
    worker.chunks.begin()
    worker.add("fast")
    assert worker.turn() == [0]
    assert worker.jobs[2:] == [["fast"]]


class Process:
    """Run a chunk as a pool process does, one event at a time."""

    def __init__(self, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began: list[str] = []
        self.between: dict[int, Callable[[], object]] = {}
        self._worker = worker

        def trace(name: str) -> Verdict:
            self.began.append(name)
            self.between.get(len(self.began), bool)()
            return HANDLED

        monkeypatch.setattr(chunks, "trace_event", trace)

    def run(self, job: int = -1) -> int:
        """Run a job, report it to the worker, and return the number of handled events."""
        worker = self._worker
        jobs: list[Any] = [(name,) for name in worker.jobs[job]]
        found = chunks.run(worker.numbers[job], worker.tokens[job], worker.marks[job], jobs)
        worker.told[job](found)
        return found[0]


@pytest.fixture
def process(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> Process:
    """The worker has given it a chunk, and has heard that it began."""
    worker.told.pop()((1, None, JOB_SECONDS / MAX_EVENTS))
    for told in (
        worker.jobs, worker.numbers, worker.tokens, worker.marks, worker.told, worker.accepted
    ):  # fmt: skip
        told.clear()
    for _ in range(8):
        worker.add("slow")
    worker.turn()
    assert [len(jobs) for jobs in worker.jobs] == [8]
    worker.accepted[-1](123, 1.0)
    return Process(worker, monkeypatch)


def late(clock: Clock, worker: Worker) -> None:
    """Let the worker look at what its processes do, and again after some time."""
    worker.chunks._check_reports()
    worker.timers = [timer for timer in worker.timers if timer[0] != REPORT_INTERVAL]
    clock.now += 2 * SLOW_RUN
    worker.chunks._check_reports()


def test_a_chunk_is_run_to_its_end(worker: Worker, process: Process) -> None:
    assert process.run() == 8
    assert worker.handled == ["fast", *["slow"] * 9]
    assert not worker.turn()


def test_a_stopping_pool_keeps_the_result_of_a_chunk_that_it_did_not_see_begin(
    worker: Worker, process: Process
) -> None:
    """Reports and results come through two pipes: the first event may be settled before that."""
    (chunk,) = worker.chunks._chunks.values()
    chunk.accepted = None
    known: list[object] = []

    def look() -> None:
        worker.chunks.read_reports()
        known.append(chunk.requests[chunk.settled].pool_result)

    process.between = dict.fromkeys(range(2, 9), look)
    process.run()
    assert known == [chunk.job] * 7


def test_events_behind_a_slow_one_move_to_another_process(
    worker: Worker, process: Process, clock: Clock
) -> None:
    process.between[3] = lambda: late(clock, worker)
    assert process.run(0) == 3
    worker.turn()
    assert [len(jobs) for jobs in worker.jobs] == [8, 5]
    assert process.run(1) == 5
    assert len(process.began) == 8
    assert len(worker.handled) == 2 + 8


def test_a_process_with_one_event_is_not_looked_at(pipes: None) -> None:
    """It may take hours, and its end is still reported."""
    worker = Worker()
    worker.add("unknown")
    worker.turn()
    assert worker.jobs == [["unknown"]]
    worker.accepted[-1](123, 1.0)
    worker.turn()
    assert REPORT_INTERVAL not in [after for after, _ in worker.timers]


def test_slow_last_event_stays(worker: Worker, process: Process, clock: Clock) -> None:
    assert REPORT_INTERVAL in [after for after, _ in worker.timers]
    worker.timers.clear()
    late(clock, worker)
    assert REPORT_INTERVAL not in [after for after, _ in worker.timers]


def test_events_behind_a_fast_one_stay(worker: Worker, process: Process) -> None:
    process.between[3] = worker.chunks._check_reports
    assert process.run() == 8


def connected_anew(worker: Worker) -> None:
    """Have a chunk of a new connection where the one of the old connection has its tokens."""
    for chunk in worker.chunks._chunks.values():
        for request in chunk.requests:
            request.delivery.message.channel = None
    worker.chunks.begin()
    for _ in range(8):
        worker.add("slow")
    worker.turn()
    assert [len(jobs) for jobs in worker.jobs] == [8, 8]
    assert worker.tokens[0] == worker.tokens[1]


def test_process_of_a_closed_connection_starts_nothing(worker: Worker, process: Process) -> None:
    """The broker delivers it again, and its tokens are reassigned."""
    process.between[3] = lambda: connected_anew(worker)
    assert process.run(0) == 3
    assert len(process.began) == 3
    assert process.run(1) == 7
    worker.turn()
    assert [len(jobs) for jobs in worker.jobs] == [8, 8, 1]


def test_late_process_exit_takes_no_tokens(worker: Worker, process: Process, clock: Clock) -> None:
    """The pool reports it ten seconds later."""
    connected_anew(worker)
    worker.failed[0](None)
    process.between[3] = lambda: late(clock, worker)
    assert process.run(1) == 3
    worker.turn()
    assert [len(jobs) for jobs in worker.jobs] == [8, 8, 5]


def test_tokens_of_an_ended_chunk_are_released(worker: Worker, process: Process) -> None:
    chunk_pipes.put_tokens(0, 5, 1)
    chunk_pipes.put_tokens(0, 2, 1)
    assert chunk_pipes.take_tokens(0, MAX_EVENTS) == bytes([1, 1])
    assert chunk_pipes.take_tokens(0, MAX_EVENTS) == b""


def test_without_token_slots_events_run_alone(worker: Worker) -> None:
    worker.told.pop()((1, None, JOB_SECONDS / MAX_EVENTS))
    worker.chunks._free_pipes.clear()
    for _ in range(3):
        worker.add("slow")
    worker.turn()
    assert worker.jobs[2] == ["slow"]
    assert worker.tokens[2] == NO_TOKENS


def test_process_death_concerns_only_the_running_event(
    worker: Worker, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events before it have ended; events behind it have not begun."""

    def killed() -> None:
        raise KeyboardInterrupt

    process.between[4] = killed
    with pytest.raises(KeyboardInterrupt):
        process.run(0)
    before = len(worker.handled)
    worker.failed[-1](None)
    assert len(worker.handled) - before == 3
    assert worker.lost == ["slow"]
    worker.turn()
    assert worker.jobs[1:] == [["slow"]] * 4


def test_after_a_death_events_run_alone_until_one_succeeds(
    worker: Worker, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = iter([HANDLED, Verdict(kind="retry"), Verdict(kind="retry")])
    monkeypatch.setattr(chunks, "trace_event", lambda _name: next(verdicts, HANDLED))
    busy = Busy(worker)
    handled = []
    for job in range(4):
        handled.append(process.run(job))
        worker.turn()
        busy.free()
    assert handled == [1, 0, 1, 4]
    assert [len(jobs) for jobs in worker.jobs] == [8, 1, 1, 4]


def test_orphaned_process_starts_nothing(
    worker: Worker, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not 1: in a container that is the parent of the tests, which stands for the worker.
    process.between[2] = lambda: monkeypatch.setattr(os, "getppid", lambda: -1)
    assert process.run(0) == 2


def test_a_worker_that_stops_lets_nothing_begin(worker: Worker, process: Process) -> None:
    """Events behind the running one return to the broker and to no other process."""
    process.between[2] = worker.chunks.stop
    assert process.run(0) == 2
    worker.turn()
    assert len(worker.jobs) == 1


def test_stopping_worker_settles_finished_events(worker: Worker, process: Process) -> None:
    """The running event may take longer than the shutdown."""
    before = len(worker.handled)
    seen: list[int] = []

    def stop() -> None:
        worker.chunks.stop()
        seen.append(len(worker.handled) - before)

    process.between[6] = stop
    assert process.run(0) == 6
    assert seen == [5]


class Busy:
    """A worker whose two processes are at ordinary tasks, and others wait for them."""

    def __init__(self, worker: Worker) -> None:
        self.served: list[str] = []
        self._worker = worker
        worker.slots.value = 0

    def ordinary(self) -> None:
        self._worker.slots.acquire(self.served.append, "ordinary")

    def free(self) -> None:
        """Let one end."""
        before = len(self._worker.jobs)
        self._worker.slots.release()
        self.served += ["events"] * (len(self._worker.jobs) - before)


def test_each_event_is_served_in_its_turn(pipes: None) -> None:
    """However many ordinary tasks wait, behind it and before it."""
    worker = Worker()
    busy = Busy(worker)
    for _ in range(5):
        worker.add("unknown")
        worker.turn()
        busy.ordinary()
    for _ in range(10):
        busy.free()
    assert busy.served == ["events", "ordinary"] * 5


def test_chunked_events_take_no_extra_turn(
    worker: Worker, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine must not make the running chunk a slow one.
    monkeypatch.setattr(chunks, "SLOW_RUN", 3600)
    busy = Busy(worker)
    for _ in range(400):
        worker.add("slow")
    worker.turn()
    busy.ordinary()
    jobs = 0
    while "ordinary" not in busy.served:
        busy.free()
        jobs += 1
    # Half of what waits at a time, and no more than a chunk can have.
    assert busy.served == ["events"] * (jobs - 1) + ["ordinary"]
    assert sum(map(len, worker.jobs[1:])) == 400
    assert jobs - 1 == len(worker.jobs) - 1
    assert worker.slots.value == 0
    busy.free()
    assert worker.slots.value == 1


@pytest.mark.parametrize("others", [True, False])
def test_small_chunk_keeps_its_turn(worker: Worker, process: Process, others: bool) -> None:
    """It waits for more only if no ordinary task needs the process."""
    busy = Busy(worker)
    for _ in range(20):
        worker.add("slow")
    worker.turn()
    if others:
        busy.ordinary()
    busy.free()
    busy.free()
    assert [len(jobs) for jobs in worker.jobs[1:]] == ([16, 4] if others else [16])
    for _ in range(3):  # soon, after 10 ms, and after as long again
        worker.turn()
    assert [len(jobs) for jobs in worker.jobs[1:]] == [16, 4]


def test_slots_of_a_closed_connection_are_released(worker: Worker, process: Process) -> None:
    busy = Busy(worker)
    worker.add("slow")
    worker.add("slow")
    worker.turn()
    worker.chunks.begin()
    busy.ordinary()
    busy.free()
    assert busy.served == ["ordinary"]
    worker.add("unknown")
    worker.turn()
    busy.free()
    assert worker.jobs[-1] == ["unknown"]


def test_after_a_pool_that_refuses_a_job_the_rest_is_handed_out(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled: list[Any] = []
    monkeypatch.setattr(state, "task_ready", lambda request: settled.append(request.name))
    worker.told.pop()((1, None, JOB_SECONDS / MAX_EVENTS))
    settle = SimpleNamespace(settle=lambda *_: None)
    worker.refuse = True
    for _ in range(20):
        worker.add("slow")
    for request in worker.chunks._pending:
        request.settler = settle  # type: ignore[assignment]
    worker.chunks._request_scheduled = False
    worker.chunks._request_processes()
    assert len(settled) in range(1, MAX_EVENTS + 1)
    while worker.timers:
        worker.turn()
        while worker.told:
            worker.told.pop()((len(worker.jobs[-1]), None, JOB_SECONDS / MAX_EVENTS))
    assert len(settled) + sum(map(len, worker.jobs[2:])) == 20


def test_timers_of_a_pool_that_shuts_down_do_nothing(worker: Worker, process: Process) -> None:
    """Celery fires them in another thread, beside the results that the main one reads."""
    looked: list[int] = []
    worker.chunks.read_reports = lambda: looked.append(1)  # type: ignore[method-assign]
    thread = threading.Thread(target=worker.chunks._check_reports)
    thread.start()
    thread.join()
    assert not looked


@pytest.mark.parametrize("free", range(6))
def test_without_descriptors_there_are_no_chunks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, free: int
) -> None:
    """The pool, which comes next, has all that there were."""
    monkeypatch.setattr(chunk_pipes, "_reports", (-1, -1))
    monkeypatch.setattr(chunk_pipes, "tokens", [])
    opened: list[int] = []
    real = os.pipe

    def pipe() -> tuple[int, int]:
        if len(opened) == 2 * free:
            raise OSError(errno.EMFILE, "Too many open files")
        opened.extend(real())
        return opened[-2], opened[-1]

    monkeypatch.setattr(os, "pipe", pipe)
    chunk_pipes.open_pipes(4)
    assert not chunk_pipes.tokens
    assert "Too many open files" in caplog.text
    for descriptor in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_pipes_take_a_part_of_the_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_pipes, "_reports", (-1, -1))
    monkeypatch.setattr(chunk_pipes, "tokens", [])
    monkeypatch.setattr(os, "sysconf", {"SC_OPEN_MAX": 1024}.__getitem__)
    chunk_pipes.open_pipes(260)
    try:
        assert 2 * len(chunk_pipes.tokens) == 1024 // chunk_pipes.DESCRIPTORS_SHARE
    finally:
        chunk_pipes._close_pipes()
