"""Pictures made on the server: no script draws them, and style sheets give them their colours."""

from __future__ import annotations

from collections.abc import Sequence

from django.utils.html import format_html
from django.utils.safestring import SafeString

#: Of one bar, and of the picture, in the units of its view box.
_BAR, _GAP, _HEIGHT = 4, 1, 20


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
        height = max(2, round(value * (_HEIGHT - 1) / most)) if value else 0
        if height:
            bars.append(f"M{index * (_BAR + _GAP)} {_HEIGHT - 1}v-{height}h{_BAR}v{height}z")
    width = max(1, len(values) * (_BAR + _GAP) - _GAP)
    return format_html(
        '<svg class="ae-spark" viewBox="0 0 {} {}" width="{}" height="{}" role="img" '
        'aria-label="{}"><title>{}</title><path class="ae-spark-base" d="M0 {}h{}v1h-{}z"/>'
        '<path class="ae-spark-bars" d="{}"/></svg>',
        width,
        _HEIGHT,
        width,
        _HEIGHT,
        label,
        label,
        _HEIGHT - 1,
        width,
        width,
        "".join(bars),
    )
