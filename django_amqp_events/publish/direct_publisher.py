"""The courier: publishes a process's own events right after their commit, in a thread.

Whoever has committed hands his rows over and waits for the confirm, but never long. While the
broker is away nobody waits at all. A confirm that is merely slow still comes to the courier, so
the event is not published a second time by a relay. Rows that the courier cannot publish in time
are the relay's: nothing here is needed for an event to arrive, only for it to arrive at once.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from django.db import connections

from ..broker.connection import celery_app
from ..conf import Settings
from ..exceptions import (
    AmqpEventsError,
    BrokerUnavailableError,
    PublishError,
    PublishInterruptedError,
    PublishTimeoutError,
)
from ..signals import event_postponed
from . import outbox_rows
from .outbox_rows import Answer, Row
from .relay import OutboxChannel, report_answers

logger = logging.getLogger(__name__)

#: Seconds that whoever has committed waits for the confirm at most.
PATIENCE: Final = 0.15
#: Rows and bytes of bodies that wait for the courier at most; what is more is left to the relay.
BACKLOG_ROWS: Final = 10_000
BACKLOG_BYTES: Final = 32 * 1024 * 1024
#: Rows that are published in one window.
BATCH: Final = 500
#: Seconds before the next look at a broker that is away: doubled from the first to the last.
BACKOFF: Final = (0.2, 5.0)
#: Seconds that a process that ends waits for what is under way.
LAST_CALL: Final = 2.0


@dataclass(slots=True, eq=False)
class CommittedRows:
    """Rows of one commit, on their way.

    Attributes:
        began: monotonic time before the first of them was written; their lease is measured from it.
        alias: the database that they are in.
        waited_for: whether whoever committed still waits, and will note the answers himself.
    """

    rows: list[Row]
    alias: str
    began: float
    waited_for: bool
    answers: list[Answer] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def size(self) -> int:
        return sum(len(row.message.body) for row in self.rows)

    @property
    def late(self) -> bool:
        """Return True if a relay might claim the rows before they are confirmed."""
        return time.monotonic() > self.began + outbox_rows.BEGIN_WITHIN


class DirectPublisher:
    """Publishes the rows of this process; at most one thread, started when first needed."""

    def __init__(self, app: Celery, settings: Settings) -> None:
        self.app = app
        self.settings = settings
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        # Reentrant: a signal handler may publish while its thread is in here.
        self._changed = threading.Condition()
        self._parcels: deque[CommittedRows] = deque()
        self._hand: list[CommittedRows] = []
        self._rows = self._bytes = 0
        self._unsettled: list[tuple[str, list[Answer], float]] = []
        self._thread: threading.Thread | None = None
        self._line: OutboxChannel | None = None
        self._closing = False
        self._failures = 0
        self._renewed = 0.0
        self._said = False
        #: Whether it is worth waiting for a confirm: not since one did not come.
        self.prompt = True

    # -- in the thread of whoever has committed -------------------------------------------------

    def deliver(self, rows: list[Row], *, alias: str, began: float) -> None:
        """Publish rows that are committed. Raises nothing; what cannot be done is the relay's."""
        if self._pid != os.getpid():
            self.forget_after_fork()
        parcel = CommittedRows(rows, alias, began, waited_for=self.prompt)
        why = self._hand_over(parcel)
        if why:
            self._leave(parcel, why)
            return
        if not parcel.waited_for:
            return
        try:
            if not parcel.over.wait(PATIENCE):
                self.prompt = False
        finally:
            # Also where a signal ends the waiting.
            with self._changed:
                mine, parcel.waited_for = bool(parcel.answers), False
            if mine:
                self._settle(parcel.alias, parcel.answers)

    def _hand_over(self, parcel: CommittedRows) -> str:
        """Return why it is not possible, ``""`` where it is."""
        if parcel.late:
            return "its transaction took too long"
        size = parcel.size
        with self._changed:
            if self._closing:
                return "this process ends"
            if self._parcels and (
                self._rows + len(parcel.rows) > BACKLOG_ROWS or self._bytes + size > BACKLOG_BYTES
            ):
                return "too many events wait for RabbitMQ in this process"
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._run, name="amqp-events-courier", daemon=True)
                try:
                    thread.start()
                except RuntimeError as exc:
                    # The interpreter shuts down.
                    return str(exc)
                self._thread = thread
            self._parcels.append(parcel)
            self._rows += len(parcel.rows)
            self._bytes += size
            self._changed.notify_all()
        return ""

    def _settle(self, alias: str, answers: list[Answer]) -> None:
        """Bring answers into the database, by the connection of this thread."""
        try:
            # Not for the disk, if it may be so: somebody may wait for this.
            wait = "deletes" not in self.settings.fast_paths
            outbox_rows.settle(alias, answers, self.settings, wait=wait)
        except Exception as exc:
            logger.exception("%d rows of the outbox are settled later", len(answers))
            with self._changed:
                self._unsettled.append((alias, answers, time.monotonic()))
                self._changed.notify_all()
            if isinstance(exc, SoftTimeLimitExceeded):
                # It is not about us: whoever has committed has run for too long.
                raise
        report_answers(answers, self.settings)

    # -- in its own thread ----------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._parcels and not self._closing:
                    if not self._changed.wait(1.0 if self._unsettled else None):
                        break
                if self._closing and not self._parcels:
                    break
                self._hand = self._take()
            try:
                self._work()
            except Exception as exc:
                # An error of ours says what it is and what to do; of others the place matters.
                logger.log(
                    logging.ERROR,
                    "the courier of the outbox failed; a relay publishes its rows: %s",
                    exc,
                    exc_info=not isinstance(exc, AmqpEventsError),
                )
                for parcel in self._hand:
                    parcel.over.set()
                self._hand = []
            self._try_again_to_settle()
            if not self._parcels:
                connections.close_all()
        self._try_again_to_settle()
        if self._line is not None:
            self._line.leave()
        connections.close_all()

    def _take(self) -> list[CommittedRows]:
        taken: list[CommittedRows] = []
        count = 0
        while self._parcels and (not taken or count + len(self._parcels[0].rows) <= BATCH):
            parcel = self._parcels.popleft()
            taken.append(parcel)
            count += len(parcel.rows)
            self._rows -= len(parcel.rows)
            self._bytes -= parcel.size
        return taken

    def _work(self) -> None:
        for parcel in [parcel for parcel in self._hand if parcel.late]:
            self._hand.remove(parcel)
            self._leave(parcel, "RabbitMQ was away for too long")
        if not self._hand:
            return
        self._renewed = min(parcel.began for parcel in self._hand)
        rows = [row for parcel in self._hand for row in parcel.rows]
        errors = self._publish(rows)
        answers = iter([Answer(row, error) for row, error in zip(rows, errors, strict=True)])
        hand, self._hand = self._hand, []
        self._judge(errors)
        mine: dict[str, list[Answer]] = {}
        waiting: list[CommittedRows] = []
        for parcel in hand:
            found = [next(answers) for _ in parcel.rows]
            tried = [answer for answer in found if not answer.untried]
            if not self._told(parcel, tried):
                mine.setdefault(parcel.alias, []).extend(tried)
            if untried := [answer.row for answer in found if answer.untried]:
                waiting.append(CommittedRows(untried, parcel.alias, parcel.began, waited_for=False))
        for alias, tried in mine.items():
            if tried:
                self._settle(alias, tried)
        with self._changed:
            self._parcels.extendleft(reversed(waiting))
            self._rows += sum(len(parcel.rows) for parcel in waiting)
            self._bytes += sum(parcel.size for parcel in waiting)
            if waiting and not self._closing:
                first, last = BACKOFF
                end = time.monotonic() + min(first * 2 ** min(self._failures - 1, 16), last)
                while not self._closing and (left := end - time.monotonic()) > 0:
                    self._changed.wait(left)
            elif waiting:
                # Nobody publishes them any more in this process.
                self._parcels.clear()

    def _publish(self, rows: Sequence[Row]) -> Sequence[PublishError | None]:
        if self._line is None or not self._line.healthy():
            # Connecting may take half of the lease.
            self._renew()
            self._line = OutboxChannel(
                self.app,
                timeout=self.settings.confirm_timeout,
                tick=self._tick,
                stop=lambda: self._closing,
            )
        return self._line.publish(
            [row.message for row in rows],
            mandatory=self.settings.unrouted != "ignore",
            timeout=self.settings.confirm_timeout,
        )

    def _told(self, parcel: CommittedRows, answers: list[Answer]) -> bool:
        """Hand answers to the committing thread if it still waits; return True if it does."""
        with self._changed:
            if parcel.waited_for:
                parcel.answers = answers
                parcel.over.set()
            return parcel.waited_for

    def _judge(self, errors: Sequence[PublishError | None]) -> None:
        """Open or close the circuit, which decides whether committing threads wait."""
        away = next((error for error in errors if isinstance(error, _UNREACHABLE)), None)
        if away is None:
            self.prompt = True
            self._failures = 0
            if self._said:
                self._said = False
                logger.warning("RabbitMQ confirms again; what was left, a relay publishes")
            return
        self.prompt = False
        self._failures += 1
        if not self._said:
            self._said = True
            logger.error("events wait in the outbox until RabbitMQ is back: %s", away)

    def _tick(self) -> None:
        """Renew leases, and report when RabbitMQ blocks publishers."""
        line = self._line
        if line is not None and line.blocked and not self._said:
            self._said, self.prompt = True, False
            logger.error(
                "events wait in the outbox: RabbitMQ blocks publishers (%s); free memory or disk "
                "on the broker",
                line.blocked,
            )
        self._renew()

    def _renew(self) -> None:
        """Renew the leases, unless that was just done."""
        now = time.monotonic()
        if now < self._renewed + outbox_rows.RENEW:
            return
        self._renewed = now
        with suppress(Exception):
            for parcel in self._hand:
                outbox_rows.renew(parcel.alias, parcel.rows)
        connections.close_all()

    def _try_again_to_settle(self) -> None:
        with self._changed:
            unsettled, self._unsettled = self._unsettled, []
        for alias, answers, since in unsettled:
            try:
                outbox_rows.settle(alias, answers, self.settings)
            except Exception as exc:  # noqa: BLE001 - it is tried again
                connections[alias].close()
                if time.monotonic() < since + outbox_rows.LEASE:
                    with self._changed:
                        self._unsettled.append((alias, answers, since))
                else:
                    logger.error(  # noqa: TRY400 - once is enough
                        "%d rows of the outbox cannot be settled: %s", len(answers), exc
                    )

    def _leave(self, parcel: CommittedRows, why: str) -> None:
        """Leave rows to the relay."""
        parcel.over.set()
        logger.info("%d events are left to the relay: %s", len(parcel.rows), why)
        for row in parcel.rows:
            event_postponed.send_robust(
                self.settings.service, event_id=row.message.event_id, name=row.message.name,
                error=why,
            )  # fmt: skip

    # -- the end --------------------------------------------------------------------------------

    def close(self, wait: float = LAST_CALL) -> None:
        """End the thread; what is under way has *wait* seconds, the rest is the relay's."""
        if self._pid != os.getpid():
            self.forget_after_fork()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(wait)

    def forget_after_fork(self) -> None:
        """Reset the state in a child process; the rows belong to the parent."""
        if self._line is not None:
            self._line.forget_after_fork()
        self._reset()


