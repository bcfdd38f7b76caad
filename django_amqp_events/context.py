"""The event that is being handled here and now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedEvent:
    """What a handler can know about the event in its hands.

    Attributes:
        id: the publisher's event id; the same in every handler, attempt and replay.
        name: the event's name, ``shop.order.created``.
        service: the publishing service, ``""`` where the publisher does not say.
        published_at: when it was published, aware; ``None`` where the publisher does not say.
        due_at: when this attempt was due, aware; ``None`` on a first attempt.
        attempt: 1 on the first run, counted per event and handler.
        replay_id: set when a person or a program replayed it from the archive.
        replay_forced: that replay was asked for although the one before may have run.
        correlation_id: id shared by everything that came from one cause.
        causation_id: id of the event whose handler published this one.
        headers: the publisher's other headers (tracing and the like).
    """

    id: str
    name: str
    service: str = ""
    published_at: datetime | None = None
    due_at: datetime | None = None
    attempt: int = 1
    replay_id: str | None = None
    replay_forced: bool = False
    correlation_id: str | None = None
    causation_id: str | None = None
    headers: Mapping[str, Any] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        # Each event travels to a pool's process. Dataclasses by themselves look their fields up
        # at both ends, and an aware datetime takes as long as all the rest.
        values = [getattr(self, name) for name in self.__slots__]
        return _event, tuple(
            value.isoformat() if isinstance(value, datetime) else value for value in values
        )


def _event(*values: Any) -> ReceivedEvent:
    """Make an event of the values of its fields, the times of which are texts."""
    fields = dict(zip(ReceivedEvent.__slots__, values, strict=True))
    for name in ("published_at", "due_at"):
        if fields[name] is not None:
            fields[name] = datetime.fromisoformat(fields[name])
    return ReceivedEvent(**fields)


_current: ContextVar[ReceivedEvent | None] = ContextVar("amqp_event", default=None)


def current_event() -> ReceivedEvent | None:
    """Return the event that is being handled, or ``None`` outside of a handler."""
    return _current.get()


@contextmanager
def handling(event: ReceivedEvent) -> Iterator[None]:
    """Make *event* the current one for the time of a handler's run."""
    token = _current.set(event)
    try:
        yield
    finally:
        _current.reset(token)
