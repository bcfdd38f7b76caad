"""Pictures drawn by the server: SVG with CSS classes, and the same as a table. Pure.

Any name gives well-formed XML. Colours are in admin.css.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final

from django.template.loader import render_to_string
from django.utils.formats import get_format, localize
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from ..broker.topology import Topology
from ..templatetags.amqp_events import UNITS, duration, line

#: Size of a chart; the width is about the pixels of a small screen, so its text is legible there.
WIDTH: Final = 360
HEIGHT: Final = 150
_LEFT: Final = 42
_BOTTOM: Final = 18
_TOP: Final = 8
#: Characters of a name in a table.
_LONG: Final = 300
#: Queues that a graph draws; the table has all.
GRAPH: Final = 200
#: Height of a row of a graph, and of a horizontal bar.
_ROW: Final = 30
#: Roles of queues, in the order in which they are shown.
ROLES: Final = ("handler", "delay", "graveyard", "dead", "abyss", "archive")
#: Width of a sparkline's bar, the gap after it, and the height.
_BAR: Final = 4
_GAP: Final = 1
_SPARK: Final = 20
Cell = str | int | float
#: CSS class and name of a layer of stacked bars, and one value per bar.
Layer = tuple[str, str, Sequence[float]]
#: The label of a queue in the graph, a number or word, and ``ok``, ``warning`` or ``error``.
Node = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture and its table.

    Attributes:
        svg: ``""`` if there is no data.
        columns, rows: the table.
        legend: CSS class and name of each colour, if there are several.
    """

    title: str
    svg: str = ""
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    legend: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """A horizontal bar."""

    name: str
    value: float
    note: str = ""
    css: str = "ae-fill"


def bars(
    title: str, labels: Sequence[str], layers: Sequence[Layer], *, of: str, unit: str = ""
) -> Picture:
    """Draw bars side by side, their layers stacked.

    Args:
        labels: below the bars; as many as fit are written.
        of: what the labels are, the head of the table's first column.
        unit: behind numbers.
    """
    names = [name for _css, name, _values in layers]
    by_bar = list(zip(*(values for _css, _name, values in layers), strict=True))
    totals = list(map(sum, by_bar))
    top = _axis_end(max(totals, default=0))
    step = (WIDTH - _LEFT) / max(1, len(labels))
    thick = max(1.0, step * 0.8)
    every = max(1, math.ceil(len(labels) / 8))
    drawn = []
    for place, label in enumerate(labels):
        below, rects, told = 0.0, [], []
        for css, name, values in layers:
            if value := values[place]:
                y = _y(below + value, top)
                rects.append((css, y, round(_y(below, top) - y, 1)))
                told.append(f"{name} {_told(value)}{unit}")
                below += value
        x = round(_LEFT + step * place + (step - thick) / 2, 1)
        written = label if place % every == 0 else None
        drawn.append((x, written, f"{label}: {', '.join(told)}", rects))
    described = "; ".join(f"{name}: {_told(sum(values))}{unit}" for _css, name, values in layers)
    return Picture(
        title=title,
        svg=_svg(
            "bars",
            title,
            described,
            axis=_axis(top, unit),
            bars=drawn,
            thick=round(thick, 1),
            half=round(thick / 2, 1),
        )
        if any(totals)
        else "",
        columns=(of, *names),
        rows=tuple(
            (label, *map(_number, values)) for label, values in zip(labels, by_bar, strict=True)
        ),
        legend=tuple((css, name) for css, name, _values in layers) if len(layers) > 1 else (),
    )


def area(title: str, points: Sequence[tuple[float, str, float]], *, of: tuple[str, str]) -> Picture:
    """Draw a value over time.

    Args:
        points: place on the axis, its label, value; in order.
        of: heads of the table: what the labels are, and the values.
    """
    picture = Picture(
        title=title, columns=of, rows=tuple((label, _number(value)) for _, label, value in points)
    )
    if not points:
        return picture
    values = [value for _, _, value in points]
    first, top = points[0][0], _axis_end(max(values))
    scale = (WIDTH - _LEFT) / ((points[-1][0] - first) or 1.0)
    places = [(round(_LEFT + scale * (x - first), 1), _y(value, top)) for x, _, value in points]
    if len(places) == 1:
        # A moment has no width; a line does.
        places.append((float(WIDTH), places[0][1]))
    outline = " L".join(f"{x} {y}" for x, y in places)
    ground = _y(0, top)
    described = _("from %(first)s to %(last)s, at most %(most)s") % {
        "first": _told(values[0]),
        "last": _told(values[-1]),
        "most": _told(max(values)),
    }
    svg = _svg(
        "area",
        title,
        described,
        axis=_axis(top),
        outline=outline,
        closed=f"M{places[0][0]} {ground} L{outline} L{places[-1][0]} {ground} Z",
        first=points[0][1],
        last=points[-1][1],
    )
    return replace(picture, svg=svg)


