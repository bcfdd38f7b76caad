"""The relay: publishes the rows that their own process did not publish.

Any number of relays may run. If one stops between confirm and delete, another publishes those rows
again, under the same event ids, when their lease has expired.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Final

from celery import Celery
from django.db import DatabaseError, Error, InterfaceError, connections

from ..broker.confirms import ConfirmChannel
from ..broker.isolation import publish_each
from ..callables import nothing
from ..conf import Settings
from ..databases import check_commits, error_line, table_missing
from ..exceptions import (
    AmqpEventsError,
    BrokerUnavailableError,
    ConfigurationError,
    PublishError,
    UnroutableError,
)
from ..logs import get_logger, message_fields
from ..message.text import counted
from ..message.types import Message
from ..service_loop import ServiceLoop
from ..signals import event_postponed, event_published, event_unrouted
from . import outbox, outbox_rows
from .outbox_rows import Answer, Row

logger = get_logger(__name__)

#: Rows that a relay claims at a time and publishes in one window.
BATCH: Final = outbox_rows.CLAIM_ROWS
#: Seconds between polls of an outbox in which nothing is due.
INTERVAL: Final = 1.0
#: Seconds between polls of a database that has no outbox and does not need one.
NO_OUTBOX_SECONDS: Final = 60.0
#: Failed rows that are retried, each alone, between two batches of others.
ALONE: Final = 100
#: Seconds to wait for pending confirms when a relay is stopped, or a process ends.
LAST_CALL: Final = 2.0


class OutboxChannel(ConfirmChannel):
    """A channel that renews the leases of its rows while it waits for confirms.

    While RabbitMQ blocks publishers (memory or disk alarm), it waits as long as the connection
    lives: RabbitMQ may accept the messages when the alarm ends, and a repeat would duplicate them.

    Args:
        stop: polled at least every :data:`~confirms.SLICE` seconds; returns True to end the wait.
    """

    def __init__(self, app: Celery, *, timeout: float, stop: Callable[[], bool] = nothing) -> None:
        super().__init__(app, timeout=timeout)
        self._stop = stop
        self._stopping = 0.0
        self._held: list[tuple[str, Sequence[Row]]] = []
        self._renewed = 0.0

    def hold(self, held: Iterable[tuple[str, Sequence[Row]]], since: float) -> None:
        """Renew the leases of rows, by database, while they are published.

        Args:
            since: when they were leased or renewed (monotonic).
        """
        self._held, self._renewed = list(held), since

    def _on_blocked(self, reason: str) -> None:
        super()._on_blocked(reason)
        logger.error(
            "events wait in the outbox: RabbitMQ blocks publishers (%s); free memory or disk on "
            "the broker",
            self.blocked,
        )

    def _renew(self) -> None:
        if time.monotonic() < self._renewed + outbox_rows.RENEW:
            return
        self._renewed = time.monotonic()
        for alias, rows in self._held:
            try:
                outbox_rows.renew(alias, rows)
            except Exception as exc:  # noqa: BLE001 - drivers raise errors of their own
                # While the database is unreachable, no relay can claim the rows.
                logger.warning("cannot renew the leases of outbox rows: %s", exc)
            finally:
                connections[alias].close()

    def connect(self) -> None:
        # Connecting may take half of a lease.
        self._renew()
        super().connect()

    def _read_waiting(self) -> None:
        self._renew()
        super()._read_waiting()

    def _before_read(self) -> None:
        self._renew()
        now = time.monotonic()
        if self._stop():
            self._stopping = self._stopping or now + LAST_CALL
            self._deadline = min(self._deadline, self._stopping)
        elif self.blocked:
            if self._missed_unblocked():
                raise ConnectionError("the connection died while RabbitMQ blocked publishers")
            self._deadline = now + self.timeout


@dataclass(slots=True, kw_only=True)
class RelayCounts:
    """The number of rows published, of those unroutable among them, and of those that failed."""

    published: int = 0
    unrouted: int = 0
    failed: int = 0

    def add(self, other: RelayCounts) -> None:
        for part in fields(self):
            setattr(self, part.name, getattr(self, part.name) + getattr(other, part.name))

    def __str__(self) -> str:
        """Write the counts for a console: ``3 events published, 1 failed``."""
        parts = (
            (self.published, f"{counted(self.published, 'event')} published"),
            (self.unrouted, f"{self.unrouted} of them unrouted"),
            (self.failed, f"{self.failed} failed"),
        )
        return ", ".join(text for count, text in parts if count) or "nothing"


def report_published(
    answers: Iterable[tuple[Message, PublishError | None]], settings: Settings
) -> list[tuple[Message, PublishError]]:
    """Send the signals of published and unroutable events; return what has failed.

    Errors of receivers are logged. So are unroutable events, in one line.
    """
    unrouted: list[tuple[Message, PublishError]] = []
    failed: list[tuple[Message, PublishError]] = []
    for message, error in answers:
        about = {"event_id": message.event_id, "name": message.name}
        if error is None:
            event_published.send_robust(settings.service, **about)
            continue
        if isinstance(error, UnroutableError):
            event_unrouted.send_robust(settings.service, **about)
        accepted = outbox_rows.is_accepted(error, settings)
        (unrouted if accepted else failed).append((message, error))
    if unrouted and settings.unrouted == "warn":
        _log(logging.WARNING, "%s%s", unrouted)
    return failed


def report_answers(answers: Sequence[Answer], settings: Settings) -> RelayCounts:
    """Send the signals of rows' answers, and log unroutable and failed events in one line each."""
    published = [answer.error for answer in answers if answer.done(settings)]
    tried = [(answer.row.message, answer.error) for answer in answers if not answer.untried]
    failed = report_published(tried, settings)
    for message, error in failed:
        event_postponed.send_robust(
            settings.service, event_id=message.event_id, name=message.name, error=str(error)
        )
    if failed:
        _log(logging.ERROR, "%s%s; kept in the outbox for a retry", failed)
    unrouted = len([error for error in published if error is not None])
    return RelayCounts(published=len(published), unrouted=unrouted, failed=len(failed))


