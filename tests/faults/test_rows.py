"""Each row of the fault table, with few events."""

from __future__ import annotations

from typing import ClassVar

import pytest

from tests.conftest import slow

from . import all_rows, brokers, rows_of, workers
from .conftest import Hold, cases

pytestmark = pytest.mark.timeout(400)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.cls is None:
        return
    metafunc.parametrize("name", cases(*metafunc.cls.rows))
    if metafunc.cls is TestDatabases:
        kinds = ["postgresql", *slow("sqlite", "mariadb")]
        metafunc.parametrize("grounds", kinds, indirect=True, scope="module")


class Rows:
    """Rows of a module, all or some groups of it.

    In classes, so that several processes share the rows (pytest-xdist's --dist loadscope).
    """

    rows: ClassVar[tuple[str, ...]]

    def test_row(self, name: str, hold: Hold) -> None:
        hold(name)


class TestProcesses(Rows):
    rows = ("workers", workers.PROCESSES)


class TestStops(Rows):
    rows = ("workers", workers.STOPS)


class TestKills(Rows):
    rows = ("brokers", brokers.KILLS, brokers.TIMEOUT)


class TestNetwork(Rows):
    rows = ("brokers", brokers.NETWORK)


class TestAlarms(Rows):
    rows = ("brokers", brokers.ALARMS)


class TestPublishers(Rows):
    rows = ("publishers",)


class TestDatabases(Rows):
    rows = ("databases",)


class TestTopologies(Rows):
    rows = ("topologies",)


class TestClusters(Rows):
    rows = ("clusters",)


def test_every_row_is_run() -> None:
    found = [name for each in Rows.__subclasses__() for name in rows_of(*each.rows)]
    assert sorted(found) == sorted(all_rows())
