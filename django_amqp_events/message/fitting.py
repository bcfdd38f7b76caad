"""Fit the headers of a message into a frame that is smaller than usual."""

from __future__ import annotations

import json
from dataclasses import replace

from . import archive_message
from .headers import (
    EVENT_ARCHIVE,
    EVENT_HANDLER,
    EVENT_HISTORY,
    publisher_headers,
    table_size,
    with_publisher_headers,
)
from .text import compact_json
from .types import Message


def fitted(message: Message, most: int) -> Message | None:
    """Return a retry, replay or archive message with headers of at most *most* bytes.

    An archive message loses its traceback first, a retry the middle of its history; then both lose
    the publisher's largest headers.

    Returns:
        ``None`` for a new event, whose publisher has to set smaller headers.
    """
    if EVENT_ARCHIVE in message.headers:
        return archive_message.fitted(message, most)
    if EVENT_HANDLER not in message.headers:
        return None
    theirs = dict(publisher_headers(message.headers))
    ours = {key: value for key, value in message.headers.items() if key not in theirs}
    if EVENT_HISTORY in ours and table_size(message.headers) > most:
        history = json.loads(ours.pop(EVENT_HISTORY))
        room = most // 2 - table_size(ours)
        text = compact_json(history)
        while len(history) > 2 and len(text.encode()) > room:
            del history[1]
            text = compact_json(history)
        if len(text.encode()) <= room:
            ours[EVENT_HISTORY] = text
    return replace(message, headers=with_publisher_headers(ours, theirs, most))
