"""When events are handed to the pool; what becomes of them there is in the acceptance tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from django_amqp_events.worker import chunks
from django_amqp_events.worker.chunks import JOB, PUT_OFF, Chunks


class Worker:
    """A consumer whose pool has two processes, and takes jobs without running them."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Any]] = []
        self.jobs: list[list[str]] = []
        self.told: list[Any] = []
        self.numbers: list[int] = []
        self.tokens: list[int] = []
        self.consumer = SimpleNamespace(
            timer=SimpleNamespace(call_after=lambda after, call: self.timers.append((after, call))),
            pool=SimpleNamespace(num_processes=2, apply_async=self._take),
            controller=SimpleNamespace(
                _quick_acquire=lambda call: call(), _quick_release=lambda: None
            ),
        )
        self.chunks = Chunks(self.consumer)
        self.chunks.begin()

    def _take(self, _run: Any, args: tuple[int, int, list[str]], callback: Any, **_: Any) -> Any:
        number, tokens, jobs = args
        self.numbers.append(number)
        self.tokens.append(tokens)
        self.jobs.append(jobs)
        self.told.append(callback)
        return SimpleNamespace  # whatever can be referred to weakly

    def add(self, name: str) -> None:
        self.chunks.add(
            SimpleNamespace(  # type: ignore[arg-type]
                name=name,
                id=name,
                job=name,
                delivery=SimpleNamespace(lost=False),
                revoked=lambda: False,
                on_success=lambda _verdict: None,
            )
        )

    def turn(self) -> list[float]:
        """Fire the timers that are set; return after how many seconds each was wanted."""
        due, self.timers = self.timers, []
        for _, call in due:
            call()
        return [after for after, _ in due]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """One that knows "fast", and has something under way in one of its processes."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    monkeypatch.setattr(chunks, "_pipe", (reading, writing))
    worker = Worker()
    worker.add("fast")
    worker.turn()
    worker.told.pop()((1, None, JOB / 10))
    worker.add("slow")
    worker.turn()
    assert worker.jobs == [["fast"], ["slow"]]
    yield worker
    os.close(reading)
    os.close(writing)


def test_what_takes_less_than_a_job_waits_for_more_but_not_for_what_is_slow(worker: Worker) -> None:
    worker.add("fast")
    worker.turn()
    assert len(worker.jobs) == 2
    assert worker.turn() == [PUT_OFF]
    assert worker.jobs[2:] == [["fast"]]


def test_what_is_worth_a_job_does_not_wait(worker: Worker) -> None:
    for _ in range(20):
        worker.add("fast")
    worker.turn()
    assert len(worker.jobs) > 2


def test_after_a_lost_connection_nothing_is_under_way(worker: Worker) -> None:
    """Of a job that no process had begun the pool says nothing any more."""
    worker.chunks.begin()
    worker.add("fast")
    assert worker.turn() == [0]
    assert worker.jobs[2:] == [["fast"]]
