"""Filters for texts and times that others wrote: bounded, with every character visible."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from django import template
from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.timezone import localtime
from django.utils.translation import pgettext_lazy

from ..message.text import parse_moment
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


@register.filter
def duration(seconds: float) -> str:
    """Write seconds for a person: the two largest units."""
    left = round(seconds)
    said = []
    for unit, length in UNITS:
        count, left = divmod(left, length)
        if count:
            said.append(f"{count} {unit}")
    return " ".join(said[:2]) or f"0 {UNITS[-1][0]}"


@register.filter
def moment(value: object) -> datetime | None:
    """Read a time of a document; ``None`` where a page could not show it."""
    found = parse_moment(value)
    return found if found is not None and 1970 <= found.year < 3000 else None


@register.filter
def exception_line(kind: object, message: object = "") -> str:
    """Write an exception and the first line of its message."""
    name, words = line(kind or "", TEXT), visible(message or "", TEXT).strip().partition("\n")[0]
    return f"{name}: {words}" if name and words else name or words


@register.filter
def ago(then: datetime, now: datetime) -> str:
    """Show how long ago that was, and when."""
    return format_html(
        '<time class="ae-age" datetime="{}" title="{}">{}</time>',
        then.isoformat(),
        date_format(localtime(then), "DATETIME_FORMAT"),
        age(then, now),
    )
