"""Pictures: well-formed whatever comes in, and the same in their table."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from django_amqp_events import conf
from django_amqp_events.admin import charts
from django_amqp_events.admin.charts import Layer, Picture, Row
from django_amqp_events.broker import topology
from django_amqp_events.declare.registry import build
from django_amqp_events.templatetags.amqp_events import duration

SPACE = "{http://www.w3.org/2000/svg}"
HOSTILE = "<b>&\"'\0\x07\u202e\ud800\ufffe]]></title>"
counts = st.one_of(st.integers(0, 10**12), st.floats(0, 1e12))
words = st.text()


def read(picture: Picture) -> ET.Element:
    """The picture as XML; it has what a screen reader wants, and no style."""
    root = ET.fromstring(picture.svg.encode())  # noqa: S314 - ours
    assert root.get("role") == "img"
    assert root.get("aria-label")
    assert root.findtext(f"{SPACE}title")
    assert root.find(f"{SPACE}desc") is not None
    for each in root.iter():
        assert each.tag != f"{SPACE}style"
        for name, value in each.attrib.items():
            assert name not in {"style", "fill", "stroke"}
            assert not name.startswith("on")
            if name in {"x", "y", "width", "height"}:
                number = float(value)
                assert number >= 0
    return root


def texts(root: ET.Element, tag: str = "text") -> list[str]:
    return [each.text or "" for each in root.iter(f"{SPACE}{tag}")]


def bars(layers: list[Layer], labels: list[str]) -> Picture:
    return charts.bars("Per hour", labels, layers, of="Hour")


def test_bars_are_stacked_and_labelled() -> None:
    picture = bars([("a", "archived", [3, 0]), ("b", "succeeded", [1, 0])], ["10", "11"])
    root = read(picture)
    first, last = root.iter(f"{SPACE}rect")
    assert (first.get("class"), last.get("class")) == ("a", "b")
    heights = [float(each.get("height", "")) for each in (first, last)]
    assert heights[0] == pytest.approx(3 * heights[1], rel=0.01)
    bottom = float(last.get("y", "")) + heights[1]
    assert bottom == pytest.approx(float(first.get("y", "")), abs=0.15)
    assert "10: archived 3, succeeded 1" in texts(root, "title")
    assert texts(root) == ["0", "5", "10", "11"]
    assert picture.columns == ("Hour", "archived", "succeeded")
    assert picture.rows == (("10", 3, 1), ("11", 0, 0))
    assert picture.legend == (("a", "archived"), ("b", "succeeded"))


@pytest.mark.parametrize(
    "picture",
    [
        bars([], []),
        bars([("a", "archived", [])], []),
        bars([("a", "archived", [0, 0])], ["1", "2"]),
        charts.area("Open", [], of=("Time", "Open")),
        charts.lying("Depths", [], of=("Queue", "Ready")),
        charts.pareto("Top", [], of=("Handler", "Events")),
        charts.schedule("h", []),
    ],
)
def test_no_data_is_no_picture(picture: Picture) -> None:
    assert picture.svg == ""
    assert picture.columns


def test_one_point() -> None:
    read(bars([("a", "archived", [1])], ["10"]))
    root = read(charts.area("Open", [(5.0, "10:00", 7)], of=("Time", "Open")))
    [area, line_] = root.iter(f"{SPACE}path")
    assert area.get("class") == "ae-area"
    assert (line_.get("d") or "").endswith("L360.0 45.2")
    read(charts.lying("Depths", [Row("q", 1)], of=("Queue", "Ready")))
    picture = charts.pareto("Top", [("h", 3)], of=("Handler", "Events"))
    assert picture.rows == (("h", 3, "100%"),)
    read(charts.schedule("h", [30.0]))


def test_an_area_that_is_zero_all_the_time() -> None:
    root = read(charts.area("Open", [(0, "a", 0), (1, "b", 0)], of=("Time", "Open")))
    assert texts(root) == ["0", "1", "a", "b"]


def test_pareto_adds_up() -> None:
    picture = charts.pareto("Top", [("a", 5), ("b", 3), ("c", 2)], of=("Handler", "Events"))
    assert picture.rows == (("a", 5, "50%"), ("b", 3, "80%"), ("c", 2, "100%"))
    assert "5 · 50%" in texts(read(picture))


def test_a_schedule_has_its_running_total() -> None:
    picture = charts.schedule("h", [1, 2, 60, 3600, 90_000])
    read(picture)
    assert picture.rows == (
        (1, "1 s", "1 s"), (2, "2 s", "3 s"), (3, "1 min", "1 min 3 s"),
        (4, "1 h", "1 h 1 min"), (5, "1 d 1 h", "1 d 2 h"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.4, "0 s"), (59.6, "1 min"), (3661, "1 h 1 min"), (200_000, "2 d 7 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    "draw",
    [
        lambda: charts.bars(HOSTILE, [HOSTILE], [("a", HOSTILE, [1])], of=HOSTILE, unit="<"),
        lambda: charts.area(HOSTILE, [(0, HOSTILE, 1), (1, HOSTILE, 2)], of=(HOSTILE, HOSTILE)),
        lambda: charts.lying(HOSTILE, [Row(HOSTILE, 1, HOSTILE)], of=(HOSTILE, HOSTILE)),
        lambda: charts.pareto(HOSTILE, [(HOSTILE, 1)], of=(HOSTILE, HOSTILE)),
        lambda: charts.graph(HOSTILE, declared(), {"billing.handler0": (HOSTILE, HOSTILE)}),
    ],
)
def test_hostile_names_are_escaped(draw: Callable[[], Picture]) -> None:
    picture = draw()
    root = read(picture)
    assert root.find(f".//{SPACE}b") is None
    assert "\u202e" not in picture.svg
    assert "<b>" in (root.findtext(f"{SPACE}title") or "")


@settings(max_examples=40)
@given(st.lists(st.tuples(st.floats(0, 1e10), words, counts, counts), max_size=20))
def test_any_picture(found: list[Any]) -> None:
    labels = [label for _, label, _, _ in found]
    layers: list[Layer] = [
        ("a", "x", [a for _, _, a, _ in found]),
        ("b", "y", [b for *_, b in found]),
    ]
    points = sorted((at, label, count) for at, label, count, _ in found)
    for picture in (
        bars(layers, labels),
        charts.area("Open", points, of=("Time", "Open")),
        charts.pareto("Top", [point[1:] for point in points], of=("Handler", "Events")),
    ):
        if picture.svg:
            read(picture)


# -- the graph


def declared(handlers: int = 2) -> topology.Topology:
    raw = {
        "SERVICE": "billing",
        "HANDLERS": {
            f"handler{n}": {
                "EVENTS": [f"shop.thing{n}.*"],
                "HANDLER": "tests.integration.handlers.handle",
            }
            for n in range(handlers)
        },
    }
    parsed, _ = conf.parse(raw)
    return topology.build(parsed, build(parsed))


def boxes(root: ET.Element, kind: str) -> dict[str, tuple[float, str]]:
    """Names of boxes: how high each is, and its class."""
    found = {}
    for group in root.iter(f"{SPACE}g"):
        css = group.get("class") or ""
        if css.startswith(f"ae-{kind}"):
            rect = group.find(f"{SPACE}rect")
            assert rect is not None
            name = (group.findtext(f"{SPACE}title") or "").split()[0]
            found[name] = (float(rect.get("y", "")), css)
    return found


def test_a_graph_has_every_exchange_queue_and_binding() -> None:
    wanted = declared()
    nodes = {
        "billing.handler0": ("42", "error"),
        "billing:delay.8s": ("5", "ok"),
        "billing:archive": ("0 · 1 consuming", "ok"),
    }
    picture = charts.graph("Topology", wanted, nodes)
    root = read(picture)
    queues, exchanges = boxes(root, "queue"), boxes(root, "exchange")
    assert set(queues) == {
        "billing.handler0", "billing.handler1", "delays", "billing:delay.8s", "billing:graveyard",
        "billing:dead", "billing:abyss", "billing:archive",
    }  # fmt: skip
    assert {"events", "billing:return", "billing:replay", "billing:archive"} <= set(exchanges)
    assert queues["billing.handler0"][1] == "ae-queue ae-error"
    for column in (queues, exchanges):
        heights = sorted(y for y, _ in column.values())
        assert all(b - a >= 30 for a, b in pairwise(heights)), "no overlap"
    told = texts(root, "title")
    for binding in wanted.bindings:
        if "delay" not in binding.queue:
            assert any(f"{binding.exchange} → {binding.queue}" in each for each in told), binding
    assert "billing.handler0 dead-letters to billing:graveyard" in told
    assert "billing:delay.8s dead-letters to billing:return" in told
    assert len(picture.rows) == len(wanted.bindings)


@pytest.mark.parametrize("handlers", [0, 1, 250])
def test_a_graph_of_any_size(handlers: int) -> None:
    root = read(charts.graph("Topology", declared(handlers), {}))
    assert len(boxes(root, "queue")) <= charts.GRAPH
