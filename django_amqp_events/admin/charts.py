"""Charts drawn by the server: SVG with CSS classes, and the same as a table. Pure.

Any name gives well-formed XML. Colours are in admin.css.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from django.template.loader import render_to_string
from django.utils.formats import localize
from django.utils.timezone import localtime
from django.utils.translation import gettext as _

from .formatting import number

TEMPLATE: Final = "admin/django_amqp_events/chart.html"
#: Size of a chart; the width is about the pixels of a small screen, so its text is legible there.
WIDTH: Final = 360
HEIGHT: Final = 150
_LEFT: Final = 54
_BOTTOM: Final = 18
_TOP: Final = 8
#: Labels below the bars at most.
_LABELS: Final = 8
#: CSS class and name of a layer of stacked bars, and one value per bar.
Layer = tuple[str, str, Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart and its table."""

    title: str
    svg: str = ""
    columns: tuple[str, ...]
    rows: tuple[tuple[str | int, ...], ...]
    legend: tuple[tuple[str, str], ...] = ()


def throughput(series: Mapping[datetime, Mapping[str, int]]) -> Chart:
    """Draw what happened in each hour."""
    layers = (
        ("ae-fill-bad", _("archived"), "archived"),
        ("ae-fill", _("succeeded"), "succeeded"),
        ("ae-fill-quiet", _("discarded"), "discarded"),
    )
    return bars(
        _("Archived, succeeded, discarded per hour"),
        [f"{localtime(hour):%H}" for hour in series],
        [(css, name, [at.get(key, 0) for at in series.values()]) for css, name, key in layers],
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
    top = max(totals, default=0) or 1
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
            written.append((round(x + thick / 2, 1), label))
    shapes = {
        "title": title,
        "width": WIDTH,
        "height": HEIGHT,
        "left": _LEFT,
        "axis": [(_y(value, top), number(value)) for value in (0, top)],
        "bars": drawn,
        "thick": round(thick, 1),
        "labels": written,
    }
    return Chart(
        title=title,
        svg=render_to_string(TEMPLATE, shapes) if any(totals) else "",
        columns=(of, *names),
        rows=tuple((label, *values) for label, values in zip(labels, by_bar, strict=True)),
        legend=tuple((css, name) for css, name, _values in layers if len(layers) > 1),
    )


def _y(value: float, top: float) -> float:
    return round(HEIGHT - _BOTTOM - (HEIGHT - _BOTTOM - _TOP) * value / top, 1)