def _log(level: int, text: str, errors: Sequence[tuple[Message, PublishError]]) -> None:
    """Log the first of several errors."""
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    message, first = errors[0]
    logger.log(level, text, first, more, extra=message_fields(message))


@dataclass(slots=True, kw_only=True)
class Relay:
    """Publishes due rows of the outbox in one database until it is stopped.

    Args:
        size: rows claimed at a time.
        needed: report a missing table, and errors of any database, from the start; otherwise those
            of a database that has had an outbox, and look for one from time to time.
        alone: a wrong setting ends it; otherwise it is reported, and tried again.
        now: first make failed rows due, however late their next try is.
        tell: receives reports, each a line of text.
        stop: polled often; returns True to stop.
    """

    app: Celery
    settings: Settings
    alias: str
    size: int = BATCH
    needed: bool = True
    alone: bool = True
    now: bool = False
    tell: Callable[[str], object] = logger.info
    stop: Callable[[], bool] = nothing
    total: RelayCounts = field(default_factory=RelayCounts)
    _channel: OutboxChannel = field(init=False)
    _answers: list[Answer] = field(default_factory=list)
    _loop: ServiceLoop = field(init=False)

    def __post_init__(self) -> None:
        self._loop = ServiceLoop(
            part="relay",
            work=f"relaying the outbox in database {self.alias!r}",
            tell=self.tell,
            stop=self.stop,
            errors=(Error, AmqpEventsError) if self.alone else (Exception,),
            fatal=(ConfigurationError,) if self.alone else (),
        )
        self._channel = OutboxChannel(
            self.app,
            timeout=self.settings.confirm_timeout,
            stop=self._loop.stop,
        )

    def run(self, *, until_empty: bool = False) -> RelayCounts:
        """Publish rows until :attr:`stop` returns True; return the counts.

        Args:
            until_empty: stop when nothing is due.
        """
        try:
            self._loop.run(partial(self._step, until_empty=until_empty))
        finally:
            # Rows that are confirmed and not deleted would be published again.
            with suppress(DatabaseError, InterfaceError, AmqpEventsError):
                self._record()
            self._channel.leave()
        return self.total

    def _step(self, *, until_empty: bool) -> float | None:
        try:
            wait = 0.0 if self._publish_due() else INTERVAL
        except Exception as exc:
            # Nothing is relayed here yet. It may have no table; a database that neither settings
            # nor handlers name may have no driver, server or right to write.
            own = self.alias in outbox_rows.needed(self.settings) and not table_missing(exc)
            if self.needed or own or isinstance(exc, AmqpEventsError):
                raise
            logger.info("no outbox is relayed in database %r: %s", self.alias, error_line(exc))
            connections.close_all()
            wait = NO_OUTBOX_SECONDS
        return None if wait and until_empty else wait

    def _publish_due(self) -> bool:
        """Publish a batch of due rows; return True if there were any."""
        self._record()
        if self.now:
            check_commits(self.alias)
            count = outbox.publish_failed_now(self.alias, self.settings.service)
            self.now = False
            self.tell(f"failed events in database {self.alias!r} that are due now: {count}")
        if not outbox_rows.due(self.alias, self.settings.service):
            return False
        check_commits(self.alias)
        # Before rows are claimed, so that none is claimed that cannot be published.
        self._channel.connect()
        fresh = self._claim(self.size, failed=False)
        self.needed = True
        self._publish(fresh)
        again = self._claim(ALONE, failed=True)
        # Their queue may confirm nothing, as without a leader, while RabbitMQ takes other rows.
        with suppress(BrokerUnavailableError) if fresh else nullcontext():
            self._publish(again, windows=[[index] for index in range(len(again))])
        return bool(fresh or again)

    def _claim(self, limit: int, *, failed: bool) -> list[Row]:
        since = time.monotonic()
        rows = outbox_rows.claim(self.alias, self.settings.service, limit=limit, failed=failed)
        if time.monotonic() > since + outbox_rows.BEGIN_WITHIN:
            # The database or a log handler was slow, so the lease is too old; another relay claims
            # the rows when they are due.
            return []
        self._channel.hold([(self.alias, rows)], since)
        return rows

    def _publish(
        self, rows: Sequence[Row], *, windows: Iterable[Sequence[int]] | None = None
    ) -> None:
        """Publish rows and record the answers; a failed row is published again by a later claim."""

        def record(index: int, error: PublishError | None) -> None:
            self._answers.append(Answer(rows[index], error))

        publish_each(
            partial(self._channel.publish, mandatory=self.settings.unrouted != "ignore"),
            [row.message for row in rows],
            record,
            windows=windows,
            stop=self._loop.stop,
        )
        self._record()

    def _record(self) -> None:
        """Write answers to the database; keep them while it is unreachable."""
        if not self._answers:
            return
        outbox_rows.record_answers(self.alias, self._answers, self.settings)
        answers, self._answers = self._answers, []
        counts = report_answers(answers, self.settings)
        self.total.add(counts)
        for answer in answers:
            if isinstance(answer.error, BrokerUnavailableError) and not self._loop.stop():
                raise answer.error
