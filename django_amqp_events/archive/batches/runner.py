"""The runner: publishes the events of batches in the background.

It leases a batch by the database's clock and publishes it in chunks. The claim of an event, its row
in the batch and the id of its replay are one transaction: after a runner is killed, another one
continues with the pending events, and the mirror publishes the queued ones under the same replay
ids. Two runners of one batch cannot publish an event twice, since it is claimed once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Final
from uuid import UUID, uuid4

from django.db import DatabaseError, InterfaceError, close_old_connections

from ...backoff import Backoff
from ...callables import nothing
from ...conf import Settings
from ...databases import error_line
from ...declare.registry import get_registry
from ...exceptions import AmqpEventsError, ConfigurationError
from ...logs import get_logger
from ...models import Replay, ReplayBatch, visible
from ...reasons import Reason
from ...service_loop import ServiceLoop
from .. import eligibility, replay, tables
from . import backfill, batch_states

logger = get_logger(__name__)

#: Most events that are claimed and published in one step of a batch.
CHUNK: Final = eligibility.CHUNK
#: Seconds between searches for batches, and least seconds between counts and judgements.
INTERVAL: Final = 1.0
#: A count is repeated after this many times its duration, since a large batch counts slowly.
COUNT_PAUSE_FACTOR: Final = 20
#: Seconds between counts of batches that only receive outcomes.
OUTCOMES_SECONDS: Final = 5.0
#: Seconds of a lease, plus three confirm timeouts.
LEASE: Final = 60.0
#: Seconds before the next attempt after one that published nothing.
BACKOFF: Final = Backoff(1.0, 60.0)
#: Events in a row that could not be published, each with its own error, after which it pauses.
UNPUBLISHED_IN_A_ROW: Final = 10
#: Longest time that a batch waits for outcomes, whatever the retries of its handlers.
OUTCOMES_TIMEOUT: Final = timedelta(days=1)


@dataclass(slots=True)
class _Work:
    """A batch that this runner holds; times are monotonic.

    Attributes:
        due: time of its next step; ``None`` until it is read.
        counted: time of the next count of its events.
        tries: attempts since an event was published.
    """

    pk: UUID
    due: float | None = None
    counted: float = -math.inf
    counts: Mapping[str, int] = field(default_factory=dict)
    tries: int = 0

    @property
    def taken(self) -> int:
        """Return the number of events claimed."""
        names = ("queued", "published", "succeeded", "failed", "unconfirmed")
        return sum(self.counts.get(name, 0) for name in names)


@dataclass(slots=True, kw_only=True)
class Runner:
    """Publishes the batches of this service until it is stopped."""

    settings: Settings
    tell: Callable[[str], object] = logger.info
    stop: Callable[[], bool] = nothing
    id: UUID = field(default_factory=uuid4)
    published: int = 0
    _held: dict[UUID, _Work] = field(default_factory=dict)
    _after: float = 0.0
    _looked: float = -math.inf
    _loop: ServiceLoop = field(init=False)

    def __post_init__(self) -> None:
        self._loop = ServiceLoop(
            part="batches", work="running batches", tell=self.tell, stop=self.stop
        )

    def run(self, *, until_done: bool = False) -> int:
        """Run batches until stopped, or until none is running; return the number published.

        Raises:
            ConfigurationError: AMQP_EVENTS is wrong, or the backend is not RabbitMQ.
        """
        if self.settings.backend != "amqp":
            raise ConfigurationError(
                f"batches need RabbitMQ, but AMQP_EVENTS['BACKEND'] is {self.settings.backend!r}"
            )
        try:
            self._loop.run(partial(self._step, until_done=until_done))
        finally:
            self._release()
        return self.published

    def _step(self, *, until_done: bool) -> float | None:
        """Publish a chunk of each batch; return the seconds until the next step."""
        now = time.monotonic()
        if now >= self._looked + INTERVAL:
            for pk in batch_states.lease(self.settings.service, self.id, self._lease):
                self._held.setdefault(pk, _Work(pk))
            if now >= self._after:
                for pk in batch_states.awaiting_outcomes(self.settings.service):
                    batch_states.count(pk)
                self._after = now + OUTCOMES_SECONDS
            # Last: after an error the next step asks the database again, and so has not resumed.
            self._looked = now
        for work in list(self._held.values()):
            if self._loop.stop():
                return 0.0
            if work.due is None or time.monotonic() >= work.due:
                self._safely(work)
        if until_done and not batch_states.running(self.settings.service):
            return None
        next_due = min((work.due or 0.0 for work in self._held.values()), default=math.inf)
        return min(next_due, self._looked + INTERVAL) - time.monotonic()

    def _safely(self, work: _Work) -> None:
        """Advance a batch; an error delays or pauses it and not the others.

        Raises:
            Error: the database takes nothing of any batch.
            ConfigurationError: as for :meth:`run`.
        """
        try:
            self._advance(work)
        except ConfigurationError:
            raise
        except (DatabaseError, InterfaceError) as exc:
            close_old_connections()
            if batch := batch_states.renew(work.pk, self.id, self._lease):
                self._retry(batch, work, Reason.of(error_line(exc)))
        except Exception as exc:
            logger.exception("batch %s", work.pk)
            self._pause(work, Reason.of(f"{type(exc).__name__}: {exc}"))

    def _advance(self, work: _Work) -> None:
        batch = batch_states.renew(work.pk, self.id, self._lease)
        if batch is None:
            # It was paused or cancelled, or another runner holds it.
            del self._held[work.pk]
            batch_states.count(work.pk)
            return
        if work.due is None:
            # A pause, or another runner before this one, makes no batch faster.
            work.due = self._due(batch)
            if work.due > time.monotonic():
                return
        careful = batch.canary is not None and not batch.trusted
        if careful or time.monotonic() >= work.counted:
            self._count(work)
        if why := self._doubt(batch, work):
            self._pause(work, why)
            return
        room = self._room(batch, work)
        seen = batch_states.next_events(work.pk, room) if room else {}
        if seen:
            by, reason = batch.started_by, batch.reason
            publish = partial(replay.replay, seen, by=by, reason=reason, batch=batch.pk)
            self._publish(batch, work, publish)
        elif room and backfill.unread(batch):
            self._publish(batch, work, partial(backfill.replay_chunk, batch, self.id, room))
        else:
            self._wait(batch, work)

    def _publish(
        self, batch: ReplayBatch, work: _Work, publish: Callable[[], replay.Report]
    ) -> None:
        began = time.monotonic()
        try:
            report = publish()
        except ConfigurationError:
            raise
        except AmqpEventsError as exc:
            report = replay.Report(stopped=Reason.of(exc))
        batch_states.skip(work.pk, report.skipped)
        self.published += len(report.published)
        if report.published:
            work.tries = 0
            batch_states.set_note(batch, None)
        elif report.stopped and not (report.unconfirmed and work.tries):
            # A broker that stops may leave one chunk unconfirmed. A second one counts as failed:
            # a broker that never confirms, such as a blocked one, would get chunk after chunk.
            self._retry(batch, work, report.stopped)
            return
        elif report.returned and _is_fruitless(batch):
            self._pause(work, Reason("nothing-published", why=report.returned[-1].why))
            return
        # Counted from each chunk, so that no burst makes up for a delay.
        sent = len(report.published) + len(report.returned)
        work.due = began + (sent / batch.rate if batch.rate is not None else 0.0)

    def _due(self, batch: ReplayBatch) -> float:
        """Return when (monotonic) the rate allows the next chunk of a batch that begins here."""
        if batch.rate is None:
            return 0.0
        last = batch_states.last_tried(batch, 1)
        if not last:
            return 0.0
        age = tables.clock() - last[0][1]
        return time.monotonic() + _chunk(batch) / batch.rate - age.total_seconds()

    def _room(self, batch: ReplayBatch, work: _Work) -> int:
        """Return how many events may be published now."""
        room = _chunk(batch)
        if batch.canary is not None and not batch.trusted:
            # A superseded replay proves nothing: another event takes its place in the canary.
            superseded = batch_states.events(work.pk).filter(superseded=True).count()
            if work.counts.get("succeeded", 0) - superseded >= batch.canary:
                batch_states.mark_canary_succeeded(work.pk)
            else:
                room = max(0, min(room, batch.canary - work.taken + superseded))
        return room

    def _wait(self, batch: ReplayBatch, work: _Work) -> None:
        """Wait for outcomes, or finish the batch."""
        self._count(work)
        work.due = work.counted
        pending, queued, published = (
            work.counts[name] for name in ("pending", "queued", "published")
        )
        unread = backfill.unread(batch)
        if not pending and not queued and not published and not unread:
            self._finish(work)
            return
        out = tables.clock() > batch_states.waiting_since(batch) + self._patience
        if (pending or unread) and queued + published:
            batch_states.set_note(batch, Reason("waiting-for-canary"))
            if out:
                self._pause(work, Reason("canary-silent", count=published))
        elif queued:
            batch_states.set_note(batch, Reason("waiting-for-mirror"))
        elif out:
            self._finish(work, Reason("outcomes-missing", count=published))
        else:
            batch_states.set_note(batch, None)

    def _doubt(self, batch: ReplayBatch, work: _Work) -> Reason | None:
        """Return why a batch must pause."""
        counts = work.counts
        if batch.canary is not None and not batch.trusted:
            bad = counts["failed"] + counts["unconfirmed"]
            if bad:
                told = {name: counts[name] for name in ("failed", "unconfirmed")}
                return Reason("canary-failed", bad=bad, taken=work.taken, **told)
        if batch.threshold is not None:
            # Read anew, since the counts may be old.
            failed, of = batch_states.failures(batch)
            # Compared with a whole window, so that one early failure does not pause it.
            if failed * 100 >= batch.threshold * batch_states.WINDOW:
                return Reason("failures", failed=failed, of=of)
        return None

    def _pause(self, work: _Work, why: Reason) -> None:
        self._held.pop(work.pk, None)
        if batch_states.pause(work.pk, by="", note=why, runner=self.id):
            self.tell(f"batch {work.pk} is paused: {visible(why, 300)}")
        batch_states.count(work.pk)

    def _finish(self, work: _Work, note: Reason | None = None) -> None:
        self._held.pop(work.pk, None)
        if batch_states.finish(work.pk, self.id, note=note):
            counts = work.counts
            self.tell(
                f"batch {work.pk} is done: {counts['succeeded']} succeeded, "
                f"{counts['failed']} failed again, {counts['skipped']} skipped, "
                f"{counts['returned'] + counts['unconfirmed']} not published or not confirmed"
                + (f"; {note}" if note else "")
            )

    def _count(self, work: _Work) -> None:
        began = time.monotonic()
        work.counts = batch_states.count(work.pk)
        now = time.monotonic()
        work.counted = now + max(INTERVAL, COUNT_PAUSE_FACTOR * (now - began))

    def _retry(self, batch: ReplayBatch, work: _Work, why: Reason) -> None:
        if not work.tries:
            self.tell(f"batch {work.pk} is waiting: {visible(why, 300)}")
        batch_states.set_note(batch, Reason("waiting-to-retry", why=why))
        work.due = time.monotonic() + BACKOFF.delay(work.tries)
        work.tries += 1

    @property
    def _lease(self) -> float:
        return LEASE + 3 * self.settings.confirm_timeout

    @property
    def _patience(self) -> timedelta:
        """Time to wait for outcomes."""
        return min(OUTCOMES_TIMEOUT, eligibility.patience(*get_registry().handlers.values()))

    def _release(self) -> None:
        try:
            batch_states.release(self.id)
            for pk in self._held:
                batch_states.count(pk)
        except (DatabaseError, InterfaceError, ConfigurationError) as exc:
            logger.warning("the leases of batches are not released, and will expire: %s", exc)


def _chunk(batch: ReplayBatch) -> int:
    """Return how many events of a batch are published together."""
    return CHUNK if batch.rate is None else max(1, min(CHUNK, int(batch.rate)))


def _is_fruitless(batch: ReplayBatch) -> bool:
    """Return True if none of the last events of a batch could be published since it was resumed."""
    last = batch_states.last_tried(batch, UNPUBLISHED_IN_A_ROW)
    bad = (Replay.State.RETURNED, Replay.State.UNCONFIRMED)
    tried = [state for state, at in last if batch.resumed_at is None or at >= batch.resumed_at]
    return len(tried) == UNPUBLISHED_IN_A_ROW and all(state in bad for state in tried)
