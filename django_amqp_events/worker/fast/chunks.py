"""Give a pool process several events in one job, since a job costs more than a short handler.

The process runs them one after another. It takes a token before each but the first, reports each
handled event, and ends the chunk at the first that was not handled. So the worker knows whether an
event is settled, running or not begun. If the process ends, the running event is settled as lost.
The events that have not begun go to another process, then and also when a run takes long: the
worker takes the remaining tokens. An event has a job of its own if it was delivered before, is a
retry or replay, has a time limit, or if its handler takes longer than a job costs.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any, Final

from celery.concurrency.prefork import TaskPool

from ..billiard_internals import ExceptionInfo, forks
from ..celery_internals import state, waiting_for_a_process
from ..request import EventRequest, Job
from ..tracing import trace_event
from ..verdict import HANDLED, REQUEUE, Verdict
from . import chunk_pipes
from .chunk_pipes import MAX_EVENTS, NO_TOKENS, put_tokens, take_tokens

logger = logging.getLogger(__name__)

#: Longest time in seconds that the events of a chunk may take together, by their averages.
MAX_SECONDS: Final = 0.05
#: Approximate cost of one pool job, in seconds. While a process is busy, events that take less
#: together wait for more.
JOB_SECONDS: Final = 0.001
#: Longest wait in seconds; twice that if other jobs are submitted meanwhile.
MAX_DELAY: Final = 0.01
#: Longest average run in seconds of a handler whose events share a chunk.
MAX_AVERAGE: Final = 0.01
#: Run in seconds after which the events behind it go to another process.
SLOW_RUN: Final = 0.05
#: Seconds between two reads of the reports; most chunks end before the first.
REPORT_INTERVAL: Final = 0.02
#: Weight of the last run in the average.
AVERAGE_WEIGHT: Final = 0.2


def run(
    number: int, pipe: int, token: int, jobs: Sequence[Job]
) -> tuple[int, Verdict | ExceptionInfo | None, float]:
    """Run the events of a chunk in a pool process.

    Args:
        number: of the chunk, for its reports.
        pipe: index of the pipe with its tokens.
        token: value of its tokens. A different one belongs to a later connection, on which
            RabbitMQ has delivered the events of this chunk again.

    Returns:
        the number of handled events, the verdict of the next one if it was not handled, and the
        seconds of the last run.
    """
    seconds, last = 0.0, len(jobs) - 1
    for index, job in enumerate(jobs):
        # Without the main process no event could be acked.
        if index and (
            os.getppid() != chunk_pipes.main_process or take_tokens(pipe, 1) != bytes([token])
        ):
            return index, None, seconds
        began = time.perf_counter()
        verdict = trace_event(*job)
        seconds = time.perf_counter() - began
        if verdict is not HANDLED:
            return index, verdict, seconds
        if seconds > SLOW_RUN:
            return index + 1, None, seconds
        if index != last:
            chunk_pipes.send_report(number, index, seconds)
    return len(jobs), None, seconds


class Chunk:
    """Events that were submitted to the pool as one job.

    Attributes:
        settled, begun: numbers of events that have a verdict, and that are known to have begun.
        since: monotonic time since which the running event is known to run.
        accepted: process id and time of the first run.
    """

    __slots__ = ("accepted", "begun", "job", "pipe", "requests", "settled", "since")

    def __init__(self, requests: list[EventRequest]) -> None:
        self.requests = requests
        self.pipe = NO_TOKENS
        self.settled = self.begun = 0
        self.since: float | None = None
        self.accepted: tuple[int, float] | None = None
        self.job: Any = None

    @property
    def left(self) -> int:
        """Number of events without a verdict."""
        return len(self.requests) - self.settled

    @property
    def needs_reports(self) -> bool:
        """Whether only reports tell which event runs."""
        return self.left > 1 or (self.left == 1 and self.begun < len(self.requests))

    def begin(self, index: int, since: float | None = None) -> None:
        """Record that the event at *index* has begun."""
        self.begun = max(self.begun, self.settled)
        while self.accepted is not None and self.begun <= index < len(self.requests):
            request = self.requests[self.begun]
            self.begun += 1
            # Remote control ends the job of this event only.
            request.pool_result = self.job
            self.since = time.monotonic()
            request.on_accepted(self.accepted[0], since or self.since)


class Chunks:
    """Submit fresh events to a prefork pool in chunks; used in the worker's main thread.

    Attributes:
        submitted: numbers of pool jobs and of events in them.
    """

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self._worker = worker = consumer.controller
        # A semaphore, which ordinary tasks acquire as well.
        self._processes_free = worker.semaphore
        self._pending: deque[EventRequest] = deque()
        self._numbers = count(1)
        self._chunks: dict[int, Chunk] = {}
        self._reported: deque[tuple[int, int, float]] = deque()
        self._free_pipes: list[int] = []
        self._request_scheduled = self._delayed = self._overdue = self._reports_scheduled = False
        self._connections = 0
        # Processes that were requested, and how many of them are no longer needed.
        self._requested = self._surplus = 0
        # Processes to release, and whether that is in progress.
        self._to_release, self._releasing = 0, False
        self._average_seconds: dict[str, float] = {}
        self._thread = 0
        self._stopped = True
        self.submitted = {"jobs": 0, "events": 0}

    @staticmethod
    def problem(consumer: Any) -> str:
        """Return why this worker's pool cannot run chunks, ``""`` if it can."""
        worker = consumer.controller
        if not isinstance(consumer.pool, TaskPool) or not forks(worker):
            return "the pool does not fork processes"
        if not chunk_pipes.tokens or consumer.hub is None:
            return "the worker has no pipes or no event loop"
        if worker.max_tasks_per_child or worker.max_memory_per_child:
            return "the pool replaces its processes"
        if worker.time_limit or worker.soft_time_limit:
            return "the worker has a time limit"
        if not worker.pool_putlocks or consumer.on_task_request != worker.process_task:
            return "tasks do not wait for a free process"
        return ""

    def begin(self) -> None:
        """Start at first, and after a lost connection, whose deliveries are void."""
        self._thread = threading.get_ident()
        self.stop()
        self._stopped = False
        self._pending.clear()
        self._request_scheduled = self._delayed = self._overdue = self._reports_scheduled = False
        self._connections += 1
        self._requested = self._surplus = 0
        # Their processes still run them, but the deliveries are lost. Celery's pool reports
        # nothing of a job that no process had begun (AsynPool.flush).
        self._chunks.clear()
        # A process that still runs one of these chunks finds no token of its own.
        self._free_pipes = list(range(len(chunk_pipes.tokens)))

    @property
    def _token(self) -> int:
        return self._connections % 256

    @property
    def _processes(self) -> int:
        number: int = self._consumer.pool.num_processes
        return max(1, number)

    def stop(self) -> None:
        """Begin no further events, which RabbitMQ delivers again, and settle those that ended.

        A process reports an event before it takes the token of the next one.
        """
        self._stopped = True
        for pipe in range(len(chunk_pipes.tokens)):
            take_tokens(pipe, MAX_EVENTS)
        if self._chunks:
            self.read_reports()

    def is_running(self, request: EventRequest) -> bool:
        """Return True if a process runs this event and no other waits behind it."""
        for chunk in self._chunks.values():
            if request in chunk.requests:
                self._split(chunk)
                return chunk.left == 1 and chunk.requests[chunk.settled] is request
        return False

    @property
    def _in_other_thread(self) -> bool:
        """Whether Celery runs this timer in another thread, as it does while a pool stops."""
        return threading.get_ident() != self._thread

    def add(self, request: EventRequest) -> None:
        self._pending.append(request)
        self._schedule_request()

    def _schedule_request(self) -> None:
        if not self._request_scheduled:
            self._request_scheduled = True
            # Not call_soon, which may run after a poll of a second. A timer runs between a poll
            # and the writing to the pool (on_tick).
            self._consumer.timer.call_after(0, self._request_processes)

    def _request_processes(self) -> None:
        """Request free processes if the pending events are worth a job.

        Each event requests one, as each ordinary task does; otherwise those tasks would be
        preferred. The requests of events that shared a chunk are surplus.
        """
        self._request_scheduled = False
        if self._stopped or self._in_other_thread:
            return
        while len(self._pending) > self._requested - self._surplus:
            if self._should_wait():
                if not self._delayed:
                    self._delayed = True
                    # Not until a chunk ends, since it may be slow.
                    again = partial(self._end_delay, self.submitted["jobs"])
                    self._consumer.timer.call_after(MAX_DELAY, again)
                return
            self._requested += 1
            start = partial(self._start, self._connections)
            self._processes_free.acquire(start)

    def _release(self) -> None:
        """Give a free process to the next request; the loop replaces a deep recursion."""
        self._to_release += 1
        if self._releasing:
            return
        self._releasing = True
        try:
            while self._to_release:
                self._to_release -= 1
                self._processes_free.release()
        finally:
            self._releasing = False

    def _end_delay(self, jobs: int) -> None:
        self._delayed = False
        self._overdue = jobs == self.submitted["jobs"]
        self._request_processes()

    def _should_wait(self) -> bool:
        """Return True if the pending events are not worth a job yet."""
        if self._overdue or not self._chunks:
            return False
        running = sum(chunk.left for chunk in self._chunks.values())
        if len(self._pending) * self._processes >= len(self._pending) + running:
            return False  # a fair share of the events that the prefetch count allows
        expected = 0.0
        for request in self._pending:
            expected += self._average_seconds.get(request.name, JOB_SECONDS)
            if expected >= JOB_SECONDS:
                return False
        return True

    def _start(self, connection: int) -> None:
        """Submit a share of the pending events to a free process, if they are worth a job."""
        if connection != self._connections:
            self._release()
            return
        self._requested -= 1
        if self._surplus:
            self._surplus -= 1
            self._release()
            return
        task_waits = waiting_for_a_process(self._worker) > self._requested
        if self._stopped or (self._should_wait() and not task_waits):
            self._release()
            self._schedule_request()
            return
        self._overdue = False
        waited = len(self._pending)
        requests = self._next_events()
        taken = waited - len(self._pending)
        self._surplus = min(self._surplus + max(0, taken - 1), self._requested)
        if not requests:
            self._release()
            return
        number, chunk = next(self._numbers), Chunk(requests)
        self._chunks[number] = chunk
        try:
            if len(requests) > 1:
                chunk.pipe = self._free_pipes.pop()
                put_tokens(chunk.pipe, len(requests) - 1, self._token)
            job = self._consumer.pool.apply_async(
                run,
                args=(number, chunk.pipe, self._token, [request.job for request in requests]),
                accept_callback=partial(self._on_accepted, chunk),
                callback=partial(self._on_returned, number, chunk),
                error_callback=partial(self._on_lost, number, chunk),
                correlation_id=requests[0].id,
            )
        except Exception:
            logger.exception(
                "%d events could not be submitted to the pool; they are requeued", len(requests)
            )
            self._end(number)
            for request in requests:
                state.task_ready(request)
                request.settler.settle(request.delivery, REQUEUE)
            self._release()
            self._schedule_request()
            return
        if job is None:
            self._end(number)
            return  # the pool is closed; RabbitMQ delivers them again
        chunk.job = job
        self._keep_result(chunk)
        self._schedule_reports()
        self.submitted["jobs"] += 1
        self.submitted["events"] += len(requests)

    def _next_events(self) -> list[EventRequest]:
        """Return the next events that may share a chunk."""
        share = -(-len(self._pending) // self._processes)
        most = MAX_EVENTS if self._free_pipes else 1
        taken: list[EventRequest] = []
        expected = 0.0
        while (
            self._pending and len(taken) < most and (len(taken) < share or expected < JOB_SECONDS)
        ):
            request = self._pending[0]
            if request.delivery.begun or request.delivery.lost or request.revoked():
                self._pending.popleft()
                continue
            seconds = self._average_seconds.get(request.name)
            alone = request.terminates_when_accepted or seconds is None or seconds > MAX_AVERAGE
            expected += seconds or 0.0
            if taken and (alone or expected > MAX_SECONDS):
                break
            self._pending.popleft()
            if request.delivery.begin():
                taken.append(request)
            if alone:
                break
        return taken

    # -- from the pool --------------------------------------------------------------------

    def _schedule_reports(self) -> None:
        """Schedule a read of the reports, unless each process has a single event."""
        if not self._reports_scheduled and any(
            chunk.needs_reports for chunk in self._chunks.values()
        ):
            self._reports_scheduled = True
            self._consumer.timer.call_after(REPORT_INTERVAL, self._check_reports)

    def _check_reports(self) -> None:
        self._reports_scheduled = False
        if self._in_other_thread:
            return
        try:
            self.read_reports()
            now = time.monotonic()
            for chunk in tuple(self._chunks.values()):
                if chunk.since is not None and now > chunk.since + SLOW_RUN:
                    self._split(chunk)
        finally:
            self._schedule_reports()

    def _split(self, chunk: Chunk) -> None:
        """Submit the events that have not begun to other processes, and record which one runs."""
        self._reclaim(chunk)
        self.read_reports()
        if chunk.left == 1:
            chunk.begin(chunk.settled)

    def _reclaim(self, chunk: Chunk) -> None:
        """Make the events pending again that have not begun."""
        behind = len(take_tokens(chunk.pipe, MAX_EVENTS)) if chunk.pipe != NO_TOKENS else 0
        if behind:
            left = chunk.requests[-behind:]
            del chunk.requests[-behind:]
            self._put_first(left)

    def read_reports(self) -> None:
        """Settle the events that pool processes have handled so far."""
        self._reported.extend(chunk_pipes.read_reports())
        # An error with one report must not lose the others.
        while self._reported:
            number, index, seconds = self._reported.popleft()
            chunk = self._chunks.get(number)
            if chunk is not None:
                self._handled(chunk, index + 1, seconds)
                chunk.since = time.monotonic()

    def _on_accepted(self, chunk: Chunk, pid: int, since: float) -> None:
        chunk.accepted = (pid, since)
        chunk.begin(chunk.settled, since)

    def _on_returned(
        self, number: int, chunk: Chunk, result: tuple[int, Verdict | ExceptionInfo | None, float]
    ) -> None:
        """Settle a chunk after its last event or one that was not handled."""
        handled, verdict, seconds = result
        self.read_reports()
        self._end(number)
        self._handled(chunk, handled, seconds)
        if verdict is not None:
            chunk.begin(handled)
            chunk.settled = handled + 1
            self._forget_duration(chunk.requests[handled])
            chunk.requests[handled].on_success(verdict)
        self._put_first(chunk.requests[chunk.settled :])

    def _on_lost(self, number: int, chunk: Chunk, exc_info: ExceptionInfo) -> None:
        """Settle a chunk whose process was lost; the first event without a report was running."""
        if number in self._chunks:
            self._reclaim(chunk)
        self.read_reports()
        self._end(number)
        if chunk.settled < len(chunk.requests):
            lost = chunk.requests[chunk.settled]
            chunk.settled += 1
            self._forget_duration(lost)
            lost.on_failure(exc_info)
        self._put_first(chunk.requests[chunk.settled :])

    def _forget_duration(self, failed: EventRequest) -> None:
        """Run the handler's next event alone.

        A failure ends a chunk, so while a service that the handler needs is down, the events
        behind it would be submitted several times.
        """
        self._average_seconds.pop(failed.name, None)

    def _handled(self, chunk: Chunk, until: int, seconds: float) -> None:
        while chunk.settled < until:
            request = chunk.requests[chunk.settled]
            # The process already runs another event.
            request.keep_running()
            chunk.begin(chunk.settled)
            chunk.settled += 1
            known = self._average_seconds.get(request.name)
            self._average_seconds[request.name] = (
                seconds if known is None else known + AVERAGE_WEIGHT * (seconds - known)
            )
            request.on_success(HANDLED)
        if chunk.accepted is None and chunk.left:
            # The report came before the pool knew that a process has begun the job.
            self._keep_result(chunk)

    @staticmethod
    def _keep_result(chunk: Chunk) -> None:
        """Have the first open event refer to the job, so that a stopping pool keeps its result."""
        chunk.requests[chunk.settled].pool_result = chunk.job

    def _end(self, number: int) -> None:
        chunk = self._chunks.pop(number, None)
        if chunk is not None and chunk.pipe != NO_TOKENS:
            self._free_pipes.append(chunk.pipe)

    def _put_first(self, requests: Sequence[EventRequest]) -> None:
        """Make events pending, before all others."""
        for request in requests:
            request.delivery.wait_again()
        self._pending.extendleft(reversed(requests))
        if self._pending:
            self._schedule_request()
