"""Messages of the archive queue: archived events and outcomes of replays."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from hashlib import sha256
from typing import Any, Final
from uuid import UUID

from ..conf import MAX_NAME
from ..context import ReceivedEvent
from ..exceptions import Malformed
from . import decoding
from .formats import wire_format
from .headers import (
    CELERY,
    EVENT_ARCHIVE,
    EVENT_HANDLER,
    EVENT_ID,
    EVENT_OUTCOME,
    FORMAT,
    MAX_HEADERS,
    basic_properties,
    fitting,
    identity_headers,
    is_broker_header,
    table_size,
)
from .text import (
    as_text,
    compact_json,
    cut_middle,
    parse_moment,
    routing_key_text,
    too_deep,
    utc_text,
)
from .types import (
    Failure,
    Message,
    Progress,
    Received,
    derived_id,
    task_id,
)

#: Files of installed packages, of Python itself, and of this package wherever it is.
INSTALLED: Final = re.compile(
    r"(site|dist)-packages|/lib(64)?/python3|<frozen |[/\\]django_amqp_events[/\\]"
)
_LOCATION: Final = ("module", "line", "function")
#: Characters of a traceback.
MAX_TRACEBACK: Final = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Archived:
    """An archived event.

    Attributes:
        reason: one word; see :func:`build`.
        detail: one sentence for a person.
        event: its identity, ``None`` if that cannot be decoded.
        exception: dotted class name of the last exception, ``""`` without one.
        message, traceback: of that exception, bounded.
        history: per attempt: attempt, time, worker, exception and first line.
        first_failed_at, last_failed_at: aware.
        queue: the last queue, ``""`` if unknown.
        frames: of the traceback, innermost last: ``file``, ``line``, ``function``, ``module``.
        body, headers: raw, as they came to the handler's queue.
        text: the ``event-archive`` header.
        document: the same, decoded.
    """

    reason: str
    detail: str = ""
    handler: str | None = None
    event: ReceivedEvent | None = None
    exception: str = ""
    message: str = ""
    traceback: str = field(default="", repr=False)
    attempts: int = 1
    history: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    first_failed_at: datetime | None = None
    last_failed_at: datetime | None = None
    queue: str = ""
    frames: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    body: bytes = field(default=b"", repr=False)
    headers: Mapping[str, Any] = field(default_factory=dict, repr=False)
    content_type: str = ""
    content_encoding: str = ""
    text: str = field(default="", repr=False)
    document: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def payload(self) -> Mapping[str, Any] | None:
        """The arguments by name, ``None`` if the body cannot be decoded; decoded at each access."""
        received = Received(
            queue=self.queue,
            exchange="",
            routing_key="",
            body=self.body,
            headers=self.headers,
            properties={
                "content_type": self.content_type,
                "content_encoding": self.content_encoding,
            },
        )
        try:
            return decoding.decode(received, len(self.body)).kwargs
        except Malformed:
            return None

    @property
    def location(self) -> str:
        """The failing line: the innermost frame outside of installed packages."""
        own = [frame for frame in self.frames if not INSTALLED.search(_word(frame.get("file")))]
        for frame in (own or list(self.frames))[-1:]:
            module, line, function = (_word(frame.get(key)) for key in _LOCATION)
            return f"{module}:{line} in {function}"
        return ""

    def identity(self, service: str) -> UUID | None:
        """Return an id of the event, handler and body that is the same at each read.

        Events with the same id are told apart by name and body. Without an id, the header
        ``event-archive`` tells them apart: a worker's has a time in it, and that of
        ``events_recover`` an id, so an equal one is the same, published twice. Of any other message
        without an id, an equal one may be another one: it has no identity.
        """
        place, body = self.handler or f"queue {self.queue}", sha256(self.body).hexdigest()
        if self.event is not None and not decoding.is_nameless(self.event):
            who = (self.event.service, self.event.id, self.event.name)
            return derived_id(service, place, body, *who)
        return derived_id(service, place, body, self.text) if self.text else None

    def occurrence(self, identity: UUID) -> UUID:
        """Return an id of this failure that is the same at each read of the message."""
        replay_id = self.event.replay_id if self.event else None
        return derived_id(identity.hex, replay_id or "", str(self.attempts), self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The successful end of a replay; a failed one is an archived event.

    Attributes:
        outcome: ``succeeded``, or ``superseded`` if the handler was not called.
        event: the replayed event; its ``replay_id`` is that of the replay.
    """

    outcome: str
    handler: str | None
    event: ReceivedEvent
    at: datetime | None


