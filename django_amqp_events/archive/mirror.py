"""The mirror: the archive queue, copied into the database.

In batches: insert what is not there, apply the outcomes of replays, commit, then ack. Whatever
stops it between commit and ack, it reads the same messages again and makes the same rows of them.
A database that is away pauses it; messages stay in the queue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import partial
from typing import Final
from uuid import uuid4

from celery import Celery
from django.db import Error, connections, transaction

from ..broker.batch_reader import Batch, BatchReader
from ..broker.topology import Names
from ..conf import Settings
from ..databases import error_line
from ..exceptions import AmqpEventsError
from ..message.types import Received
from ..models import (
    ArchivedEvent,
)
from ..service_loop import ServiceLoop
from . import replay, states
from .groups import failure_groups
from .message_store import Counts, store

logger = logging.getLogger(__name__)

#: Messages in one transaction at most.
BATCH: Final = 500
#: Seconds between looks for replays that a dead process left queued: where nothing comes in, and
#: where there is always something, in which their outcomes may be.
SWEEP: Final = (5.0, 60.0)
#: Seconds between looks for what was counted and is to be added up.
FOLD: Final = 5.0
#: Seconds after which messages that could not be stored are tried again.
ASIDE: Final = 60.0


@dataclass(slots=True, kw_only=True)
class Mirror:
    """Mirrors the archive of this service until it is stopped.

    Args:
        size: messages in a batch at most.
        tell: called with a sentence whenever something changes that a person should know.
        mirrored: called after each batch with what it came to.
        stop: asked often whether to end.
        total: what was done.
        aside: messages that could not be stored, and are unacked still.
    """

    app: Celery
    settings: Settings
    size: int = BATCH
    tell: Callable[[str], object] = logger.info
    mirrored: Callable[[Counts], object] = bool
    stop: Callable[[], bool] = bool
    total: Counts = field(default_factory=Counts)
    aside: int = 0
    _swept: float = 0.0
    _folded: float = 0.0
    _loop: ServiceLoop = field(init=False)

    def __post_init__(self) -> None:
        archive = Names.of(self.settings).archive
        self._loop = ServiceLoop(work=f"mirroring {archive}", tell=self.tell, stop=self.stop)

    def run(self, *, until_empty: bool = False) -> Counts:
        """Mirror; returns what was done, after :attr:`stop` says so.

        Args:
            until_empty: end when the queue has nothing more.
        """
        self._loop.run(partial(self._consume, until_empty=until_empty))
        return self.total

    def _consume(self, *, until_empty: bool) -> float | None:
        """Mirror batch after batch over one connection; return ``None`` if that was all."""
        self._wait_for_database()
        names = Names.of(self.settings)
        self.aside = 0
        intake = BatchReader(
            self.app,
            names.archive,
            size=self.size,
            timeout=self.settings.confirm_timeout,
            fast_paths=self.settings.fast_paths,
        )
        began = time.monotonic()
        try:
            while not self.stop():
                batch = intake.batch(wait=0.5 if until_empty else 1.0, stop=self.stop)
                if batch is not None:
                    self._mirror(intake, batch)
                elif until_empty and not intake.ready():
                    self._fold(idle=True, now=True)
                    return None
                self._sweep(idle=batch is None)
                self._fold(idle=batch is None)
                self._loop.recovered()
                if self.aside and time.monotonic() > began + ASIDE:
                    # A new connection gets them once more.
                    return 0.0
            return None
        finally:
            intake.close()

    def _mirror(self, intake: BatchReader, batch: Batch) -> None:
        places = range(len(batch.messages))
        counts = Counts()
        stored = list(self._divided(batch.messages, places, counts))
        whole = not self.aside and len(stored) == len(batch.messages)
        intake.ack(batch, None if whole else stored)
        self.total.add(counts)
        self.mirrored(counts)

    def _divided(
        self, messages: Sequence[Received], places: Sequence[int], counts: Counts
    ) -> Iterator[int]:
        """Store messages; yields the places of those that are.

        One that the database does not take although it takes others is left unacked, so that those
        behind it need not wait for it.

        Raises:
            Error: the database is away.
        """
        part = [messages[place] for place in places]
        try:
            counts.add(self._twice(part))
        except Error as exc:
            if not _takes_rows() or self.aside >= self.size:
                raise
            if len(places) > 1:
                middle = len(places) // 2
                yield from self._divided(messages, places[:middle], counts)
                yield from self._divided(messages, places[middle:], counts)
                return
            self.aside += 1
            self.tell(
                f"a message cannot be stored and stays in the archive queue "
                f"({error_line(exc)}); the others go on, it is tried again in {ASIDE:g} s"
            )
        else:
            yield from places

    def _twice(self, messages: Sequence[Received]) -> Counts:
        try:
            return store(messages, self.settings)
        except Error:
            # Where a new connection is all that is needed, nobody need hear of it.
            if not _takes_rows():
                raise
        return store(messages, self.settings)

    def _sweep(self, *, idle: bool) -> None:
        pause = SWEEP[0] if idle else SWEEP[1]
        if time.monotonic() < self._swept + pause:
            return
        self._swept = time.monotonic()
        try:
            resumed = replay.resume()
        except Error:
            raise
        except Exception as exc:
            # Whatever is wrong with a replay, archived events still come in.
            if not isinstance(exc, AmqpEventsError):
                logger.exception("replays that are left queued cannot be published")
            self.tell(f"replays that are left queued cannot be published: {exc}")
        else:
            if resumed:
                self.tell(f"{resumed} replays of a process that ended are published again")

    def _fold(self, *, idle: bool, now: bool = False) -> None:
        """Add up what was counted, and group events that are in no group."""
        if not now and time.monotonic() < self._folded + FOLD:
            return
        self._folded = time.monotonic()
        failure_groups.fold_all_counts(self.stop)
        while idle and not self.stop() and failure_groups.group_ungrouped():
            if time.monotonic() > self._folded + FOLD:
                # There may be a million of them; what comes in goes first.
                return

    def _wait_for_database(self) -> None:
        """Wait until the table accepts rows, so that no message is read that cannot be stored."""
        alias = states.database()
        connections[alias].close_if_unusable_or_obsolete()
        states.rows().exists()


def _takes_rows() -> bool:
    """Return True if the database accepts a row now; the row is rolled back."""
    alias = states.database()
    now = datetime.now(UTC)
    moments = ("first_failed_at", "last_failed_at", "mirrored_at", "state_since")
    row = ArchivedEvent(pk=uuid4(), body=b"", body_size=0, headers_raw=b"")
    for name in moments:
        setattr(row, name, now)
    try:
        connections[alias].close_if_unusable_or_obsolete()
        with transaction.atomic(using=alias):
            row.save(using=alias, force_insert=True)
            transaction.set_rollback(True, using=alias)
    except Error:
        return False
    return True


def describe(counts: Mapping[str, int] | Counts) -> str:
    """Write counts for a console: ``3 events, 1 outcome``."""
    values = counts if isinstance(counts, Mapping) else {
        each.name: getattr(counts, each.name) for each in fields(counts)
    }  # fmt: skip
    words = {
        "events": ("new event", "new events"),
        "failures": ("failed again", "failed again"),
        "outcomes": ("replay succeeded", "replays succeeded"),
        "known": ("known already", "known already"),
        "foreign": ("outcome of an unknown replay", "outcomes of unknown replays"),
        "unreadable": ("unreadable", "unreadable"),
    }
    shown = [
        f"{values[key]} {one if values[key] == 1 else many}"
        for key, (one, many) in words.items()
        if values.get(key)
    ]
    return ", ".join(shown) or "nothing"
