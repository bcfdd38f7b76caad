"""Record when handlers' queues were bound, so that a backfill doubles nothing.

An event that is routed before the binding is only in the history; one that is routed after it is in
both. The record of a queue tells them apart: the queue has no event up to an offset of the history,
and none of the *missed* ones after it. It is a message in the stream ``svc:bindings``.

How it is found: RabbitMQ puts one copy into a queue, however many routes lead there. So the queue
and a second queue are bound to a temporary exchange, and that to the events; then the queue is
bound directly. Of the events that the history has of this time, the queue missed those that the
second queue has not.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

import amqp
from celery import Celery

from ...conf import Settings
from ...declare.patterns import pattern_matches
from ...exceptions import TopologyError
from .. import history
from ..batch_reader import BatchReader
from ..history import digest
from ..topology import Binding, Exchange, Names, Queue
from .amqp_api import Amqp, to_bind, to_declare

#: Seconds after which RabbitMQ routes every event by a new binding, and has stored the events that
#: it routed before.
SETTLE_SECONDS: Final = 2.0
#: Milliseconds after which RabbitMQ deletes the second queue of a process that was killed.
_EXPIRES: Final = 600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingRecord:
    """Since when a handler's queue is bound by some routing keys.

    Attributes:
        offset: of the last event in the history before; -1 if there was none, or the queue was
            bound before the history.
        missed: offsets of later events that the queue did not get.
        witness: digest of the event at :attr:`place`, which shows whether the history is still the
            same stream.
    """

    queue: str
    patterns: Sequence[str]
    at: str
    offset: int = -1
    missed: Sequence[int] = ()
    witness: str = ""

    @property
    def place(self) -> int | None:
        """The offset of the witness; ``None`` if the queue missed no event."""
        return self.offset if self.offset >= 0 else next(iter(self.missed), None)

    def received(self, offset: int) -> bool:
        """Return True if the queue got the event at this offset, if its key matches."""
        return offset > self.offset and offset not in self.missed


def read_records(app: Celery, settings: Settings) -> list[BindingRecord]:
    """Return the records of this service, the oldest first.

    Raises:
        TopologyError: there is no such stream.
        BrokerUnavailableError: no connection, or it broke.
    """
    queue = Names.of(settings).bindings
    last = history.last(app, settings, queue)
    offsets = range(last.offset + 1 if last else 0)
    records = history.read(app, settings, queue, offsets)
    return [BindingRecord(**json.loads(record.received.body)) for record in records]


@dataclass(frozen=True, slots=True)
class _Window:
    """A queue to bind, and the name of its temporary exchange and of the second queue."""

    name: str
    queue: str
    patterns: list[str]

    def open(self, session: Amqp, events: str) -> None:
        """Let the events go to both queues."""
        arguments = {"x-queue-type": "classic", "x-expires": _EXPIRES}
        session.carry_out(
            to_declare(Exchange(name=self.name, type="fanout")),
            to_declare(Queue(name=self.name, arguments=arguments)),
            *(to_bind(Binding(exchange=self.name, queue=q)) for q in (self.name, self.queue)),
        )
        session.call(
            lambda channel: [channel.exchange_bind(self.name, events, key) for key in self.patterns]
        )

    def close(self, session: Amqp) -> None:
        """Let no further event go to the second queue."""
        session.call(lambda channel: channel.exchange_delete(self.name))

    def read(self, app: Celery, settings: Settings, session: Amqp) -> Counter[str]:
        """Return the digests of the events that the second queue has."""
        depth = session.depth(self.name)
        left = depth.ready if depth else 0
        seen: Counter[str] = Counter()
        with closing(BatchReader(app, self.name, settings, size=history.SIZE)) as reader:
            while left > 0:
                batch = reader.batch(wait=settings.confirm_timeout)
                if batch is None:
                    raise history.silent(self.name)
                seen.update(map(digest, batch.messages))
                reader.ack(batch, range(len(batch.messages)))
                left -= len(batch.messages)
        return seen


def delete_window(session: Amqp, name: str) -> None:
    """Delete a temporary exchange and the second queue, whose copies nothing handles."""
    session.call(lambda channel: channel.exchange_delete(name))
    session.call(lambda channel: channel.queue_delete(name))


def unrecorded(app: Celery, settings: Settings, bindings: Sequence[Binding]) -> list[Binding]:
    """Return the bindings that have no record."""
    known: set[tuple[str, str]] = set()
    if bindings:
        with suppress(TopologyError):  # the stream is not declared yet
            for record in read_records(app, settings):
                known.update((record.queue, pattern) for pattern in record.patterns)
    return [each for each in bindings if (each.queue, each.routing_key) not in known]


def record_bound(
    app: Celery, settings: Settings, session: Amqp, bindings: Sequence[Binding]
) -> None:
    """Record the bound queues that have no record, as queues that have missed no event."""
    names = Names.of(settings)
    for queue, patterns in _by_queue(unrecorded(app, settings, bindings)).items():
        # A killed process may have left a window.
        delete_window(session, names.window(queue))
        _publish(session, settings, queue, patterns)


def bind_recorded(
    app: Celery, settings: Settings, session: Amqp, bindings: Sequence[Binding]
) -> None:
    """Bind handlers' queues to the events for the first time, and record it.

    Raises:
        amqp.exceptions.ChannelError: RabbitMQ refused a step.
        BrokerUnavailableError: no connection, or it broke. A queue that is bound already has no
            record then.
    """
    names = Names.of(settings)
    by_queue = _by_queue(bindings)
    windows = [_Window(names.window(queue), queue, keys) for queue, keys in by_queue.items()]
    # The window of a killed process has routed events since; it is unknown which.
    left_over = [window for window in windows if session.exchange_exists(window.name)]
    recorded = [window for window in windows if window not in left_over]
    before = history.last(app, settings, names.history)
    try:
        for window in recorded:
            window.open(session, names.events)
        session.carry_out(*map(to_bind, bindings))
        time.sleep(SETTLE_SECONDS)
        after = history.last(app, settings, names.history)
        for window in left_over:
            delete_window(session, window.name)
            _publish(session, settings, window.queue, window.patterns)
        for window in recorded:
            window.close(session)
        passed = {window.queue: window.read(app, settings, session) for window in recorded}
    finally:
        for window in recorded:
            delete_window(session, window.name)
    offset = before.offset if before is not None else -1
    end = after.offset if after is not None else -1
    routed = _routed(app, settings, range(offset + 1, end + 1))
    for window in recorded:
        missed: dict[int, str] = {}
        for place, key, seen in routed:
            if not any(pattern_matches(pattern, key) for pattern in window.patterns):
                continue
            if passed[window.queue][seen]:
                passed[window.queue][seen] -= 1
            else:
                missed[place] = seen
        witness = next(iter(missed.values()), "") if before is None else digest(before.received)
        _publish(
            session,
            settings,
            window.queue,
            window.patterns,
            offset=offset,
            missed=list(missed),
            witness=witness,
        )


def _by_queue(bindings: Iterable[Binding]) -> dict[str, list[str]]:
    patterns: dict[str, list[str]] = {}
    for binding in bindings:
        patterns.setdefault(binding.queue, []).append(binding.routing_key)
    return patterns


def _routed(app: Celery, settings: Settings, offsets: range) -> list[tuple[int, str, str]]:
    """Return the events that the history has at these offsets: offset, routing key, digest."""
    records = history.read(app, settings, Names.of(settings).history, offsets)
    return [
        (record.offset, record.received.routing_key, digest(record.received)) for record in records
    ]


def _publish(
    session: Amqp, settings: Settings, queue: str, patterns: Sequence[str], **found: Any
) -> None:
    at = datetime.now(UTC).isoformat()
    record = BindingRecord(queue=queue, patterns=patterns, at=at, **found)

    def publish(channel: amqp.Channel) -> None:
        channel.confirm_select()
        message = amqp.Message(json.dumps(asdict(record)), delivery_mode=2)
        channel.basic_publish_confirm(message, Names.of(settings).bindings)

    session.call(publish)
