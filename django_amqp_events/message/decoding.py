"""Decode an event from a delivery in any format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Final
from uuid import UUID

from ..context import ReceivedEvent
from ..exceptions import Malformed
from . import formats
from .encoding import MAX_HISTORY_BYTES
from .headers import (
    CELERY,
    CONTENT_ENCODING,
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
from .text import as_text, compact_json, has_surrogates, parse_moment, too_deep
from .types import Payload, Progress, Received

#: Longest accepted identity header, in characters.
MAX_ID: Final = 255
#: Content encodings start with one of these; the body's first bytes show which it is. HTTP and MIME
#: have names for none at all (RFC 9110, 12.5.3; RFC 2045, 6.1).
_ENCODINGS: Final = (
    "utf-8", "utf8", "utf-16", "utf-32", "us-ascii", "ascii", "identity", "binary", "7bit", "8bit",
)  # fmt: skip
#: Types that kombu's JSON encoder wraps into text.
_KOMBU_TEXTS: Final = ("datetime", "date", "time", "decimal", "bytes", "base64")
#: An id derived from the content of a message that has none: no program has such ids of its own.
CONTENT_ID: Final = re.compile(r"derived-from-content-[0-9a-f]{32}")


def decode(received: Received, max_body: int) -> Payload:
    """Decode the body of a delivery.

    Raises:
        Malformed: the body is longer than *max_body* bytes, or not an event's.
    """
    check_size(received, max_body)
    form = formats.wire_format(received)
    celery = form in CELERY
    if celery and received.headers.get("compression"):
        raise Malformed(f"the body is compressed ({received.headers['compression']!r:.80})")
    encoding = str(received.properties.get("content_encoding") or CONTENT_ENCODING).strip().lower()
    if not encoding.startswith(_ENCODINGS):
        raise Malformed(f"the content encoding is {encoding!r:.80}, not 'utf-8'")
    # Celery sets the content type of its own messages, and pickles some.
    if formats.media_type(received) not in (formats.JSON, formats.STRUCTURED) and (
        celery or not formats.is_json(received)
    ):
        raise Malformed(
            f"the content type is {_content_type(received)}, not {formats.JSON!r} or "
            f"{formats.STRUCTURED!r}"
        )
    if not celery:
        return Payload(args=[], kwargs=formats.payload(received))
    body = formats.decode_json(received.body, _decode_wrapped if form == "kombu" else json.loads)
    if not isinstance(body, list) or len(body) != 3:
        raise Malformed(
            "the body is neither a JSON object nor [args, kwargs, embed] (Celery's protocol 2)"
        )
    args, kwargs, embed = body
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise Malformed("the body's args are not a list, or its kwargs not an object")
    if embed is not None and not isinstance(embed, dict):
        raise Malformed("the body's embed is not an object")
    formats.check_depth(args, kwargs)
    return Payload(args=args, kwargs=kwargs)


def _content_type(received: Received) -> str:
    value = received.properties.get("content_type")
    return "missing" if value in (None, "") else f"{value!r:.80}"


def check_size(received: Received, max_body: int) -> None:
    if len(received.body) > max_body:
        raise Malformed(f"the body has {len(received.body)} bytes, MAX_BODY is {max_body}")


def _plain(value: dict[str, Any]) -> Any:
    # kombu's encoder, used by plain Celery publishers, wraps dates, Decimal and UUID. A handler
    # gets the same plain text from every publisher.
    if value.keys() == {"__type__", "__value__"}:
        kind, wrapped = value["__type__"], value["__value__"]
        if kind == "uuid" and isinstance(wrapped, dict):
            return str(UUID(hex=str(wrapped.get("hex"))))
        if kind in _KOMBU_TEXTS and isinstance(wrapped, str):
            return wrapped
    return value


#: json.loads() with a hook would create a decoder for each call.
_decode_wrapped: Final = json.JSONDecoder(object_hook=_plain).decode


def identify(
    received: Received, *, trusted: bool, only_event: str = ""
) -> tuple[ReceivedEvent, Progress]:
    """Decode an event's identity and its progress.

    Args:
        trusted: the delivery came through this service's return or replay exchange, so its
            progress headers count. A publisher could set them to anything.
        only_event: the name of the only event of its queue, for a message from the default
            exchange, whose key is the name of the queue.

    Raises:
        Malformed: there is no event id or no name, or an identity header has a wrong type.
    """
    headers, cloud = received.headers, {}
    key = _identity({"routing-key": received.event_key}, "routing-key")
    form = formats.wire_format(received)
    celery = form in CELERY
    if not celery:
        cloud = _attributes(received, form, key, trusted=trusted)
        if not trusted:
            # A header of another type is the other program's own.
            headers = {key: value for key, value in headers.items() if isinstance(value, str)}
        headers = {**_foreign_identity(received, cloud), **headers}
    event_id = _identity(headers, EVENT_ID) or (_identity(headers, "id") if celery else "")
    if not event_id:
        raise Malformed(
            f"the message has neither an event-id nor a Celery task id, and the body is no JSON "
            f"object; its content type is {_content_type(received)}"
        )
    # Another program's JSON may have a header of that name.
    named = {"task": headers.get("task")} if celery else {}
    if trusted or not received.exchange:
        # A retry has its handler's key, a message for the default exchange that of a queue.
        name = _identity(headers, EVENT_NAME) or _identity(named, "task") or only_event or key
    else:
        name = key or _identity(named, "task")
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
        correlation_id=_unless_invalid(headers, EVENT_CORRELATION_ID) or event_id,
        causation_id=_unless_invalid(headers, EVENT_CAUSATION_ID) or None,
        subject=as_text(cloud.get("subject")),
        content_type=as_text(received.properties.get("content_type")) or "",
        extensions=formats.extensions(cloud),
        headers=dict(publisher_headers(received.headers, form)),
    )
    return event, progress


def _attributes(
    received: Received, form: formats.WireFormat, key: str, *, trusted: bool
) -> dict[str, Any]:
    """Return the CloudEvents attributes of a message, ``{}`` for plain JSON.

    Raises:
        Malformed: they are invalid. A copy of ours has its identity in our headers instead.
    """
    if form == "json":
        return {}
    try:
        cloud = formats.attributes(received)
    except Malformed:
        if trusted:
            return {}
        raise
    # A message for the default exchange has the name of a queue as its key.
    if not trusted and received.exchange and cloud["type"] != key:
        raise Malformed(f"the CloudEvents type is {cloud['type']!r:.80}, the routing key {key!r}")
    return cloud


def _foreign_identity(received: Received, cloud: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity of a message of another format, under the names of our headers."""
    properties = received.properties
    attributes = {
        EVENT_ID: cloud.get("id") or properties.get("message_id") or _content_id(received),
        EVENT_SERVICE: cloud.get("source") or properties.get("app_id"),
        EVENT_PUBLISHED_AT: _time(cloud.get("time") or properties.get("timestamp")),
        EVENT_CORRELATION_ID: cloud.get("correlationid") or properties.get("correlation_id"),
        EVENT_CAUSATION_ID: cloud.get("causationid"),
        EVENT_NAME: None if received.exchange else cloud.get("type"),
    }
    return {key: value for key, value in attributes.items() if value is not None}


