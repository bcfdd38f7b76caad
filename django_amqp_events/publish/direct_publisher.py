"""The direct publisher: publishes a process's own events after their commit, in a thread.

The committing thread waits at most :data:`CONFIRM_WAIT_SECONDS` for the confirm, and not at all
while RabbitMQ is unreachable. A later confirm still reaches the direct publisher, which renews the
leases until then. Relays publish the rows that it cannot publish before their leases expire, or
before the process ends.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Final

from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from django.db import connections

from ..backoff import Backoff
from ..broker.connection import celery_app
from ..conf import Settings
from ..exceptions import AmqpEventsError
from ..signals import event_postponed
from . import outbox_rows
from .outbox_rows import Answer, Row
from .relay import LAST_CALL, OutboxChannel, report_answers

logger = logging.getLogger(__name__)

#: Seconds that the committing thread waits for the confirm, at most.
CONFIRM_WAIT_SECONDS: Final = 0.15
#: Bytes of the backlog, bodies and :data:`ROW_BYTES` a row; a relay publishes what exceeds them.
BACKLOG_BYTES: Final = 32 * 1024 * 1024
ROW_BYTES: Final = 3 * 1024
#: Rows that are published in one window.
BATCH: Final = 500
#: Seconds between attempts while RabbitMQ is unreachable.
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
        self._leased: list[CommittedRows] = []
        self._bytes = 0
        self._unrecorded: list[tuple[str, list[Answer], float]] = []
        self._thread: threading.Thread | None = None
        self._channel = OutboxChannel(
            self.app,
            timeout=self.settings.confirm_timeout,
            tick=self._tick,
            stop=lambda: self._closing,
        )
        self._closing = False
        self._failures = 0
        self._reported = False
        #: Confirms arrive in time; otherwise committing threads do not wait for them.
        self.prompt = True

    # -- in the committing thread ---------------------------------------------------------------

    def deliver(self, commit: CommittedRows) -> None:
        """Publish committed rows, or leave them to a relay; no error of RabbitMQ is raised."""
        if self._pid != os.getpid():
            self.forget_after_fork()
        wait = CONFIRM_WAIT_SECONDS if self.prompt else 0.0
        try:
            if why := self._enqueue(commit):
                self._leave([commit], why)
                self._tell([commit], why)
            else:
                commit.answers.result(wait)
        except CancelledError:
            pass
        except TimeoutError:
            self.prompt = False
        finally:
            # Also when a signal ends it.
            if not commit.answers.cancel():
                answers = commit.answers.result()
                try:
                    self._record(commit.alias, answers)
                finally:
                    report_answers(answers, self.settings)

    def _enqueue(self, commit: CommittedRows) -> str:
        """Add rows to the backlog; return the reason if that is impossible."""
        if commit.late:
            return "its transaction took too long"
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

    def _record(self, alias: str, answers: list[Answer]) -> None:
        """Write answers to the database; retry later if that fails."""
        try:
            # The committing thread waits for this.
            outbox_rows.record_answers(alias, answers, self.settings, lazily=True)
        except BaseException as exc:
            with self._changed:
                self._unrecorded.append((alias, answers, time.monotonic()))
                self._changed.notify_all()
            logger.exception("cannot settle %d outbox rows; retrying", len(answers))
            if isinstance(exc, SoftTimeLimitExceeded) or not isinstance(exc, Exception):
                # It concerns the handler that has committed, or the process.
                raise

    # -- in its own thread ----------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._backlog and not self._closing:
                    if not self._changed.wait(1.0 if self._unrecorded else None):
                        break
                if self._closing and not self._backlog:
                    break
                self._leased = self._take()
            try:
                self._publish_leased()
            except Exception as exc:
                logger.error(  # noqa: TRY400
                    "the direct publisher failed; a relay publishes its rows: %s",
                    exc,
                    # Messages of our own errors name the cause.
                    exc_info=not isinstance(exc, AmqpEventsError),
                )
                for commit in self._leased:
                    commit.answers.cancel()
                self._leased = []
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

    def _publish_leased(self) -> None:
        late = [commit for commit in self._leased if commit.late]
        self._leased = [commit for commit in self._leased if commit not in late]
        why = "RabbitMQ was unreachable for too long"
        self._leave(late, why)
        try:
            if self._leased:
                self._publish_rows()
        finally:
            # Receivers may take their time, in which leases would expire.
            self._tell(late, why)

    def _publish_rows(self) -> None:
        held = ((commit.alias, commit.rows) for commit in self._leased)
        self._channel.hold(held, min(commit.began for commit in self._leased))
        rows = [row for commit in self._leased for row in commit.rows]
        messages = [row.message for row in rows]
        # Without publish_each(): after a refused message, what RabbitMQ has not read is untried and
        # goes back to the backlog, and a relay publishes the other neighbours.
        errors = self._channel.publish(messages, mandatory=self.settings.unrouted != "ignore")
        published = list(map(Answer, rows, errors))
        answers = iter(published)
        commits, self._leased = self._leased, []
        self._switch(published)
        mine: dict[str, list[Answer]] = {}
        waiting: list[CommittedRows] = []
        for commit in commits:
            own_answers = [next(answers) for _ in commit.rows]
            tried = [answer for answer in own_answers if not answer.untried]
            if untried := [answer.row for answer in own_answers if answer.untried]:
                again = CommittedRows(rows=untried, alias=commit.alias, began=commit.began)
                again.answers.cancel()
                waiting.append(again)
            if commit.answers.set_running_or_notify_cancel():
                commit.answers.set_result(tried)
            elif tried:
                mine.setdefault(commit.alias, []).extend(tried)
        for alias, tried in mine.items():
            self._record(alias, tried)
        for tried in mine.values():
            report_answers(tried, self.settings)
        with self._changed:
            self._backlog.extendleft(reversed(waiting))
            self._bytes += sum(commit.size for commit in waiting)
            ending = self._closing
            if waiting and not ending:
                end = time.monotonic() + BACKOFF.delay(self._failures - 1)
                while not self._closing and (left := end - time.monotonic()) > 0:
                    self._changed.wait(left)
        if waiting and ending:
            # RabbitMQ is unreachable; relays publish the rest.
            with self._changed:
                left_over, self._backlog = list(self._backlog), deque()
            self._release(left_over)

    def _switch(self, answers: Sequence[Answer]) -> None:
        """Decide from the answers whether committing threads wait for confirms."""
        errors = [answer.error for answer in answers]
        down = next((error for error in errors if error and error.scope == "broker"), None)
        self.prompt = down is None
        if down is not None:
            self._failures += 1
            if not self._reported:
                self._reported = True
                logger.error("events wait in the outbox until RabbitMQ is reachable: %s", down)
            return
        self._failures = 0
        if self._reported:
            self._reported = False
            logger.warning("RabbitMQ confirms again; a relay publishes the events left over")

    def _tick(self) -> None:
        """Report when RabbitMQ blocks publishers."""
        if self._channel.blocked and not self._reported:
            self._reported, self.prompt = True, False
            logger.error(
                "events wait in the outbox: RabbitMQ blocks publishers (%s); free memory or disk "
                "on the broker",
                self._channel.blocked,
            )

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

    def _leave(self, commits: Sequence[CommittedRows], why: str) -> None:
        """Leave rows to a relay."""
        for commit in commits:
            commit.answers.cancel()
            logger.info("a relay publishes %d events: %s", len(commit.rows), why)
        self._release(commits)

    def _tell(self, commits: Sequence[CommittedRows], why: str) -> None:
        """Send the signals of rows that are left to a relay."""
        for row in (row for commit in commits for row in commit.rows):
            event_postponed.send_robust(
                self.settings.service, event_id=row.message.event_id, name=row.message.name,
                error=why,
            )  # fmt: skip

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

    @staticmethod
    def _release(commits: Iterable[CommittedRows]) -> None:
        """Let a relay publish rows now; after an error, when their leases expire."""
        for commit in commits:
            try:
                outbox_rows.release(commit.alias, commit.rows)
            except SoftTimeLimitExceeded:
                # It concerns the handler that has committed.
                raise
            except Exception as exc:  # noqa: BLE001 - drivers raise errors of their own
                logger.info(
                    "could not release %d events, which a relay publishes later: %s",
                    len(commit.rows),
                    exc,
                )

    def forget_after_fork(self) -> None:
        """Reset the state in a child process; its parent publishes the rows."""
        self._channel.forget_after_fork()
        self._reset()


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
