"""Charts: well-formed whatever comes in, and the same in their table."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from django_amqp_events.admin import charts
from django_amqp_events.admin.charts import Chart, Layer

SPACE = "{http://www.w3.org/2000/svg}"
HOSTILE = "<b>&\"'\0\x07\u202e\ud800\ufffe]]></title>"
counts = st.integers(0, 10**12)
words = st.text()


def read(chart: Chart) -> ET.Element:
    """The chart as XML; it has what a screen reader wants, and no style."""
    root = ET.fromstring(chart.svg.encode())  # noqa: S314 - ours
    assert root.get("role") == "img"
    assert root.get("aria-label")
    for each in root.iter():
        assert each.tag != f"{SPACE}style"
        for name, value in each.attrib.items():
            assert name not in {"style", "fill", "stroke"}
            assert not name.startswith("on")
            if name in {"x", "y", "width", "height"}:
                assert float(value) >= 0
    return root


def texts(root: ET.Element, tag: str = "text") -> list[str]:
    return [each.text or "" for each in root.iter(f"{SPACE}{tag}")]


def bars(layers: list[Layer], labels: list[str]) -> Chart:
    return charts.bars("Per hour", labels, layers, of="Hour")


def test_bars_are_stacked_and_labelled() -> None:
    chart = bars([("a", "archived", [3, 0]), ("b", "succeeded", [1, 0])], ["10", "11"])
    root = read(chart)
    first, last = root.iter(f"{SPACE}rect")
    assert (first.get("class"), last.get("class")) == ("a", "b")
    heights = [float(each.get("height", "")) for each in (first, last)]
    assert heights[0] == pytest.approx(3 * heights[1], rel=0.01)
    bottom = float(last.get("y", "")) + heights[1]
    assert bottom == pytest.approx(float(first.get("y", "")), abs=0.15)
    assert "10: archived 3, succeeded 1" in texts(root, "title")
    assert texts(root) == ["0", "4", "10", "11"]
    assert chart.columns == ("Hour", "archived", "succeeded")
    assert chart.rows == (("10", 3, 1), ("11", 0, 0))
    assert chart.legend == (("a", "archived"), ("b", "succeeded"))


@pytest.mark.parametrize(
    "chart",
    [
        bars([], []),
        bars([("a", "archived", [])], []),
        bars([("a", "archived", [0, 0])], ["1", "2"]),
    ],
)
def test_no_data_is_no_chart(chart: Chart) -> None:
    assert chart.svg == ""
    assert chart.columns


def test_hostile_names_are_escaped() -> None:
    chart = charts.bars(HOSTILE, [HOSTILE], [("a", HOSTILE, [1])], of=HOSTILE)
    root = read(chart)
    assert root.find(f".//{SPACE}b") is None
    assert "\u202e" not in chart.svg
    assert "<b>" in root.get("aria-label", "")


@settings(max_examples=15)
@given(st.lists(st.tuples(words, counts, counts), max_size=20))
def test_any_chart(found: list[tuple[str, int, int]]) -> None:
    labels = [label for label, _, _ in found]
    chart = bars([("a", "x", [a for _, a, _ in found]), ("b", "y", [b for *_, b in found])], labels)
    if chart.svg:
        read(chart)
