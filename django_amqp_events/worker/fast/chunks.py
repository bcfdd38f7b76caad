"""Several fresh events in one job of a pool process: a job costs more than a short handler.

The process runs them one after another. It takes a token before each but the first, and reports
each that was handled; the first one that was not ends the chunk. So it is known of each event
whether it is settled, runs, or has not begun. What ends the process concerns the one that runs;
what has not begun is handed out again, to another process also when a run takes long: the worker
takes the tokens that are left. What may hang, fail or kill goes alone: what was delivered before,
came back, has a time limit, or whose handler takes longer than a job does.

Tokens and reports go through pipes that the processes inherit. A read of a pipe gives a token to
one of those who ask for it, whatever ends the others, which no lock in shared memory does.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any, Final
from weakref import ref

from billiard.einfo import ExceptionInfo
from celery.concurrency.prefork import TaskPool
from celery.worker import state

from ..request import EventRequest, Job
from ..task import trace_event
from ..verdict import HANDLED, REQUEUE, Verdict

logger = logging.getLogger(__name__)

#: Events of one chunk at most, and seconds that they may take together by what is known.
MOST: Final = 16
BUDGET: Final = 0.05
#: Seconds that a job costs whoever hands it out, about: what takes less together waits for more,
#: while a process is at work.
JOB: Final = 0.001
#: Seconds that it waits for more at most, or twice that where others went meanwhile.
PUT_OFF: Final = 0.01
#: Seconds that a run of a handler takes on the average at most, for its events to be in chunks.
FAST: Final = 0.01
#: Seconds that a run takes before what stands behind it is handed to another process, at least.
SLOW: Final = 0.05
#: Seconds between looks at the reports of chunks under way: most end before the first.
LOOK: Final = 0.02
#: Weight of the last run in the average.
WEIGHT: Final = 0.2

#: Chunk, place in it, seconds: written at once, since it is shorter than PIPE_BUF.
_REPORT: Final = struct.Struct("=QHd")

#: Where the tokens of one event are: it needs none.
NOWHERE: Final = -1

Pipe = tuple[int, int]

#: Reading and writing end of the reports of this worker's pool; there is none yet.
_reports: Pipe = (-1, -1)
#: The same of the tokens, one for each chunk that can be under way at a time.
_tokens: list[Pipe] = []
#: The worker's main process.
_main = 0


def open_pipes(processes: int) -> None:
    """Make the pipes that the processes of the pool inherit; before there are any.

    Args:
        processes: of the pool, at most.
    """
    global _reports, _main  # noqa: PLW0603 - one process is one worker, and its children's all
    if _reports[0] < 0:
        _reports = os.pipe()
        os.set_blocking(_reports[0], False)
    _main = os.getpid()
    # A process is free again a moment before its chunk is over, or ten seconds if it was killed.
    while len(_tokens) < 2 * processes:
        pipe = os.pipe()
        os.set_blocking(pipe[0], False)
        _tokens.append(pipe)


def _take_tokens(place: int, number: int) -> bytes:
    """Take up to *number* tokens of a chunk, and return those that there were."""
    try:
        return os.read(_tokens[place][0], number)
    except BlockingIOError:
        return b""


def _put_tokens(place: int, number: int, mark: int) -> None:
    """Put the tokens of a chunk where none are left of those that have ended."""
    while _take_tokens(place, MOST):
        pass
    os.write(_tokens[place][1], bytes([mark] * number))


def run(
    number: int, tokens: int, mark: int, jobs: Sequence[Job]
) -> tuple[int, Verdict | ExceptionInfo | None, float]:
    """Run events in a pool process; what the pool calls.

    Args:
        number: of the chunk, for its reports.
        tokens: where those of the chunk are.
        mark: what they are. Others there are of a connection after this one, whose events the
            broker has delivered again.

    Returns:
        how many were handled, the verdict of the next one if it was none of these, and the seconds
        of the last run.
    """
    took, last = 0.0, len(jobs) - 1
    for place, job in enumerate(jobs):
        # Without the main process nobody would ack it.
        if place and (os.getppid() != _main or _take_tokens(tokens, 1) != bytes([mark])):
            return place, None, took
        began = time.perf_counter()
        verdict = trace_event(*job)
        took = time.perf_counter() - began
        if verdict is not HANDLED:
            return place, verdict, took
        if took > SLOW:
            return place + 1, None, took
        if place != last:
            os.write(_reports[1], _REPORT.pack(number, place, took))
    return len(jobs), None, took


class Chunk:
    """Events that a pool process has in hand.

    Attributes:
        tokens: where its tokens are.
        settled: how many of them have their verdict.
        running: how many the worker has noted as begun.
        since: when the one that runs was seen to begin at the latest, monotonic; ``None`` before
            the first.
    """

    __slots__ = ("accepted", "job", "requests", "running", "settled", "since", "tokens")

    def __init__(self, requests: list[EventRequest]) -> None:
        self.requests = requests
        self.tokens = NOWHERE
        self.settled = self.running = 0
        self.since: float | None = None
        self.accepted: tuple[int, float] | None = None
        self.job: Any = None

    @property
    def left(self) -> int:
        """How many of them have no verdict yet."""
        return len(self.requests) - self.settled

    @property
    def unclear(self) -> bool:
        """Whether it is not known of each which one runs, so that somebody has to look."""
        return self.left > 1 or (self.left == 1 and self.running < len(self.requests))

    def begin(self, place: int, since: float | None = None) -> None:
        """Note that the run of an event has begun, for those who look and those who end it."""
        self.running = max(self.running, self.settled)
        while self.accepted is not None and self.running <= place < len(self.requests):
            request = self.requests[self.running]
            self.running += 1
            # Ends this one: those behind it are nobody's yet.
            request._apply_result = ref(self.job)  # noqa: SLF001
            self.since = time.monotonic()
            request.on_accepted(self.accepted[0], since or self.since)


class Chunks:
    """Hands fresh events to the processes of a prefork pool; in the worker's main thread.

    Args:
        consumer: Celery's consumer, whose worker has the pool and its slots.

    Attributes:
        handed: jobs that were given to the pool, and the events in them.
    """

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self._worker = consumer.controller
        self._pending: deque[EventRequest] = deque()
        self._numbers = count(1)
        self._under_way: dict[int, Chunk] = {}
        self._reported: deque[tuple[int, int, float]] = deque()
        self._free: list[int] = []
        self._asked = self._put_off = self._overdue = self._looks = False
        self._connections = 0
        # Places in the queue for processes, and how many of them nobody needs any more.
        self._places = self._spare = 0
        # Processes that are given to the next in that queue, and whether somebody does that.
        self._slots, self._releasing = 0, False
        self._seconds: dict[str, float] = {}
        self._thread = 0
        self._over = True
        self.handed = {"jobs": 0, "events": 0}

    @staticmethod
    def possible(consumer: Any) -> bool:
        """Say whether this worker's pool can take chunks."""
        worker = consumer.controller
        return (
            bool(_tokens)
            and consumer.hub is not None
            and isinstance(consumer.pool, TaskPool)
            and worker.pool_start_method == "fork"
            and consumer.on_task_request == worker._process_task_sem  # noqa: SLF001
            and not any(
                (
                    worker.max_tasks_per_child,
                    worker.max_memory_per_child,
                    worker.time_limit,
                    worker.soft_time_limit,
                )
            )
        )

    def begin(self) -> None:
        """Start, perhaps again after a lost connection, whose deliveries nobody waits for."""
        self._thread = threading.get_ident()
        self.let_go()
        self._over = False
        self._pending.clear()
        self._asked = self._put_off = self._overdue = self._looks = False
        self._connections += 1
        self._places = self._spare = 0
        # What is under way ends in its process, and its verdicts come too late for a lost channel.
        # Of a job that no process had begun Celery's pool says nothing any more (AsynPool.flush).
        self._under_way.clear()
        # Whoever is still at one of these finds no token with its own mark.
        self._free = list(range(len(_tokens)))

    @property
    def _mark(self) -> int:
        return self._connections % 256

    @property
    def _processes(self) -> int:
        number: int = self._consumer.pool.num_processes
        return max(1, number)

    def let_go(self) -> None:
        """Let nothing begin any more that has not: the broker has it again.

        What has ended by now is settled: a process reports it before it takes the next token.
        """
        self._over = True
        for place in range(len(_tokens)):
            _take_tokens(place, MOST)
        if self._under_way:
            self.read_reports()

    def runs(self, request: EventRequest) -> bool:
        """Say whether its process runs this event, and has nothing behind it any more."""
        for chunk in self._under_way.values():
            if request in chunk.requests:
                self._make_clear(chunk)
                return chunk.left == 1 and chunk.requests[chunk.settled] is request
        return False

    @property
    def _elsewhere(self) -> bool:
        """Whether this is a timer of Celery's in another thread, as while a pool shuts down."""
        return threading.get_ident() != self._thread

    def takes(self, request: EventRequest) -> bool:
        """Say whether an event may be in a chunk with others."""
        return request.task.time_limit is None and request.task.soft_time_limit is None

    def add(self, request: EventRequest) -> None:
        """Hand an event to the pool, soon: with what else has come by then."""
        self._pending.append(request)
        self._soon()

    def _soon(self) -> None:
        if not self._asked:
            self._asked = True
            # By the timer: what is called soon may come after a poll of a second, and between
            # poll and writing to the pool (on_tick) there must be none.
            self._consumer.timer.call_after(0, self._ask)

    def _ask(self) -> None:
        """Wait for free processes, if what waits is worth a job by now.

        Each event has a place of its own in the queue for them, as ordinary tasks have, or these
        would be served first. The places of those that went along with others are not used.
        """
        self._asked = False
        if self._over or self._elsewhere:
            return
        while len(self._pending) > self._places - self._spare:
            if self._too_little():
                if not self._put_off:
                    self._put_off = True
                    # What is at work may be something slow: nobody waits for its end.
                    again = partial(self._put_off_over, self.handed["jobs"])
                    self._consumer.timer.call_after(PUT_OFF, again)
                return
            self._places += 1
            start = partial(self._start, self._connections)
            self._worker._quick_acquire(start)  # noqa: SLF001 - as Celery's own tasks do

    def _release(self) -> None:
        """Give a process to the next place in the queue; not deeper down for each of ours."""
        self._slots += 1
        if self._releasing:
            return
        self._releasing = True
        try:
            while self._slots:
                self._slots -= 1
                self._worker._quick_release()  # noqa: SLF001
        finally:
            self._releasing = False

    @property
    def _undisturbed(self) -> bool:
        """Whether nobody else waits for a process."""
        waiting = self._worker.semaphore._waiting  # noqa: SLF001 - it tells of them nowhere else
        return len(waiting) <= self._places

    def _put_off_over(self, jobs: int) -> None:
        self._put_off = False
        self._overdue = jobs == self.handed["jobs"]
        self._ask()

    def _too_little(self) -> bool:
        """Say whether what waits is not worth a job yet; the end of one under way asks again."""
        if self._overdue or not self._under_way:
            return False
        at_work = sum(chunk.left for chunk in self._under_way.values())
        if len(self._pending) * self._processes >= len(self._pending) + at_work:
            return False  # a fair share of all that the broker lets this worker have
        expected = 0.0
        for request in self._pending:
            expected += self._seconds.get(request.name, JOB)
            if expected >= JOB:
                return False
        return True

    def _start(self, connection: int) -> None:
        """Give a free process its share of what waits, if that is worth a job now."""
        if connection != self._connections:
            self._release()
            return
        self._places -= 1
        if self._spare:
            self._spare -= 1
            self._release()
            return
        if self._over or (self._too_little() and self._undisturbed):
            self._release()
            self._soon()
            return
        self._overdue = False
        waited = len(self._pending)
        requests = self._take()
        taken = waited - len(self._pending)
        self._spare = min(self._spare + max(0, taken - 1), self._places)
        if not requests:
            self._release()
            return
        number, chunk = next(self._numbers), Chunk(requests)
        try:
            if len(requests) > 1:
                chunk.tokens = self._free.pop()
                _put_tokens(chunk.tokens, len(requests) - 1, self._mark)
            job = self._consumer.pool.apply_async(
                run,
                args=(number, chunk.tokens, self._mark, [request.job for request in requests]),
                accept_callback=partial(self._on_accepted, chunk),
                callback=partial(self._on_returned, number, chunk),
                error_callback=partial(self._on_lost, number, chunk),
                correlation_id=requests[0].id,
            )
        except Exception:
            logger.exception("%d events were not handed to the pool", len(requests))
            for request in requests:
                state.task_ready(request)
                request.delivery.settler.settle(request.delivery, REQUEUE)
            self._give_back(chunk)
            self._release()
            self._soon()
            return
        if job is None:
            return  # the pool is closed: the broker has them again when the channel is
        chunk.job = job
        requests[0]._apply_result = ref(job)  # noqa: SLF001 - so that it is not forgotten (keep)
        self._under_way[number] = chunk
        self._look_soon()
        self.handed["jobs"] += 1
        self.handed["events"] += len(requests)

    def _take(self) -> list[EventRequest]:
        """Return the next events that may go together."""
        share = -(-len(self._pending) // self._processes)
        most = MOST if self._free else 1
        taken: list[EventRequest] = []
        expected = 0.0
        while self._pending and len(taken) < most and (len(taken) < share or expected < JOB):
            request = self._pending[0]
            if request.delivery.lost or request.revoked():
                self._pending.popleft()
                continue
            seconds = self._seconds.get(request.name)
            # Remote control may want to end its process when it has begun.
            doomed = request._terminate_on_ack is not None  # noqa: SLF001
            alone = doomed or seconds is None or seconds > FAST
            expected += seconds or 0.0
            if taken and (alone or expected > BUDGET):
                break
            taken.append(self._pending.popleft())
            if alone:
                break
        return taken

    # -- from the pool --------------------------------------------------------------------

    def _look_soon(self) -> None:
        """Look soon, unless each process has one event: the end of that is told anyway."""
        if not self._looks and any(chunk.unclear for chunk in self._under_way.values()):
            self._looks = True
            self._consumer.timer.call_after(LOOK, self._look)

    def _look(self) -> None:
        self._looks = False
        if self._elsewhere:
            return
        try:
            self.read_reports()
            now = time.monotonic()
            for chunk in tuple(self._under_way.values()):
                if chunk.since is not None and now > chunk.since + SLOW:
                    self._make_clear(chunk)
        finally:
            self._look_soon()

    def _make_clear(self, chunk: Chunk) -> None:
        """Hand out to others what has not begun, and note which one runs."""
        self._take_back(chunk)
        # A process reports an event before it takes the token of the next one.
        self.read_reports()
        if chunk.left == 1:
            chunk.begin(chunk.settled)

    def _take_back(self, chunk: Chunk) -> None:
        """Hand out to others what stands behind a run that takes long."""
        behind = len(_take_tokens(chunk.tokens, MOST)) if chunk.tokens != NOWHERE else 0
        if behind:
            left = chunk.requests[-behind:]
            del chunk.requests[-behind:]
            self._first(left)

    def read_reports(self) -> None:
        """Settle what pool processes have handled so far."""
        while True:
            try:
                raw = os.read(_reports[0], 1024 * _REPORT.size)
            except BlockingIOError:
                break
            self._reported.extend(_REPORT.iter_unpack(raw))
        # One that cannot be settled now takes none of the others along.
        while self._reported:
            number, place, seconds = self._reported.popleft()
            chunk = self._under_way.get(number)
            if chunk is not None:
                self._handled(chunk, place + 1, seconds)
                chunk.since = time.monotonic()

    def _on_accepted(self, chunk: Chunk, pid: int, since: float) -> None:
        chunk.accepted = (pid, since)
        chunk.begin(chunk.settled, since)

    def _on_returned(
        self, number: int, chunk: Chunk, found: tuple[int, Verdict | ExceptionInfo | None, float]
    ) -> None:
        """The process has come to the end of a chunk, or to one that was not handled."""
        handled, verdict, seconds = found
        self.read_reports()
        self._end(number)
        self._handled(chunk, handled, seconds)
        if verdict is not None:
            chunk.begin(handled)
            chunk.settled = handled + 1
            self._alone_next(chunk.requests[handled])
            chunk.requests[handled].on_success(verdict)
        self._again(chunk)

    def _on_lost(self, number: int, chunk: Chunk, exc_info: ExceptionInfo) -> None:
        """The process has ended in the middle of the first one that is not reported."""
        if number in self._under_way:
            self._take_back(chunk)
        self.read_reports()
        self._end(number)
        if chunk.settled < len(chunk.requests):
            lost = chunk.requests[chunk.settled]
            chunk.settled += 1
            self._alone_next(lost)
            lost.on_failure(exc_info)
        self._again(chunk)

    def _alone_next(self, failed: EventRequest) -> None:
        """Let the next one of a handler go alone: what fails keeps those behind it from their run.

        Where a service that all of them need is away, each would be handed out several times.
        """
        self._seconds.pop(failed.name, None)

    def _handled(self, chunk: Chunk, until: int, seconds: float) -> None:
        while chunk.settled < until:
            request = chunk.requests[chunk.settled]
            # Too late to end it: its process is at another one.
            request._terminate_on_ack = None  # noqa: SLF001
            chunk.begin(chunk.settled)
            chunk.settled += 1
            known = self._seconds.get(request.name)
            self._seconds[request.name] = (
                seconds if known is None else known + WEIGHT * (seconds - known)
            )
            request.on_success(HANDLED)

    def _end(self, number: int) -> None:
        chunk = self._under_way.pop(number, None)
        if chunk is not None:
            self._give_back(chunk)

    def _give_back(self, chunk: Chunk) -> None:
        if chunk.tokens != NOWHERE:
            self._free.append(chunk.tokens)

    def _again(self, chunk: Chunk) -> None:
        """Hand out once more what has not begun, and ask for what waits."""
        self._first(chunk.requests[chunk.settled :])
        if self._pending:
            self._soon()

    def _first(self, requests: Sequence[EventRequest]) -> None:
        """Hand these out before all others."""
        if requests:
            self._pending.extendleft(reversed(requests))
            self._soon()
