"""Pictures made by the server: SVG with CSS classes and no style, and the same as a table. Pure.

Whatever comes in, well-formed XML comes out: names are somebody else's. Colours are in admin.css.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from django.utils.formats import get_format, localize
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext as _

from ..broker.topology import Queue, Topology
from .formatting import UNITS, line

#: Units of a chart, about the pixels that a small screen has: its text can be read there.
WIDTH: Final = 360
HEIGHT: Final = 150
_LEFT: Final = 42
_BOTTOM: Final = 18
_TOP: Final = 8
#: Characters of a name in a picture, and of one in its tooltip.
_NAME: Final = 46
_LONG: Final = 300
#: Queues that a graph draws; the table has all.
GRAPH: Final = 200
#: Roles of queues, in the order in which they are shown.
ROLES: Final = ("handler", "delay", "graveyard", "dead", "abyss", "archive")
#: Of one bar of a sparkline, and of the picture, in the units of its view box.
_BAR: Final = 4
_GAP: Final = 1
_SPARK: Final = 20
Cell = str | int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture and its table.

    Attributes:
        title: its heading.
        svg: ``""`` where there is nothing to draw.
        columns, rows: the same as text.
        legend: CSS class and name of each colour, where there is more than one.
    """

    title: str
    svg: SafeString
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    legend: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of stacked bars: CSS class, name, one value per bar."""

    css: str
    name: str
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class Row:
    """A horizontal bar: name, number, note, CSS class."""

    name: str
    value: float
    note: str = ""
    css: str = "ae-fill"


def bars(
    title: str, labels: Sequence[str], layers: Sequence[Layer], *, of: str, unit: str = ""
) -> Picture:
    """Draw bars side by side, their layers stacked.

    Args:
        labels: what stands below each bar; as many as fit are written.
        of: what the labels are, the head of the table's first column.
        unit: behind numbers.
    """
    totals = [sum(values) for values in zip(*(layer.values for layer in layers), strict=True)]
    rows = tuple(
        (label, *(_number(layer.values[place]) for layer in layers))
        for place, label in enumerate(labels)
    )
    top = _nice(max(totals, default=0))
    step = (WIDTH - _LEFT) / max(1, len(labels))
    width = max(1.0, step * 0.8)
    every = max(1, math.ceil(len(labels) / 8))
    parts = [_axis(top, unit)]
    for place, label in enumerate(labels):
        x = _LEFT + step * place + (step - width) / 2
        below = 0.0
        told = ", ".join(
            f"{layer.name} {_told(layer.values[place])}{unit}"
            for layer in layers
            if layer.values[place]
        )
        pieces = []
        for layer in layers:
            value = layer.values[place]
            if value > 0:
                pieces.append(
                    format_html(
                        '<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>',
                        layer.css,
                        _at(x),
                        _at(_y(below + value, top)),
                        _at(width),
                        _at(_y(below, top) - _y(below + value, top)),
                    )
                )
            below += value
        if pieces:
            name = line(f"{label}: {told}", _LONG)
            parts.append(format_html("<g><title>{}</title>{}</g>", name, _joined(pieces)))
        if place % every == 0:
            middle = x + width / 2
            parts.append(_text(middle, HEIGHT - 5, label, anchor="middle", limit=10))
    described = "; ".join(f"{layer.name}: {_told(sum(layer.values))}{unit}" for layer in layers)
    return Picture(
        title=title,
        svg=_svg(title, described, HEIGHT, parts) if any(totals) else SafeString(),
        columns=(of, *(layer.name for layer in layers)),
        rows=rows,
        legend=tuple((layer.css, layer.name) for layer in layers) if len(layers) > 1 else (),
    )


def area(title: str, points: Sequence[tuple[float, str, float]], *, of: tuple[str, str]) -> Picture:
    """Draw a value over time.

    Args:
        points: place on the axis, its label, value; in order.
        of: heads of the table: what the labels are, and the values.
    """
    rows = tuple((label, _number(value)) for _, label, value in points)
    if not points:
        return Picture(title=title, svg=SafeString(), columns=of, rows=rows)
    first, last = points[0][0], points[-1][0]
    span = (last - first) or 1.0
    top = _nice(max(value for _, _, value in points))
    places = [
        (_LEFT + (WIDTH - _LEFT) * (x - first) / span, _y(value, top)) for x, _, value in points
    ]
    if len(places) == 1:
        # A moment has no width; a line does.
        places.append((float(WIDTH), places[0][1]))
    outline = " L".join(f"{_at(x)} {_at(y)}" for x, y in places)
    ground = _at(_y(0, top))
    parts = [
        _axis(top, ""),
        format_html(
            '<path class="ae-area" d="M{} {} L{} L{} {} Z"/><path class="ae-line" d="M{}"/>',
            _at(places[0][0]),
            ground,
            outline,
            _at(places[-1][0]),
            ground,
            outline,
        ),
        _text(_LEFT, HEIGHT - 5, points[0][1], limit=20),
        _text(WIDTH, HEIGHT - 5, points[-1][1], anchor="end", limit=20),
    ]
    values = [value for _, _, value in points]
    described = _("from %(first)s to %(last)s, at most %(most)s") % {
        "first": _told(values[0]),
        "last": _told(values[-1]),
        "most": _told(max(values)),
    }
    return Picture(title=title, svg=_svg(title, described, HEIGHT, parts), columns=of, rows=rows)


def lying(title: str, found: Sequence[Row], *, of: tuple[str, str]) -> Picture:
    """Draw one horizontal bar per name."""
    most = max((row.value for row in found), default=0)
    parts = []
    for place, row in enumerate(found):
        y = place * 30
        width = WIDTH * row.value / most if most else 0
        number = f"{_told(row.value)}{f' · {row.note}' if row.note else ''}"
        parts.append(
            format_html(
                '<g><title>{}</title>{}{}<rect class="ae-track" x="0" y="{}" width="{}" '
                'height="8"/>{}</g>',
                line(f"{row.name}: {number}", _LONG),
                _text(0, y + 13, row.name, limit=_NAME),
                _text(WIDTH, y + 13, number, anchor="end", limit=_NAME),
                y + 18,
                WIDTH,
                format_html(
                    '<rect class="{}" x="0" y="{}" width="{}" height="8"/>',
                    row.css,
                    y + 18,
                    _at(max(1.0, width)),
                )
                if row.value
                else "",
            )
        )
    described = ", ".join(f"{line(row.name)} {_told(row.value)}" for row in found[:5])
    return Picture(
        title=title,
        svg=_svg(title, described, 30 * len(found), parts) if found else SafeString(),
        columns=of,
        rows=tuple((line(row.name, _LONG), _number(row.value)) for row in found),
    )


def pareto(title: str, found: Sequence[tuple[str, int]], *, of: tuple[str, str]) -> Picture:
    """Draw what is most frequent first, with the share that it has together with those above."""
    total = sum(count for _, count in found)
    shares = [
        _("%(number)s%%") % {"number": round(100 * so_far / total)} if total else ""
        for so_far in accumulate(count for _, count in found)
    ]
    drawn = lying(
        title,
        [Row(name, count, share) for (name, count), share in zip(found, shares, strict=True)],
        of=of,
    )
    return Picture(
        title=title,
        svg=drawn.svg,
        columns=(*of, _("Together")),
        rows=tuple((*row, share) for row, share in zip(drawn.rows, shares, strict=True)),
    )


def schedule(title: str, delays: Sequence[float]) -> Picture:
    """Draw the retries of a handler: each bar is the time since the first failure."""
    totals = list(accumulate(delays))
    most = totals[-1] if totals else 0.0
    unit, length = next((each for each in UNITS if most >= 2 * each[1]), UNITS[-1])
    drawn = bars(
        title,
        [str(place) for place in range(1, len(delays) + 1)],
        [
            Layer(
                "ae-fill-quiet",
                _("delay before"),
                [(total - delay) / length for total, delay in zip(totals, delays, strict=True)],
            ),
            Layer("ae-fill", _("delay"), [delay / length for delay in delays]),
        ],
        of=_("Retry"),
        unit=f" {unit}",
    )
    return Picture(
        title=title,
        svg=drawn.svg,
        columns=(_("Retry"), _("Delay"), _("Running total")),
        rows=tuple(
            (place, duration(delay), duration(total))
            for place, (delay, total) in enumerate(zip(delays, totals, strict=True), 1)
        ),
        legend=drawn.legend,
    )


@dataclass(frozen=True, slots=True)
class Node:
    """The label of a queue in the graph: a number or word, and ``ok``, ``warning`` or ``error``."""

    text: str = ""
    severity: str = "ok"


def graph(title: str, topology: Topology, nodes: Mapping[str, Node]) -> Picture:
    """Draw exchanges on the left, queues on the right, and how messages go between them.

    Delay queues that have nothing to say are one box.

    Args:
        nodes: what is known of queues, by name.
    """
    delays = _("delays")
    dull = {
        queue.name
        for queue in topology.queues
        if queue.role == "delay" and not nodes.get(queue.name, Node()).text
    }

    def box(name: str) -> str:
        return delays if name in dull else name

    queues = list(dict.fromkeys(box(queue.name) for queue in _in_order(topology)))[:GRAPH]
    height = 30
    right = {name: place * height for place, name in enumerate(queues)}
    edges: dict[tuple[str, str], list[str]] = {}
    for binding in topology.bindings:
        if (queue := box(binding.queue)) in right:
            edges.setdefault((box(binding.exchange), queue), []).append(binding.routing_key)
    left = _beside(right, edges)
    parts = [
        mark_safe(
            '<defs><marker id="ae-arrow" class="ae-arrow" viewBox="0 0 6 6" refX="6" refY="3" '
            'markerWidth="6" markerHeight="6" orient="auto"><path d="M0 0 L6 3 L0 6 Z"/>'
            "</marker></defs>"
        )
    ]
    for (exchange, queue), keys in edges.items():
        told = f"{exchange} → {queue} {', '.join(sorted({key for key in keys if key}))}"
        parts.append(_edge("ae-edge", 270, left[exchange] + 12, 400, right[queue] + 12, told))
    dead: dict[tuple[str, str], str] = {}
    for each in topology.queues:
        target = box(str(each.arguments.get("x-dead-letter-exchange", "")))
        if target in left and box(each.name) in right:
            dead[box(each.name), target] = each.role
    for queue, target in dead:
        told = _("%(queue)s dead-letters to %(target)s") % {"queue": queue, "target": target}
        parts.append(_edge("ae-edge-dead", 400, right[queue] + 18, 270, left[target] + 18, told))
    parts += [_box(name, 10, y, 260, Node(), "ae-exchange") for name, y in left.items()]
    parts += [
        _box(name, 400, y, 310, nodes.get(name, Node()), "ae-queue") for name, y in right.items()
    ]
    tall = max([*left.values(), *right.values()], default=0) + height
    described = _("exchanges: %(exchanges)s, queues: %(queues)s, bindings: %(bindings)s") % {
        "exchanges": len(topology.exchanges),
        "queues": len(topology.queues),
        "bindings": len(topology.bindings),
    }
    return Picture(
        title=title,
        svg=_svg(title, described, tall, parts, width=720, css="ae-svg ae-graph"),
        columns=(_("Exchange"), _("Queue"), _("Routing key")),
        rows=tuple(
            (line(each.exchange, _LONG), line(each.queue, _LONG), line(each.routing_key, _LONG))
            for each in topology.bindings
        ),
        legend=(("ae-edge", _("binding")), ("ae-edge-dead", _("dead letters, expired delays"))),
    )


def duration(seconds: float) -> str:
    """Write seconds for a person: the two largest units."""
    left = round(seconds)
    said = []
    for unit, length in UNITS:
        count, left = divmod(left, length)
        if count:
            said.append(f"{count} {unit}")
    return " ".join(said[:2]) or f"0 {UNITS[-1][0]}"


def _in_order(topology: Topology) -> list[Queue]:
    return sorted(topology.queues, key=lambda queue: ROLES.index(queue.role))


def _beside(right: Mapping[str, int], edges: Mapping[tuple[str, str], object]) -> dict[str, int]:
    """Place each exchange beside the middle of its queues, and none on another."""
    of: dict[str, list[int]] = {}
    for exchange, queue in edges:
        of.setdefault(exchange, []).append(right[queue])
    wanted = sorted(of, key=lambda name: (sum(of[name]) / len(of[name]), name))
    placed: dict[str, int] = {}
    free = 0
    for place, name in enumerate(wanted):
        middle = round(sum(of[name]) / len(of[name]))
        # Those that follow need room as well.
        last = max(free, max(right.values()) - 30 * (len(wanted) - 1 - place))
        placed[name] = min(max(free, middle), last)
        free = placed[name] + 30
    return placed


def _box(name: str, x: int, y: int, width: int, node: Node, css: str) -> SafeString:
    severity = node.severity if node.severity in ("warning", "error", "unknown") else "ok"
    return format_html(
        '<g class="{} ae-{}"><title>{}</title><rect x="{}" y="{}" width="{}" height="24" '
        'rx="4"/>{}{}</g>',
        css,
        severity,
        line(f"{name} {node.text}", _LONG),
        x,
        y,
        width,
        _text(x + 8, y + 16, name, limit=_NAME - 12 if node.text else _NAME - 4),
        _text(x + width - 8, y + 16, node.text, anchor="end", limit=24) if node.text else "",
    )


def _edge(css: str, x: int, y: int, to_x: int, to_y: int, told: str) -> SafeString:
    middle = (x + to_x) // 2
    return format_html(
        '<path class="{}" marker-end="url(#ae-arrow)" d="M{} {} C{} {} {} {} {} {}"><title>{}'
        "</title></path>",
        css,
        x,
        y,
        middle,
        y,
        middle,
        to_y,
        to_x,
        to_y,
        line(told, _LONG),
    )


def _svg(
    title: str,
    described: str,
    height: int,
    parts: Sequence[str],
    *,
    width: int = WIDTH,
    css: str = "ae-svg",
) -> SafeString:
    return format_html(
        '<svg xmlns="http://www.w3.org/2000/svg" class="{}" role="img" aria-label="{}" '
        'viewBox="0 0 {} {}"><title>{}</title><desc>{}</desc>{}</svg>',
        css,
        line(f"{title}: {described}", _LONG),
        width,
        height,
        line(title, _LONG),
        line(described, _LONG),
        _joined(parts),
    )


def _axis(top: float, unit: str) -> SafeString:
    return _joined(
        [
            format_html(
                '<line class="ae-axis" x1="{}" y1="{}" x2="{}" y2="{}"/>{}',
                _LEFT,
                _at(_y(value, top)),
                WIDTH,
                _at(_y(value, top)),
                _text(_LEFT - 4, _y(value, top) + 4, f"{_short(value)}{unit}", anchor="end"),
            )
            for value in (0, top)
        ]
    )


def _text(
    x: float, y: float, text: object, *, anchor: str = "start", limit: int = 12
) -> SafeString:
    return format_html(
        '<text x="{}" y="{}" text-anchor="{}">{}</text>', _at(x), _at(y), anchor, line(text, limit)
    )


def _joined(parts: Sequence[str]) -> SafeString:
    return format_html_join("", "{}", ((part,) for part in parts))


def _y(value: float, top: float) -> float:
    return HEIGHT - _BOTTOM - (HEIGHT - _BOTTOM - _TOP) * value / top


def _nice(most: float) -> float:
    """Return the end of an axis: 1, 2 or 5 times a power of ten."""
    if most <= 1:
        return 1
    power = 10.0 ** math.floor(math.log10(most))
    return next(power * step for step in (1, 2, 5, 10) if power * step >= most)


def _number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else round(value, 1)


def _told(value: float) -> str:
    return str(localize(_number(value)))


def _short(value: float) -> str:
    point = get_format("DECIMAL_SEPARATOR")
    for unit, size in (("M", 1_000_000), ("k", 1000)):
        if value >= size:
            return f"{value / size:g}{unit}".replace(".", point)
    return f"{value:g}".replace(".", point)


def _at(value: float) -> str:
    """Write a coordinate, whatever the locale."""
    return f"{value:.1f}"


def sparkline(values: Sequence[int], label: str) -> SafeString:
    """Draw bars beside each other, the highest of them full.

    Args:
        values: none below 0.
        label: says in words what is seen.
    """
    most = max(values, default=0)
    bars = []
    for index, value in enumerate(values):
        # What is there at all is seen beside what is a thousand times as high.
        height = max(2, round(value * (_SPARK - 1) / most)) if value else 0
        if height:
            bars.append(f"M{index * (_BAR + _GAP)} {_SPARK - 1}v-{height}h{_BAR}v{height}z")
    width = max(1, len(values) * (_BAR + _GAP) - _GAP)
    return format_html(
        '<svg class="ae-spark" viewBox="0 0 {} {}" width="{}" height="{}" role="img" '
        'aria-label="{}"><title>{}</title><path class="ae-spark-base" d="M0 {}h{}v1h-{}z"/>'
        '<path class="ae-spark-bars" d="{}"/></svg>',
        width,
        _SPARK,
        width,
        _SPARK,
        label,
        label,
        _SPARK - 1,
        width,
        width,
        "".join(bars),
    )
