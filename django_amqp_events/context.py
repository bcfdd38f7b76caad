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

    def __reduce__(self) -> tuple[Any, ...]:
        # Each event is pickled for a pool process. The default of dataclasses looks up the fields
        # at both ends, and an aware datetime takes as long as all the other fields.
        published_at, due_at = self.published_at, self.due_at
        return _event, (
            self.id,
            self.name,
            self.service,
            None if published_at is None else published_at.isoformat(),
            None if due_at is None else due_at.isoformat(),
            self.attempt,
            self.replay_id,
            self.replay_forced,
            self.correlation_id,
            self.causation_id,
            self.subject,
            self.content_type,
            self.extensions,
            self.headers,
        )


def _event(
    event_id: str, name: str, service: str, published_at: str | None, due_at: str | None,
    attempt: int, replay_id: str | None, replay_forced: bool, correlation_id: str | None,
    causation_id: str | None, subject: str | None, content_type: str,
    extensions: Mapping[str, Any], headers: Mapping[str, Any],
) -> ReceivedEvent:  # fmt: skip
    return ReceivedEvent(
        id=event_id,
        name=name,
        service=service,
        published_at=None if published_at is None else datetime.fromisoformat(published_at),
        due_at=None if due_at is None else datetime.fromisoformat(due_at),
        attempt=attempt,
        replay_id=replay_id,
        replay_forced=replay_forced,
        correlation_id=correlation_id,
        causation_id=causation_id,
        subject=subject,
        content_type=content_type,
        extensions=extensions,
        headers=headers,
    )


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
