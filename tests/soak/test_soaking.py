"""A soak finds a planted fault of the package, and nothing else; its clocks are stepped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.conftest import _grounds, grounds  # noqa: F401 - fixtures
from tests.faults.world import Grounds, world

from . import clocks, soaking

PROJECT = Path(__file__).parents[1] / "acceptance" / "project" / "testproject"
CLOCKS = """
import datetime, os, sys, time
import clock
clock.INTERVAL = 0
clock.install()
def tell():
    monotonic = time.clock_gettime(time.CLOCK_MONOTONIC)
    print(time.time(), datetime.datetime.now().timestamp(), monotonic, flush=True)
tell()
sys.stdin.readline()
pid = os.fork()
tell()
pid and os.waitpid(pid, 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("grounds", ["sqlite"], indirect=True)
def test_a_fault_of_the_package_is_found(
    grounds: Grounds,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(soaking, "EVENTS", 50)
    # These would end in the graveyard, or take as long as their time limit.
    monkeypatch.setattr(soaking, "DEADLY", 0.0)
    monkeypatch.setattr(soaking, "HANGING", 0.0)
    with world(grounds, name="soak", events=0, seed="planted") as here:
        here.service.handlers = "planted"
        result = soaking.soak(here, [grounds.node], 1, (), 1)
        lines = here.service.ledger()
    failed = {(line["event"], line["handler"]) for line in lines if line["what"] == "raised"}
    assert failed
    assert [each.rule for each in result.wrong] == ["lost"] * len(failed)
    assert result.figures.lost == len(failed)
    assert any("raised" in line for line in result.story)
    assert result.figures.pairs > len(failed)


@pytest.mark.slow
def test_a_clock_is_stepped_in_a_process_and_its_forks(tmp_path: Path) -> None:
    file = tmp_path / "clock"
    clocks.step(file, 0)
    environ = {"TESTPROJECT_CLOCK": str(file), "PYTHONPATH": str(PROJECT)}
    process = subprocess.Popen(
        [sys.executable, "-c", CLOCKS],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ,
    )  # fmt: skip
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        first = process.stdout.readline()
        clocks.step(file, -100)
        process.stdin.write("\n")
        process.stdin.flush()
        lines = [first, *process.stdout]
    offsets = []
    for line in lines:
        wall, date, monotonic = map(float, line.split())
        assert date == pytest.approx(wall, abs=5)
        offsets.append(wall - monotonic)
    assert [round(each - offsets[0]) for each in offsets] == [0, -100, -100]
