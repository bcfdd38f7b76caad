"""Decode an event from a delivery."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from ..context import ReceivedEvent
from ..exceptions import Malformed
from .encoding import MAX_HISTORY_BYTES
from .headers import (
    CONTENT_ENCODING,
    CONTENT_TYPE,
    EVENT_ATTEMPT,
    EVENT_CAUSATION_ID,
    EVENT_CORRELATION_ID,
    EVENT_DUE_AT,
    EVENT_HANDLER,
    EVENT_HISTORY,
    EVENT_ID,
    EVENT_NAME,
    EVENT_PUBLISHED_AT,
    EVENT_REPLAY_FORCED,
    EVENT_REPLAY_ID,
    EVENT_SERVICE,
    IDENTITY_HEADERS,
    publisher_headers,
)
from .text import (
    MAX_DEPTH,
    compact_json,
    count_brackets,
    has_surrogates,
    parse_moment,
    too_deep,
)
from .types import Payload, Progress, Received

#: Longest accepted identity header, in characters.
MAX_ID: Final = 255


def decode(received: Received, max_body: int) -> Payload:
    """Decode the body of a delivery.

    Raises:
        Malformed: the body is longer than *max_body* bytes, or not an event's.
    """
    if len(received.body) > max_body:
        raise Malformed(f"the body has {len(received.body)} bytes, MAX_BODY is {max_body}")
    content_type = received.properties.get("content_type")
    if content_type != CONTENT_TYPE:
        raise Malformed(f"the content type is {content_type!r}, not {CONTENT_TYPE!r}")
    if received.headers.get("compression"):
        raise Malformed(f"the body is compressed ({received.headers['compression']!r:.80})")
    encoding = str(received.properties.get("content_encoding") or CONTENT_ENCODING).lower()
    if encoding not in ("utf-8", "utf8", "us-ascii", "ascii"):
        raise Malformed(f"the content encoding is {encoding!r:.80}, not 'utf-8'")
    return decode_body(received.body)


def decode_body(raw: bytes) -> Payload:
    """Decode a body that is JSON in UTF-8.

    Raises:
        Malformed: it is not Celery's ``[args, kwargs, embed]``.
    """
    try:
        body = _decode(raw.decode("utf-8"))
    except (ValueError, RecursionError) as exc:
        raise Malformed(f"the body is not JSON in UTF-8: {exc}") from exc
    if not isinstance(body, list) or len(body) != 3:
        raise Malformed("the body is not [args, kwargs, embed] (Celery's protocol 2)")
    args, kwargs, embed = body
    if count_brackets(raw) > MAX_DEPTH and (too_deep(args) or too_deep(kwargs)):
        raise Malformed(f"the body is nested deeper than {MAX_DEPTH}")
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise Malformed("the body's args are not a list, or its kwargs not an object")
    if embed is not None and not isinstance(embed, dict):
        raise Malformed("the body's embed is not an object")
    return Payload(args=args, kwargs=kwargs)


def _plain(value: dict[str, Any]) -> Any:
    # kombu's encoder, used by plain Celery publishers, wraps dates, Decimal and UUID. A handler
    # gets the same plain text from every publisher.
    if len(value) == 2 and "__type__" in value and "__value__" in value:
        wrapped = value["__value__"]
        if value["__type__"] == "uuid" and isinstance(wrapped, dict):
            return str(UUID(hex=str(wrapped.get("hex"))))
        return wrapped
    return value


#: json.loads() with a hook would create a decoder for each call.
_decode: Final = json.JSONDecoder(object_hook=_plain).decode


def identify(received: Received, *, trusted: bool) -> tuple[ReceivedEvent, Progress]:
    """Decode an event's identity and its progress.

    Args:
        trusted: the delivery returned to this service (its return or replay exchange, or a dead
            letter), so its progress headers count. A publisher could set them to anything.

    Raises:
        Malformed: there is no event id or no name, or an identity header has a wrong type.
    """
    headers = received.headers
    event_id = _identity(headers, EVENT_ID) or _identity(headers, "id")
    if not event_id:
        raise Malformed("the message has neither an event-id nor a Celery task id")
    key = _identity({"routing-key": received.event_key}, "routing-key")
    # A retry arrives under its handler's key, and its name must stay the same.
    name = (_identity(headers, EVENT_NAME) if trusted else key) or _identity(headers, "task") or key
    if not name:
        raise Malformed("the message has neither a routing key nor a Celery task name")
    progress = Progress()
    if trusted:
        attempt = headers.get(EVENT_ATTEMPT, 1)
        if isinstance(attempt, bool) or not isinstance(attempt, int) or not 1 <= attempt < 2**31:
            raise Malformed(f"the event-attempt header is {attempt!r:.80}")
        progress = Progress(
            attempt=attempt,
            due_at=parse_moment(headers.get(EVENT_DUE_AT)),
            replay_id=_identity(headers, EVENT_REPLAY_ID) or None,
            handler=_identity(headers, EVENT_HANDLER) or None,
            history=_history(headers.get(EVENT_HISTORY)),
        )
    event = ReceivedEvent(
        id=event_id,
        name=name,
        service=_identity(headers, EVENT_SERVICE),
        published_at=parse_moment(headers.get(EVENT_PUBLISHED_AT)),
        due_at=progress.due_at,
        attempt=progress.attempt,
        replay_id=progress.replay_id,
        replay_forced=bool(progress.replay_id and headers.get(EVENT_REPLAY_FORCED) is True),
        correlation_id=_identity(headers, EVENT_CORRELATION_ID) or event_id,
        causation_id=_identity(headers, EVENT_CAUSATION_ID) or None,
        headers=dict(publisher_headers(headers)),
    )
    return event, progress


def _identity(headers: Mapping[str, Any], key: str) -> str:
    value = headers.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_ID:
        raise Malformed(f"the {key} header is {value!r:.80}, not a text of at most {MAX_ID}")
    if not value.isascii() and has_surrogates(value):
        raise Malformed(f"the {key} header is {value!r:.80}, which has a lone surrogate")
    if "\0" in value and key in IDENTITY_HEADERS and key not in (EVENT_NAME, "task"):
        # PostgreSQL stores none, so a replay would have another id than the event.
        raise Malformed(f"the {key} header is {value!r:.80}, which has a NUL")
    return value


def _history(value: object) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, str) or len(value) > 4 * MAX_HISTORY_BYTES:
        return ()
    try:
        entries = json.loads(value)
    except (ValueError, RecursionError):
        return ()
    # Measured again: a retry writes characters as escapes, up to six times as long.
    if (
        not isinstance(entries, list)
        or too_deep(entries)
        or len(compact_json(entries)) > 4 * MAX_HISTORY_BYTES
    ):
        return ()
    return tuple(entry for entry in entries if isinstance(entry, dict))
