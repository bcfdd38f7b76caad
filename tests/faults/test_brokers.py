"""The rows of :mod:`tests.faults.brokers`, with few events."""

from __future__ import annotations

import pytest

from . import brokers, rows_of
from .conftest import Hold, cases
from .rows import ROWS

pytestmark = pytest.mark.timeout(400)


# Classes, so that several processes share the rows (pytest-xdist's --dist loadscope).
class TestKills:
    @pytest.mark.parametrize("name", cases("brokers", brokers.KILLS, brokers.TIMEOUT))
    def test_row(self, name: str, hold: Hold) -> None:
        hold(name)


class TestNetwork:
    @pytest.mark.parametrize("name", cases("brokers", brokers.NETWORK))
    def test_row(self, name: str, hold: Hold) -> None:
        hold(name)


class TestAlarms:
    @pytest.mark.parametrize("name", cases("brokers", brokers.ALARMS))
    def test_row(self, name: str, hold: Hold) -> None:
        hold(name)


def test_every_row_is_run() -> None:
    groups = {brokers.KILLS, brokers.TIMEOUT, brokers.NETWORK, brokers.ALARMS}
    assert {ROWS[name].group for name in rows_of("brokers")} == groups