def build(
    received: Received,
    *,
    exchange: str,
    reason: str,
    at: datetime | None,
    worker: str,
    service: str,
    detail: str = "",
    event: ReceivedEvent | None = None,
    progress: Progress | None = None,
    handler: str | None = None,
    failure: Failure | None = None,
    copy: str = "",
) -> Message:
    """Build an archive message: the body and headers as they came, plus ``event-archive``.

    Args:
        reason: one word: ``failed``, ``exhausted``, ``arguments``, ``malformed``,
            ``contract``, ``unknown``, ``unsupported``, ``poison``.
        at: of the failure; ``None`` if it is unknown.
        service: the service that owns the archive.
        copy: an id of this archive message, of an event without an id.
    """
    progress = progress or Progress()
    last = utc_text(at) if at is not None else None
    archive = {
        "version": FORMAT,
        "reason": reason,
        "detail": detail[:2_000],
        "service": service,
        "handler": handler,
        "queue": as_text(received.queue),
        "event_id": event.id if event else None,
        "event_name": event.name if event else None,
        "source": event.service if event else None,
        "attempt": progress.attempt,
        "replay_id": progress.replay_id,
        "worker": worker[:255],
        "first_failed_at": progress.first_failed_at or last,
        "last_failed_at": last,
        **_about(failure),
        "history": list(progress.history),
        "deaths": received.deaths,
        "exchange": as_text(received.exchange),
        "routing_key": as_text(received.routing_key),
        "properties": {
            key: as_text(value)
            for key, value in received.properties.items()
            if key not in ("headers", "application_headers")
        },
        "cut": [] if all(isinstance(key, str) for key in received.headers) else ["headers"],
    }
    if copy:
        archive["copy"] = copy
    return Message(
        exchange=exchange,
        routing_key=routing_key_text(received.event_key),
        body=received.body,
        headers=_fitted(_kept_headers(received, event), archive),
        properties=basic_properties(
            task_id(service, handler or "", event, progress.replay_id) if event else None,
            received.properties,
        ),
        event_id=event.id if event else "",
        name=event.name if event else received.event_key,
    )


def _about(failure: Failure | None) -> dict[str, Any]:
    if failure is None:
        return {"exception": None, "frames": [], "traceback": ""}
    return {
        "exception": {
            "type": failure.exception[:500],
            "message": cut_middle(failure.message, 4_000),
        },
        "frames": [dict(frame) for frame in failure.frames],
        "traceback": cut_middle(failure.traceback, MAX_TRACEBACK),
    }


def _kept_headers(received: Received, event: ReceivedEvent | None) -> dict[str, Any]:
    ours = (EVENT_ARCHIVE, EVENT_OUTCOME)
    kept = {
        key: value
        for key, value in received.headers.items()
        if isinstance(key, str) and not is_broker_header(key) and key not in ours
    }
    if event is not None and (form := wire_format(received)) not in CELERY:
        # Its identity may be in properties, which the archive message has for itself.
        kept |= identity_headers(event, form)
    return kept


