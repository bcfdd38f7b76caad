"""The event that a handler is running for."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedEvent:
    """The event that a handler receives.

    Attributes:
        id: the publisher's event id, the same in every handler, attempt and replay.
        name: the event's name, ``shop.order.created``.
        service: the publishing service, or the source of a CloudEvent; ``""`` if unknown.
        published_at: the time of the publish, aware; ``None`` if unknown.
        due_at: the time at which this attempt was due, aware; ``None`` on a first attempt.
        attempt: 1 on the first run, counted per event and handler.
        replay_id: set if the event was replayed from the archive.
        replay_forced: the replay was forced although an earlier one may have run.
        correlation_id: id shared by all events of one cause.
        causation_id: id of the event whose handler published this one.
        subject: of a CloudEvent.
        content_type: of the message, as published.
        extensions: further attributes of a CloudEvent.
        headers: the publisher's other headers, such as those of tracing.
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
    subject: str | None = None
    content_type: str = "application/json"
    extensions: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """The publishing service, under the name that it has in CloudEvents."""
        return self.service


_current: ContextVar[ReceivedEvent | None] = ContextVar("amqp_event", default=None)


def current_event() -> ReceivedEvent | None:
    """Return the event that the handler is running for, or ``None`` outside of a handler."""
    return _current.get()


class handling:  # noqa: N801 - used like a function
    """Make *event* the current one while a handler runs.

    contextlib would assign the traceback to an exception, which one that is a frozen dataclass
    refuses with another error.
    """

    __slots__ = ("_event", "_token")

    def __init__(self, event: ReceivedEvent) -> None:
        self._event = event

    def __enter__(self) -> None:
        self._token = _current.set(self._event)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)
