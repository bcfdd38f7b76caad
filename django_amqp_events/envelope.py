"""The message: what is on the wire, how it is read, and how copies of it are made.

Format 1. Other programs depend on it: `tests/messages/` holds one file per kind of message,
and the tests compare byte for byte. An event is a Celery message, protocol 2, JSON only:
header ``task`` is the event's name, ``id`` the event id, the body ``[args, kwargs, embed]``.
Headers of our own begin with ``event-``. Everything here is pure.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha1
from typing import Any, Final
from uuid import UUID

from django.core.serializers.json import DjangoJSONEncoder

from .context import ReceivedEvent
from .exceptions import InvalidEventError, Malformed

#: Version of the event message and of the archive message.
FORMAT: Final = 1

CONTENT_TYPE: Final = "application/json"
CONTENT_ENCODING: Final = "utf-8"

# Identity: written by the publisher, believed on every delivery.
EVENT_FORMAT: Final = "event-format"
EVENT_ID: Final = "event-id"
EVENT_NAME: Final = "event-name"
EVENT_SERVICE: Final = "event-service"
EVENT_PUBLISHED_AT: Final = "event-published-at"
EVENT_CORRELATION_ID: Final = "event-correlation-id"
EVENT_CAUSATION_ID: Final = "event-causation-id"
# Progress: written by this service's workers, believed only on what came back to them.
EVENT_HANDLER: Final = "event-handler"
EVENT_ATTEMPT: Final = "event-attempt"
EVENT_DUE_AT: Final = "event-due-at"
EVENT_REPLAY_ID: Final = "event-replay-id"
EVENT_REPLAY_FORCED: Final = "event-replay-forced"
EVENT_HISTORY: Final = "event-history"
EVENT_ARCHIVE: Final = "event-archive"
EVENT_OUTCOME: Final = "event-outcome"
#: Headers and properties as bytes, in an archive message, where they could not be read.
EVENT_UNREADABLE: Final = "event-unreadable"

_PROGRESS = frozenset(
    {
        EVENT_HANDLER, EVENT_ATTEMPT, EVENT_DUE_AT, EVENT_REPLAY_ID, EVENT_REPLAY_FORCED,
        EVENT_HISTORY,
    }
)  # fmt: skip
_IDENTITY = frozenset(
    {
        EVENT_ID, EVENT_NAME, EVENT_SERVICE, EVENT_PUBLISHED_AT, EVENT_CORRELATION_ID,
        EVENT_CAUSATION_ID, "id", "task",
    }
)  # fmt: skip
_OURS = _PROGRESS | {
    EVENT_FORMAT,
    EVENT_ID,
    EVENT_NAME,
    EVENT_SERVICE,
    EVENT_PUBLISHED_AT,
    EVENT_CORRELATION_ID,
    EVENT_CAUSATION_ID,
    EVENT_ARCHIVE,
    EVENT_OUTCOME,
    EVENT_UNREADABLE,
}
#: Headers that the broker writes and interprets; a copy must not carry them: up to 3.13 a
#: republished x-death is believed, and CC routes the copy to another handler as well.
_BROKER_HEADER = re.compile(
    r"^(x-death|x-(first|last)-death-.*|x-delivery-count|x-acquired-count|CC|BCC|x-delay|"
    r"x-opt-.*|x-received-from|x-match.*)$",
    re.IGNORECASE,
)
#: Celery's headers; an event's copy gets fresh ones.
_CELERY_HEADERS = frozenset(
    {
        "lang", "task", "id", "shadow", "eta", "expires", "group", "group_index", "retries",
        "timelimit", "root_id", "parent_id", "argsrepr", "kwargsrepr", "origin", "ignore_result",
        "stamped_headers", "stamps", "replaced_task_nesting", "meth", "compression",
    }
)  # fmt: skip
#: Celery's native delayed delivery puts 28 one-bit words before the routing key
#: (kombu.transport.native_delayed_delivery.calculate_routing_key).
_DELAY_PREFIX = re.compile(r"^(?:[01]\.){28}")

#: All headers of a copy together stay below this many bytes; RabbitMQ's frame_max is 128 kB
#: and a larger header frame closes the connection (501).
MAX_HEADERS: Final = 60_000
MAX_TRACEBACK: Final = 20_000
MAX_HISTORY_ENTRIES: Final = 20
MAX_HISTORY_BYTES: Final = 8_000
#: Longest event id or correlation id that is believed.
MAX_ID: Final = 255
#: Deepest nesting of payloads and headers: what is deeper cannot be pickled for a pool's process
#: (RecursionError, out of which a slot of the pool would not come back).
MAX_DEPTH: Final = 200
_CUT = "\n… cut by django_amqp_events …\n"

_NAMESPACE: Final = UUID("6c0cf4a6-5d5b-5b0e-9d0f-0f3f0c1f5b58")


def utc_text(moment: datetime) -> str:
    """Write an aware datetime as ISO 8601 in UTC with microseconds and ``Z``."""
    utc = moment.astimezone(UTC).replace(tzinfo=None)
    return utc.isoformat(timespec="microseconds") + "Z"


def parse_moment(value: object) -> datetime | None:
    """Read what :func:`utc_text` wrote; ``None`` for anything that is not such a text."""
    if not isinstance(value, str) or len(value) > 64:
        return None
    try:
        moment = datetime.fromisoformat(value)
        # At once: a publisher's 0001-01-01T00:00+14:00 has no time in UTC.
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def task_id(source: str, event_id: str, handler: str, replay_id: str | None) -> str:
    """Return the id of one handler's run of one event, the same on every attempt.

    Several handlers share a published id, and Celery's worker state and results are keyed
    by task id, so each (source, event id, handler, replay) has an id of its own.
    """
    name = "\0".join((source, event_id, handler, replay_id or ""))
    # RFC 9562's UUID of version 5, as uuid.uuid5() makes it in three times the time.
    digest = bytearray(sha1(_NAMESPACE.bytes + name.encode(), usedforsecurity=False).digest()[:16])
    digest[6] = digest[6] & 0x0F | 0x50
    digest[8] = digest[8] & 0x3F | 0x80
    text = digest.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message to be published.

    Attributes:
        exchange, routing_key: where it goes.
        body: bytes as they go on the wire.
        headers: AMQP headers; values are strings, numbers, or what came from the broker.
        properties: AMQP basic properties; always persistent.
        event_id, name: who it is, for errors and logs.
    """

    exchange: str
    routing_key: str
    body: bytes
    headers: Mapping[str, Any]
    properties: Mapping[str, Any]
    event_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What went wrong in one attempt, in words that fit in a header.

    Attributes:
        exception: dotted class name.
        message: text of the exception, bounded.
        traceback: formatted traceback, bounded; ``""`` where there is none.
        frames: innermost last; each ``{"file", "line", "function", "module"}``.
    """

    exception: str
    message: str = ""
    traceback: str = ""
    frames: tuple[Mapping[str, Any], ...] = ()

    @property
    def first_line(self) -> str:
        """Exception and the first line of its text, for lists and logs."""
        return f"{self.exception}: {self.message.splitlines()[0] if self.message else ''}".rstrip(
            ": "
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A delivery as it came from the broker, nothing believed yet.

    Attributes:
        queue: the queue that it was consumed from.
        exchange, routing_key, redelivered: the broker's delivery info.
        unreadable: why its headers and properties could not be read, ``""`` where they could.
    """

    queue: str
    exchange: str
    routing_key: str
    body: bytes
    headers: Mapping[str, Any]
    properties: Mapping[str, Any]
    redelivered: bool = False
    unreadable: str = ""

    @property
    def event_key(self) -> str:
        """Routing key without the prefix that Celery's native delayed delivery leaves."""
        return _DELAY_PREFIX.sub("", self.routing_key)

    @property
    def deaths(self) -> list[dict[str, Any]]:
        """The broker's own death history, reduced to JSON types; not always newest first."""
        deaths = self.headers.get("x-death")
        if not isinstance(deaths, list):
            return []
        return [
            {
                "queue": _text(death.get("queue")),
                "reason": _text(death.get("reason")),
                "at": _death_time(death.get("time")),
                "count": death.get("count") if isinstance(death.get("count"), int) else None,
                "exchange": _text(death.get("exchange")),
                "routing_keys": _texts(death.get("routing-keys")),
            }
            for death in deaths[:16]
            if isinstance(death, Mapping)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far one handler has come with one event."""

    attempt: int = 1
    due_at: datetime | None = None
    replay_id: str | None = None
    handler: str | None = None
    history: tuple[Mapping[str, Any], ...] = ()

    @property
    def first_failed_at(self) -> str | None:
        """When the first attempt failed, as written in the history."""
        at = self.history[0].get("at") if self.history else None
        return at if isinstance(at, str) and parse_moment(at) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """The decoded body of an event."""

    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


# -- publishing ---------------------------------------------------------------------------


# One for all: it keeps nothing between two calls.
_ENCODER: Final = DjangoJSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encode_payload(name: str, payload: Mapping[str, Any], args: Sequence[Any] = ()) -> bytes:
    """Write an event's payload as the body of a message.

    Values are written by Django's JSON encoder (ISO 8601, Decimal and UUID as strings).

    Args:
        args: values without a name, which a plain Celery publisher may have sent.

    Raises:
        InvalidEventError: the payload is no JSON.
    """
    try:
        body = _ENCODER.encode([list(args), payload, {}]).encode()
        if _brackets(body) > MAX_DEPTH and too_deep(payload):
            raise ValueError(f"it is nested deeper than {MAX_DEPTH}")
        return body
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidEventError(
            f"the payload of event {name!r} cannot be written as JSON: {exc}; publish plain "
            f"values (text, numbers, booleans, None, lists, dicts, dates, Decimal, UUID)"
        ) from exc


def event_message(
    *,
    exchange: str,
    name: str,
    body: bytes,
    event_id: str,
    service: str,
    published_at: datetime,
    correlation_id: str | None = None,
    causation_id: str | None = None,
    headers: Mapping[str, Any] | None = None,
) -> Message:
    """Build the message of a new event."""
    ours: dict[str, Any] = {
        "lang": "py",
        "task": name,
        "id": event_id,
        "root_id": event_id,
        "retries": 0,
        "argsrepr": "()",
        "kwargsrepr": "{…}",
        "origin": service,
        EVENT_FORMAT: FORMAT,
        EVENT_ID: event_id,
        EVENT_NAME: name,
        EVENT_SERVICE: service,
        EVENT_PUBLISHED_AT: utc_text(published_at),
        EVENT_CORRELATION_ID: correlation_id or event_id,
    }
    if causation_id:
        ours[EVENT_CAUSATION_ID] = causation_id
    return Message(
        exchange=exchange,
        routing_key=name,
        body=body,
        headers={**(headers or {}), **ours},
        properties={**_properties(event_id), "correlation_id": event_id},
        event_id=event_id,
        name=name,
    )


def of_the_broker(key: object) -> bool:
    """Say whether a header is the broker's, which may be another one at the next delivery."""
    return isinstance(key, str) and _BROKER_HEADER.match(key) is not None


def check_headers(name: str, headers: Mapping[str, Any]) -> None:
    """Refuse headers that a publisher may not set.

    Raises:
        InvalidEventError: names the header and the reason.
    """
    for key, value in headers.items():
        if not isinstance(key, str) or not key or _surrogates(key) or len(key.encode()) > 128:
            raise InvalidEventError(
                f"header {key!r} of event {name!r}: a header's name is text of 1 to 128 bytes"
            )
        if key.startswith("event-") or key in _CELERY_HEADERS or _BROKER_HEADER.match(key):
            raise InvalidEventError(
                f"header {key!r} of event {name!r} belongs to django_amqp_events, Celery or "
                f"RabbitMQ; choose another name"
            )
        if not isinstance(value, (str, int, float, bool)):
            raise InvalidEventError(
                f"header {key!r} of event {name!r} is a {type(value).__name__}; a header is "
                f"text, a number or a boolean"
            )
        if (isinstance(value, str) and _surrogates(value)) or (
            isinstance(value, int) and not -(2**63) <= value < 2**63
        ):
            raise InvalidEventError(
                f"header {key!r} of event {name!r} has a lone surrogate, or a number that does "
                f"not fit in 64 bits"
            )
        if isinstance(value, float) and not math.isfinite(value):
            # RabbitMQ answers with an internal error and closes the connection.
            raise InvalidEventError(
                f"header {key!r} of event {name!r} is {value!r}; a number is a finite one"
            )
    if _size(headers) > MAX_HEADERS // 2:
        raise InvalidEventError(
            f"the headers of event {name!r} take more than {MAX_HEADERS // 2} bytes; put large "
            f"values in the payload"
        )


# -- reading ------------------------------------------------------------------------------


def decode(received: Received, max_body: int) -> Payload:
    """Read the body of a delivery.

    Raises:
        Malformed: with what is wrong; the body is not decoded above *max_body* bytes.
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
    """Read a body that is JSON in UTF-8.

    Raises:
        Malformed: with what is wrong.
    """
    try:
        body = _decode(raw.decode("utf-8"))
    except (ValueError, RecursionError) as exc:
        raise Malformed(f"the body is no JSON in UTF-8: {exc}") from exc
    if not isinstance(body, list) or len(body) != 3:
        raise Malformed("the body is not [args, kwargs, embed] (Celery's protocol 2)")
    args, kwargs, embed = body
    if _brackets(raw) > MAX_DEPTH and (too_deep(args) or too_deep(kwargs)):
        raise Malformed(f"the body is nested deeper than {MAX_DEPTH}")
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise Malformed("the body's args are not a list, or its kwargs not an object")
    if embed is not None and not isinstance(embed, dict):
        raise Malformed("the body's embed is not an object")
    return Payload(args=args, kwargs=kwargs)


def _plain(value: dict[str, Any]) -> Any:
    # kombu's encoder, used by plain Celery publishers, wraps dates, Decimal and UUID; a
    # handler gets the same plain text whoever published.
    if len(value) == 2 and "__type__" in value and "__value__" in value:
        wrapped = value["__value__"]
        if value["__type__"] == "uuid" and isinstance(wrapped, dict):
            return str(UUID(hex=str(wrapped.get("hex"))))
        return wrapped
    return value


#: Made once: json.loads() with a hook makes one for each call.
_decode: Final = json.JSONDecoder(object_hook=_plain).decode


def identify(received: Received, *, trusted: bool) -> tuple[ReceivedEvent, Progress]:
    """Read who an event is and how far it has come.

    Args:
        trusted: the delivery came back to this service (its return or replay exchange, or
            a dead letter), so our own progress headers are believed. A publisher could
            write anything in them.

    Raises:
        Malformed: there is no event id or no name, or an identity header has a wrong type.
    """
    headers = received.headers
    event_id = _identity(headers, EVENT_ID) or _identity(headers, "id")
    if not event_id:
        raise Malformed("the message has neither an event-id nor a Celery task id")
    key = _identity({"routing-key": received.event_key}, "routing-key")
    # What a retry could not carry back would be another event then.
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
        headers=dict(_foreign(headers)),
    )
    return event, progress


def _identity(headers: Mapping[str, Any], key: str) -> str:
    value = headers.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_ID:
        raise Malformed(f"the {key} header is {value!r:.80}, not a text of at most {MAX_ID}")
    if not value.isascii() and _surrogates(value):
        raise Malformed(f"the {key} header is {value!r:.80}, which has a lone surrogate")
    if "\0" in value and key in _IDENTITY and key not in (EVENT_NAME, "task"):
        # PostgreSQL keeps none: a replay would come with another id than the event had.
        raise Malformed(f"the {key} header is {value!r:.80}, which has a NUL")
    return value


def _history(value: object) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, str) or len(value) > 4 * MAX_HISTORY_BYTES:
        return ()
    try:
        entries = json.loads(value)
    except (ValueError, RecursionError):
        return ()
    # Once more: what came as characters leaves as escapes, up to six times as long.
    if (
        not isinstance(entries, list)
        or too_deep(entries)
        or len(_compact(entries)) > 4 * MAX_HISTORY_BYTES
    ):
        return ()
    return tuple(entry for entry in entries if isinstance(entry, dict))


def _foreign(headers: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Yield the publisher's own headers: tracing and the like."""
    for key, value in headers.items():
        if (
            isinstance(key, str)
            and key not in _OURS
            and key not in _CELERY_HEADERS
            and not _BROKER_HEADER.match(key)
        ):
            yield key, value


# -- copies -------------------------------------------------------------------------------


def remember(
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
        len(entries) > 2 and len(_compact(entries).encode()) > MAX_HISTORY_BYTES
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
        **_identity_headers(event),
        EVENT_HANDLER: handler,
        EVENT_ATTEMPT: attempt,
        EVENT_DUE_AT: utc_text(due_at),
    }
    if replay_id:
        headers[EVENT_REPLAY_ID] = replay_id
    if replay_id and event.replay_forced:
        headers[EVENT_REPLAY_FORCED] = True
    if history:
        headers[EVENT_HISTORY] = _compact(list(history))
    return Message(
        exchange=exchange,
        routing_key=routing_key,
        body=received.body,
        headers=_with_foreign(headers, received.headers),
        properties=_properties(
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
        headers=_with_foreign(
            {
                **_identity_headers(event),
                EVENT_HANDLER: handler,
                EVENT_ATTEMPT: 1,
                EVENT_REPLAY_ID: replay_id,
                **({EVENT_REPLAY_FORCED: True} if forced else {}),
            },
            received.headers,
        ),
        properties=_properties(
            task_id(event.service, event.id, handler, replay_id),
            content_type=received.properties.get("content_type"),
            content_encoding=received.properties.get("content_encoding"),
        ),
        event_id=event.id,
        name=event.name,
    )


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
        "queue": _text(received.queue),
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
        "exchange": _text(received.exchange),
        "routing_key": _text(received.routing_key),
        "properties": {
            key: _text(value)
            for key, value in received.properties.items()
            if key not in ("headers", "application_headers")
        },
        "cut": [],
    }
    if failure is not None:
        archive["exception"] = {
            "type": failure.exception[:500],
            "message": _bounded(failure.message, 4_000),
        }
        archive["frames"] = [dict(frame) for frame in failure.frames]
        archive["traceback"] = _bounded(failure.traceback, MAX_TRACEBACK)
    kept = {
        key: value
        for key, value in received.headers.items()
        if isinstance(key, str) and not of_the_broker(key)
    }
    kept.pop(EVENT_ARCHIVE, None)
    kept.pop(EVENT_OUTCOME, None)
    if not all(isinstance(key, str) for key in received.headers):
        archive["cut"].append("headers")
    event_id = event.id if event else ""
    return Message(
        exchange=exchange,
        routing_key=_short(received.event_key),
        body=received.body,
        headers=_fit(kept, archive),
        properties=_properties(
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
            **_identity_headers(event),
            EVENT_HANDLER: handler,
            EVENT_OUTCOME: _compact(outcome_header),
        },
        properties=_properties(task_id(event.service, event.id, handler, event.replay_id)),
        event_id=event.id,
        name=event.name,
    )


def redirected(message: Message, *, exchange: str, routing_key: str) -> Message:
    """Return the same message for another exchange or key."""
    return replace(message, exchange=exchange, routing_key=routing_key)


def _identity_headers(event: ReceivedEvent) -> dict[str, Any]:
    headers: dict[str, Any] = {
        "lang": "py",
        "task": event.name,
        "id": event.id,
        EVENT_FORMAT: FORMAT,
        EVENT_ID: event.id,
        EVENT_NAME: event.name,
    }
    optional = {
        EVENT_SERVICE: event.service,
        EVENT_PUBLISHED_AT: utc_text(event.published_at) if event.published_at else None,
        EVENT_CORRELATION_ID: event.correlation_id,
        EVENT_CAUSATION_ID: event.causation_id,
    }
    headers.update({key: value for key, value in optional.items() if value})
    return headers


def _properties(
    message_id: str | None,
    content_type: object = CONTENT_TYPE,
    content_encoding: object = CONTENT_ENCODING,
) -> dict[str, Any]:
    properties: dict[str, Any] = {"delivery_mode": 2}
    if message_id:
        properties["message_id"] = message_id
    if isinstance(content_type, str):
        properties["content_type"] = content_type
    if isinstance(content_encoding, str):
        properties["content_encoding"] = content_encoding
    return properties


def _with_foreign(ours: dict[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Add the publisher's headers to ours, small ones first, as far as they fit."""
    room = MAX_HEADERS - _size(ours)
    kept: dict[str, Any] = {}
    for key, value in sorted(_foreign(theirs), key=lambda item: _size({item[0]: item[1]})):
        size = _size({key: value})
        if size > room:
            break
        room -= size
        kept[key] = value
    return {**kept, **ours}


def _fit(kept: dict[str, Any], archive: dict[str, Any]) -> dict[str, Any]:
    """Join the original headers and the archive header below :data:`MAX_HEADERS` bytes.

    The traceback is cut first, then the message's history, the frames, the deaths; then the
    largest of the publisher's headers go, then the words, and at last the headers that say who it
    is. What was cut is named in ``cut``.
    """
    # Summed once: a publisher may send tens of thousands of headers.
    sizes = {key: _size({key: value}) for key, value in kept.items()}
    total = sum(sizes.values())

    def cut(what: str) -> None:
        if what not in archive["cut"]:
            archive["cut"].append(what)

    def room() -> int:
        return MAX_HEADERS - total - len(_compact(archive).encode()) - len(EVENT_ARCHIVE) - 64

    for limit in (MAX_TRACEBACK // 4, MAX_TRACEBACK // 16, 0):
        if room() >= 0:
            break
        archive["traceback"] = _bounded(archive["traceback"], limit)
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

    drop([key for key in kept if key not in _IDENTITY])
    if room() < 0:
        # Only text that JSON writes with 12 bytes a character comes here.
        archive["detail"] = _bounded(archive["detail"], 500)
        if archive["exception"]:
            archive["exception"]["message"] = _bounded(archive["exception"]["message"], 500)
        cut("words")
    # Who it is goes last: among thousands of small headers the id may be the largest.
    drop(list(kept))
    return {**kept, EVENT_ARCHIVE: _compact(archive)}


def too_deep(value: Mapping[str, Any] | Sequence[Any]) -> bool:
    """Say whether lists and dicts are nested deeper than :data:`MAX_DEPTH`, level by level."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list, tuple))
        ]
        if not level:
            return False
    return True


def _brackets(body: bytes) -> int:
    """Return what the nesting cannot exceed, so that few bodies are looked through."""
    return body.count(b"[") + body.count(b"{")


def _surrogates(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)


def _bounded(text: str, limit: int) -> str:
    """Cut the middle out of *text*: a traceback's ends say most."""
    if len(text) <= limit:
        return text
    if limit <= 2 * len(_CUT):
        return _CUT.strip()
    half = (limit - len(_CUT)) // 2
    return text[:half] + _CUT + text[-half:]


def _short(text: str) -> str:
    """Cut text to what a routing key has room for; a forged x-death can be longer."""
    raw = text.encode("utf-8", "surrogatepass")
    return text if len(raw) <= 255 else raw[:255].decode("utf-8", "ignore")


def shown(text: str) -> str:
    """Write a publisher's words for a log: no line of its own, nothing that a terminal obeys."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def _compact(value: object) -> str:
    # ASCII: a lone surrogate in an exception's text must not stop the message from leaving.
    return json.dumps(value, separators=(",", ":"), default=str)


def _size(value: object) -> int:
    """Estimate the bytes of a header table on the wire, from above."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass")) + 5
    if isinstance(value, (bytes, bytearray, memoryview)):
        return len(value) + 5
    if isinstance(value, Mapping):
        return 5 + sum(_size(str(key)) + _size(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return 5 + sum(_size(item) for item in value)
    return 16


def _death_time(value: object) -> str | None:
    """Write the broker's time of a death; py-amqp reads AMQP's seconds as UTC, naive."""
    if not isinstance(value, datetime):
        return None
    try:
        return utc_text(value if value.tzinfo else value.replace(tzinfo=UTC))
    except (ValueError, OverflowError):
        return None


def _text(value: object) -> str | None:
    return None if value is None else str(value)[:500]


def _texts(value: object) -> list[str | None]:
    # Before the first death an x-death is whatever a publisher wrote.
    return [_text(item) for item in value[:8]] if isinstance(value, list) else []


def without_foreign_headers(message: Message) -> Message:
    """Return the message with our headers and Celery's identity only.

    Of those only what a table holds without doubt; an archive message says what is gone.
    """
    kept = {
        key: value
        for key, value in message.headers.items()
        if key in _OURS | {"lang", "task", "id"} and isinstance(value, (str, int, bytes))
    }
    if EVENT_ARCHIVE in kept and len(kept) < len(message.headers):
        archive = json.loads(str(kept[EVENT_ARCHIVE]))
        archive["cut"] = [*archive["cut"], *({"headers"} - set(archive["cut"]))]
        kept[EVENT_ARCHIVE] = _compact(archive)
    return replace(message, headers=kept)
