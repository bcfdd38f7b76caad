"""Find past events in the history."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from celery import Celery

from ..broker import connection, history
from ..broker.history import Record, Start, StreamReader
from ..callables import nothing
from ..conf import Settings, get_settings
from ..declare.patterns import pattern_matches
from ..exceptions import Malformed
from ..message import decoding
from ..message.text import YEARS
from ..reasons import Reason
from . import redaction, search_values
from .selection import SearchTerm

#: Time by which the clocks of publishers and RabbitMQ may differ, and an event may be stored later.
CLOCKS: Final = timedelta(minutes=5)
#: Longest time that an event may have waited in an outbox, after which a range is not read.
LATE: Final = timedelta(days=1)
#: Default scan budget, in events.
BUDGET: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PastSelection:
    """A filter on past events; an empty field matches everything.

    Attributes:
        events: names or patterns.
        ids, correlation_ids: of events.
        search: values in the redacted payload, such as ``order_id=17``; all have to match.
        since, until: when it was published; *until* is excluded.

    Raises:
        ValueError: a term of *search* is not ``path=value``, or the range is empty.
    """

    events: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    correlation_ids: tuple[str, ...] = ()
    search: tuple[str, ...] = ()
    since: datetime | None = None
    until: datetime | None = None

    def __post_init__(self) -> None:
        for term in self.search:
            SearchTerm.parse(term)
        if self.since and self.until and self.since >= self.until:
            raise ValueError("the start of the range must be before its end")

    @property
    def start(self) -> Start:
        """Return where to begin to read."""
        # The first minutes of 1970 have none before them in RabbitMQ.
        return "first" if self.since is None or self.since.year <= YEARS[0] else self.since - CLOCKS

    def matches(self, record: Record, stored: range) -> bool:
        """Return True if a record matches; one that cannot be read never does.

        Args:
            stored: :attr:`Offsets.stored`.
        """
        event, at = record.event, record.at
        if event is None or (at is None and record.offset not in stored):
            return False
        if self.since is not None and at is not None and at < self.since:
            return False
        if self.until is not None and at is not None and at >= self.until:
            return False
        return (
            (not self.events or any(pattern_matches(name, event.name) for name in self.events))
            and (not self.ids or event.id in self.ids)
            and (not self.correlation_ids or event.correlation_id in self.correlation_ids)
            and (not self.search or self._found(record))
        )

    def _found(self, record: Record) -> bool:
        payload = shown_payload(record)
        if isinstance(payload, Reason):
            return False
        for term in map(SearchTerm.parse, self.search):
            values = [value for _path, value in search_values.pairs([term.path], payload)]
            if not any(
                value.startswith(term.value) if term.start else value == term.value
                for value in values
            ):
                return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Offsets:
    """Where the history has the events of a range, by the times at which RabbitMQ stored them.

    A publisher's wrong clock cannot end it early.

    Attributes:
        read: of the events that can match.
        stored: of those that were stored in the range. An event without a time of its own is in the
            range if it is one of these.
    """

    read: range
    stored: range


def offsets_of(app: Celery, settings: Settings, queue: str, selection: PastSelection) -> Offsets:
    """Return the offsets of the stored events that can match."""
    last = history.last(app, settings, queue)
    if last is None:
        return Offsets(read=range(0), stored=range(0))
    end = last.offset + 1

    def place(at: Start) -> int:
        record = history.first(app, settings, queue, at)
        return end if record is None else min(end, record.offset)

    begin, stop = place(selection.start), end
    stored_begin, stored_stop = begin, end
    if selection.since is not None:
        stored_begin = place(selection.since)
    if selection.until is not None:
        stop, stored_stop = place(selection.until + LATE), place(selection.until)
    return Offsets(read=range(begin, max(begin, stop)), stored=range(stored_begin, stored_stop))


def shown_payload(record: Record) -> Mapping[str, Any] | Reason:
    """Return the redacted payload, or why there is none to show."""
    try:
        payload = decoding.decode(record.received, get_settings().max_body).kwargs
    except Malformed as exc:
        return Reason.of(str(exc))
    return redaction.redact_json(record.key, payload)


@dataclass(slots=True, kw_only=True)
class Scan:
    """Reads the history from the start of a filter on, and yields what matches.

    Attributes:
        budget: most events to read.
        read: events that were read.
        last: the record that was read last.
        complete: every event that can match was read.
    """

    settings: Settings
    selection: PastSelection
    budget: int = BUDGET
    read: int = 0
    last: Record | None = None
    complete: bool = False

    def records(
        self, *, follow: bool = False, stop: Callable[[], bool] = nothing
    ) -> Iterator[Record]:
        """Yield the matching events, the oldest first.

        Args:
            follow: continue with events that are published now, without a budget.

        Raises:
            ConfigurationError: there is no history, or no Celery app.
            TopologyError, BrokerUnavailableError: as :class:`~..broker.history.StreamReader`.
        """
        queue = history.require(self.settings)
        app = connection.broker_app(self.settings)
        offsets = Offsets(read=range(0), stored=range(sys.maxsize))
        if follow:
            start = "next" if self.selection.since is None else self.selection.start
        else:
            offsets = offsets_of(app, self.settings, queue, self.selection)
            start = offsets.read.start
            self.complete = not offsets.read
        wait = history.LULL if follow else self.settings.confirm_timeout
        if self.complete:
            return
        with closing(StreamReader(app, queue, self.settings, start=start)) as reader:
            while not stop():
                for record in reader.records(wait=wait, stop=stop):
                    self.read += 1
                    self.last = record
                    if self.selection.matches(record, offsets.stored):
                        yield record
                    if follow:
                        continue
                    if record.offset >= offsets.read[-1]:
                        self.complete = True
                        return
                    if self.read >= self.budget:
                        return
                if not follow:
                    return
