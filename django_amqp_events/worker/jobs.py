"""Hand deliveries to the pool in jobs, and settle them by the outcomes; in the main process.

A job is handed out when a process is free. Ordinary tasks wait in the same line.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final
from weakref import WeakSet

from billiard.exceptions import TimeLimitExceeded
from celery.concurrency.prefork import TaskPool as PreforkPool
from celery.concurrency.solo import TaskPool as SoloPool

from ..backoff import Backoff
from ..logs import get_logger
from ..message.text import counted, printable
from .backlog import Backlog
from .celery_internals import keep_result, shutdown_requested, state
from .delivery import Delivery, Item, Job
from .pool_job import JobOptions, Outcome, run_job
from .prefetch import HOLDING, WAITING, run_limit
from .stop_signals import StopSignals
from .task_events import TaskEvents

logger = get_logger(__name__)

#: Delays before a failed publish is repeated; longer ones if RabbitMQ may have stored the message,
#: since each repeat may then be a duplicate.
BACKOFF: Final = Backoff(0.5, 30.0)
UNCONFIRMED_BACKOFF: Final = Backoff(5.0, 600.0, factor=4)
#: Requests for a free process that wait in Celery's line at once, for each process; as many as the
#: tasks that Celery prefetches by default.
REQUESTS: Final = 4
#: Shortest time between two timers that wake the loop.
WAKE_SECONDS: Final = 0.01
#: Seconds in which messages that are not published yet are published when the worker stops.
STOPPING_SECONDS: Final = 20.0
#: Longest time in seconds that a signal waits until processes have received their jobs.
WRITING_SECONDS: Final = 5.0


#: Those of this process, for the check for hanging handlers.
all_jobs: WeakSet[Jobs] = WeakSet()


class Jobs:
    """The deliveries of a worker, from their receipt to their settlement.

    Args:
        c: Celery's consumer.
        size: most deliveries of a job.
        wake: has :meth:`settle_ended` called in the main thread.
        on_lost: settles deliveries whose process ended without an outcome; *exceeded* is the hard
            time limit that ended it, if one did.
    """

    def __init__(
        self,
        c: Any,
        *,
        consumer_timeout: float,
        size: int,
        wake: Callable[[], object],
        on_lost: Callable[[list[Delivery], float | None, str], object],
    ) -> None:
        self.c = c
        self.size = size
        self.wait = consumer_timeout * WAITING
        self._holding = consumer_timeout * HOLDING
        self._wake = wake
        self._on_lost = on_lost
        self.backlog = Backlog(
            consumer_timeout,
            limited=not c.disable_rate_limits,
            on_wait=lambda seconds: self._wake_after(max(WAKE_SECONDS, seconds)),
        )
        self._events = TaskEvents(c)
        #: Called when a handler has become quick, or is so no longer.
        self.on_change: Callable[[], object] | None = None
        #: Called when a process is free, before a job is chosen.
        self.on_free: Callable[[], object] | None = None
        self.running: set[Job] = set()
        # Events that were given back because they had waited for too long, by queue.
        self._late: Counter[str] = Counter()
        # With a verdict whose message is not published, from a monotonic time on.
        self._unpublished: list[tuple[float, Delivery]] = []
        self._ended: deque[tuple[Job, list[Outcome] | str | None]] = deque()
        # Requests for a free process, and those that are given back in a loop.
        self._requested = self._to_release = 0
        # Processes that were granted while all seemed to be busy.
        self._granted = 0
        self._releasing = self._starting = False
        # When the next timer wakes the loop (monotonic).
        self._wake_at = 0.0
        self._connections = 0
        self._thread = threading.get_ident()
        self.stopping = False
        #: When (monotonic) a solo worker began the run after which it has not read all deliveries.
        self.unread_since: float | None = None
        all_jobs.add(self)
        worker = c.controller
        self._limits = worker.time_limit, worker.soft_time_limit
        self._alone = bool(worker.max_tasks_per_child)
        pool = c.pool
        self._semaphore: Any = worker.semaphore if isinstance(pool, PreforkPool) else None
        #: Whether jobs run in the event loop.
        self.inline = isinstance(pool, SoloPool)
        self.stop_signals = StopSignals(wake)
        # Until when (monotonic) a signal waits for jobs that are being written.
        self._stop_at = 0.0

    @property
    def processes(self) -> int:
        return max(1, int(self.c.pool.num_processes))

    @property
    def busy(self) -> bool:
        return bool(self.running or self._waiting())

    @property
    def in_threads(self) -> bool:
        """Whether jobs have begun in threads of this process."""
        return any(job.began is not None and not job.in_process for job in self.running)

    @property
    def _ends(self) -> bool:
        """Whether no further job may begin."""
        return self.stopping or shutdown_requested() or self.stop_signals.waiting

    @property
    def has_room(self) -> bool:
        """Whether further deliveries would share the next jobs of a pool without processes."""
        return self._semaphore is None and len(self.backlog) < self.size * self.processes

    @property
    def runs_in_loop(self) -> bool:
        """Whether a solo worker runs a job now, in its event loop."""
        return self.inline and bool(self.running)

    # -- from the step --------------------------------------------------------------------

    def begin(self) -> None:
        """Start at first, and after a lost connection: RabbitMQ delivers everything again."""
        self._thread = threading.get_ident()
        self.stopping = False
        self._connections += 1
        # Celery has emptied its line.
        self._requested = self._granted = 0
        self._wake_at = 0.0
        for job in self.running:
            with job.lock:
                job.withdrawn = job.began is None
        # Processes may still run some of them. Celery 5.5 does not report their end.
        begun = [delivery for job in self.running for delivery in job.deliveries]
        for delivery in self._waiting() + begun:
            state.task_ready(delivery)
        self.backlog.remove()
        self._unpublished.clear()
        self.running.clear()

    def add(self, delivery: Delivery) -> None:
        state.task_reserved(delivery)
        self.backlog.add(delivery)
        self._events.received(delivery)
        for callback in self.c.on_task_message:  # autoscaling
            callback(delivery)
        if self._semaphore is None:
            self._wake()  # when everything that has arrived is read
        else:
            self.request()

    def again(self, delivery: Delivery) -> None:
        """Hand out a delivery once more, before the others of its queue."""
        self.backlog.put_back([delivery])
        self.request()

    def settle(
        self, delivery: Delivery, item: Item, *, error: str = "", unconfirmed: bool = False
    ) -> None:
        """Have a pool process carry out a verdict, or decide on an exceeded time limit.

        Args:
            error: why publishing its message failed before.
        """
        wait = 0.0
        delivery.item = item._replace(unconfirmed=unconfirmed)
        if error:
            wait = (UNCONFIRMED_BACKOFF if unconfirmed else BACKOFF).delay(delivery.failures)
            delivery.failures += 1
            what, extra = delivery.title, delivery.log_fields
            error = printable(error)
            if time.monotonic() + wait > delivery.since + self._holding:
                text = "%s is requeued after %d failed publishes: %s"
                logger.error(text, what, delivery.failures, error, extra=extra)
                self.requeue([delivery])
                return
            text = "publishing %s failed; it is repeated in %.1f s: %s"
            logger.warning(text, what, wait, error, extra=extra)
            self._wake_after(wait)
        self._unpublished.append((time.monotonic() + wait, delivery))

    def _wake_after(self, seconds: float) -> None:
        """Hand out again after some seconds, with one timer for all reasons."""
        now = time.monotonic()
        if not now < self._wake_at <= now + seconds + WAKE_SECONDS:
            self._wake_at = now + seconds
            self.c.timer.call_after(seconds, self._wake)

    def requeue(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            if self._close(delivery):
                self._events.send("task-rejected", delivery, requeue=True)
                delivery.acks.requeue([delivery.tag])

    def give_back_late(self) -> Counter[str]:
        """Requeue what has waited for too long; return the number of events since the last call.

        They are counted by queue.
        """
        before = time.monotonic() - self.wait
        self._give_back(self.backlog.remove(before))
        for job in tuple(self.running):
            if job.in_process or job.began is not None or job.deliveries[0].since >= before:
                continue
            with job.lock:  # it waits for a thread, behind ordinary tasks
                job.withdrawn = job.began is None
            if job.withdrawn:
                self._give_back(job.deliveries)
        late, self._late = self._late, Counter()
        return late

    def _give_back(self, deliveries: Iterable[Delivery]) -> None:
        self._late.update(one.item.delivered.queue for one in deliveries)
        self.requeue(deliveries)

    def keep_results(self) -> None:
        """Keep the results of jobs that processes have received, before the pool stops."""
        for job in self.running:
            if job.began is None:
                keep_result(job.result)

    def loop_runs(self) -> None:
        """Let signals wait for the event loop; not in solo, where a run may occupy it for long."""
        if not self.inline:
            self.stop_signals.install()

    def stop_by_signal(self) -> None:
        """Let Celery shut down, as soon as no job is being written to a process."""
        now = time.monotonic()
        self._stop_at = self._stop_at or now + WRITING_SECONDS
        written = all(job.began is not None for job in self.running if job.in_process)
        if written or now > self._stop_at:
            self._stop_at = 0.0
            self.stop_signals.deliver()
        else:
            self._wake_after(WAKE_SECONDS)

    def stop(self) -> None:
        """Hand out nothing more, and give back what was not handed out."""
        self.stopping = True
        self.requeue(self.backlog.remove())

    def finish(self, *, publish: bool) -> bool:
        """Settle what the pool has returned, after it has ended.

        Args:
            publish: publish the messages that are not published yet, in this process.

        Returns:
            whether everything is settled; RabbitMQ delivers the rest again.
        """
        deadline = time.monotonic() + STOPPING_SECONDS
        self.settle_ended()
        while publish and self._unpublished and time.monotonic() < deadline:
            _, delivery = self._unpublished.pop(0)
            outcomes = run_job(JobOptions(worker=self.c.hostname), [delivery.item])
            self._end(Job([delivery], in_process=False), outcomes)
            if not delivery.acknowledged:
                time.sleep(BACKOFF.first)
        return not self._unpublished

    # -- to the pool ----------------------------------------------------------------------

    def _waiting(self) -> list[Delivery]:
        return [*self.backlog, *(delivery for _, delivery in self._unpublished)]

    def request(self) -> None:
        """Request free processes for what waits."""
        if self._ends:
            return
        waiting = len(self.backlog) + len(self._unpublished)
        if self._semaphore is None:
            self._start_here()
            return
        wanted = min(waiting, REQUESTS * self.processes)
        if self.on_free is not None:
            wanted = max(wanted, 1)
        # Each may be granted at once, and even be given back.
        for _ in range(wanted - self._requested):
            self._requested += 1
            self._semaphore.acquire(partial(self._start, self._connections))

    def _start_here(self) -> None:
        """Start jobs in a pool whose processes Celery does not count."""
        if self._starting:
            return  # a solo worker runs one
        self._starting = True
        try:
            if self.on_free is not None and len(self.running) < self.processes:
                self.on_free()
            while len(self.running) < self.processes and (job := self._next_job()) is not None:
                began = time.monotonic()
                self._submit(job)
                if self.inline:
                    self.unread_since = self.unread_since or began
                    self._wake()  # Celery's loop has its turn before the next job
                    return
        finally:
            self._starting = False

    def _start(self, connection: int) -> None:
        """Use a free process."""
        if connection != self._connections:
            self._release()
            return
        self._requested -= 1
        if len(self.running) >= self.processes:
            # billiard reports a job's end after it has released the process, and releases one that
            # exits twice: settle_ended() knows more.
            self._granted += 1
        else:
            self._use_process()

    def _use_process(self) -> None:
        """Submit a job to a free process."""
        job = None
        if not self._ends:
            if self.on_free is not None:
                self.on_free()
            job = self._next_job()
        if job is not None:
            self._submit(job)
        else:
            self._release()

    def _release(self) -> None:
        """Give a free process to the next request; the loop replaces a deep recursion."""
        self._to_release += 1
        if self._releasing:
            return
        self._releasing = True
        try:
            while self._to_release:
                self._to_release -= 1
                self._semaphore.release()
        finally:
            self._releasing = False

    def _next_job(self) -> Job | None:
        now = time.monotonic()
        # A repeat may wait in vain for its confirm, so one process at a time publishes them.
        repeats = any(job.deliveries[0].failures for job in self.running)
        for index, (at, delivery) in enumerate(self._unpublished):
            if at <= now and not (repeats and delivery.failures):
                del self._unpublished[index]
                return self._job([delivery])
        free = max(1, self.processes - len(self.running))
        taken, seconds = self.backlog.take(self.size, free, self._is_quick)
        if not taken:
            return None
        job = self._job(taken)
        job.expected = seconds
        return job

    def _job(self, deliveries: list[Delivery]) -> Job:
        job = Job(deliveries, in_process=self._semaphore is not None)
        for delivery in deliveries:
            delivery.job = job
        return job

    def _is_quick(self, delivery: Delivery) -> bool:
        """Return True if a delivery may share a job."""
        handler = delivery.handler
        return (
            handler is not None
            and self.backlog.durations.is_quick(handler.name)
            and not delivery.item.delivered.redelivered
            and not (self._alone or self._events.on)
            and not self.backlog.rate(delivery.task)
            and self._limit(delivery) is None
        )

    def _limit(self, delivery: Delivery) -> float | None:
        return run_limit(delivery.task, *self._limits)

    def _submit(self, job: Job) -> None:
        self.running.add(job)
        first = job.deliveries[0]
        hard, soft = None, None
        if first.item.runs:
            hard, soft = first.task.time_limit, first.task.soft_time_limit
        elif any(self._limits):
            hard = soft = self._holding  # the worker's own limits must not end a publish
        options = JobOptions(
            worker=self.c.hostname,
            observed=self._events.on,
            limited=self._limit(first) is not None,
        )
        run: Callable[..., Any] = run_job
        if not job.in_process:
            run = partial(self._run_here, job)
        accepted: Any = partial(self._accepted, job) if job.in_process else None
        try:
            job.result = self.c.pool.apply_async(
                run,
                args=(options, [delivery.item for delivery in job.deliveries]),
                accept_callback=accepted,
                callback=partial(self._returned, job),
                error_callback=partial(self._failed, job),
                timeout_callback=partial(self._timed_out, job),
                soft_timeout=soft,
                timeout=hard,
                correlation_id=first.id,
            )
        except Exception:
            logger.exception(
                "%d events could not be given to the pool; they are requeued", len(job.deliveries)
            )
            self.running.discard(job)
            self.requeue(job.deliveries)
            if job.in_process:
                self._release()
            return
        if job.result is None and job.in_process:
            self.running.discard(job)  # the pool is closed; RabbitMQ delivers them again

    def _run_here(
        self, job: Job, options: JobOptions, items: list[Item]
    ) -> list[Outcome] | str | None:
        """Run a job in a thread, unless its connection is lost or the worker stops meanwhile."""
        with job.lock:
            if job.withdrawn or shutdown_requested():
                return None
            job.began = time.monotonic()
        try:
            self._accepted(job, 0, job.began)
            return run_job(options, items, lambda: job.deliveries[0].acks.lost)
        except BaseException as exc:  # noqa: BLE001 - the pool would drop it
            return repr(exc)

    # -- from the pool; in a thread of it, or in a timer's while it stops ----------------------

    def _accepted(self, job: Job, pid: int, since: float) -> None:
        job.pid, job.began = pid or None, since
        for delivery in job.deliveries:
            delivery.accepted()
            if delivery.item.runs:
                state.task_accepted(delivery)
                self._events.send("task-started", delivery)

    def _returned(self, job: Job, outcomes: list[Outcome] | str | None) -> None:
        self._ended.append((job, outcomes))
        if threading.get_ident() == self._thread:
            self.settle_ended()
        else:
            self._wake()

    def _failed(self, job: Job, info: Any) -> None:
        error = info.exception
        error = getattr(error, "exc", error)  # in billiard's wrapper with its traceback
        if isinstance(error, TimeLimitExceeded):
            job.exceeded = error.args[0]
        self._returned(job, repr(error))

    def _timed_out(self, job: Job, soft: bool, timeout: float) -> None:
        """Log a time limit; the pool ends the process after a hard one."""
        # Not an error: the event is retried, or archived with an error of its own.
        limit, delivery = "Soft" if soft else "Hard", job.deliveries[0]
        text = "%s time limit (%ss) exceeded for %s"
        logger.warning(text, limit, timeout, delivery.title, extra=delivery.log_fields)

    # -- settlement -----------------------------------------------------------------------

    def settle_ended(self) -> None:
        """Settle the jobs that have ended, and hand out the next; in the main thread."""
        while self._ended:
            job, outcomes = self._ended.popleft()
            try:
                self._end(job, outcomes)
            except Exception:
                logger.exception("a job could not be settled; its events are requeued")
                self.requeue(job.deliveries)
        while self._granted:
            self._granted -= 1
            if len(self.running) < self.processes:
                self._use_process()
        self.request()

    def _end(self, job: Job, outcomes: list[Outcome] | str | None) -> None:
        self.running.discard(job)
        deliveries = job.deliveries
        if job.ended:
            return  # the pool has reported the end twice
        job.ended = True
        if deliveries[0].acks.lost:
            for delivery in deliveries:
                self._close(delivery)
            logger.info(
                "the connection of %s was lost before the settlement; RabbitMQ delivers again",
                title(deliveries),
                extra=deliveries[0].log_fields,
            )
            return
        if outcomes is None:
            self.requeue(deliveries)
            return
        if isinstance(outcomes, str):
            self._lost(job, deliveries, outcomes)
            return
        acked: list[Delivery] = []
        unpublished: list[tuple[Delivery, Outcome]] = []
        changed = False
        if job.expected and job.began is not None:
            took = time.monotonic() - job.began
            self.backlog.took_longer(deliveries[0].item.delivered.queue, took - job.expected)
        for delivery, outcome in zip(deliveries, outcomes, strict=False):
            if outcome.seconds is not None:
                changed |= self.backlog.durations.ended(delivery.name, outcome.seconds)
            elif delivery.item.runs:
                self.backlog.not_run(delivery)
            run_ended = delivery.item.verdict is None and outcome.kind != "requeue"
            if run_ended and outcome.verdict is not None:
                self._events.ended(delivery, outcome.verdict)
            if outcome.kind in ("ack", "published"):
                acked.append(delivery)
            elif outcome.kind == "requeue":
                self.requeue([delivery])
            else:
                unpublished.append((delivery, outcome))
        for delivery in acked:
            self._close(delivery)
        if acked:
            acked[0].acks.ack([delivery.tag for delivery in acked])
        self._put_back(deliveries[len(outcomes) :])
        for delivery, outcome in unpublished:  # last, since it logs
            item = delivery.item._replace(verdict=outcome.verdict, exceeded=None)
            self.settle(delivery, item, error=outcome.error, unconfirmed=outcome.unconfirmed)
        if changed and self.on_change is not None:
            self.on_change()

    def _lost(self, job: Job, deliveries: list[Delivery], error: str) -> None:
        """Settle deliveries whose process has ended, or whose job failed by a bug of ours."""
        if deliveries[0].item.runs:
            self._on_lost(deliveries, job.exceeded, error)
        else:
            self.requeue(deliveries)
        if job.exceeded is None:
            logger.error(
                "the pool process that handled %s ended or failed: %s",
                title(deliveries),
                printable(error),
                extra=deliveries[0].log_fields,
            )

    def _put_back(self, deliveries: list[Delivery]) -> None:
        """Hand out deliveries again, before all others of their queue."""
        if self.stopping:
            self.requeue(deliveries)
            return
        if deliveries and deliveries[0].since < time.monotonic() - self.wait:
            self._give_back(deliveries)  # the run before them took unusually long
            return
        self.backlog.put_back(deliveries)

    def _close(self, delivery: Delivery) -> bool:
        """Forget a delivery; return False if it was settled before."""
        if delivery.acknowledged:
            return False
        delivery.acknowledged = True
        state.task_ready(delivery)
        return True


def title(deliveries: list[Delivery]) -> str:
    """Name deliveries in a log: the first, and how many there are."""
    first = deliveries[0].title
    return first if len(deliveries) == 1 else f"{counted(len(deliveries), 'event')}, first {first},"
