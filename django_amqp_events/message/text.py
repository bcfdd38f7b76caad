"""Text and times of messages: bounded, safe to store, to show and to log; counts in sentences."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

#: Deepest nesting of payloads and headers. Deeper ones cannot be pickled for a pool process: a
#: RecursionError would leak the pool's slot.
MAX_DEPTH: Final = 200

#: Years of valid times; pages could not show others in every time zone, and RabbitMQ knows none
#: before 1970.
YEARS: Final = range(1970, 3000)

_CUT = "\n… cut by django_amqp_events …\n"
_HIDDEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\uffff\ud800-\udfff\U000e0000-\U000e007f]"
)


def utc_text(moment: datetime) -> str:
    """Write an aware datetime as ISO 8601 in UTC with microseconds and ``Z``."""
    utc = moment.astimezone(UTC).replace(tzinfo=None)
    return utc.isoformat(timespec="microseconds") + "Z"


def parse_moment(value: object) -> datetime | None:
    """Parse a time written by :func:`utc_text`; ``None`` for other values."""
    if not isinstance(value, str) or len(value) > 64:
        return None
    try:
        moment = datetime.fromisoformat(value)
        # Here, since a publisher's 0001-01-01T00:00+14:00 has no time in UTC.
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def valid_moment(value: datetime | None) -> datetime | None:
    """Return a time, ``None`` if its year is not valid."""
    return value if value is not None and value.year in YEARS else None


def too_deep(value: Mapping[str, Any] | Sequence[Any]) -> bool:
    """Return True if lists and dicts are nested deeper than :data:`MAX_DEPTH`."""
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


def has_surrogates(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)


def clean(value: object, limit: int | None = None) -> str:
    """Return text that any database stores; NUL and lone surrogates become Python escapes."""
    text = "" if value is None else str(value)
    text = text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()
    if limit is not None and len(text) > limit:
        text = text[: limit - 1] + "…"
    return text


def visible(value: object, limit: int | None = None) -> str:
    """Return text without invisible or misleading characters.

    Controls, bidirectional overrides, zero-width characters and lone surrogates become Python
    escapes.
    """
    text = "" if value is None else str(value)
    if limit is not None and len(text) > limit:
        text = text[: limit - 1] + "…"
    return _HIDDEN.sub(_escape, text.replace("\r\n", "\n"))


def _escape(match: re.Match[str]) -> str:
    number = ord(match[0])
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def cut_middle(text: str, limit: int) -> str:
    """Cut the middle out of *text*; the ends of a traceback matter most."""
    if len(text) <= limit:
        return text
    if limit <= 2 * len(_CUT):
        return _CUT.strip()
    half = (limit - len(_CUT)) // 2
    return text[:half] + _CUT + text[-half:]


def routing_key_text(text: str) -> str:
    """Cut text to the size of a routing key; a forged x-death can be longer."""
    raw = text.encode("utf-8", "surrogatepass")
    return text if len(raw) <= 255 else raw[:255].decode("utf-8", "ignore")


def printable(text: str) -> str:
    """Escape a publisher's text for a log: no line breaks and no terminal control characters."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def counted(count: int, noun: str, ending: str = "s") -> str:
    """Write a count: ``1 event``, ``2 events``."""
    return f"{count} {noun}" + ("" if count == 1 else ending)


def compact_json(value: object) -> str:
    # ASCII: a lone surrogate in an exception's text must not fail the publish.
    return json.dumps(value, separators=(",", ":"), default=str)


def as_text(value: object) -> str | None:
    return None if value is None else str(value)[:500]