def is_nameless(event: ReceivedEvent | None) -> bool:
    """Return True if a message has no id of its own."""
    return event is None or CONTENT_ID.fullmatch(event.id) is not None


def _content_id(received: Received) -> str:
    """Return an id for a message without one, the same at each delivery."""
    digest = blake2b(received.event_key.encode() + b"\0" + received.body, digest_size=16)
    return f"derived-from-content-{digest.hexdigest()}"


def _time(value: object) -> str | None:
    """Return a time as text: of CloudEvents, a header's (naive UTC), or a property's seconds."""
    with suppress(ValueError, OverflowError, OSError):
        if isinstance(value, int):
            value = datetime.fromtimestamp(value, UTC)
        if isinstance(value, datetime):
            return value.isoformat()
    return value if isinstance(value, str) else None


def _identity(headers: Mapping[str, Any], key: str) -> str:
    value = headers.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_ID:
        raise Malformed(
            f"the message's {key} is {value!r:.80}, not a text of at most {MAX_ID} characters"
        )
    if not value.isascii() and has_surrogates(value):
        raise Malformed(f"the message's {key} is {value!r:.80}, which has a lone surrogate")
    if "\0" in value and key in IDENTITY_HEADERS and key not in (EVENT_NAME, "task"):
        # PostgreSQL stores none, so a replay would have another id than the event.
        raise Malformed(f"the message's {key} is {value!r:.80}, which has a NUL")
    return value


def _unless_invalid(headers: Mapping[str, Any], key: str) -> str:
    """Return a text that an event can do without."""
    with suppress(Malformed):
        return _identity(headers, key)
    return ""


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
