"""Event names and topic patterns."""

from __future__ import annotations

from functools import cache
from typing import Final

from .. import conf
from ..options import has_control_characters

_PARSED: Final = frozenset(",[]?")


def pattern_matches(pattern: str, name: str) -> bool:
    """Return True if a topic pattern matches an event name, by RabbitMQ's rules."""
    return patterns_overlap(pattern, name, literal=True)


def patterns_overlap(first: str, second: str, *, literal: bool = False) -> bool:
    """Return True if an event name can match both patterns.

    ``*`` stands for one word, ``#`` for any number of words, including zero.

    Args:
        literal: *second* is a name, in which ``*`` and ``#`` have no meaning.
    """
    if not _wild(first) and (literal or not _wild(second)):
        return first == second
    left, right = tuple(first.split(".")), tuple(second.split("."))

    @cache
    def meet(i: int, j: int) -> bool:
        hash_left = i < len(left) and left[i] == "#"
        hash_right = not literal and j < len(right) and right[j] == "#"
        if i == len(left) and j == len(right):
            return True
        if hash_left and (meet(i + 1, j) or (j < len(right) and meet(i, j + 1))):
            return True
        if hash_right and (meet(i, j + 1) or (i < len(left) and meet(i + 1, j))):
            return True
        if i == len(left) or j == len(right) or hash_left or hash_right:
            return False
        same = left[i] == right[j] or left[i] == "*" or (not literal and right[j] == "*")
        return same and meet(i + 1, j + 1)

    return meet(0, 0)


def _wild(pattern: str) -> bool:
    return "*" in pattern or "#" in pattern


def pattern_problem(pattern: object) -> str | None:
    """Return what is wrong with an event name or topic pattern, ``None`` if it is valid."""
    if not isinstance(pattern, str) or not pattern:
        return "it is not a string, or empty"
    if len(pattern.encode("utf-8", "surrogatepass")) > conf.MAX_NAME:
        return f"it is longer than AMQP's limit of {conf.MAX_NAME} bytes"
    for word in pattern.split("."):
        if not word:
            return "it has an empty word between dots"
        if ("*" in word or "#" in word) and len(word) > 1:
            return "* and # stand for whole words only"
        if any(map(str.isspace, word)) or has_control_characters(word):
            return "it has a space, a control character or a lone surrogate"
        # Celery's -Q has a list of queues, events_worker takes shell patterns of handlers.
        if not _PARSED.isdisjoint(word):
            return "it has a comma, a bracket or a question mark"
    return None


def full_name_problem(name: object) -> str | None:
    """Return what is wrong with a name without ``*`` and ``#``, ``None`` if it is valid."""
    wrong = pattern_problem(name)
    return wrong or ("it has * or # as a word" if is_pattern(str(name)) else None)


def is_pattern(name: str) -> bool:
    return any(word in ("*", "#") for word in name.split("."))