def lying(title: str, rows: Sequence[Row], *, of: tuple[str, str]) -> Picture:
    """Draw one horizontal bar per name."""
    most = max((row.value for row in rows), default=0)
    drawn = [
        (
            place * _ROW,
            row,
            f"{_told(row.value)}{f' · {row.note}' if row.note else ''}",
            round(max(1.0, WIDTH * row.value / most), 1) if row.value else 0,
        )
        for place, row in enumerate(rows)
    ]
    described = ", ".join(f"{line(row.name)} {_told(row.value)}" for row in rows[:5])
    return Picture(
        title=title,
        svg=_svg("lying", title, described, height=_ROW * len(rows), bars=drawn) if rows else "",
        columns=of,
        rows=tuple((line(row.name, _LONG), _number(row.value)) for row in rows),
    )


def pareto(title: str, groups: Sequence[tuple[str, int]], *, of: tuple[str, str]) -> Picture:
    """Draw the most frequent first, with the share of it and those above together."""
    total = sum(count for _, count in groups)
    shares = [
        _("%(number)s%%") % {"number": round(100 * so_far / total)} if total else ""
        for so_far in accumulate(count for _, count in groups)
    ]
    rows = [Row(name, count, share) for (name, count), share in zip(groups, shares, strict=True)]
    drawn = lying(title, rows, of=of)
    return replace(
        drawn,
        columns=(*of, _("Cumulative share")),
        rows=tuple((*row, share) for row, share in zip(drawn.rows, shares, strict=True)),
    )


def schedule(title: str, delays: Sequence[float]) -> Picture:
    """Draw the retries of a handler: each bar is the time since the first failure."""
    totals = list(accumulate(delays))
    most = totals[-1] if totals else 0.0
    unit, length = next((candidate for candidate in UNITS if most >= 2 * candidate[1]), UNITS[-1])
    before = [(total - delay) / length for total, delay in zip(totals, delays, strict=True)]
    drawn = bars(
        title,
        [str(place) for place in range(1, len(delays) + 1)],
        [
            ("ae-fill-quiet", _("delay before"), before),
            ("ae-fill", _("delay"), [delay / length for delay in delays]),
        ],
        of=_("Retry"),
        unit=f" {unit}",
    )
    return replace(
        drawn,
        columns=(_("Retry"), _("Delay"), _("Running total")),
        rows=tuple(
            (place, duration(delay), duration(total))
            for place, (delay, total) in enumerate(zip(delays, totals, strict=True), 1)
        ),
    )


def graph(title: str, topology: Topology, nodes: Mapping[str, Node]) -> Picture:
    """Draw exchanges on the left, queues on the right, and how messages go between them.

    Delay queues without a label are one box.

    Args:
        nodes: labels of queues by name.
    """
    delays = _("delays")
    dull = {
        queue.name
        for queue in topology.queues
        if queue.role == "delay" and not nodes.get(queue.name, ("", "ok"))[0]
    }

    def box(name: str) -> str:
        return delays if name in dull else name

    in_order = sorted(topology.queues, key=lambda queue: ROLES.index(queue.role))
    queues = list(dict.fromkeys(box(queue.name) for queue in in_order))[:GRAPH]
    right = {name: place * _ROW for place, name in enumerate(queues)}
    edges: dict[tuple[str, str], list[str]] = {}
    for binding in topology.bindings:
        if (queue := box(binding.queue)) in right:
            edges.setdefault((box(binding.exchange), queue), []).append(binding.routing_key)
    left = _beside(right, edges)
    dead = {
        (box(queue.name), box(str(queue.arguments.get("x-dead-letter-exchange", ""))))
        for queue in topology.queues
    }
    boxes = [("ae-exchange ae-ok", 10, y, 260, name, "") for name, y in left.items()]
    for name, y in right.items():
        text, severity = nodes.get(name, ("", "ok"))
        if severity not in ("warning", "error", "unknown"):
            severity = "ok"
        boxes.append((f"ae-queue ae-{severity}", 400, y, 310, name, text))
    tall = max([*left.values(), *right.values()], default=0) + _ROW
    described = _("exchanges: %(exchanges)s, queues: %(queues)s, bindings: %(bindings)s") % {
        "exchanges": len(topology.exchanges),
        "queues": len(topology.queues),
        "bindings": len(topology.bindings),
    }
    drawn = _edges(left, right, edges, dead)
    return Picture(
        title=title,
        svg=_svg("graph", title, described, 720, tall, css="ae-graph", edges=drawn, boxes=boxes),
        columns=(_("Exchange"), _("Queue"), _("Routing key")),
        rows=tuple(
            tuple(line(name, _LONG) for name in (bound.exchange, bound.queue, bound.routing_key))
            for bound in topology.bindings
        ),
        legend=(("ae-edge", _("binding")), ("ae-edge-dead", _("dead letters, expired delays"))),
    )


