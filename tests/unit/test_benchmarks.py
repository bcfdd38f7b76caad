"""Figures, verdicts and pictures of benchmarks/; what they measure is not a test's business."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest

from benchmarks import charts, results
from benchmarks.measured import (
    OURS,
    PLAIN,
    Curve,
    Result,
    Table,
    Target,
    from_json,
    in_turn,
    to_json,
)
from benchmarks.programs.given import payload
from benchmarks.programs.tally import Tally
from benchmarks.rows import NAMES, benchmarks


def table(**words) -> Table:
    given = {
        "what": "Event call <one by one>",
        "unit": "events/s",
        "better": "more",
        "values": {OURS: [200.0, 150.0, 330.0], PLAIN: [100.0, 100.0, 110.0]},
        "targets": (
            Target(level="reach", factor=1.6, against=PLAIN),
            Target(level="stretch", factor=3, against=PLAIN),
        ),
    }
    return Table(**{**given, **words})


def curve(**words) -> Curve:
    points = {1.0: [100.0, 110.0], 10.0: [100.0], 100.0: [80.0]}
    given = {
        "what": "Handled", "x": "handlers", "unit": "events/s", "better": "more",
        "values": {OURS: points}, "flat": 1.3,
    }  # fmt: skip
    return Curve(**{**given, **words})


def test_ratios_are_those_of_each_round() -> None:
    ratio = table().ratio(OURS, PLAIN)

    assert (ratio.least, ratio.median, ratio.most) == (1.5, 2.0, 3.0)
    assert [met for *_, met in table().verdicts()] == [True, False]


def test_less_is_better_where_it_is() -> None:
    times = table(better="less", unit="ms", values={OURS: [1.5], PLAIN: [1.0]})

    assert [met for *_, met in times.verdicts()] == [True, True]


def test_single_target() -> None:
    memory = table(
        better="less", unit="MB", targets=(Target(level="reach", factor=5, against=""),),
        values={OURS: [4.0], PLAIN: [100.0]},
    )  # fmt: skip

    ((_, spread, met),) = memory.verdicts()

    assert (spread.median, met) == (4.0, True)


def test_flat_means_no_extra_cost() -> None:
    assert curve().growth(OURS) == pytest.approx(105 / 80)
    assert curve().met is False
    assert curve(flat=1.5).met is True
    assert curve(flat=0).met is None


def test_a_line_has_a_slope() -> None:
    line = curve(better="less", values={OURS: {1.0: [12.0], 2.0: [14.0], 3.0: [16.0]}})

    assert line.slope(OURS) == pytest.approx((2.0, 10.0, 1.0))


def test_everybody_begins_a_round_in_turn() -> None:
    order: list[str] = []

    def run(name: str) -> float:
        order.append(name)
        return 1.0

    values = in_turn({"a": lambda: run("a"), "b": lambda: run("b")}, 3)

    assert order == ["a", "b", "b", "a", "a", "b"]
    assert values == {"a": [1.0] * 3, "b": [1.0] * 3}


def test_results_round_trip() -> None:
    for measured in (table(notes=("a note",)), curve()):
        again = from_json(json.loads(json.dumps(to_json(measured))))

        assert again == measured


def test_the_history_names_what_has_changed(tmp_path) -> None:
    history = tmp_path / "history.jsonl"

    def record(*values: float, better: str = "more", machine: str = "here") -> list[str]:
        result = Result(
            name="publish", title="Publishing", about="", at="now", code="abc", seconds=3,
            versions={"machine": machine},
            measured=[
                table(better=better, values={OURS: list(values), PLAIN: [1.0, 1.0]}), curve(),
            ],
        )  # fmt: skip
        return results.record(result, history)

    assert record(1.0, 2.0) == []
    assert record(1.9, 3.0) == [], "the spreads overlap"
    assert record(5.0, 5.0, machine="elsewhere") == []
    assert record(3.1, 4.0) == [
        "better: Event call <one by one>: 2.45 (abc) → 3.55 of Celery"
    ]  # fmt: skip
    assert record(1.0, 1.0)[0].startswith("WORSE: ")
    assert record(2.0, 2.0, better="less")[0].startswith("WORSE: ")
    assert len(history.read_text().splitlines()) == 6


def test_ratios_of_another_release_are_a_column(tmp_path) -> None:
    history = tmp_path / "history.jsonl"

    def made(rabbit: str, *values: float) -> Result:
        return Result(
            name="publish", title="Publishing", about="", at="now", code="abc", seconds=3,
            versions={"machine": "here", "RabbitMQ": rabbit},
            measured=[table(values={OURS: list(values), PLAIN: [1.0, 1.0]}), curve()],
        )  # fmt: skip

    ours = made("3.10.8", 2.0, 2.0)
    for result in (ours, made("4.3.6", 9.0, 9.0), made("4.3.6", 3.0, 4.0)):
        results.record(result, history)
    lines = results.elsewhere({"publish": ours}, results.latest(history))

    assert "RabbitMQ 4.3.6; here" in "".join(lines)
    assert "RabbitMQ 3.10.8" not in "".join(lines), "that is the page's own table"
    assert "3.50x (3.00 to 4.00)" in "".join(lines), "the last run's"
    assert results.elsewhere({"publish": ours}, {}) == []


@pytest.mark.parametrize("measured", [table(), curve(), curve(values={OURS: {1.0: [0.0]}})])
def test_pictures_are_well_formed(measured) -> None:
    picture = ET.fromstring(charts.chart(measured))  # noqa: S314 - our own

    assert picture.tag.endswith("svg")
    assert measured.what in "".join(picture.itertext())


def test_all_publish_the_same_payload() -> None:
    assert len(json.dumps(payload(), separators=(",", ":"))) == 500


def test_calls_are_counted(tmp_path) -> None:
    tally = Tally(tmp_path / "tally")
    tally.reset()
    other = Tally(tally.path)

    tally.hit()
    other.hit()
    other.hit()

    assert tally.count == other.count == 3


def test_each_benchmark_has_a_description() -> None:
    found = benchmarks()

    assert tuple(found) == NAMES
    assert all(each.title and each.about for each in found.values())
