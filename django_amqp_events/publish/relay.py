"""The relay: publishes rows that a dead process or an unreachable broker left in the outbox.

Takes rows that are due, publishes them with a window of confirms, deletes what is confirmed. Any
number of relays share the work. Whatever stops one between confirm and delete, another one
publishes those rows again, under the same event ids, once their lease has ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Final

from celery import Celery
from django.db import DatabaseError, InterfaceError, connections

from ..broker.confirms import ConfirmChannel
from ..conf import Settings
from ..databases import check_commits
from ..exceptions import (
    AmqpEventsError,
    BrokerUnavailableError,
    PublishError,
    PublishTimeoutError,
    UnroutableError,
)
from ..service_loop import ServiceLoop
from ..signals import event_postponed, event_published, event_unrouted
from . import outbox_rows
from .outbox_rows import Answer, Row

logger = logging.getLogger(__name__)

#: Rows that a relay takes at a time, and publishes in one window.
BATCH: Final = outbox_rows.CLAIM_ROWS
#: Seconds between looks into an outbox that has nothing due.
INTERVAL: Final = 1.0
#: Seconds between looks into a database that has no outbox and need not have one.
ELSEWHERE: Final = 60.0
#: Seconds after which waiting for a confirm is interrupted, to renew leases and to see a stop.
SLICE: Final = 0.5
#: Rows that failed before and are tried, each by itself, between two batches of others.
ALONE: Final = 100
#: Seconds for the confirms that are under way when the relay is stopped.
LAST_CALL: Final = 2.0


class OutboxChannel(ConfirmChannel):
    """A channel for rows of an outbox: it keeps their leases while it waits for confirms.

    While RabbitMQ blocks publishers (memory or disk alarm) it waits as long as the connection
    lives: what was sent may be taken when the alarm ends, and a repeat would double it.

    Args:
        tick: called often while confirms are waited for.
        stop: asked often whether to wait no longer.
    """

    def __init__(
        self,
        app: Celery,
        *,
        timeout: float,
        tick: Callable[[], object] = bool,
        stop: Callable[[], bool] = bool,
    ) -> None:
        super().__init__(app, timeout=timeout)
        self._ticking = tick
        self._stop = stop
        self._stopping = 0.0

    def connect(self) -> None:
        """Connect, where that is not done yet.

        Raises:
            BrokerUnavailableError: no connection, or RabbitMQ blocks publishers.
        """
        if self._conn is None and not self.broken:
            try:
                self._open(self.timeout)
            except BaseException:
                self.close()
                raise
        if not self.healthy():
            raise BrokerUnavailableError("the connection to RabbitMQ is lost")
        if self.blocked:
            raise BrokerUnavailableError(
                f"RabbitMQ blocks publishers ({self.blocked}); free memory or disk on the broker"
            )

    def _read_waiting(self) -> None:
        self._ticking()
        super()._read_waiting()

    def _settle(self, until: int) -> None:
        while len(self._unconfirmed) > until:
            self._ticking()
            now = time.monotonic()
            if self._stop():
                self._stopping = self._stopping or now + LAST_CALL
                self._deadline = min(self._deadline, self._stopping)
            elif self.blocked:
                self._deadline = now + self._patience
            remaining = self._deadline - now
            if remaining <= 0:
                raise TimeoutError(f"no confirm within {self._patience:g} s")
            try:
                self._amqp.blocking_read(min(remaining, SLICE))
            except TimeoutError:
                # py-amqp keeps the half of a frame that it has read.
                continue


@dataclass(slots=True, kw_only=True)
class RelayCounts:
    """Counts of the rows that a relay published.

    Attributes:
        published: confirmed.
        unrouted: of these, those that no queue was bound for.
        failed: they wait, with their error, for another try.
    """

    published: int = 0
    unrouted: int = 0
    failed: int = 0

    @property
    def rows(self) -> int:
        return self.published + self.failed

    def add(self, other: RelayCounts) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


def report_answers(answers: Sequence[Answer], settings: Settings) -> RelayCounts:
    """Send the signals of answers and log them, a line of each kind."""
    counts = RelayCounts()
    unrouted: list[PublishError] = []
    failures: list[PublishError] = []
    for answer in answers:
        message, error = answer.row.message, answer.error
        about = {"event_id": message.event_id, "name": message.name}
        if isinstance(error, UnroutableError):
            event_unrouted.send_robust(settings.service, **about)
        elif error is None:
            event_published.send_robust(settings.service, **about)
        if answer.done(settings):
            counts.published += 1
            if error is not None:
                counts.unrouted += 1
                unrouted.append(error)
        elif error is not None and not answer.untried:
            event_postponed.send_robust(settings.service, **about, error=str(error))
            counts.failed += 1
            failures.append(error)
    if unrouted and settings.unrouted == "warn":
        logger.warning("%s%s", unrouted[0], _and_more(unrouted))
    if failures:
        logger.error(
            "%s%s; kept in the outbox and tried again later", failures[0], _and_more(failures)
        )
    return counts


def _and_more(errors: Sequence[PublishError]) -> str:
    return f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""


@dataclass(slots=True, kw_only=True)
class Relay:
    """Publishes what is due in one database's outbox until it is stopped.

    Args:
        size: rows taken at a time.
        needed: say so where there is no outbox; else look again from time to time.
        tell: called with a sentence whenever something changes that a person should know.
        relayed: called after each batch with what it came to.
        stop: asked often whether to end.
    """

    app: Celery
    settings: Settings
    alias: str
    size: int = BATCH
    needed: bool = True
    tell: Callable[[str], object] = logger.info
    relayed: Callable[[RelayCounts], object] = bool
    stop: Callable[[], bool] = bool
    total: RelayCounts = field(default_factory=RelayCounts)
    _line: OutboxChannel | None = None
    _hand: list[Row] = field(default_factory=list)
    _renewed: float = 0.0
    _answers: list[Answer] = field(default_factory=list)
    _loop: ServiceLoop = field(init=False)

    def __post_init__(self) -> None:
        self._loop = ServiceLoop(
            work=f"relaying the outbox in database {self.alias!r}", tell=self.tell, stop=self.stop
        )

    def run(self, *, until_empty: bool = False) -> RelayCounts:
        """Relay; returns what was done, after :attr:`stop` says so.

        Args:
            until_empty: end when nothing is due any more.
        """
        try:
            self._loop.run(partial(self._step, until_empty=until_empty))
        finally:
            # What is confirmed and not noted would be published again.
            with suppress(DatabaseError, InterfaceError, AmqpEventsError):
                self._note()
            if self._line is not None:
                self._line.leave()
        return self.total

    def _step(self, *, until_empty: bool) -> float | None:
        try:
            wait = 0.0 if self._once() else INTERVAL
        except DatabaseError as exc:
            if self.needed or not outbox_rows.no_table(exc):
                raise
            connections[self.alias].close()
            wait = ELSEWHERE
        return None if wait and until_empty else wait

    def _once(self) -> bool:
        """Publish what is due, at most so much; returns whether there was anything."""
        connections[self.alias].close_if_unusable_or_obsolete()
        self._note()
        if not outbox_rows.due(self.alias, self.settings.service):
            return False
        check_commits(self.alias)
        # Before anything is taken: rows that cannot be published stay as they are.
        self._connected()
        fresh = self._claim(self.size, failed=False)
        if fresh:
            self._publish(fresh)
        again = self._claim(ALONE, failed=True)
        self._publish_alone(again)
        # Those that could not be read were due too.
        return bool(fresh or again) or outbox_rows.due(self.alias, self.settings.service)

    def _claim(self, limit: int, *, failed: bool) -> list[Row]:
        self._renewed = time.monotonic()
        self._hand = outbox_rows.claim(
            self.alias, self.settings.service, limit=limit, failed=failed
        )
        return self._hand

    def _publish(self, rows: Sequence[Row]) -> None:
        """Publish rows together, and note the answers."""
        assert self._line is not None  # noqa: S101 - it was connected before they were taken
        self._send(self._line, rows)
        self._note()

    def _send(self, line: OutboxChannel, rows: Sequence[Row]) -> None:
        errors = line.publish(
            [row.message for row in rows],
            mandatory=self.settings.unrouted != "ignore",
            timeout=self.settings.confirm_timeout,
        )
        self._answers += [Answer(row, error) for row, error in zip(rows, errors, strict=True)]

    def _publish_alone(self, rows: Sequence[Row]) -> None:
        """Publish rows one by one, so that one that closes the connection fails alone.

        After one that got no confirm in time the rest is given back.
        """
        for index, row in enumerate(rows):
            if self.stop():
                outbox_rows.release(self.alias, rows[index:])
                # Those before it are confirmed: left behind, they would be published again.
                break
            try:
                self._send(self._connected(), [row])
            except BrokerUnavailableError:
                outbox_rows.release(self.alias, rows[index:])
                self._note()
                raise
            if isinstance(self._answers[-1].error, PublishTimeoutError):
                # So that the others do not wait behind each of a hundred such.
                outbox_rows.release(self.alias, rows[index + 1 :])
                break
        self._note()

    def _note(self) -> None:
        """Write answers to the database; keep them while it is unreachable."""
        if not self._answers:
            return
        outbox_rows.settle(self.alias, self._answers, self.settings)
        answers, self._answers, self._hand = self._answers, [], []
        counts = report_answers(answers, self.settings)
        self.total.add(counts)
        if counts.rows:
            self.relayed(counts)
        for answer in answers:
            if isinstance(answer.error, BrokerUnavailableError):
                raise answer.error

    def _connected(self) -> OutboxChannel:
        line = self._line
        if line is None or not line.healthy():
            if line is not None:
                line.close()
            # Connecting may take half of the lease.
            self._renew()
            line = self._line = OutboxChannel(
                self.app, timeout=self.settings.confirm_timeout, tick=self._tick, stop=self.stop
            )
        line.connect()
        return line

    def _tick(self) -> None:
        """Renew leases."""
        if time.monotonic() >= self._renewed + outbox_rows.RENEW:
            self._renew()

    def _renew(self) -> None:
        if not self._hand:
            return
        self._renewed = time.monotonic()
        try:
            outbox_rows.renew(self.alias, self._hand)
        except (DatabaseError, InterfaceError) as exc:
            # Nor can another relay take them then.
            logger.warning("leases of the outbox cannot be renewed: %s", exc)
            connections[self.alias].close()


__all__ = ["BATCH", "OutboxChannel", "Relay", "RelayCounts", "report_answers"]
