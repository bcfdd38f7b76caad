"""Build retries and replays: the raw body with rebuilt headers."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from ..context import ReceivedEvent
from .headers import (
    EVENT_ATTEMPT,
    EVENT_DUE_AT,
    EVENT_HANDLER,
    EVENT_HISTORY,
    EVENT_REPLAY_FORCED,
    EVENT_REPLAY_ID,
    basic_properties,
    identity_headers,
    with_publisher_headers,
)
from .text import compact_json, utc_text
from .types import (
    Failure,
    Message,
    Progress,
    Received,
    task_id,
)

MAX_HISTORY_ENTRIES: Final = 20


MAX_HISTORY_BYTES: Final = 8_000


# -- copies -------------------------------------------------------------------------------


def add_to_history(
    progress: Progress, failure: Failure, *, at: datetime, worker: str
) -> tuple[Mapping[str, Any], ...]:
    """Return the history with this attempt's failure added, bounded in entries and bytes.

    The first entry is kept for ever (since when does it fail?), the oldest after it go.
    """
    entry = {
        "attempt": progress.attempt,
        "at": utc_text(at),
        "worker": worker[:120],
        "exception": failure.exception[:200],
        "message": failure.message.splitlines()[0][:200] if failure.message else "",
    }
    entries = [*progress.history, entry]
    while len(entries) > MAX_HISTORY_ENTRIES or (
        len(entries) > 2 and len(compact_json(entries).encode()) > MAX_HISTORY_BYTES
    ):
        del entries[1]
    return tuple(entries)


def retry_copy(
    received: Received,
    event: ReceivedEvent,
    *,
    exchange: str,
    routing_key: str,
    handler: str,
    attempt: int,
    due_at: datetime,
    replay_id: str | None,
    history: tuple[Mapping[str, Any], ...],
) -> Message:
    """Build the clean copy that waits in a delay queue: the raw body, rebuilt headers."""
    headers: dict[str, Any] = {
        **identity_headers(event),
        EVENT_HANDLER: handler,
        EVENT_ATTEMPT: attempt,
        EVENT_DUE_AT: utc_text(due_at),
    }
    if replay_id:
        headers[EVENT_REPLAY_ID] = replay_id
    if replay_id and event.replay_forced:
        headers[EVENT_REPLAY_FORCED] = True
    if history:
        headers[EVENT_HISTORY] = compact_json(list(history))
    return Message(
        exchange=exchange,
        routing_key=routing_key,
        body=received.body,
        headers=with_publisher_headers(headers, received.headers),
        properties=basic_properties(
            task_id(event.service, event.id, handler, replay_id),
            content_type=received.properties.get("content_type"),
            content_encoding=received.properties.get("content_encoding"),
        ),
        event_id=event.id,
        name=event.name,
    )


def replay_copy(
    received: Received,
    event: ReceivedEvent,
    *,
    exchange: str,
    routing_key: str,
    handler: str,
    replay_id: str,
    forced: bool = False,
) -> Message:
    """Build the message of a replay: the raw body, a first attempt, the replay's id.

    It is made of rebuilt headers only, so nothing of the broker's goes along: a copy that kept
    its x-death would be dropped as a cycle behind a delay queue (RabbitMQ up to 3.13).
    """
    return Message(
        exchange=exchange,
        routing_key=routing_key,
        body=received.body,
        headers=with_publisher_headers(
            {
                **identity_headers(event),
                EVENT_HANDLER: handler,
                EVENT_ATTEMPT: 1,
                EVENT_REPLAY_ID: replay_id,
                **({EVENT_REPLAY_FORCED: True} if forced else {}),
            },
            received.headers,
        ),
        properties=basic_properties(
            task_id(event.service, event.id, handler, replay_id),
            content_type=received.properties.get("content_type"),
            content_encoding=received.properties.get("content_encoding"),
        ),
        event_id=event.id,
        name=event.name,
    )
