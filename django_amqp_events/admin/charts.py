"""Charts drawn by the server: SVG with CSS classes, and the same as a table. Pure.

Any name gives well-formed XML. Colours are in admin.css.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.template.loader import render_to_string
from django.utils.formats import get_format, localize
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.timezone import localtime
from django.utils.translation import gettext as _

from ..monitor.statistics import Series
from ..templatetags.amqp_events import line

#: Size of a chart; the width is about the pixels of a small screen, so its text is legible there.
WIDTH: Final = 360
HEIGHT: Final = 150
_LEFT: Final = 42
_BOTTOM: Final = 18
_TOP: Final = 8
#: Labels below the bars at most.
_LABELS: Final = 8
#: CSS class and name of a layer of stacked bars, and one value per bar.
Layer = tuple[str, str, Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart and its table.

    Attributes:
        svg: ``""`` if there is no data.
        columns, rows: the table.
        legend: CSS class and name of each colour, if there are several.
    """

    title: str
    svg: str = ""
    columns: tuple[str, ...]
    rows: tuple[tuple[str | int, ...], ...]
    legend: tuple[tuple[str, str], ...] = ()


def throughput(series: Series) -> Chart:
    """Draw what happened in each hour."""
    return bars(
        _("Archived, succeeded, discarded per hour"),
        [f"{localtime(hour):%H}" for hour in series.hours],
        [
            ("ae-fill-bad", _("archived"), series.archived),
            ("ae-fill", _("succeeded"), series.succeeded),
            ("ae-fill-quiet", _("discarded"), series.discarded),
        ],
        of=_("Hour"),
    )


def bars(title: str, labels: Sequence[str], layers: Sequence[Layer], *, of: str) -> Chart:
    """Draw bars side by side, their layers stacked.

    Args:
        labels: below the bars; as many as fit are written.
        of: what the labels are, the head of the table's first column.
    """
    names = [name for _css, name, _values in layers]
    by_bar = list(zip(*(values for _css, _name, values in layers), strict=True))
    totals = list(map(sum, by_bar))
    top = _axis_end(max(totals, default=0))
    step = (WIDTH - _LEFT) / max(1, len(labels))
    thick = max(1.0, step * 0.8)
    every = max(1, math.ceil(len(labels) / _LABELS))
    drawn, written = [], []
    for place, label in enumerate(labels):
        below, rects, told = 0, [], []
        for css, name, values in layers:
            if value := values[place]:
                y = _y(below + value, top)
                rects.append((css, y, round(_y(below, top) - y, 1)))
                told.append(f"{name} {localize(value)}")
                below += value
        x = round(_LEFT + step * place + (step - thick) / 2, 1)
        drawn.append((x, f"{label}: {', '.join(told)}", rects))
        if place % every == 0:
            written.append((round(x + thick / 2, 1), "middle", label))
    described = "; ".join(f"{name}: {localize(sum(values))}" for _css, name, values in layers)
    shapes = {"bars": drawn, "thick": round(thick, 1), "labels": written}
    return Chart(
        title=title,
        svg=_svg(title, described, top, **shapes) if any(totals) else "",
        columns=(of, *names),
        rows=tuple((label, *values) for label, values in zip(labels, by_bar, strict=True)),
        legend=tuple((css, name) for css, name, _values in layers),
    )


def curve(title: str, points: Sequence[tuple[float, str, int]], *, of: tuple[str, str]) -> Chart:
    """Draw a value over time.

    Args:
        points: place on the axis, its label, value; in order.
        of: heads of the table: what the labels are, and the values.
    """
    rows = tuple((label, value) for _place, label, value in points)
    if not points:
        return Chart(title=title, columns=of, rows=rows)
    values = [value for _label, value in rows]
    first, top = points[0][0], _axis_end(max(values))
    scale = (WIDTH - _LEFT) / ((points[-1][0] - first) or 1.0)
    places = [
        (round(_LEFT + scale * (place - first), 1), _y(value, top)) for place, _, value in points
    ]
    if len(places) == 1:
        # A moment has no width; a line does.
        places.append((float(WIDTH), places[0][1]))
    outline = " L".join(f"{x} {y}" for x, y in places)
    ground = _y(0, top)
    described = _("from %(first)s to %(last)s, at most %(most)s") % {
        "first": localize(values[0]),
        "last": localize(values[-1]),
        "most": localize(max(values)),
    }
    shapes = {
        "outline": outline,
        "closed": f"M{places[0][0]} {ground} L{outline} L{places[-1][0]} {ground} Z",
        "labels": [(_LEFT, "start", points[0][1]), (WIDTH, "end", points[-1][1])],
    }
    return Chart(title=title, svg=_svg(title, described, top, **shapes), columns=of, rows=rows)


def progress(parts: Iterable[tuple[str, float]], label: str) -> SafeString:
    """Draw one bar of several parts: the CSS class and the percentage of each."""
    drawn, at = [], 0.0
    for css, width in parts:
        if width:
            drawn.append((css, f"{at:.2f}", f"{width:.2f}"))
        at += width
    return format_html(
        '<svg class="ae-bar" viewBox="0 0 100 6" preserveAspectRatio="none" role="img" '
        'aria-label="{}">{}</svg>',
        label,
        format_html_join("", '<rect class="{}" x="{}" y="0" width="{}" height="6"></rect>', drawn),
    )


def _svg(title: str, described: str, top: float, **shapes: Any) -> SafeString:
    return render_to_string(
        "admin/django_amqp_events/chart.html",
        {
            "title": title,
            "described": described,
            "label": line(f"{title}: {described}", 300),
            "width": WIDTH,
            "height": HEIGHT,
            "left": _LEFT,
            "axis": [(_y(value, top), _short(value)) for value in (0, top)],
            **shapes,
        },
    )


def _y(value: float, top: float) -> float:
    return round(HEIGHT - _BOTTOM - (HEIGHT - _BOTTOM - _TOP) * value / top, 1)


def _axis_end(most: float) -> float:
    """Return 1, 2 or 5 times a power of ten."""
    if most <= 1:
        return 1
    power = 10.0 ** math.floor(math.log10(most))
    return next(power * step for step in (1, 2, 5, 10) if power * step >= most)


def _short(value: float) -> str:
    unit, size = next(
        (candidate for candidate in (("M", 1_000_000), ("k", 1000)) if value >= candidate[1]),
        ("", 1),
    )
    return f"{value / size:g}{unit}".replace(".", get_format("DECIMAL_SEPARATOR"))
