"""Filters for texts and times that others wrote: bounded, with every character visible."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any, Final

from django import template
from django.utils.formats import date_format
from django.utils.html import conditional_escape, format_html
from django.utils.safestring import SafeString, mark_safe
from django.utils.timezone import localtime
from django.utils.translation import gettext as _
from django.utils.translation import pgettext_lazy

from ..message.text import parse_moment, valid_moment
from ..models import visible
from ..reasons import Reason, translated

register = template.Library()


@register.filter
def reason(document: Any) -> Reason:
    """Read a reason of a JSON document."""
    return Reason.from_json(document)


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

#: Where a name may wrap: between its parts, and within a part that no column has room for.
_WRAP: Final = re.compile(r"[._:/](?=\w)|[a-z](?=[A-Z])|(?:[A-Z]{24}|[^\W_A-Z]{24})(?=[^\W_])")
_CODE: Final = re.compile(r"`([^`\n]+)`")


def text(value: object, limit: int | None = None) -> str:
    """Return text with all characters visible; reasons are translated."""
    return visible(translated(value) if value is not None else "", limit)


@register.filter
def line(value: object, limit: int = WORD) -> str:
    """Return text on one line; reasons are translated."""
    return text(value, limit).replace("\n", " ").replace("\t", " ").strip()


@register.filter
def breakable(value: object, limit: int = WORD) -> SafeString:
    """Return a name on one line that wraps between its parts, such as after a dot."""
    return mark_safe(_WRAP.sub(r"\g<0><wbr>", conditional_escape(line(value, limit))))  # noqa: S308


@register.filter
def code(value: str) -> SafeString:
    """Return one of our texts, with the commands between its backticks as HTML code."""
    return mark_safe(_CODE.sub(r"<code>\1</code>", conditional_escape(value)))  # noqa: S308


@register.filter
def shown(value: object, limit: int = TEXT) -> str:
    """Return a text of several lines."""
    return text(value, limit)


def age(then: datetime, now: datetime) -> str:
    """Write the time between two moments in one unit: ``3 min``."""
    seconds = max(0.0, (now - then).total_seconds())
    unit, size = next((candidate for candidate in UNITS if seconds >= candidate[1]), UNITS[-1])
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
    return valid_moment(parse_moment(value))


@register.filter
def exception_line(kind: object, message: object = "") -> str:
    """Write an exception and the first line of its message."""
    name, words = line(kind or "", TEXT), visible(message or "", TEXT).strip().partition("\n")[0]
    return f"{name}: {words}" if name and words else name or words


@register.filter
def ago(then: datetime, now: datetime) -> SafeString:
    """Show how long ago that was, ``3 min ago``, with the exact time as a tooltip."""
    return format_html(
        '<time class="ae-age" datetime="{}" title="{}">{}</time>',
        then.isoformat(),
        date_format(localtime(then), "DATETIME_FORMAT"),
        _("%(age)s ago") % {"age": age(then, now)},
    )
