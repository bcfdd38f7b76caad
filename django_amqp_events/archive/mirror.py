"""The mirror: copies the archive queue into the database.

It stores a batch in one transaction, commits, then acks. If it dies between commit and ack, it
reads the same messages again and stores the same rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from celery import Celery
from django.db import Error, connections

from ..broker.batch_reader import Batch, BatchReader
from ..broker.topology import Names
from ..callables import nothing
from ..conf import Settings
from ..databases import error_kind, error_line
from ..exceptions import AmqpEventsError
from ..logs import get_logger
from ..service_loop import ServiceLoop
from . import replay, row_writer, tables
from .entries import Item, read_entries
from .row_writer import Counts

logger = get_logger(__name__)

#: Messages that may be put aside; with more, the database is at fault, such as a full disk.
MAX_ASIDE: Final = 20
#: Most messages in one transaction.
BATCH: Final = 500
#: Seconds between searches for replays of dead processes: while the queue is empty, and while it
#: is not, since it may contain their outcomes.
SWEEP: Final = (5.0, 60.0)
#: Seconds until messages that could not be stored are read again.
REREAD_SECONDS: Final = 60.0


@dataclass(slots=True, kw_only=True)
class Mirror:
    """Mirrors the archive of this service until it is stopped.

    Args:
        tell: called with a line of text about each change of the mirror's condition.
        aside: number of messages that could not be stored and are not acked.
    """

    app: Celery
    settings: Settings
    size: int = BATCH
    tell: Callable[[str], object] = logger.info
    stop: Callable[[], bool] = nothing
    total: Counts = field(default_factory=Counts)
    aside: int = 0
    _swept: float = 0.0
    _loop: ServiceLoop = field(init=False)

    def __post_init__(self) -> None:
        archive = Names.of(self.settings).archive
        self._loop = ServiceLoop(
            part="mirror", work=f"mirroring {archive}", tell=self.tell, stop=self.stop
        )

    def run(self, *, until_empty: bool = False) -> Counts:
        """Mirror until stopped, or until the queue is empty; return the counts."""
        self._loop.run(partial(self._consume, until_empty=until_empty))
        return self.total

    def _consume(self, *, until_empty: bool) -> float | None:
        """Mirror batch after batch over one connection; return ``None`` at the end."""
        # No message is read while the database cannot store it.
        tables.rows().exists()
        self.aside = 0
        reader = BatchReader(
            self.app,
            Names.of(self.settings).archive,
            self.settings,
            size=self.size,
        )
        began = time.monotonic()
        try:
            while not self._loop.stop():
                batch = reader.batch(wait=0.5 if until_empty else 1.0, stop=self._loop.stop)
                if batch is not None:
                    self._mirror(reader, batch)
                elif until_empty and not reader.ready():
                    return None
                self._sweep(idle=batch is None)
                self._loop.recovered()
                if self.aside and time.monotonic() > began + REREAD_SECONDS:
                    # RabbitMQ delivers them again on a new connection.
                    return 0.0
            return None
        finally:
            reader.close()

    def _mirror(self, reader: BatchReader, batch: Batch) -> None:
        items = read_entries(batch.messages, self.settings)
        aside: set[int] = set()
        counts = row_writer.store_items(items, partial(self._put_aside, aside))
        reader.ack(batch, [place for place, item in enumerate(items) if id(item) not in aside])
        self.total.add(counts)

    def _put_aside(self, aside: set[int], exc: Exception, item: Item | None) -> None:
        """Leave a message in the queue that a working database does not store.

        One whose statement times out, for example; it does not block the others.

        Raises:
            Exception: the database is unreachable.
        """
        passing = isinstance(exc, Error) and error_kind(exc) in ("missing", "locked", "read-only")
        if passing or self.aside >= MAX_ASIDE:
            raise exc
        connections[tables.database()].close_if_unusable_or_obsolete()
        tables.rows().exists()
        if item is None:
            return
        self.aside += 1
        aside.add(id(item))
        self.tell(
            f"a message cannot be stored and stays in the archive queue "
            f"({error_line(exc)}); the mirror tries again in {REREAD_SECONDS:g} s"
        )

    def _sweep(self, *, idle: bool) -> None:
        """Publish replays of dead processes again."""
        if time.monotonic() < self._swept + (SWEEP[0] if idle else SWEEP[1]):
            return
        self._swept = time.monotonic()
        try:
            resumed = replay.resume()
        except Error:
            raise
        except Exception as exc:
            # An error in a replay must not stop the mirror.
            if not isinstance(exc, AmqpEventsError):
                logger.exception("queued replays cannot be published again")
            self.tell(f"queued replays cannot be published again: {exc}")
        else:
            if resumed:
                self.tell(f"published {resumed} replays again, which a dead process left queued")
