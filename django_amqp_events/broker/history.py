"""Read the history: the stream that has every event of the exchange.

RabbitMQ gives each message of a stream an offset. Reading removes nothing, and any number of
processes may read at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import blake2b
from typing import Any, Final

from amqp.exceptions import PreconditionFailed
from celery import Celery

from ..callables import nothing
from ..conf import Settings
from ..context import ReceivedEvent
from ..exceptions import (
    BrokerUnavailableError,
    ConfigurationError,
    Malformed,
    TopologyError,
)
from ..message import decoding
from ..message.text import valid_moment
from ..message.types import Received
from ..reasons import Reason
from .batch_reader import BatchReader
from .topology import Names

#: The header in which RabbitMQ delivers a message's offset.
OFFSET: Final = "x-stream-offset"
#: Most messages that are read together.
SIZE: Final = 500
#: Seconds without a message after which the end of a stream is reached.
LULL: Final = 0.5
#: Seconds to wait, twice, for the first message from a place on that may be the end.
FIRST: Final = 1.0
#: Longest time in seconds to find the end of a stream, while more is published.
END_SECONDS: Final = 3.0

#: Where to begin: "first", "last" (with its last messages), an offset, or the time of storing.
Start = str | int | datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A past event.

    Attributes:
        received: the message, as a handler's queue got it.
        event: ``None`` if its identity cannot be read.
        at: when its publisher published it; ``None`` if that is not in the message or not valid.
    """

    offset: int
    received: Received
    event: ReceivedEvent | None
    at: datetime | None

    @classmethod
    def of(cls, message: Received) -> Record:
        headers = {key: value for key, value in message.headers.items() if key != OFFSET}
        received = replace(message, headers=headers)
        try:
            event, _progress = decoding.identify(received, trusted=False)
        except Malformed:
            event = None
        at = valid_moment(event.published_at if event else None)
        return cls(offset=message.headers[OFFSET], received=received, event=event, at=at)

    @property
    def key(self) -> str:
        """The routing key, which is the event's name."""
        return self.received.event_key


class StreamReader(BatchReader):
    """Reads a stream from *start* on; acks only let RabbitMQ send more.

    Raises (from every method):
        TopologyError: there is no such queue, or it is no stream.
        BrokerUnavailableError: as :class:`BatchReader`.
    """

    # A stream keeps its messages, and RabbitMQ refuses to requeue one.
    requeue = staticmethod(nothing)

    def __init__(
        self, app: Celery, queue: str, settings: Settings, *, start: Start, size: int = SIZE
    ) -> None:
        self._start = start
        self._last = -1
        try:
            super().__init__(app, queue, settings, size=size)
        except BrokerUnavailableError as exc:
            if not isinstance(exc.__cause__, PreconditionFailed):
                raise
            raise TopologyError(
                f"the queue {queue!r} is no stream; delete it if its messages are not needed, then "
                f"run `manage.py events_declare`"
            ) from exc

    def _options(self) -> dict[str, Any]:
        begin = self._start if self._last < 0 else self._last + 1
        return {"arguments": {OFFSET: begin}}

    def _keep(self, number: int, received: Received) -> None:
        offset = received.headers[OFFSET]
        # A consumer that was replaced by one with another prefetch count may still deliver.
        if offset > self._last:
            self._last = offset
            super()._keep(number, received)

    def records(
        self, *, wait: float = LULL, stop: Callable[[], bool] = nothing
    ) -> Iterator[Record]:
        """Yield messages until none arrives within *wait* seconds."""
        while not stop() and (batch := self.batch(wait=wait, stop=stop)):
            yield from map(Record.of, batch.messages)
            self.ack(batch, range(len(batch.messages)))


def require(settings: Settings) -> str:
    """Return the name of the history.

    Raises:
        ConfigurationError: there is none.
    """
    if settings.history is None:
        raise ConfigurationError(
            "there is no history: set AMQP_EVENTS['HISTORY'], such as {'MAX_AGE': '14d'}, and run "
            "`manage.py events_declare`; it keeps the events that are published from then on"
        )
    return Names.of(settings).history


def first(app: Celery, settings: Settings, queue: str, start: Start = "first") -> Record | None:
    """Return the first record from a place on, ``None`` if there is none."""
    with closing(StreamReader(app, queue, settings, start=start)) as reader:
        ready = 0
        for _ in range(2):
            if record := next(reader.records(wait=FIRST), None):
                return record
            # If RabbitMQ was silent, wait until it answers.
            ready = reader.ready()
    if start == "first" and ready:
        raise silent(queue)
    return None


def read(app: Celery, settings: Settings, queue: str, offsets: range) -> Iterator[Record]:
    """Yield the records that a stream has at these offsets, the last of which exists.

    Raises:
        TopologyError, BrokerUnavailableError: as :class:`StreamReader`.
    """
    if not offsets:
        return
    with closing(StreamReader(app, queue, settings, start=offsets.start)) as reader:
        for record in reader.records(wait=settings.confirm_timeout):
            if record.offset in offsets:
                yield record
            if record.offset >= offsets[-1]:
                return
    raise silent(queue)


def silent(queue: str) -> BrokerUnavailableError:
    """Return the error for a queue whose messages do not arrive."""
    return BrokerUnavailableError(Reason("queue-silent", queue=repr(queue)))


def last(app: Celery, settings: Settings, queue: str) -> Record | None:
    """Return the last record, or a later one: every record of this moment is not after it."""
    found = None
    with closing(StreamReader(app, queue, settings, start="last")) as reader:
        end = time.monotonic() + END_SECONDS
        ready = reader.ready()
        wait = settings.confirm_timeout if ready else LULL
        while batch := reader.batch(wait=wait):
            reader.ack(batch, range(len(batch.messages)))
            found, wait = Record.of(batch.messages[-1]), LULL
            if time.monotonic() > end:
                break
    if ready and found is None:
        raise silent(queue)
    return found


def digest(received: Received) -> str:
    """Return what tells a message from others, in a stream or another queue."""
    # RabbitMQ keeps no lists and tables in the headers of a stream.
    headers = sorted(
        (key, repr(value))
        for key, value in received.headers.items()
        if not isinstance(value, (list, dict))
    )
    content = repr((received.routing_key, headers)).encode("utf-8", "backslashreplace")
    return blake2b(content + received.body, digest_size=16).hexdigest()
