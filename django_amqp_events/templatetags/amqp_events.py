"""Filters for texts that others wrote: bounded, on request on one line, every character visible."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from django import template
from django.utils.translation import pgettext_lazy

from ..models import visible
from ..reasons import stored, translated

register = template.Library()
register.filter("stored", stored)

#: Characters of a word in a list, and of a text in a table.
WORD: Final = 160
TEXT: Final = 2_000
#: Units of time, the largest first, and their seconds.
UNITS: Final[tuple[tuple[Any, int], ...]] = (
    (pgettext_lazy("days", "d"), 86_400),
    (pgettext_lazy("hours", "h"), 3_600),
    (pgettext_lazy("minutes", "min"), 60),
    (pgettext_lazy("seconds", "s"), 1),
)


def text(value: object, limit: int | None = None) -> str:
    """Return text with all characters visible; reasons are translated."""
    return visible(translated(value) if value is not None else "", limit)


@register.filter
def line(value: object, limit: int = WORD) -> str:
    """Return text on one line; reasons are translated."""
    return text(value, limit).replace("\n", " ").replace("\t", " ").strip()


@register.filter
def shown(value: object, limit: int = TEXT) -> str:
    """Return a text of several lines."""
    return text(value, limit)


@register.filter
def age(then: datetime, now: datetime) -> str:
    """Write how long ago that was, in one unit: ``3 min``."""
    seconds = max(0.0, (now - then).total_seconds())
    unit, size = next((each for each in UNITS if seconds >= each[1]), UNITS[-1])
    return f"{int(seconds // size)} {unit}"
