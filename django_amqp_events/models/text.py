"""Text that every database stores, text that a page can show, and documents in columns."""

from __future__ import annotations

import json
import re
from typing import Any, Final

_HIDDEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\uffff\ud800-\udfff\U000e0000-\U000e007f]"
)


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


def read_document(text: str) -> dict[str, Any]:
    """Decode a JSON object; ``{}`` if the text is not one."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _escape(match: re.Match[str]) -> str:
    number = ord(match[0])
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