def _fitted(headers: dict[str, Any], archive: dict[str, Any]) -> dict[str, Any]:
    """Join the original headers and the archive header within :data:`MAX_HEADERS`.

    The traceback is cut first, then other parts of the archive header, then its texts if it takes
    more than half, and at last headers. ``cut`` names all of these.
    """
    size = table_size(headers)

    def room() -> int:
        return MAX_HEADERS - len(compact_json(archive)) - len(EVENT_ARCHIVE) - 64

    def cut(what: str) -> None:
        if what not in archive["cut"]:
            archive["cut"].append(what)

    for limit in (MAX_TRACEBACK // 4, MAX_TRACEBACK // 16, 0):
        if room() < size:
            archive["traceback"] = cut_middle(archive["traceback"], limit)
            cut("traceback")
    for what, empty in (("history", []), ("frames", []), ("deaths", []), ("properties", {})):
        if room() < size:
            archive[what] = empty
            cut(what)
    if room() < size and room() < MAX_HEADERS // 2:
        for name in ("detail", "queue", "exchange", "routing_key"):
            archive[name] = archive[name][:MAX_NAME]
        for name, text in (archive["exception"] or {}).items():
            archive["exception"][name] = text[:MAX_NAME]
        cut("words")
    if room() < size:
        cut("headers")
        headers = fitting(headers, room())
    return {**headers, EVENT_ARCHIVE: compact_json(archive)}


def build_outcome(
    event: ReceivedEvent,
    *,
    exchange: str,
    handler: str,
    service: str,
    outcome: str,
    at: datetime,
    worker: str,
) -> Message:
    """Build the report of a replay that succeeded; it travels in the archive queue."""
    outcome_header = {
        "version": FORMAT,
        "outcome": outcome,
        "service": service,
        "handler": handler,
        "event_id": event.id,
        "event_name": event.name,
        "source": event.service,
        "replay_id": event.replay_id,
        "attempt": event.attempt,
        "at": utc_text(at),
        "worker": worker,
    }
    return Message(
        exchange=exchange,
        routing_key=event.name,
        body=b"",
        headers={
            **identity_headers(event, "celery"),
            EVENT_HANDLER: handler,
            EVENT_OUTCOME: compact_json(outcome_header),
        },
        properties=basic_properties(task_id(service, handler, event, event.replay_id)),
        event_id=event.id,
        name=event.name,
    )


def read(received: Received) -> Archived | Outcome:
    """Read a message of the archive queue; any message has a result."""
    if received.unreadable:
        return Archived(
            reason="unreadable",
            detail=received.unreadable,
            body=received.body,
            headers=dict(received.headers),
        )
    event, progress = _identify(received)
    outcome = _document(received, EVENT_OUTCOME)
    # A message with a body is no outcome: a publisher may set this header.
    if outcome and event is not None and not received.body:
        return _outcome(outcome, event)
    headers = {key: value for key, value in received.headers.items() if not is_broker_header(key)}
    sent: dict[str, Any] = {
        "body": received.body,
        "headers": headers,
        "content_type": _text(received.properties.get("content_type")) or "",
        "content_encoding": _text(received.properties.get("content_encoding")) or "",
    }
    if document := _document(received, EVENT_ARCHIVE):
        text = str(headers.pop(EVENT_ARCHIVE))
        return _archived(document, event, text=text, **sent)
    # The alternate exchange routed it here, unchanged, from its delay queue.
    handler = _text(headers.get(EVENT_HANDLER))
    return Archived(
        reason="unknown",
        detail="its handler was removed while the event was delayed"
        if handler
        else "no worker of this service archived it",
        handler=handler,
        event=event,
        attempts=event.attempt if event else 1,
        history=progress.history,
        **sent,
    )


def _outcome(document: Mapping[str, Any], event: ReceivedEvent) -> Outcome:
    return Outcome(
        outcome=_text(document.get("outcome")) or "",
        handler=_text(document.get("handler")),
        event=replace(
            event,
            replay_id=_text(document.get("replay_id")),
            attempt=_count(document.get("attempt")),
        ),
        at=parse_moment(document.get("at")),
    )


def _archived(document: Mapping[str, Any], event: ReceivedEvent | None, **sent: Any) -> Archived:
    if event is not None:
        # The headers are the publisher's, so only the document counts.
        event = replace(
            event,
            name=_text(document.get("event_name")) or event.name,
            attempt=_count(document.get("attempt")),
            replay_id=_text(document.get("replay_id")),
        )
    exception = _mapping(document.get("exception"))
    return Archived(
        reason=_text(document.get("reason")) or "unknown",
        detail=_text(document.get("detail")) or "",
        handler=_text(document.get("handler")),
        event=event,
        exception=_text(exception.get("type")) or "",
        message=_text(exception.get("message")) or "",
        traceback=_text(document.get("traceback")) or "",
        attempts=_count(document.get("attempt")),
        history=_mappings(document.get("history")),
        first_failed_at=parse_moment(document.get("first_failed_at")),
        last_failed_at=parse_moment(document.get("last_failed_at")),
        queue=_text(document.get("queue")) or "",
        frames=_mappings(document.get("frames")),
        document=document,
        **sent,
    )


def _document(received: Received, header: str) -> Mapping[str, Any] | None:
    value = received.headers.get(header)
    if not isinstance(value, str):
        return None
    try:
        document = json.loads(value)
    except (ValueError, RecursionError):
        return None
    # Any client with write permission on the archive's exchange can publish anything.
    if not isinstance(document, dict) or too_deep(document):
        return None
    return document


def _identify(received: Received) -> tuple[ReceivedEvent | None, Progress]:
    # The last as if it came from the default exchange: the key may be the archive's.
    for candidate, trusted in (
        (received, True),
        (received, False),
        (replace(received, exchange=""), False),
    ):
        with suppress(Malformed):
            event, progress = decoding.identify(candidate, trusted=trusted)
            # An id that is only in the properties is that of the archive message.
            named = EVENT_ID in received.headers or wire_format(received) != "json"
            return (event if named else None), progress
    return None, Progress()


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _mappings(value: object) -> tuple[Mapping[str, Any], ...]:
    items = value if isinstance(value, list) else []
    return tuple(item for item in items if isinstance(item, dict))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _word(value: object) -> str:
    if isinstance(value, int):
        return str(value) if -(2**63) <= value < 2**63 else "?"
    return value if isinstance(value, str) else "?"


def _count(value: object) -> int:
    return value if isinstance(value, int) and 0 < value < 2**31 else 1
