"""Build archive messages and replay outcomes."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any, Final

from ..context import ReceivedEvent
from .headers import (
    EVENT_ARCHIVE,
    EVENT_HANDLER,
    EVENT_OUTCOME,
    FORMAT,
    IDENTITY_HEADERS,
    MAX_HEADERS,
    basic_properties,
    identity_headers,
    is_broker_header,
    table_size,
)
from .text import (
    as_text,
    compact_json,
    cut_middle,
    routing_key_text,
    utc_text,
)
from .types import (
    Failure,
    Message,
    Progress,
    Received,
    task_id,
)

MAX_TRACEBACK: Final = 20_000


def archive_copy(
    received: Received,
    *,
    exchange: str,
    reason: str,
    at: datetime,
    worker: str,
    service: str,
    detail: str = "",
    event: ReceivedEvent | None = None,
    progress: Progress | None = None,
    handler: str | None = None,
    failure: Failure | None = None,
) -> Message:
    """Build the archive message: the body and headers as they came, plus ``event-archive``.

    Args:
        reason: one word: ``failed``, ``exhausted``, ``arguments``, ``malformed``,
            ``unknown``, ``revoked``, ``unsupported``, ``poison``.
        detail: one sentence for a person.
        event, progress, handler, failure: as far as they are known.
        service: the service whose archive it is.
    """
    progress = progress or Progress()
    stamp = utc_text(at)
    archive: dict[str, Any] = {
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
        "first_failed_at": progress.first_failed_at or stamp,
        "last_failed_at": stamp,
        "exception": None,
        "frames": [],
        "traceback": "",
        "history": list(progress.history),
        "deaths": received.deaths,
        "exchange": as_text(received.exchange),
        "routing_key": as_text(received.routing_key),
        "properties": {
            key: as_text(value)
            for key, value in received.properties.items()
            if key not in ("headers", "application_headers")
        },
        "cut": [],
    }
    if failure is not None:
        archive["exception"] = {
            "type": failure.exception[:500],
            "message": cut_middle(failure.message, 4_000),
        }
        archive["frames"] = [dict(frame) for frame in failure.frames]
        archive["traceback"] = cut_middle(failure.traceback, MAX_TRACEBACK)
    kept = {
        key: value
        for key, value in received.headers.items()
        if isinstance(key, str) and not is_broker_header(key)
    }
    kept.pop(EVENT_ARCHIVE, None)
    kept.pop(EVENT_OUTCOME, None)
    if not all(isinstance(key, str) for key in received.headers):
        archive["cut"].append("headers")
    event_id = event.id if event else ""
    return Message(
        exchange=exchange,
        routing_key=routing_key_text(received.event_key),
        body=received.body,
        headers=_fit(kept, archive),
        properties=basic_properties(
            task_id(event.service, event.id, handler or "", progress.replay_id) if event else None,
            content_type=received.properties.get("content_type"),
            content_encoding=received.properties.get("content_encoding"),
        ),
        event_id=event_id,
        name=event.name if event else received.event_key,
    )


def outcome_message(
    event: ReceivedEvent,
    *,
    exchange: str,
    handler: str,
    service: str,
    outcome: str,
    at: datetime,
    worker: str,
) -> Message:
    """Build the report that a replay ended well; it travels in the archive queue."""
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
            **identity_headers(event),
            EVENT_HANDLER: handler,
            EVENT_OUTCOME: compact_json(outcome_header),
        },
        properties=basic_properties(task_id(event.service, event.id, handler, event.replay_id)),
        event_id=event.id,
        name=event.name,
    )


def _fit(kept: dict[str, Any], archive: dict[str, Any]) -> dict[str, Any]:
    """Join the original headers and the archive header below :data:`MAX_HEADERS` bytes.

    The traceback is cut first, then the message's history, the frames, the deaths; then the
    largest of the publisher's headers go, then the words, and at last the headers that say who it
    is. What was cut is named in ``cut``.
    """
    # Summed once: a publisher may send tens of thousands of headers.
    sizes = {key: table_size({key: value}) for key, value in kept.items()}
    total = sum(sizes.values())

    def cut(what: str) -> None:
        if what not in archive["cut"]:
            archive["cut"].append(what)

    def room() -> int:
        return MAX_HEADERS - total - len(compact_json(archive).encode()) - len(EVENT_ARCHIVE) - 64

    for limit in (MAX_TRACEBACK // 4, MAX_TRACEBACK // 16, 0):
        if room() >= 0:
            break
        archive["traceback"] = cut_middle(archive["traceback"], limit)
        cut("traceback")
    for what, empty in (("history", []), ("frames", []), ("deaths", []), ("properties", {})):
        if room() >= 0:
            break
        archive[what] = empty
        cut(what)

    def drop(names: Collection[str]) -> None:
        nonlocal total
        if not names or room() >= 0:
            return
        # First, since it takes room itself.
        cut("headers")
        missing = -room()
        for key in sorted(names, key=lambda name: -sizes[name]):
            if missing <= 0:
                break
            del kept[key]
            missing -= sizes[key]
            total -= sizes[key]

    drop([key for key in kept if key not in IDENTITY_HEADERS])
    if room() < 0:
        # Only text that JSON writes with 12 bytes a character comes here.
        archive["detail"] = cut_middle(archive["detail"], 500)
        if archive["exception"]:
            archive["exception"]["message"] = cut_middle(archive["exception"]["message"], 500)
        cut("words")
    # Who it is goes last: among thousands of small headers the id may be the largest.
    drop(list(kept))
    return {**kept, EVENT_ARCHIVE: compact_json(archive)}
