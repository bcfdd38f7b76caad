"""Pictures drawn by the server: SVG with CSS classes, and the same as a table. Pure.

Any name gives well-formed XML. Colours are in admin.css.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

from django.utils.formats import get_format, localize
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from ..broker.topology import Topology
from ..templatetags.amqp_events import UNITS, line

#: Size of a chart; the width is about the pixels of a small screen, so its text is legible there.
WIDTH: Final = 360
HEIGHT: Final = 150
_LEFT: Final = 42
_BOTTOM: Final = 18
_TOP: Final = 8
#: Characters of a name in a picture, and in its tooltip.
_NAME: Final = 46
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
class Layer:
    """One layer of stacked bars, with one value per bar."""

    css: str
    name: str
    values: Sequence[float]


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
    totals = [sum(values) for values in zip(*(layer.values for layer in layers), strict=True)]
    top = _axis_end(max(totals, default=0))
    step = (WIDTH - _LEFT) / max(1, len(labels))
    width = max(1.0, step * 0.8)
    every = max(1, math.ceil(len(labels) / 8))
    parts = [_axis(top, unit)]
    for place, label in enumerate(labels):
        x = _LEFT + step * place + (step - width) / 2
        below, pieces, told = 0.0, [], []
        for layer in layers:
            if value := layer.values[place]:
                y, height = _y(below + value, top), _y(below, top) - _y(below + value, top)
                pieces.append(_tag("rect", class_=layer.css, x=x, y=y, width=width, height=height))
                told.append(f"{layer.name} {_told(value)}{unit}")
                below += value
        if pieces:
            title_ = _tag("title", line(f"{label}: {', '.join(told)}", _LONG))
            parts.append(_tag("g", title_, *pieces))
        if place % every == 0:
            parts.append(_text(x + width / 2, HEIGHT - 5, label, anchor="middle", limit=10))
    described = "; ".join(f"{layer.name}: {_told(sum(layer.values))}{unit}" for layer in layers)
    return Picture(
        title=title,
        svg=_svg(title, described, HEIGHT, parts) if any(totals) else "",
        columns=(of, *(layer.name for layer in layers)),
        rows=tuple(
            (label, *(_number(layer.values[place]) for layer in layers))
            for place, label in enumerate(labels)
        ),
        legend=tuple((layer.css, layer.name) for layer in layers) if len(layers) > 1 else (),
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
    places = [(_LEFT + scale * (x - first), _y(value, top)) for x, _, value in points]
    if len(places) == 1:
        # A moment has no width; a line does.
        places.append((float(WIDTH), places[0][1]))
    outline = " L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    left, right, ground = places[0][0], places[-1][0], _y(0, top)
    closed = f"M{left:.1f} {ground:.1f} L{outline} L{right:.1f} {ground:.1f} Z"
    parts = [
        _axis(top, ""),
        _tag("path", class_="ae-area", d=closed),
        _tag("path", class_="ae-line", d=f"M{outline}"),
        _text(_LEFT, HEIGHT - 5, points[0][1], limit=20),
        _text(WIDTH, HEIGHT - 5, points[-1][1], anchor="end", limit=20),
    ]
    described = _("from %(first)s to %(last)s, at most %(most)s") % {
        "first": _told(values[0]),
        "last": _told(values[-1]),
        "most": _told(max(values)),
    }
    return replace(picture, svg=_svg(title, described, HEIGHT, parts))


def lying(title: str, found: Sequence[Row], *, of: tuple[str, str]) -> Picture:
    """Draw one horizontal bar per name."""
    most = max((row.value for row in found), default=0)
    parts = []
    for place, row in enumerate(found):
        y = place * _ROW
        number = f"{_told(row.value)}{f' · {row.note}' if row.note else ''}"
        pieces = [
            _tag("title", line(f"{row.name}: {number}", _LONG)),
            _text(0, y + 13, row.name, limit=_NAME),
            _text(WIDTH, y + 13, number, anchor="end", limit=_NAME),
            _tag("rect", class_="ae-track", x=0, y=y + 18, width=WIDTH, height=8),
        ]
        if row.value:
            width = max(1.0, WIDTH * row.value / most)
            pieces.append(_tag("rect", class_=row.css, x=0, y=y + 18, width=width, height=8))
        parts.append(_tag("g", *pieces))
    described = ", ".join(f"{line(row.name)} {_told(row.value)}" for row in found[:5])
    return Picture(
        title=title,
        svg=_svg(title, described, _ROW * len(found), parts) if found else "",
        columns=of,
        rows=tuple((line(row.name, _LONG), _number(row.value)) for row in found),
    )


def pareto(title: str, found: Sequence[tuple[str, int]], *, of: tuple[str, str]) -> Picture:
    """Draw the most frequent first, with the share of it and those above together."""
    total = sum(count for _, count in found)
    shares = [
        _("%(number)s%%") % {"number": round(100 * so_far / total)} if total else ""
        for so_far in accumulate(count for _, count in found)
    ]
    rows = [Row(name, count, share) for (name, count), share in zip(found, shares, strict=True)]
    drawn = lying(title, rows, of=of)
    return replace(
        drawn,
        columns=(*of, _("Together")),
        rows=tuple((*row, share) for row, share in zip(drawn.rows, shares, strict=True)),
    )


def schedule(title: str, delays: Sequence[float]) -> Picture:
    """Draw the retries of a handler: each bar is the time since the first failure."""
    totals = list(accumulate(delays))
    most = totals[-1] if totals else 0.0
    unit, length = next((each for each in UNITS if most >= 2 * each[1]), UNITS[-1])
    before = [(total - delay) / length for total, delay in zip(totals, delays, strict=True)]
    drawn = bars(
        title,
        [str(place) for place in range(1, len(delays) + 1)],
        [
            Layer("ae-fill-quiet", _("delay before"), before),
            Layer("ae-fill", _("delay"), [delay / length for delay in delays]),
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


@dataclass(frozen=True, slots=True)
class Node:
    """The label of a queue in the graph: a number or word, and ``ok``, ``warning`` or ``error``."""

    text: str = ""
    severity: str = "ok"


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
        if queue.role == "delay" and not nodes.get(queue.name, Node()).text
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
    arrow = _tag(
        "marker",
        _tag("path", d="M0 0 L6 3 L0 6 Z"),
        id="ae-arrow",
        class_="ae-arrow",
        viewBox="0 0 6 6",
        refX=6,
        refY=3,
        markerWidth=6,
        markerHeight=6,
        orient="auto",
    )
    parts = [_tag("defs", arrow)]
    for (exchange, queue), keys in edges.items():
        told = f"{exchange} → {queue} {', '.join(sorted({key for key in keys if key}))}"
        parts.append(_edge("ae-edge", 270, left[exchange] + 12, 400, right[queue] + 12, told))
    dead = {
        (box(each.name), box(str(each.arguments.get("x-dead-letter-exchange", ""))))
        for each in topology.queues
    }
    for queue, target in sorted(dead):
        if queue in right and target in left:
            told = _("%(queue)s dead-letters to %(target)s") % {"queue": queue, "target": target}
            parts.append(
                _edge("ae-edge-dead", 400, right[queue] + 18, 270, left[target] + 18, told)
            )
    parts += [_box(name, 10, y, 260, Node(), "ae-exchange") for name, y in left.items()]
    parts += [
        _box(name, 400, y, 310, nodes.get(name, Node()), "ae-queue") for name, y in right.items()
    ]
    tall = max([*left.values(), *right.values()], default=0) + _ROW
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


def sparkline(values: Sequence[int], label: str) -> SafeString:
    """Draw bars side by side, relative to the highest; *label* describes them."""
    most = max(values, default=0)
    drawn = ""
    for index, value in enumerate(values):
        if value:
            # Visible beside a bar that is a thousand times as high.
            height = max(2, round(value * (_SPARK - 1) / most))
            drawn += f"M{index * (_BAR + _GAP)} {_SPARK - 1}v-{height}h{_BAR}v{height}z"
    width = max(1, len(values) * (_BAR + _GAP) - _GAP)
    return _tag(
        "svg",
        _tag("title", label),
        _tag("path", class_="ae-spark-base", d=f"M0 {_SPARK - 1}h{width}v1h-{width}z"),
        _tag("path", class_="ae-spark-bars", d=drawn),
        class_="ae-spark",
        viewBox=f"0 0 {width} {_SPARK}",
        width=width,
        height=_SPARK,
        role="img",
        aria_label=label,
    )


def progress(parts: Iterable[tuple[str, float]], label: str) -> SafeString:
    """Draw one bar of several parts: the CSS class and the percentage of each."""
    drawn, at = [], 0.0
    for css, width in parts:
        if width:
            drawn.append(
                _tag("rect", class_=css, x=f"{at:.2f}", y=0, width=f"{width:.2f}", height=6)
            )
        at += width
    return _tag(
        "svg",
        *drawn,
        class_="ae-bar",
        viewBox="0 0 100 6",
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
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


def _beside(right: Mapping[str, int], edges: Mapping[tuple[str, str], object]) -> dict[str, int]:
    """Place each exchange beside the middle of its queues, without overlap."""
    of: dict[str, list[int]] = {}
    for exchange, queue in edges:
        of.setdefault(exchange, []).append(right[queue])
    middles = {name: sum(places) / len(places) for name, places in of.items()}
    wanted = sorted(middles, key=lambda name: (middles[name], name))
    placed: dict[str, int] = {}
    free = 0
    for place, name in enumerate(wanted):
        # Those that follow need room as well.
        last = max(free, max(right.values()) - _ROW * (len(wanted) - 1 - place))
        placed[name] = min(max(free, round(middles[name])), last)
        free = placed[name] + _ROW
    return placed


def _box(name: str, x: int, y: int, width: int, node: Node, css: str) -> SafeString:
    severity = node.severity if node.severity in ("warning", "error", "unknown") else "ok"
    parts = [
        _tag("title", line(f"{name} {node.text}", _LONG)),
        _tag("rect", x=x, y=y, width=width, height=24, rx=4),
        _text(x + 8, y + 16, name, limit=_NAME - 12 if node.text else _NAME - 4),
    ]
    if node.text:
        parts.append(_text(x + width - 8, y + 16, node.text, anchor="end", limit=24))
    return _tag("g", *parts, class_=f"{css} ae-{severity}")


def _edge(css: str, x: int, y: int, to_x: int, to_y: int, told: str) -> SafeString:
    middle = (x + to_x) // 2
    return _tag(
        "path",
        _tag("title", line(told, _LONG)),
        class_=css,
        marker_end="url(#ae-arrow)",
        d=f"M{x} {y} C{middle} {y} {middle} {to_y} {to_x} {to_y}",
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
    return _tag(
        "svg",
        _tag("title", line(title, _LONG)),
        _tag("desc", line(described, _LONG)),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        class_=css,
        role="img",
        aria_label=line(f"{title}: {described}", _LONG),
        viewBox=f"0 0 {width} {height}",
    )


def _axis(top: float, unit: str) -> SafeString:
    parts = []
    for value in (0, top):
        y = _y(value, top)
        parts.append(_tag("line", class_="ae-axis", x1=_LEFT, y1=y, x2=WIDTH, y2=y))
        parts.append(_text(_LEFT - 4, y + 4, f"{_short(value)}{unit}", anchor="end"))
    return _tag("g", *parts)


def _text(
    x: float, y: float, text: object, *, anchor: str = "start", limit: int = 12
) -> SafeString:
    return _tag("text", line(text, limit), x=x, y=y, text_anchor=anchor)


def _tag(name: str, *content: str, **attributes: object) -> SafeString:
    """Write an element; an underscore in the name of an attribute is a hyphen, or its end."""
    written = (
        (key.rstrip("_").replace("_", "-"), f"{value:.1f}" if isinstance(value, float) else value)
        for key, value in attributes.items()
    )
    return format_html(
        "<{0}{1}>{2}</{0}>",
        name,
        format_html_join("", ' {}="{}"', written),
        format_html_join("", "{}", ((each,) for each in content)),
    )


def _y(value: float, top: float) -> float:
    return HEIGHT - _BOTTOM - (HEIGHT - _BOTTOM - _TOP) * value / top


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
        (each for each in (("M", 1_000_000), ("k", 1000)) if value >= each[1]), ("", 1)
    )
    return f"{value / size:g}{unit}".replace(".", get_format("DECIMAL_SEPARATOR"))