def sparkline(values: Sequence[int], label: str) -> SafeString:
    """Draw bars side by side, relative to the highest; *label* describes them."""
    most = max(values, default=0)
    drawn = ""
    for index, value in enumerate(values):
        if value:
            # Visible beside a bar that is a thousand times as high.
            height = max(2, round(value * (_SPARK - 1) / most))
            drawn += f"M{index * (_BAR + _GAP)} {_SPARK - 1}v-{height}h{_BAR}v{height}z"
    return format_html(
        '<svg class="ae-spark" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" aria-label="{label}"><title>{label}</title>'
        '<path class="ae-spark-base" d="M0 {base}h{width}v1h-{width}z"/>'
        '<path class="ae-spark-bars" d="{drawn}"/></svg>',
        width=max(1, len(values) * (_BAR + _GAP) - _GAP),
        height=_SPARK,
        base=_SPARK - 1,
        label=label,
        drawn=drawn,
    )


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


def _edges(
    left: Mapping[str, int],
    right: Mapping[str, int],
    bindings: Mapping[tuple[str, str], Iterable[str]],
    dead: Iterable[tuple[str, str]],
) -> list[tuple[str, int, int, int, int, str]]:
    """Return the lines of a graph: bindings, and from which queue dead letters go where."""
    drawn = [
        (
            "ae-edge",
            *(270, left[exchange] + 12, 400, right[queue] + 12),
            f"{exchange} → {queue} {', '.join(sorted({key for key in keys if key}))}",
        )
        for (exchange, queue), keys in bindings.items()
    ]
    for queue, target in sorted(dead):
        if queue in right and target in left:
            told = _("%(queue)s dead-letters to %(target)s") % {"queue": queue, "target": target}
            drawn.append(("ae-edge-dead", 400, right[queue] + 18, 270, left[target] + 18, told))
    return drawn


def _beside(right: Mapping[str, int], edges: Mapping[tuple[str, str], object]) -> dict[str, int]:
    """Place each exchange beside the middle of its queues, without overlap."""
    of: dict[str, list[int]] = {}
    for exchange, queue in edges:
        of.setdefault(exchange, []).append(right[queue])
    middles = {name: sum(places) / len(places) for name, places in of.items()}
    ordered = sorted(middles, key=lambda name: (middles[name], name))
    placed: dict[str, int] = {}
    free = 0
    for place, name in enumerate(ordered):
        # Those that follow need room as well.
        last = max(free, max(right.values()) - _ROW * (len(ordered) - 1 - place))
        placed[name] = min(max(free, round(middles[name])), last)
        free = placed[name] + _ROW
    return placed


def _svg(
    name: str, title: str, described: str, width: int = WIDTH, height: int = HEIGHT, **shapes: Any
) -> SafeString:
    label = line(f"{title}: {described}", _LONG)
    size = {"width": width, "height": height, "left": _LEFT}
    return render_to_string(
        f"admin/django_amqp_events/charts/{name}.html",
        {"title": title, "described": described, "label": label, **size, **shapes},
    )


def _axis(top: float, unit: str = "") -> list[tuple[float, str]]:
    """Return height and label of the ends of an axis."""
    return [(_y(value, top), f"{_short(value)}{unit}") for value in (0, top)]


def _y(value: float, top: float) -> float:
    return round(HEIGHT - _BOTTOM - (HEIGHT - _BOTTOM - _TOP) * value / top, 1)


def _axis_end(most: float) -> float:
    """Return 1, 2 or 5 times a power of ten."""
    if most <= 1:
        return 1
    power = 10.0 ** math.floor(math.log10(most))
    return next(power * step for step in (1, 2, 5, 10) if power * step >= most)


def _number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else round(value, 1)


def _told(value: float) -> str:
    return str(localize(_number(value)))


def _short(value: float) -> str:
    unit, size = next(
        (candidate for candidate in (("M", 1_000_000), ("k", 1000)) if value >= candidate[1]),
        ("", 1),
    )
    return f"{value / size:g}{unit}".replace(".", get_format("DECIMAL_SEPARATOR"))
