"""Carrying out verdicts: publish the copy, wait for its confirm, then ack the delivery.

One thread with a connection of its own: publishing on the consuming connection would re-enter
deliveries while it waits. Acks and rejects are written by the main thread, which owns the
consuming channel. Where handlers run in the worker's own process, the next run begins when the
last one is settled: it may end the process, and what is not acked is run again. A publish that
fails is repeated alone, with the handler not run again, and the delivery stays in hand until
shortly before the broker's consumer timeout.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Any, Final

from celery import Celery
from celery.concurrency.solo import TaskPool as SoloPool
from celery.concurrency.thread import TaskPool as ThreadPool
from celery.worker import state
from django.db import close_old_connections

from ..broker.confirms import WINDOW, ConfirmChannel
from ..conf import Settings
from ..exceptions import PublishError, PublishRefusedError, PublishTimeoutError
from ..message import headers
from ..message.messages import Message
from .fast.batched_acks import Acks, Answers
from .outgoing import Copies, announce
from .request import Delivery
from .verdict import REQUEUE, Verdict

logger = logging.getLogger(__name__)

#: Seconds that a delivery is held while its copy cannot be published. RabbitMQ's consumer
#: timeout is 30 minutes by default and runs from the delivery.
HOLD: Final = 25 * 60.0
#: Seconds between repeats of a failed publish: doubled from the first to the last.
BACKOFF: Final = (0.5, 30.0)
#: Seconds that the next run waits at most for the last one's confirm and ack.
PATIENCE: Final = 2.0
#: Seconds after which the event loop is asked again: one that was left has lost what it was to do.
LOST_CALL: Final = 1.0


@dataclass(slots=True, eq=False)
class Job:
    """A copy on its way, and the delivery that waits for its confirm."""

    delivery: Delivery
    verdict: Verdict | None
    message: Message
    failures: int = 0
    not_before: float = 0.0


class Settler:
    """Settles deliveries by verdicts. :meth:`settle` may be called from any thread.

    Args:
        call_soon: runs a function in the main thread, soon.
        errors: connection errors that an ack on a lost channel may raise.

    Attributes:
        acks: told of each delivery when it comes.
    """

    def __init__(
        self,
        *,
        app: Celery,
        settings: Settings,
        copies: Copies,
        call_soon: Callable[..., Any],
        errors: tuple[type[BaseException], ...],
    ) -> None:
        self.app = app
        self.settings = settings
        self.copies = copies
        self.call_soon = call_soon
        self.acks = Acks(together="acks" in settings.fast_paths, errors=errors)
        self._answers = Answers(self.flush)
        # When the main thread was asked to flush, and has not yet.
        self._asked: float | None = None
        self._jobs: deque[Job] = deque()
        self._busy = 0
        # The first wakes the thread that publishes, the second those who wait for acks.
        lock = threading.RLock()
        self._wake = threading.Condition(lock)
        self._answered = threading.Condition(lock)
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._channel: ConfirmChannel | None = None
        self._done: deque[tuple[Delivery, bool]] = deque()
        # The last publish timed out: whether the broker takes messages at all is not known.
        self._doubt = False
        # Settled and not answered yet, where somebody waits for that; not those whose copy is held
        # after a failed publish.
        self._open: set[Delivery] = set()
        self._inline = self._threads = self._waited_for = self._ending = False

    # -- from the worker ------------------------------------------------------------------

    def runs_in(self, pool: Any) -> None:
        """Say which pool handlers run in: in some, their end is the worker's."""
        self._inline = isinstance(pool, SoloPool)
        self._threads = isinstance(pool, ThreadPool)
        self._waited_for = self._inline or self._threads

    def begin(self) -> None:
        """Start, perhaps again after a lost connection."""
        self._ending = False
        self._asked = None

    def end(self) -> None:
        """Let no run wait any more: the main thread waits for them, and answers afterwards."""
        with self._answered:
            self._ending = True
            self._answered.notify_all()

    def catch_up(self) -> None:
        """Answer what is settled before the main thread of a solo worker runs anything else.

        Celery's loop comes to it only after the next message, if that is there already: whose
        run may take an hour or end the process, with the copies of the last ones published and
        their acks not written.
        """
        if not self._inline:
            return
        deadline = time.monotonic() + PATIENCE
        self.flush()
        with self._answered:
            while self._open and (left := deadline - time.monotonic()) > 0:
                if not self._done:
                    self._answered.wait(left)
                self.flush()

    def wait_for(self, delivery: Delivery) -> None:
        """Wait in a thread of the pool until *delivery* is answered, before its next run."""
        if not self._threads:
            return
        deadline = time.monotonic() + PATIENCE
        with self._answered:
            while delivery in self._open and (left := deadline - time.monotonic()) > 0:
                if (self._ending or state.should_stop is not None
                        or state.should_terminate is not None):  # fmt: skip
                    return
                self._answered.wait(min(left, 0.1))

    def settle(self, delivery: Delivery, verdict: Verdict) -> None:
        """Carry out *verdict*; the first one for a delivery counts."""
        if delivery.settled:
            return
        delivery.settled = True
        if delivery.lost:
            self._log_lost(delivery)
        elif verdict.kind == "requeue":
            self._answer(delivery, ack=False)
        else:
            try:
                message = self.copies.build(delivery, verdict, datetime.now(UTC))
            except Exception:
                # A bug of ours; without an answer the delivery would keep its place for ever.
                logger.exception("%s goes back to the broker: no copy of it", delivery.title)
                self._answer(delivery, ack=False)
                return
            if message is None:
                self._answer(delivery, ack=True)
            else:
                self._add(Job(delivery, verdict, message))

    def unanswered(self, delivery: Delivery, exc: BaseException) -> Verdict:
        """Say what becomes of a delivery whose run gave no verdict: it is delivered again."""
        return REQUEUE

    def timed_out(self, delivery: Delivery, exc: BaseException) -> Verdict | None:
        """Say what becomes of a run that its time limit ended; ``None``: what its policy says."""
        return None

    def postpone(self, delivery: Delivery) -> None:
        """Send an event that came back too early round again."""
        if not delivery.settled:
            delivery.settled = True
            message = self.copies.postponed(delivery, datetime.now(UTC))
            self._add(Job(delivery, None, message))

    def drain(self, timeout: float) -> bool:
        """Wait until every copy is out and every ack is written; call it in the main thread.

        Returns:
            whether that was so within *timeout* seconds. What is left is delivered again.
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
        """Write the acks and rejects that are ready; in the main thread only."""
        self._asked = None
        while self._done:
            ready = [self._done.popleft() for _ in range(len(self._done))]
            acked = []
            try:
                for delivery, ack in ready:
                    if delivery.lost:
                        self._log_lost(delivery)
                    elif ack:
                        acked.append(delivery.message)
                    else:
                        self.acks.reject(delivery.message)
                self.acks.ack(acked)
            finally:
                self._close(*(delivery for delivery, _ in ready))

    def _answer(self, *deliveries: Delivery, ack: bool) -> None:
        """Let the main thread ack or reject, all that is ready at once."""
        if self._waited_for:
            with self._answered:
                self._open.update(deliveries)
                self._done.extend((delivery, ack) for delivery in deliveries)
                if self._inline:
                    self._answered.notify_all()
        else:
            self._done.extend((delivery, ack) for delivery in deliveries)
        now, asked = time.monotonic(), self._asked
        if asked is None or now > asked + LOST_CALL:
            self._asked = now
            self.call_soon(self._answers.ack_log_error)

    def _close(self, *deliveries: Delivery) -> None:
        """Nobody need wait for them any more."""
        if self._waited_for:
            with self._answered:
                self._open.difference_update(deliveries)
                self._answered.notify_all()

    def _log_lost(self, delivery: Delivery) -> None:
        logger.info(
            "the connection of %s was lost before it was settled; the broker delivers it again",
            delivery.title,
        )

    # -- the thread -----------------------------------------------------------------------

    def _add(self, job: Job) -> None:
        with self._wake:
            if self._waited_for:
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
            except Exception:
                # Never let the thread die with deliveries in hand.
                logger.exception("settlement failed; the publishes are repeated")
                for job in batch:
                    self._hold(job, None)
            finally:
                with self._wake:
                    self._busy = 0
                    self._wake.notify_all()
        if self._channel is not None:
            self._channel.close()
            self._channel = None

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
        jobs = []
        for job in batch:
            if job.delivery.lost:
                # Publishing now would make two of it.
                self._log_lost(job.delivery)
                self._close(job.delivery)
            else:
                jobs.append(job)
        # A missing exchange or a header that is refused closes the channel, and with it go the
        # confirms of the same window: what failed before is repeated alone, after the others.
        windows = [[job for job in jobs if not job.failures]]
        windows += [[job] for job in jobs if job.failures]
        for number, window in enumerate(windows):
            if not window:
                continue
            channel = self._connect()
            if isinstance(channel, PublishError):
                for job in chain.from_iterable(windows[number:]):
                    self._hold(job, channel)
                return
            self._attempt(channel, window)

    def _connect(self) -> ConfirmChannel | PublishError:
        """Return a channel on which the broker answers, or what is wrong."""
        try:
            if self._channel is None or not self._channel.healthy():
                self._channel = ConfirmChannel(self.app, timeout=self.settings.confirm_timeout)
        except PublishError as exc:
            return exc
        if not self._doubt:
            return self._channel
        # A broker that blocks publishers (memory, disk) says so after the first publish on a
        # connection, and takes that publish when the alarm is over, although nobody waits for
        # its confirm any more. So after a time-out it is asked with a message that no queue
        # gets; otherwise every repeat would be one more copy of the event.
        question = Message(
            exchange=self.copies.names.replay,
            routing_key="",
            body=b"",
            headers={},
            properties={"delivery_mode": 1, "message_id": "question"},
            name="a question whether the broker takes messages",
        )
        (error,) = self._channel.publish(
            [question], mandatory=False, timeout=self.settings.confirm_timeout
        )
        self._doubt = isinstance(error, PublishTimeoutError)
        return error or self._channel

    def _attempt(self, channel: ConfirmChannel, jobs: list[Job]) -> None:
        results = channel.publish(
            [job.message for job in jobs], mandatory=True, timeout=self.settings.confirm_timeout
        )
        if channel.broken:
            channel.close()
            self._channel = None
        confirmed = []
        for job, error in zip(jobs, results, strict=True):
            if error is None:
                confirmed.append(job)
            else:
                self._doubt = self._doubt or isinstance(error, PublishTimeoutError)
                self._hold(job, error)
        self._answer(*(job.delivery for job in confirmed), ack=True)
        for job in confirmed:
            if announce(self.settings.service, job.delivery, job.verdict):
                close_old_connections()

    def _hold(self, job: Job, error: PublishError | None) -> None:
        """Keep the delivery and repeat the publish later, or give it back at the last moment."""
        if isinstance(error, PublishRefusedError) and not job.failures:
            # A header that cannot be written, or that the broker refuses, is not the event.
            job.message = headers.without_foreign_headers(job.message)
        first, last = BACKOFF
        wait = min(first * 2 ** min(job.failures, 16), last)
        job.failures += 1
        job.not_before = time.monotonic() + wait
        what = job.delivery.title
        if job.not_before > job.delivery.since + HOLD:
            logger.error("gave %s back to the broker after %d failed publishes: %s",
                         what, job.failures, error)  # fmt: skip
            self._answer(job.delivery, ack=False)
            return
        self._close(job.delivery)
        logger.warning("%s is held, its copy is published again in %.1f s: %s", what, wait, error)
        with self._wake:
            self._jobs.append(job)
