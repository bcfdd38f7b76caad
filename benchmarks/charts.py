"""Charts as SVG: horizontal bars with their spread and the targets; curves. Pure.

A chart has a light background of its own, so it looks the same on a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from .measured import OURS, PLAIN, Curve, Measured, Table, shown

WIDTH = 760
_LEFT, _RIGHT, _TOP = 210, 150, 44
_BAR, _STEP = 20, 32
_HEIGHT = 260
_COLOURS = {OURS: "#0b7a4b", PLAIN: "#8a5a00"}
_OTHERS = ("#4a6fa5", "#7a4a8c", "#a54a4a", "#4a9aa5", "#777777")
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.t{font-weight:600;font-size:14px}"
    ".s{fill:#666;font-size:12px}.w{stroke:#222;stroke-width:1.2}"
    ".reach{stroke:#c02020;stroke-dasharray:5 3}.stretch{stroke:#6a3ab0;stroke-dasharray:2 3}"
    ".g{stroke:#ddd}.l{fill:none;stroke-width:2}"
)


def chart(measured: Measured) -> str:
    """Draw a measurement."""
    return curve(measured) if isinstance(measured, Curve) else bars(measured)


def colour(name: str, others: Sequence[str]) -> str:
    """Return the colour of a participant; the project always has the same."""
    for known, value in _COLOURS.items():
        if name == known or name.startswith(known + ","):
            return value
    return _OTHERS[others.index(name) % len(_OTHERS)]


def bars(table: Table) -> str:
    """Draw the median, minimum and maximum of each participant, and the targets."""
    names = list(table.values)
    spreads = {name: table.spread(name) for name in names}
    marks = [
        (target.level, target.factor * (spreads[target.against].median if target.against else 1.0))
        for target in table.targets
    ]
    top = max([0.0, *(each.most for each in spreads.values()), *(at for _, at in marks)]) or 1.0
    width = WIDTH - _LEFT - _RIGHT
    height = _TOP + _STEP * len(names) + 26

    def at(value: float) -> float:
        return _LEFT + width * value / top

    parts = [_title(table.what, f"{table.unit}, {table.better} is better")]
    for place, name in enumerate(names):
        spread, y = spreads[name], _TOP + _STEP * place
        middle = y + _BAR / 2
        parts += [
            f'<text x="{_LEFT - 8}" y="{middle + 4:.1f}" text-anchor="end">{escape(name)}</text>',
            (
                f'<rect x="{_LEFT}" y="{y}" width="{max(0.0, at(spread.median) - _LEFT):.1f}" '
                f'height="{_BAR}" fill="{colour(name, names)}"/>'
            ),
            (
                f'<path class="w" d="M{at(spread.least):.1f} {middle}H{at(spread.most):.1f}'
                f'M{at(spread.least):.1f} {middle - 4}v8M{at(spread.most):.1f} {middle - 4}v8"/>'
            ),
            (
                f'<text x="{at(spread.most) + 8:.1f}" y="{middle + 4:.1f}">'
                f"{shown(spread.median)}</text>"
            ),
        ]
    bottom = _TOP + _STEP * len(names) - 6
    for level, value in marks:
        parts.append(
            f'<path class="{level}" d="M{at(value):.1f} {_TOP - 6}V{bottom}"/>'
            f'<text class="s" x="{at(value):.1f}" y="{bottom + (14 if level == "reach" else 26)}" '
            f'text-anchor="middle">{level} {shown(value)}</text>'
        )
    return _svg(height, parts)


def curve(measured: Curve) -> str:
    """Draw the medians over the size, with logarithmic axes."""
    names = list(measured.values)
    lines = {name: measured.medians(name) for name in names}
    xs = sorted({x for points in lines.values() for x, _ in points})
    values = [y for points in lines.values() for _, y in points if y > 0] or [1.0]
    low, high = _decade(min(values), -1), _decade(max(values), 1)
    width = WIDTH - 70 - _RIGHT

    def across(x: float) -> float:
        first, last = math.log10(max(xs[0], 1e-9)), math.log10(max(xs[-1], 1e-9))
        return 70 + width * (math.log10(max(x, 1e-9)) - first) / ((last - first) or 1)

    def down(y: float) -> float:
        share = (math.log10(max(y, low)) - math.log10(low)) / (math.log10(high) - math.log10(low))
        return _TOP + (_HEIGHT - _TOP - 40) * (1 - share)

    parts = [_title(measured.what, f"{measured.unit} by {measured.x}, {measured.better} is better")]
    for value in _ticks(low, high):
        parts.append(
            f'<path class="g" d="M70 {down(value):.1f}h{width}"/><text class="s" x="64" '
            f'y="{down(value) + 4:.1f}" text-anchor="end">{shown(value)}</text>'
        )
    for x in xs:
        parts.append(
            f'<text class="s" x="{across(x):.1f}" y="{_HEIGHT - 20}" text-anchor="middle">'
            f"{x:,.0f}</text>"
        )
    ends: list[float] = []
    for name, points in lines.items():
        path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in points)
        shade = colour(name, names)
        # Above the numbers of the axis, and not over another name.
        end = min(down(points[-1][1]), _HEIGHT - 54)
        while any(abs(end - other) < 14 for other in ends):
            end -= 14
        ends.append(end)
        parts.append(
            f'<polyline class="l" stroke="{shade}" points="{path}"/>'
            + "".join(
                f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="3" fill="{shade}"/>'
                for x, y in points
            )
            + f'<text x="{across(points[-1][0]) + 8:.1f}" y="{end + 4:.1f}" style="fill:{shade}">'
            f"{escape(name)}</text>"
        )
    return _svg(_HEIGHT, parts)


def _decade(value: float, way: int) -> float:
    """Round to 1, 2 or 5 times a power of ten, away from the middle."""
    base = 10.0 ** math.floor(math.log10(value))
    steps = [base * each for each in (0.5, 1, 2, 5, 10, 20)]
    if way < 0:
        return max(step for step in steps if step < value * 0.999)
    return min(step for step in steps if step > value * 1.001)


def _ticks(low: float, high: float) -> Iterable[float]:
    base = 10.0 ** math.floor(math.log10(low))
    found = []
    while base <= high:
        found += [base * each for each in (1, 2, 5) if low * 0.999 <= base * each <= high * 1.001]
        base *= 10
    return found if len(found) <= 8 else found[:: math.ceil(len(found) / 8)]


def _title(text: str, below: str) -> str:
    return (
        f'<text class="t" x="12" y="18">{escape(text)}</text>'
        f'<text class="s" x="12" y="34">{escape(below)}</text>'
    )


def _svg(height: float, parts: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" height="{height:.0f}" role="img"><style>{_STYLE}</style>'
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#fff"/>' + "\n".join(parts) + "</svg>\n"
    )
