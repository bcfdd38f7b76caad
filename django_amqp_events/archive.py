"""What is in the archive queue, read back: archived events and the outcomes of replays. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from . import envelope
from .context import ReceivedEvent
from .envelope import EVENT_ARCHIVE, EVENT_HANDLER, EVENT_OUTCOME, Payload, Received
from .exceptions import Malformed


@dataclass(frozen=True, slots=True, kw_only=True)
class Archived:
    """An archived event.

    Attributes:
        reason: one word; see :func:`django_amqp_events.envelope.archive_copy`.
        detail: one sentence for a person.
        handler: the handler's name, ``None`` where nobody was found.
        event: who it is, ``None`` where that could not be read.
        payload: its arguments by name, ``None`` where the body could not be read.
        exception: dotted class name of what was raised last, ``""`` where nothing was.
        message: text of that exception.
        traceback: its traceback, bounded.
        attempts: how many times the handler was tried.
        history: per attempt: attempt, time, worker, exception and first line.
        first_failed_at, last_failed_at: aware.
        body, headers: raw, as they came to the handler's queue.
        document: the whole ``event-archive`` header.
    """

    reason: str
    detail: str = ""
    handler: str | None = None
    event: ReceivedEvent | None = None
    payload: Mapping[str, Any] | None = field(default=None, repr=False)
    exception: str = ""
    message: str = ""
    traceback: str = field(default="", repr=False)
    attempts: int = 1
    history: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    first_failed_at: datetime | None = None
    last_failed_at: datetime | None = None
    body: bytes = field(default=b"", repr=False)
    headers: Mapping[str, Any] = field(default_factory=dict, repr=False)
    document: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a replay ended.

    Attributes:
        outcome: ``succeeded``.
        event: the event that was replayed; its ``replay_id`` says by which replay.
    """

    outcome: str
    handler: str | None
    event: ReceivedEvent
    at: datetime | None
    document: Mapping[str, Any] = field(default_factory=dict, repr=False)


def read(received: Received) -> Archived | Outcome:
    """Read a message of the archive queue; whatever it is, something is returned."""
    event = _event(received)
    outcome = _document(received, EVENT_OUTCOME)
    if outcome and event is not None:
        return Outcome(
            outcome=str(outcome.get("outcome")),
            handler=_text(outcome.get("handler")),
            event=replace(
                event,
                replay_id=_text(outcome.get("replay_id")),
                attempt=_count(outcome.get("attempt")),
            ),
            at=envelope.parse_moment(outcome.get("at")),
            document=outcome,
        )
    document = _document(received, EVENT_ARCHIVE)
    if not document:
        # The alternate exchange brought it here just as it was in its delay queue.
        return Archived(
            reason="unknown",
            detail="it came back from a delay and its handler is gone",
            handler=_text(received.headers.get(EVENT_HANDLER)),
            event=event,
            payload=_payload(received),
            attempts=event.attempt if event else 1,
            body=received.body,
            headers=dict(received.headers),
        )
    if event is not None:
        # The publisher's headers are in the message as they came: only the document's count.
        event = replace(
            event,
            name=_text(document.get("event_name")) or event.name,
            attempt=_count(document.get("attempt")),
            replay_id=_text(document.get("replay_id")),
        )
    exception = document.get("exception") or {}
    return Archived(
        reason=str(document.get("reason")),
        detail=str(document.get("detail") or ""),
        handler=_text(document.get("handler")),
        event=event,
        payload=_payload(received),
        exception=str(exception.get("type") or ""),
        message=str(exception.get("message") or ""),
        traceback=str(document.get("traceback") or ""),
        attempts=_count(document.get("attempt")),
        history=tuple(document.get("history") or ()),
        first_failed_at=envelope.parse_moment(document.get("first_failed_at")),
        last_failed_at=envelope.parse_moment(document.get("last_failed_at")),
        body=received.body,
        headers={key: value for key, value in received.headers.items() if key != EVENT_ARCHIVE},
        document=document,
    )


def _document(received: Received, header: str) -> Mapping[str, Any] | None:
    value = received.headers.get(header)
    if not isinstance(value, str):
        return None
    try:
        document = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _event(received: Received) -> ReceivedEvent | None:
    try:
        return envelope.identify(received, trusted=True)[0]
    except Malformed:
        pass
    try:
        return envelope.identify(received, trusted=False)[0]
    except Malformed:
        return None


def _payload(received: Received) -> Mapping[str, Any] | None:
    try:
        payload: Payload = envelope.decode(received, len(received.body))
    except Malformed:
        return None
    return payload.kwargs


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 1
