"""The rows of :mod:`tests.faults.workers`, with few events."""

from __future__ import annotations

import pytest

from . import rows_of, workers
from .conftest import Hold, cases
from .rows import ROWS

pytestmark = pytest.mark.timeout(400)


# Classes, so that several processes share the rows (pytest-xdist's --dist loadscope).
class TestProcesses:
    @pytest.mark.parametrize("name", cases("workers", workers.PROCESSES))
    def test_row(self, name: str, hold: Hold) -> None:
        hold(name)


class TestStops:
    @pytest.mark.parametrize("name", cases("workers", workers.STOPS))
    def test_row(self, name: str, hold: Hold) -> None:
        hold(name)


def test_every_row_is_run() -> None:
    groups = {workers.PROCESSES, workers.STOPS}
    assert {ROWS[name].group for name in rows_of("workers")} == groups
