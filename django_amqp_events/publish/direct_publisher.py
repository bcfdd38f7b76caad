"""The direct publisher: publishes a process's own events after their commit, in a thread.

The committing thread waits at most :data:`CONFIRM_WAIT_SECONDS` for the confirm, and not at all
while RabbitMQ is unreachable. A later confirm still reaches the direct publisher, which renews the
leases until then. Relays publish the rows that RabbitMQ did not read.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import Final

from celery import Celery
from celery.signals import worker_process_shutdown
from django.db import Error, connections

from ..backoff import Backoff
from ..broker.connection import celery_app
from ..conf import Settings
from ..exceptions import AmqpEventsError, BrokerUnavailableError
from ..logs import get_logger
from ..signals import event_postponed
from . import outbox_rows
from .outbox_rows import Answer, Row
from .relay import LAST_CALL, OutboxChannel, report_answers

logger = get_logger(__name__)

#: Seconds that the committing thread waits for the confirm, at most.
CONFIRM_WAIT_SECONDS: Final = 0.15
#: Bytes of the backlog, bodies and :data:`ROW_BYTES` a row; a relay publishes what exceeds them.
BACKLOG_BYTES: Final = 32 * 1024 * 1024
ROW_BYTES: Final = 3 * 1024
#: Rows that are published in one window.
BATCH: Final = 500
#: Seconds for which rows are left to a relay after RabbitMQ was unreachable.
BACKOFF: Final = Backoff(0.2, 5.0)


@dataclass(slots=True, kw_only=True, eq=False)
class CommittedRows:
    """Rows of one transaction in the database *alias*.

    Attributes:
        began: monotonic time before the first row was written, from which their lease is measured.
        size: bytes of memory.
        answers: for the committing thread, which then records them. It cancels this when it waits
            no longer, and the direct publisher records them.
    """

    rows: list[Row]
    alias: str
    began: float
    size: int = field(init=False)
    answers: Future[list[Answer]] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.size = sum(len(row.message.body) + ROW_BYTES for row in self.rows)

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
        self._backlog: deque[CommittedRows] = deque()
        self._bytes = 0
        self._unrecorded: list[tuple[str, list[Answer], float]] = []
        self._thread: threading.Thread | None = None
        self._channel = OutboxChannel(
            self.app, timeout=self.settings.confirm_timeout, stop=lambda: self._closing
        )
        self._closing = False
        # Publishes in a row that did not reach RabbitMQ, and the time until which none is tried.
        self._failures = 0
        self._resumes = 0.0
        #: Confirms arrive in time; otherwise committing threads do not wait for them.
        self.prompt = True

    # -- in the committing thread ---------------------------------------------------------------

    def deliver(self, commit: CommittedRows) -> None:
        """Publish committed rows, or leave them to a relay; no error of RabbitMQ is raised.

        What a signal handler of the caller raises meanwhile, such as a time limit, is raised.
        """
        if self._pid != os.getpid():
            self.forget_after_fork()
        wait = CONFIRM_WAIT_SECONDS if self.prompt else 0.0
        try:
            if why := self._enqueue(commit):
                commit.answers.set_result(_left(commit, why))
            # Not result(timeout), whose error could also be a signal handler's.
            wait_for([commit.answers], wait)
        finally:
            if not commit.answers.done():
                self.prompt = False
            if not commit.answers.cancel():
                answers = commit.answers.result()
                try:
                    self._record(commit.alias, answers)
                finally:
                    self._report(answers)

    def _enqueue(self, commit: CommittedRows) -> str:
        """Add rows to the backlog; return the reason if that is impossible."""
        if why := self._impossible(commit):
            return why
        with self._changed:
            if self._closing:
                return "this process ends"
            if self._backlog and self._bytes + commit.size > BACKLOG_BYTES:
                return "too many events wait for RabbitMQ in this process"
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(
                    target=self._run, name="amqp-events-publisher", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as exc:
                    # The interpreter shuts down.
                    return str(exc)
                self._thread = thread
            self._backlog.append(commit)
            self._bytes += commit.size
            self._changed.notify_all()
        return ""

    def _impossible(self, commit: CommittedRows) -> str:
        """Return why rows cannot be published now, ``""`` if they can."""
        if commit.late:
            return "they were not published in time"
        return "RabbitMQ is unreachable" if time.monotonic() < self._resumes else ""

    def _record(self, alias: str, answers: list[Answer]) -> None:
        """Write answers to the database; retry later if that fails."""
        try:
            # The committing thread waits for this.
            outbox_rows.record_answers(alias, answers, self.settings, lazily=True)
        except BaseException as exc:
            with self._changed:
                self._unrecorded.append((alias, answers, time.monotonic()))
                self._changed.notify_all()
            if not isinstance(exc, Error) and threading.current_thread() is not self._thread:
                # A signal handler's, such as a time limit.
                raise
            logger.exception("cannot settle %d outbox rows; retrying", len(answers))

    def _report(self, answers: list[Answer]) -> None:
        report_answers(answers, self.settings)
        for answer in answers:
            if answer.untried:
                event_postponed.send_robust(
                    self.settings.service, event_id=answer.row.message.event_id,
                    name=answer.row.message.name, error=str(answer.error),
                )  # fmt: skip

    # -- in its own thread ----------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._backlog and not self._closing:
                    if not self._changed.wait(1.0 if self._unrecorded else None):
                        break
                if self._closing and not self._backlog:
                    break
                commits = self._take()
            try:
                self._publish(commits)
            except Exception as exc:
                logger.error(  # noqa: TRY400
                    "the direct publisher failed; a relay publishes its rows: %s",
                    exc,
                    # Messages of our own errors name the cause.
                    exc_info=not isinstance(exc, AmqpEventsError),
                )
                for commit in commits:
                    if commit.answers.cancel():
                        # wait() counts it as done only now.
                        commit.answers.set_running_or_notify_cancel()
            self._retry_unrecorded()
            if not self._backlog:
                connections.close_all()
        self._retry_unrecorded()
        self._channel.leave()
        connections.close_all()

    def _take(self) -> list[CommittedRows]:
        taken: list[CommittedRows] = []
        count = 0
        while self._backlog and (not taken or count + len(self._backlog[0].rows) <= BATCH):
            commit = self._backlog.popleft()
            taken.append(commit)
            count += len(commit.rows)
            self._bytes -= commit.size
        return taken

    def _publish(self, commits: Sequence[CommittedRows]) -> None:
        """Publish rows; a relay publishes those that RabbitMQ does not read."""
        left = {
            commit: _left(commit, why) for commit in commits if (why := self._impossible(commit))
        }
        fresh = [commit for commit in commits if commit not in left]
        rows = [row for commit in fresh for row in commit.rows]
        answers: list[Answer] = []
        if fresh:
            held = [(commit.alias, commit.rows) for commit in fresh]
            self._channel.hold(held, min(commit.began for commit in fresh))
            errors = self._channel.publish(
                [row.message for row in rows], mandatory=self.settings.unrouted != "ignore"
            )
            answers = list(map(Answer, rows, errors))
        mine: dict[str, list[Answer]] = {}
        published = iter(answers)
        for commit in commits:
            own = left.get(commit) or [next(published) for _ in commit.rows]
            if commit.answers.set_running_or_notify_cancel():
                commit.answers.set_result(own)
            else:
                mine.setdefault(commit.alias, []).extend(own)
        for alias, own in mine.items():
            self._record(alias, own)
        # Log handlers and receivers may be slow, so they run after the answers are recorded.
        if answers:
            self._switch(answers)
        for own in mine.values():
            self._report(own)

    def _switch(self, answers: Sequence[Answer]) -> None:
        """Decide from the answers whether to publish, and whether committing threads wait."""
        errors = [answer.error for answer in answers if answer.error is not None]
        # A refused message closes the connection, and its neighbours are not read. One that is
        # late among confirmed ones has a queue that does not confirm.
        down = len(errors) == len(answers) and all(error.scope == "broker" for error in errors)
        self.prompt = not down
        if down:
            if not self._failures:
                logger.error("events wait in the outbox until RabbitMQ confirms: %s", errors[0])
            self._resumes = time.monotonic() + BACKOFF.delay(self._failures)
            self._failures += 1
            return
        if self._failures:
            logger.warning("RabbitMQ confirms again; a relay publishes the events left over")
        self._failures = 0

    def _retry_unrecorded(self) -> None:
        with self._changed:
            unrecorded, self._unrecorded = self._unrecorded, []
        for alias, answers, since in unrecorded:
            try:
                outbox_rows.record_answers(alias, answers, self.settings)
            except Exception as exc:  # noqa: BLE001 - retried
                connections[alias].close()
                if time.monotonic() < since + outbox_rows.LEASE:
                    with self._changed:
                        self._unrecorded.append((alias, answers, since))
                else:
                    logger.error(  # noqa: TRY400 - the traceback was logged before
                        "cannot settle %d outbox rows; a relay publishes them again: %s",
                        len(answers),
                        exc,
                    )

    # -- the end --------------------------------------------------------------------------------

    def close(self, wait: float = LAST_CALL) -> None:
        """End the thread; wait up to *wait* seconds for pending confirms."""
        if self._pid != os.getpid():
            self.forget_after_fork()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(wait)

    def forget_after_fork(self) -> None:
        """Reset the state in a child process; its parent publishes the rows."""
        self._channel.forget_after_fork()
        self._reset()


def _left(commit: CommittedRows, why: str) -> list[Answer]:
    """Return the answers of rows that are left to a relay."""
    logger.info("a relay publishes %d events: %s", len(commit.rows), why)
    return [
        Answer(
            row,
            BrokerUnavailableError(why, event_id=row.message.event_id, event_name=row.message.name),
        )
        for row in commit.rows
    ]


_publishers: dict[Celery, DirectPublisher] = {}
_publishers_lock = threading.RLock()


def get_direct_publisher(settings: Settings) -> DirectPublisher:
    """Return this process's direct publisher for the project's Celery app."""
    app = celery_app(settings)
    with _publishers_lock:
        publisher = _publishers.get(app)
        if publisher is None or publisher.settings is not settings:
            if publisher is not None:
                publisher.close(0)
            publisher = _publishers[app] = DirectPublisher(app, settings)
    return publisher


def close_direct_publishers(wait: float = LAST_CALL) -> None:
    """End the direct publishers of this process; relays publish the rows left over."""
    deadline = time.monotonic() + wait
    with _publishers_lock:
        ending = list(_publishers.values())
        _publishers.clear()
    for publisher in ending:
        publisher.close(0)
    for publisher in ending:
        publisher.close(max(0.0, deadline - time.monotonic()))


def _after_fork_in_child() -> None:
    global _publishers_lock  # noqa: PLW0603 - a thread of the parent may hold it
    _publishers_lock = threading.RLock()
    for publisher in _publishers.values():
        publisher.forget_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(close_direct_publishers)

# A pool process ends without the functions of atexit.
worker_process_shutdown.connect(lambda **_: close_direct_publishers(), weak=False)
