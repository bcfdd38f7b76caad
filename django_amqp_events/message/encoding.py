"""Build the messages of new events, retries and replays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from django.core.serializers.json import DjangoJSONEncoder

from ..context import ReceivedEvent
from ..exceptions import InvalidEventError
from ..options import Format
from .formats import STRUCTURED, WireFormat, wire_format
from .headers import (
    CELERY,
    EVENT_ATTEMPT,
    EVENT_CAUSATION_ID,
    EVENT_CORRELATION_ID,
    EVENT_DUE_AT,
    EVENT_FORMAT,
    EVENT_HANDLER,
    EVENT_HISTORY,
    EVENT_ID,
    EVENT_NAME,
    EVENT_PUBLISHED_AT,
    EVENT_REPLAY_FORCED,
    EVENT_REPLAY_ID,
    EVENT_SERVICE,
    basic_properties,
    identity_headers,
    with_publisher_headers,
)
from .text import (
    MAX_DEPTH,
    compact_json,
    too_deep,
    utc_text,
)
from .types import Failure, Message, Progress, Received, task_id

#: Bounds of a message's history of attempts: entries, and bytes of its JSON.
MAX_HISTORY_ENTRIES: Final = 20
MAX_HISTORY_BYTES: Final = 8_000

_ENCODER: Final = DjangoJSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encode_payload(
    name: str,
    payload: Mapping[str, Any],
    args: Sequence[Any] = (),
    *,
    form: WireFormat = "celery",
    attributes: Mapping[str, Any] | None = None,
) -> bytes:
    """Encode an event's payload as the body of a message.

    Django's JSON encoder writes the values (ISO 8601; Decimal and UUID as strings).

    Args:
        args: positional values, which a plain Celery publisher may have sent.
        form: the format of the message.
        attributes: those of CloudEvents that the body has (``cloudevents``).

    Raises:
        InvalidEventError: a value is not one of JSON.
    """
    try:
        content: object = dict(payload)
        if form in CELERY:
            content = [list(args), content, {}]
        elif form == "cloudevents":
            content = {**(attributes or {}), "data": content}
        body = _ENCODER.encode(content).encode()
        if too_deep(payload):
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
    form: Format = "celery",
    correlation_id: str | None = None,
    causation_id: str | None = None,
    headers: Mapping[str, Any] | None = None,
) -> Message:
    """Build the message of a new event.

    Args:
        body: as :func:`encode_payload` writes it for *form*.
    """
    properties = {**basic_properties(event_id), "correlation_id": event_id}
    ours: dict[str, Any] = {}
    if form == "celery":
        ours = {
            "lang": "py",
            "task": name,
            "id": event_id,
            "root_id": event_id,
            "retries": 0,
            "argsrepr": "()",
            "kwargsrepr": "{…}",
            "origin": service,
        }
    else:
        properties |= {"type": name, "app_id": service}
        if form == "cloudevents":
            properties["content_type"] = STRUCTURED
    ours |= {
        EVENT_FORMAT: form,
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
        properties=properties,
        event_id=event_id,
        name=name,
    )


def add_to_history(
    progress: Progress, failure: Failure, *, at: datetime, worker: str
) -> tuple[Mapping[str, Any], ...]:
    """Return the history with this attempt's failure added, bounded in entries and bytes.

    The first entry stays, since it tells when the failures began; the oldest after it go first.
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


def retry_message(
    received: Received,
    event: ReceivedEvent,
    *,
    exchange: str,
    routing_key: str,
    service: str,
    handler: str,
    attempt: int = 1,
    due_at: datetime | None = None,
    replay_id: str | None = None,
    history: tuple[Mapping[str, Any], ...] = (),
) -> Message:
    """Build the message of a later attempt, or of a replay: the raw body with rebuilt headers.

    RabbitMQ up to 3.13 would drop a message that kept its x-death as a cycle behind a delay queue.

    Args:
        service, handler: of the handler that it returns to.
    """
    headers: dict[str, Any] = {
        **identity_headers(event, wire_format(received)),
        EVENT_HANDLER: handler,
        EVENT_ATTEMPT: attempt,
    }
    if due_at is not None:
        headers[EVENT_DUE_AT] = utc_text(due_at)
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
            task_id(service, handler, event, replay_id), received.properties
        ),
        event_id=event.id,
        name=event.name,
    )
