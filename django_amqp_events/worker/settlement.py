"""Carry out verdicts: publish the message, wait for its confirm, then ack the delivery.

A thread publishes, on a connection of its own: the consuming connection would receive further
deliveries while it waits for a confirm. The main thread, which owns the consuming channel, writes
acks and rejects. In a solo or thread pool a run may end the worker, and an event that is not acked
runs again. So a run starts only when the previous event of its thread is settled; after quick runs,
up to :attr:`Acks.ahead` events may still be unacked. While a solo worker runs an event for longer,
another thread writes their acks. A failed publish is repeated without running the handler again,
until shortly before RabbitMQ's consumer timeout.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from celery import Celery, signals
from celery.concurrency.solo import TaskPool as SoloPool
from celery.concurrency.thread import TaskPool as ThreadPool
from django.db import close_old_connections
from kombu.message import Message as KombuMessage

from ..backoff import Backoff
from ..broker.confirms import WINDOW, ConfirmChannel
from ..broker.isolation import isolate
from ..exceptions import BrokerUnavailableError, PublishError, PublishTimeoutError
from ..message.types import Message
from .acks import Acks
from .celery_internals import shutdown_requested
from .dispatch import Delivery
from .outgoing import OutgoingMessages, announce
from .prefetch import HOLDING
from .task import HandlerTask
from .verdict import REQUEUE, Verdict

logger = logging.getLogger(__name__)

#: Delays before a failed publish is repeated.
BACKOFF: Final = Backoff(0.5, 30.0)
#: After a run of fewer seconds than this, the next may begin before the event is acked. If that run
#: takes longer in a solo worker, another thread writes the ack.
QUICK: Final = 0.01
#: Longest time in seconds that a run waits for the settlement of the last event.
SETTLE_TIMEOUT: Final = 2.0
#: Seconds after which a flush is requested again: an event loop that has ended drops callbacks.
FLUSH_TIMEOUT: Final = 1.0


@dataclass(slots=True, eq=False)
class Job:
    """A message to publish and the delivery that its confirm settles."""

    delivery: Delivery
    verdict: Verdict | None
    message: Message
    failures: int = 0
    not_before: float = 0.0


class Settler:
    """Settle deliveries by verdicts. :meth:`settle` may be called from any thread.

    Args:
        acks: writes acks and rejects; it needs to know of each delivery on arrival.
        call_soon: runs a function in the main thread, soon.
    """

    def __init__(
        self,
        *,
        app: Celery,
        outgoing: OutgoingMessages,
        acks: Acks,
        call_soon: Callable[..., Any],
    ) -> None:
        self.app = app
        self.settings = outgoing.settings
        self.outgoing = outgoing
        self.call_soon = call_soon
        self.acks = acks
        #: Called with the name of a handler and the seconds that a run of it took.
        self.on_ended: Callable[[str, float], object] | None = None
        self._flushing = threading.Lock()
        # When a flush was requested that has not run yet.
        self._flush_requested: float | None = None
        self._jobs: deque[Job] = deque()
        self._busy = 0
        # The first wakes the publishing thread, the second the threads that wait for acks.
        lock = threading.RLock()
        self._wake = threading.Condition(lock)
        self._answered = threading.Condition(lock)
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._channel = ConfirmChannel(app, timeout=self.settings.confirm_timeout)
        self._done: deque[tuple[Delivery, bool]] = deque()
        # The last publish timed out, so it is not known whether RabbitMQ accepts messages.
        self._may_be_blocked = False
        # Deliveries with a verdict and without an ack that runs wait for.
        self._open: set[Delivery] = set()
        # Those whose runs ended in a thread of the pool, or quickly in a solo worker, by thread.
        self._unacked: defaultdict[int, set[Delivery]] = defaultdict(set)
        self._inline = self._threads = self._ending = False
        #: Whether a solo worker runs an event; its main thread holds the lock at all other times.
        self.runs_event = False
        self._present = threading.Lock()
        # Process and thread of a solo worker.
        self._home = (0, 0)
        # Set when a run begins while acks remain to be written.
        self._left = threading.Event()

    # -- from the worker ------------------------------------------------------------------

    def runs_in(self, pool: Any) -> None:
        """Set the pool; in a solo or thread pool a run waits for the last settlement."""
        self._inline = isinstance(pool, SoloPool)
        self._threads = isinstance(pool, ThreadPool)
        if self._inline:
            self._present.acquire()
            self._home = os.getpid(), threading.get_ident()
            signals.task_prerun.connect(self._before_task)
            threading.Thread(target=self._ack_late, name="amqp-events-acks", daemon=True).start()

    def begin(self) -> None:
        """Start at first, and after a lost connection."""
        self._ending = False
        self._flush_requested = None

    def end(self) -> None:
        """Let runs wait no longer, since the main thread waits for them before it writes acks."""
        with self._answered:
            self._ending = True
            self._answered.notify_all()

    def catch_up(self, following: Delivery | None = None) -> None:
        """Settle all events of this thread before it runs anything else, in a solo or thread pool.

        That run may take an hour or end the process.

        Args:
            following: the event that it runs next. If that is delivered for the first time, quick
                runs may stay unacked; a redelivered one may have ended a worker before.
        """
        fresh = following is not None and not following.received.redelivered
        if self._in_thread and not fresh:
            self._wait_for_acks(0)
        if not self._inline or self.runs_event:
            return
        if fresh and self._open == self._unacked[threading.get_ident()]:
            return
        deadline = time.monotonic() + SETTLE_TIMEOUT
        self.flush()
        with self._answered:
            while self._open and (left := deadline - time.monotonic()) > 0:
                if not self._done:
                    self._answered.wait(left)
                self.flush()

    def _before_task(self, sender: Any = None, **_: Any) -> None:
        """Write all acks before a solo worker runs a task, except one that a handler calls."""
        if isinstance(sender, HandlerTask) or self._home != (os.getpid(), threading.get_ident()):
            return  # or a child or thread of a handler or task calls it
        self.catch_up()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let another thread write the acks that are left, while a solo worker runs an event."""
        if not self._inline:
            yield
            return
        if self._open:
            self._left.set()
        self.runs_event = True
        self._present.release()
        try:
            yield
        finally:
            self._present.acquire()
            self.runs_event = False

    def _ack_late(self) -> None:
        """Write the remaining acks while a run takes longer than :data:`QUICK`.

        During a run the main thread does not use the connection.
        """
        while True:
            self._left.wait()
            self._left.clear()
            time.sleep(QUICK)
            # An error is a lost connection, which the main thread will find as well.
            with self._present, suppress(Exception):
                self.flush()

    def wait_for(self, delivery: Delivery, *, quick: bool) -> None:
        """Wait until all deliveries of this thread, or all but a few, are acked.

        Does nothing in other pools: only in a solo or thread pool can the next run end the worker.

        Args:
            quick: the run of *delivery* took less than :data:`QUICK`, and only an ack is left to
                write. Then :attr:`Acks.ahead` may be unacked; after a redelivered one, none. Acks
                follow in milliseconds; if the worker is killed first, the events run again.
        """
        if not (self._in_thread or self._inline):
            return
        ahead = self.acks.ahead if quick and not delivery.received.redelivered else 0
        with self._answered:
            unacked = self._unacked[threading.get_ident()]
            if delivery in self._open and (ahead or not self._inline):
                unacked.add(delivery)
        if not self._inline:
            self._wait_for_acks(ahead)
        elif not ahead or len(unacked) > ahead:
            self.catch_up()

    @property
    def _in_thread(self) -> bool:
        """Whether this is a thread of the pool.

        The main thread, which writes the acks, settles what is revoked or rejected before a run.
        """
        return self._threads and threading.current_thread() is not threading.main_thread()

    def _wait_for_acks(self, most: int) -> None:
        """Wait until at most so many deliveries of this thread are unacked."""
        deadline = time.monotonic() + SETTLE_TIMEOUT
        with self._answered:
            unacked = self._unacked[threading.get_ident()]
            while len(unacked) > most:
                left = deadline - time.monotonic()
                if left <= 0 or self._ending or shutdown_requested():
                    return
                self._answered.wait(min(left, 0.1))

    def settle(self, delivery: Delivery, verdict: Verdict) -> bool:
        """Carry out *verdict*, unless the delivery has one already.

        Return True if only an ack is left to write. A message that is published before the ack
        would be published again if the event ran again.
        """
        if delivery.settled:
            return False
        delivery.settled = True
        if delivery.lost:
            self._log_lost(delivery)
        elif verdict.kind == "requeue":
            self._answer(delivery, ack=False)
        else:
            try:
                message = self.outgoing.build(delivery, verdict, datetime.now(UTC))
            except Exception:
                # A bug of ours. An unsettled delivery would occupy the prefetch count until the
                # worker ends.
                logger.exception(
                    "%s is requeued: its message cannot be built",
                    delivery.title,
                    extra=delivery.log_fields,
                )
                self._answer(delivery, ack=False)
                return False
            if message is None:
                self._answer(delivery, ack=True)
                return True
            self._add(Job(delivery, verdict, message))
        return False

    def unanswered(self, delivery: Delivery, exc: BaseException) -> Verdict:
        """Return the verdict for a delivery whose run ended without one; the reaper isolates it."""
        return REQUEUE

    def timed_out(self, delivery: Delivery, exc: BaseException) -> Verdict | None:
        """Return the verdict after a hard time limit, ``None`` if the handler's policy decides."""
        return None

    def postpone(self, delivery: Delivery) -> None:
        """Publish an event to a delay queue again if its retry is not due yet."""
        if not delivery.settled:
            delivery.settled = True
            message = self.outgoing.delayed(delivery, delivery.progress, datetime.now(UTC))
            self._add(Job(delivery, None, message))

    @property
    def working(self) -> bool:
        """Whether settlements are not finished."""
        return bool(self._jobs or self._busy or self._done)

    def drain(self, timeout: float) -> bool:
        """Wait until every message is confirmed, then write the acks; in the main thread only.

        Return False if some were not confirmed within *timeout* seconds; RabbitMQ delivers their
        events again.
        """
        deadline = time.monotonic() + timeout
        with self._wake:
            while (self._jobs or self._busy) and time.monotonic() < deadline:
                self._wake.wait(0.1)
            clean = not self._jobs and not self._busy
            self._stopping = True
            self._wake.notify_all()
        self.flush()
        return clean

    def flush(self) -> None:
        """Write the acks and rejects that are ready.

        In the main thread, and while it runs an event in the thread that acks late. While the pool
        stops, also in Celery's timer thread. Celery does not wait for that thread's end, so it may
        still write when the main thread closes the channel.
        """
        with self._flushing:
            self._flush_requested = None
            while self._done:
                ready = [self._done.popleft() for _ in range(len(self._done))]
                acked: list[KombuMessage] = []
                rejected: list[KombuMessage] = []
                try:
                    for delivery, ack in ready:
                        if delivery.lost:
                            self._log_lost(delivery)
                        else:
                            (acked if ack else rejected).append(delivery.message)
                    # First: RabbitMQ holds back what follows many rejects.
                    self.acks.ack(acked)
                    for message in rejected:
                        self.acks.reject(message)
                finally:
                    self._close(*(delivery for delivery, _ in ready))

    def _answer(self, *deliveries: Delivery, ack: bool) -> None:
        """Have the main thread ack or reject deliveries, all that are ready at once."""
        with self._answered:
            if self._inline or self._threads:
                self._open.update(deliveries)
            self._done.extend((delivery, ack) for delivery in deliveries)
            if self._inline:
                self._answered.notify_all()
        now, requested = time.monotonic(), self._flush_requested
        if requested is None or now > requested + FLUSH_TIMEOUT:
            self._flush_requested = now
            self.call_soon(self.flush)

    def _close(self, *deliveries: Delivery) -> None:
        """Release the runs that wait for these deliveries."""
        with self._answered:
            self._open.difference_update(deliveries)
            for unacked in self._unacked.values():
                unacked.difference_update(deliveries)
            self._answered.notify_all()

    def _log_lost(self, delivery: Delivery) -> None:
        logger.info(
            "the connection of %s was lost before it was settled; RabbitMQ delivers it again",
            delivery.title,
            extra=delivery.log_fields,
        )

    # -- the thread -----------------------------------------------------------------------

    def _add(self, job: Job) -> None:
        with self._wake:
            if self._inline or self._threads:
                self._open.add(job.delivery)
            self._jobs.append(job)
            self._wake.notify_all()
            if self._thread is None or not self._thread.is_alive():
                self._stopping = False
                self._thread = threading.Thread(
                    target=self._run, name="amqp-events-settlement", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        while True:
            batch = self._take()
            if not batch:
                break
            try:
                self._publish(batch)
            finally:
                with self._wake:
                    self._busy = 0
                    self._wake.notify_all()
        self._channel.close()

    def _take(self) -> list[Job]:
        with self._wake:
            while True:
                now = time.monotonic()
                ready = [job for job in self._jobs if job.not_before <= now][:WINDOW]
                if ready:
                    taken = set(map(id, ready))
                    self._jobs = deque(job for job in self._jobs if id(job) not in taken)
                    self._busy = len(ready)
                    return ready
                if self._stopping:
                    return []
                self._wake.wait(
                    min((job.not_before for job in self._jobs), default=now + 3600) - now
                )

    def _publish(self, batch: list[Job]) -> None:
        jobs: dict[int, Job] = {}
        for job in batch:
            if job.delivery.lost:
                # RabbitMQ delivers it again, so publishing would duplicate it.
                self._log_lost(job.delivery)
                self._close(job.delivery)
            else:
                jobs[len(jobs)] = job
        messages = [job.message for job in jobs.values()]
        failed = {index: job for index, job in jobs.items() if job.failures}
        try:
            for answers in isolate(self._attempt, messages, alone=failed):
                confirmed = [jobs.pop(at) for at, error in answers.items() if error is None]
                self._answer(*(job.delivery for job in confirmed), ack=True)
                for job in confirmed:
                    self._announce(job)
                for at, error in answers.items():
                    if error is not None:
                        self._hold(jobs.pop(at), error)
        except Exception as exc:
            # The thread must not end while deliveries depend on it.
            if not isinstance(exc, PublishError):
                logger.exception("the settlement of %d events failed; it is repeated", len(jobs))
            for job in jobs.values():
                self._hold(job, exc)

    def _attempt(self, messages: Sequence[Message]) -> Sequence[PublishError | None]:
        """Publish messages.

        Raises:
            PublishError: RabbitMQ accepts no messages.
        """
        self._channel.reopen()
        if self._may_be_blocked:
            self._test_channel()
        errors = self._channel.publish(messages, mandatory=True)
        self._may_be_blocked = any(isinstance(error, PublishTimeoutError) for error in errors)
        down = [error for error in errors if isinstance(error, BrokerUnavailableError)]
        if len(down) == len(messages):
            # The others would each wait for a connection as well.
            raise down[0]
        return errors

    def _test_channel(self) -> None:
        # RabbitMQ reports an alarm (memory, disk) after the first publish on a connection, and
        # accepts that message when the alarm ends, although its confirm has timed out here. So
        # after a timeout a message without a queue tests the channel; otherwise each repeat would
        # duplicate the event.
        test = Message(
            exchange=self.outgoing.names.replay,
            routing_key="",
            body=b"",
            headers={},
            properties={"delivery_mode": 1, "message_id": "question"},
            name="a test whether RabbitMQ accepts messages",
        )
        (error,) = self._channel.publish([test], mandatory=False)
        self._may_be_blocked = isinstance(error, PublishTimeoutError)
        if error is not None:
            raise error

    def _announce(self, job: Job) -> None:
        """Log a settled event and send its signal; an error must not settle it again."""
        try:
            if announce(self.settings.service, job.delivery, job.verdict):
                close_old_connections()
        except Exception:
            with suppress(Exception):  # a filter of logging may raise again
                logger.exception(
                    "%s is settled, but was not announced",
                    job.delivery.title,
                    extra=job.delivery.log_fields,
                )

    def _hold(self, job: Job, error: Exception) -> None:
        """Repeat the publish later, or requeue the delivery before RabbitMQ does."""
        wait = BACKOFF.delay(job.failures)
        job.failures += 1
        job.not_before = time.monotonic() + wait
        what, about = job.delivery.title, job.delivery.log_fields
        if job.not_before > job.delivery.since + HOLDING * self.settings.consumer_timeout:
            self._answer(job.delivery, ack=False)
            level, text = logging.ERROR, "%s is requeued after %d failed publishes: %s"
            told: tuple[object, ...] = (what, job.failures, error)
        else:
            self._close(job.delivery)
            with self._wake:
                self._jobs.append(job)
            level, text = logging.WARNING, "publishing %s failed; it is repeated in %.1f s: %s"
            told = (what, wait, error)
        with suppress(Exception):  # a filter of logging may raise, and would end the thread
            logger.log(level, text, *told, extra=about)
