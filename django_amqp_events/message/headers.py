"""Headers on the wire, and the ones that a copy of a message carries."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ..context import ReceivedEvent
from ..exceptions import InvalidEventError
from .text import has_surrogates, utc_text

#: Version of the archive message.
FORMAT: Final = 1
CONTENT_TYPE: Final = "application/json"
#: The formats of Celery's protocol 2.
CELERY: Final = frozenset({"celery", "kombu"})
#: Prefixes of the headers with CloudEvents attributes; the module ``formats`` reads them.
PREFIXES: Final = ("cloudEvents_", "cloudEvents:", "ce-", "ce_")
CONTENT_ENCODING: Final = "utf-8"

# Identity: set by the publisher. The name counts where the routing key is not that of the event.
EVENT_FORMAT: Final = "event-format"
EVENT_ID: Final = "event-id"
EVENT_NAME: Final = "event-name"
EVENT_SERVICE: Final = "event-service"
EVENT_PUBLISHED_AT: Final = "event-published-at"
EVENT_CORRELATION_ID: Final = "event-correlation-id"
EVENT_CAUSATION_ID: Final = "event-causation-id"

# Progress: set by this service's workers and trusted only on deliveries that return to them.
EVENT_HANDLER: Final = "event-handler"
EVENT_ATTEMPT: Final = "event-attempt"
EVENT_DUE_AT: Final = "event-due-at"
EVENT_REPLAY_ID: Final = "event-replay-id"
EVENT_REPLAY_FORCED: Final = "event-replay-forced"
EVENT_HISTORY: Final = "event-history"

# Documents of messages in the archive queue.
EVENT_ARCHIVE: Final = "event-archive"
EVENT_OUTCOME: Final = "event-outcome"
#: Headers and properties that cannot be decoded, as bytes.
EVENT_UNREADABLE: Final = "event-unreadable"

_EVENT_IDENTITY = frozenset(
    {
        EVENT_ID, EVENT_NAME, EVENT_SERVICE, EVENT_PUBLISHED_AT, EVENT_CORRELATION_ID,
        EVENT_CAUSATION_ID,
    }
)  # fmt: skip
IDENTITY_HEADERS = _EVENT_IDENTITY | {"id", "task"}
_OURS = _EVENT_IDENTITY | {
    EVENT_FORMAT, EVENT_HANDLER, EVENT_ATTEMPT, EVENT_DUE_AT, EVENT_REPLAY_ID, EVENT_REPLAY_FORCED,
    EVENT_HISTORY, EVENT_ARCHIVE, EVENT_OUTCOME, EVENT_UNREADABLE,
}  # fmt: skip

#: Headers that RabbitMQ sets and interprets. A copy must not carry them: up to 3.13 a republished
#: x-death is believed, and CC routes the copy to another handler as well.
_BROKER_HEADER = re.compile(
    r"^(x-death|x-(first|last)-death-.*|x-delivery-count|x-acquired-count|CC|BCC|x-delay|"
    r"x-opt-.*|x-received-from)$"
)
#: Celery's headers; a copy of an event gets its own.
_CELERY_HEADERS = frozenset(
    {
        "lang", "task", "id", "shadow", "eta", "expires", "group", "group_index", "retries",
        "timelimit", "root_id", "parent_id", "argsrepr", "kwargsrepr", "origin", "ignore_result",
        "stamped_headers", "stamps", "replaced_task_nesting", "meth", "compression",
    }
)  # fmt: skip

#: Largest size in bytes of a copy's headers. Headers and properties are in one frame, of at most
#: RabbitMQ's ``frame_max`` (128 KiB by default).
MAX_HEADERS: Final = 60_000


def is_broker_header(key: object) -> bool:
    """Return True if RabbitMQ sets this header, so that it can change on redelivery."""
    return isinstance(key, str) and _BROKER_HEADER.match(key) is not None


def check_headers(name: str, headers: Mapping[str, Any]) -> None:
    """Check the headers of a publisher.

    Raises:
        InvalidEventError: a header's name or value is not allowed.
    """
    for key, value in headers.items():
        if problem := _problem(key, value):
            raise InvalidEventError(f"header {key!r} of event {name!r} {problem}")
    # Copies have others too.
    most = MAX_HEADERS // 2
    if table_size(headers) > most:
        raise InvalidEventError(
            f"the headers of event {name!r} take more than {most} bytes; put large values in the "
            f"payload"
        )


def _problem(key: object, value: object) -> str:
    """Return why a publisher may not set a header, ``""`` if it may."""
    if not isinstance(key, str) or not key or has_surrogates(key) or len(key.encode()) > 128:
        return "has a name that is not text of 1 to 128 bytes"
    if key.startswith("event-") or key in _CELERY_HEADERS or is_broker_header(key):
        return "belongs to django_amqp_events, Celery or RabbitMQ; choose another name"
    if not isinstance(value, (str, int, float)):
        return f"is a {type(value).__name__}; use text, a number or a boolean"
    if isinstance(value, str) and has_surrogates(value):
        return "has a lone surrogate"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "does not fit in 64 bits"
    # RabbitMQ answers with an internal error and closes the connection.
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {value!r}; use a finite number"
    return ""


def publisher_headers(headers: Mapping[str, Any], form: str) -> Iterable[tuple[str, Any]]:
    """Yield the publisher's own headers, such as those of tracing.

    Args:
        form: the format of the message, a ``WireFormat``.
    """
    others = _OURS | _CELERY_HEADERS if form in CELERY else _OURS
    for key, value in headers.items():
        if isinstance(key, str) and key not in others and not is_broker_header(key):
            yield key, value


def identity_headers(event: ReceivedEvent, form: str) -> dict[str, Any]:
    """Return the headers that identify an event.

    Args:
        form: the format of the message, a ``WireFormat``.
    """
    celery = {"lang": "py", "task": event.name, "id": event.id}
    headers: dict[str, Any] = {
        **(celery if form in CELERY else {}),
        EVENT_FORMAT: form,
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


_CONTENT: Final = {"content_type": CONTENT_TYPE, "content_encoding": CONTENT_ENCODING}


def basic_properties(
    message_id: str | None, like: Mapping[str, object] = _CONTENT
) -> dict[str, Any]:
    """Return the properties of a message, with the content's type and encoding in *like*."""
    properties: dict[str, Any] = {"delivery_mode": 2}
    if message_id:
        properties["message_id"] = message_id
    return properties | {key: like[key] for key in _CONTENT if isinstance(like.get(key), str)}


