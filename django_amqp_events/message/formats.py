"""The formats of events on the wire: Celery's protocol 2, CloudEvents 1.0 and plain JSON. Pure.

Our own messages, and all retries and replays, name theirs in ``event-format``. That of a message of
another program follows from its content type, its headers and the first byte of its body.

CloudEvents: https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/spec.md. It has no binding
for AMQP 0-9-1; the headers of the binary mode follow the binding for AMQP 1.0, and ``ce-`` that for
HTTP, which libraries use too.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, get_args

from ..exceptions import Malformed
from .headers import CONTENT_TYPE, EVENT_FORMAT, PREFIXES
from .text import MAX_DEPTH, too_deep, utc_text
from .types import Received

#: The formats that are read. ``kombu`` is Celery's protocol 2 as other programs publish it, whose
#: encoder wraps values; ``cloudevents`` is the structured mode, the envelope in the body.
WireFormat = Literal["celery", "kombu", "cloudevents", "cloudevents-binary", "json"]
FORMATS: Final = get_args(WireFormat)

JSON: Final = CONTENT_TYPE
STRUCTURED: Final = "application/cloudevents+json"
SPECVERSION: Final = "1.0"
_REQUIRED: Final = ("id", "source", "type")
_STANDARD: Final = frozenset(
    {
        "specversion", "id", "source", "type", "subject", "time", "datacontenttype", "dataschema",
        "data", "data_base64",
    }
)  # fmt: skip
#: Content types of bodies that may be JSON; many clients set none, or their default.
_MAYBE_JSON: Final = frozenset({JSON, "text/json", "text/plain", "application/octet-stream", ""})
#: White space, and what UTF-16, UTF-32 and byte order marks put around it.
_BEFORE_JSON: Final = b" \t\n\r\0\xef\xbb\xbf\xfe\xff"


def wire_format(received: Received) -> WireFormat:
    """Return the format of a message; ``kombu`` if it is unknown."""
    named: Any = received.headers.get(EVENT_FORMAT)
    if named in FORMATS:
        form: WireFormat = named
        return form
    if media_type(received) == STRUCTURED:
        return "cloudevents"
    is_object = received.body.lstrip(_BEFORE_JSON)[:1] == b"{"
    if "task" in received.headers and not is_object:
        return "kombu"
    if _prefix(received.headers):
        return "cloudevents-binary"
    return "json" if is_object and is_json(received) else "kombu"


def is_json(received: Received) -> bool:
    """Return True if the content type is JSON's, or one that clients use for any bytes or text."""
    media = media_type(received)
    # A batch of CloudEvents is no payload.
    vendor = media.endswith("+json") and not media.startswith("application/cloudevents")
    return vendor or media in _MAYBE_JSON


def media_type(received: Received) -> str:
    """Return the content type in lower case, without parameters."""
    value = received.properties.get("content_type")
    return value.partition(";")[0].strip().lower() if isinstance(value, str) else ""


def _prefix(headers: Mapping[str, Any]) -> str:
    return next((prefix for prefix in PREFIXES if f"{prefix}specversion" in headers), "")


def attributes(received: Received) -> dict[str, Any]:
    """Return the CloudEvents attributes of a message, its extensions among them.

    Raises:
        Malformed: it is not an event of CloudEvents 1.0.
    """
    if wire_format(received) == "cloudevents":
        document = _without_data(envelope(received.body))
    else:
        prefix = _prefix(received.headers)
        document = {
            key.removeprefix(prefix): value
            for key, value in received.headers.items()
            if isinstance(key, str) and key.startswith(prefix)
        }
    if document.get("specversion") != SPECVERSION:
        version = document.get("specversion")
        raise Malformed(f"the CloudEvents specversion is {version!r:.80}, not {SPECVERSION!r}")
    for name in _REQUIRED:
        if not isinstance(document.get(name), str) or not document[name]:
            raise Malformed(f"the CloudEvents attribute {name!r} is missing or not a text")
    return document


def _without_data(document: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in ("data", "data_base64")}


def new_attributes(
    *,
    event_id: str,
    name: str,
    service: str,
    published_at: datetime,
    correlation_id: str | None,
    causation_id: str | None,
) -> dict[str, str]:
    """Return the CloudEvents attributes of a new event.

    The ids of correlation and causation are those of the correlation extension:
    https://github.com/cloudevents/spec/blob/main/cloudevents/extensions/correlation.md.
    """
    document = {
        "specversion": SPECVERSION,
        "id": event_id,
        "source": service,
        "type": name,
        "time": utc_text(published_at),
        "datacontenttype": JSON,
        "correlationid": correlation_id or event_id,
    }
    return document if causation_id is None else {**document, "causationid": causation_id}


def extensions(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the CloudEvents attributes that the specification does not define."""
    return {key: value for key, value in document.items() if key not in _STANDARD}


def envelope_attributes(received: Received) -> dict[str, Any] | None:
    """Return what the body of a message in structured mode has beside the data.

    ``None`` for a message in another format, and for one that cannot be read.
    """
    if wire_format(received) != "cloudevents":
        return None
    try:
        return _without_data(envelope(received.body))
    except Malformed:
        return None


def envelope(raw: bytes) -> dict[str, Any]:
    """Decode the body of a CloudEvents message in structured mode.

    Raises:
        Malformed: it is not a JSON object.
    """
    document = decode_json(raw)
    if not isinstance(document, dict):
        raise Malformed("the body is not a CloudEvents object")
    return document


def payload(received: Received) -> dict[str, Any]:
    """Return the payload of a message in CloudEvents or plain JSON.

    Raises:
        Malformed: it is not a JSON object.
    """
    form, raw = wire_format(received), received.body
    if form == "cloudevents":
        whole = envelope(raw)
        # Its attributes are passed on too.
        check_depth(_without_data(whole))
        document = whole.get("data", {})
        if "data_base64" in whole:
            try:
                raw = b64decode(whole["data_base64"], validate=True)
            except (TypeError, ValueError) as exc:
                raise Malformed(f"the CloudEvents data_base64 is not Base64: {exc}") from exc
            document = decode_json(raw)
    else:
        # CloudEvents need no data.
        document = {} if form == "cloudevents-binary" and not raw else decode_json(raw)
    if not isinstance(document, dict):
        raise Malformed("the payload is not a JSON object")
    check_depth(document)
    return document


def decode_json(raw: bytes, load: Callable[[str], Any] = json.loads) -> Any:
    """Decode JSON in UTF-8, or with another encoding that its first bytes show.

    Raises:
        Malformed: it is not.
    """
    encoding = json.detect_encoding(raw)
    try:
        return load(raw.decode(encoding))
    except (ValueError, RecursionError) as exc:
        raise Malformed(f"the body is not JSON in {encoding.upper()}: {exc}") from exc


def check_depth(*values: Mapping[str, Any] | Sequence[Any]) -> None:
    """Raise Malformed if one of the values is nested too deeply."""
    if any(map(too_deep, values)):
        raise Malformed(f"the body is nested deeper than {MAX_DEPTH}")
