"""Fit the headers of a message into a frame."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Final

from ..conf import MAX_NAME
from .headers import (
    EVENT_ARCHIVE,
    EVENT_FORMAT,
    EVENT_HANDLER,
    EVENT_HISTORY,
    IDENTITY_HEADERS,
    PREFIXES,
    publisher_headers,
    table_size,
    with_publisher_headers,
)
from .text import compact_json, cut_middle
from .types import Message

#: Characters of a traceback.
MAX_TRACEBACK: Final = 20_000


def fitted(message: Message, most: int) -> Message | None:
    """Return a retry, replay or archive message with headers of at most *most* bytes.

    An archive message loses its traceback first, a retry the middle of its history; then both lose
    the publisher's largest headers.

    Returns:
        ``None`` for a new event, whose publisher has to set smaller headers.
    """
    if EVENT_ARCHIVE in message.headers:
        kept = dict(message.headers)
        archive = json.loads(kept.pop(EVENT_ARCHIVE))
        return replace(message, headers=fitted_archive(kept, archive, most))
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


def fitted_archive(kept: dict[str, Any], archive: dict[str, Any], most: int) -> dict[str, Any]:
    """Join the original headers and the archive header below *most* bytes.

    The traceback is cut first, then the history, the frames and the deaths; then the publisher's
    largest headers, those of CloudEvents after the others, the texts, and at last the identity
    headers. ``cut`` names all of these.
    """
    # Summed once, since a publisher may set tens of thousands of headers.
    sizes = {key: table_size({key: value}) for key, value in kept.items()}
    total = sum(sizes.values())

    def cut(what: str) -> None:
        if what not in archive["cut"]:
            archive["cut"].append(what)

    def room() -> int:
        return most - total - len(compact_json(archive).encode()) - len(EVENT_ARCHIVE) - 64

    for limit in (MAX_TRACEBACK // 4, MAX_TRACEBACK // 16, 0):
        if room() >= 0:
            break
        archive["traceback"] = cut_middle(archive["traceback"], limit)
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
        # First, since it needs room itself.
        cut("headers")
        missing = -room()
        for key in sorted(names, key=lambda name: -sizes[name]):
            if missing <= 0:
                break
            del kept[key]
            missing -= sizes[key]
            total -= sizes[key]

    others = kept.keys() - IDENTITY_HEADERS - {EVENT_FORMAT}
    attributes = {key for key in others if key.startswith(PREFIXES)}
    drop(others - attributes)
    drop(attributes)
    for limit in (500, 50):
        if room() >= 0:
            break
        archive["detail"] = cut_middle(archive["detail"], limit)
        for name in ("queue", "exchange", "routing_key"):
            # Longer than AMQP allows only if a publisher has forged a dead letter.
            archive[name] = archive[name][:MAX_NAME]
        if exception := archive["exception"]:
            exception["message"] = cut_middle(exception["message"], limit)
            exception["type"] = exception["type"][:limit]
        cut("words")
    # Last, since among thousands of small headers the id may be the largest.
    drop(list(kept))
    return {**kept, EVENT_ARCHIVE: compact_json(archive)}