def with_publisher_headers(ours: dict[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return our headers, which name the format, and those of the publisher that fit."""
    room = MAX_HEADERS - table_size(ours)
    return {**fitting(dict(publisher_headers(theirs, ours[EVENT_FORMAT])), room), **ours}


def fitting(headers: Mapping[str, Any], room: int) -> dict[str, Any]:
    """Return the headers that fit into *room* bytes.

    The identity of the event comes first, then attributes of CloudEvents, then the smallest.
    """
    sizes = {key: table_size({key: value}) for key, value in headers.items()}

    def rank(key: str) -> tuple[bool, bool, int]:
        identity = key == EVENT_FORMAT or key in IDENTITY_HEADERS
        return not identity, not key.startswith(PREFIXES), sizes[key]

    kept: dict[str, Any] = {}
    for key in sorted(headers, key=rank):
        if sizes[key] <= room:
            room -= sizes[key]
            kept[key] = headers[key]
    return kept


def table_size(value: object) -> int:
    """Return an upper estimate of a header table's bytes on the wire."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass")) + 5
    if isinstance(value, (bytes, bytearray, memoryview)):
        return len(value) + 5
    if isinstance(value, Mapping):
        return 5 + sum(table_size(str(key)) + table_size(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return 5 + sum(table_size(item) for item in value)
    return 16