_UNREACHABLE: Final = (BrokerUnavailableError, PublishTimeoutError, PublishInterruptedError)

_publishers: dict[int, DirectPublisher] = {}
_publishers_lock = threading.RLock()


def get_direct_publisher(settings: Settings) -> DirectPublisher:
    """Return this process's courier for the project's Celery app."""
    app = celery_app(settings)
    key = id(app)
    found = _publishers.get(key)
    if found is None or found.app is not app or found.settings is not settings:
        with _publishers_lock:
            found = _publishers.get(key)
            if found is None or found.app is not app or found.settings is not settings:
                if found is not None:
                    found.close(0)
                found = _publishers[key] = DirectPublisher(app, settings)
    return found


def close_direct_publishers(wait: float = LAST_CALL) -> None:
    """End the couriers of this process; what they had not published is the relay's."""
    deadline = time.monotonic() + wait
    with _publishers_lock:
        ending = list(_publishers.values())
        _publishers.clear()
    for each in ending:
        each.close(0)
    for each in ending:
        each.close(max(0.0, deadline - time.monotonic()))


def _after_fork_in_child() -> None:
    global _publishers_lock  # noqa: PLW0603 - the parent's may be held by a thread that is not here
    _publishers_lock = threading.RLock()
    for each in _publishers.values():
        each.forget_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(close_direct_publishers)
