"""The benchmarks run; how long anything takes is not a test's business."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.commands import run_program

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def test_the_cheapest_ones_run() -> None:
    """Each counts what it has published and handled."""
    benchmarks = ("publish", "latency", "--short", "--scale", "0.2")
    done = run_program(sys.executable, "-m", "benchmarks", *benchmarks, cwd=ROOT, timeout=None)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Event call, confirmed, one by one" in done.stdout
    assert "Latency publish → handler, 50/s, p99" in done.stdout
