"""Celery's consumer with a pool whose jobs a test ends: real state and semaphore, no processes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

from billiard.einfo import ExceptionInfo
from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery.concurrency.prefork import TaskPool
from kombu.asynchronous.semaphore import LaxBoundedSemaphore

from django_amqp_events.worker.delivery import Item
from django_amqp_events.worker.pool_job import JobOptions


@dataclass
class PoolJob:
    """What a worker has given to the pool."""

    options: JobOptions
    items: Sequence[Item]
    callbacks: dict[str, Any]
    soft_timeout: float | None
    timeout: float | None


class Pool(TaskPool):
    """A prefork pool whose jobs end when the test says so."""

    def __init__(self, semaphore: LaxBoundedSemaphore, processes: int) -> None:
        self.semaphore, self.processes = semaphore, processes
        self.jobs: list[PoolJob] = []

    @property
    def num_processes(self) -> int:
        return self.processes

    def apply_async(self, target: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        names = ("accept_callback", "callback", "error_callback", "timeout_callback")
        job = PoolJob(
            args[0], args[1], {name: options[name] for name in names},
            options["soft_timeout"], options["timeout"],
        )  # fmt: skip
        self.jobs.append(job)
        return job

    def accept(self, job: PoolJob) -> None:
        job.callbacks["accept_callback"](1, 0.0)

    def end(self, job: PoolJob, outcomes: Any) -> None:
        """Return a job's outcomes, in billiard's order: the process is free first."""
        self.jobs.remove(job)
        self.semaphore.release()
        job.callbacks["callback"](outcomes)

    def lose(self, job: PoolJob, exceeded: float | None = None) -> None:
        """End a job's process, by a hard time limit or otherwise."""
        self.jobs.remove(job)
        try:
            raise TimeLimitExceeded(exceeded) if exceeded else WorkerLostError("signal 9")
        except (TimeLimitExceeded, WorkerLostError):
            job.callbacks["error_callback"](ExceptionInfo())
        if exceeded:
            job.callbacks["timeout_callback"](False, exceeded)
        self.semaphore.release()


@dataclass
class Timer:
    """Celery's timer, whose time the test moves."""

    now: float = 0.0
    _entries: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = field(
        default_factory=list
    )
    _numbers: Any = field(default_factory=count)

    def call_after(self, seconds: float, call: Callable[..., Any], args: Any = ()) -> None:
        heapq.heappush(self._entries, (self.now + seconds, next(self._numbers), call, args))

    def advance(self, seconds: float) -> None:
        self.now += seconds
        while self._entries and self._entries[0][0] <= self.now:
            _, _, call, args = heapq.heappop(self._entries)
            call(*args)


def consumer(processes: int, **controller: Any) -> Any:
    """Return a consumer with a pool of so many processes."""
    semaphore = LaxBoundedSemaphore(processes)
    usual = {
        "time_limit": None, "soft_time_limit": None, "max_tasks_per_child": None,
        "prefetch_multiplier": 4,
    }  # fmt: skip
    return SimpleNamespace(
        hostname="worker@here",
        pool=Pool(semaphore, processes),
        controller=SimpleNamespace(semaphore=semaphore, **{**usual, **controller}),
        timer=Timer(),
        event_dispatcher=None,
        on_task_message=set(),
        disable_rate_limits=False,
    )
