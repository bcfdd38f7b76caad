"""Each row of the fault table, with few events; one of the peer's."""

from __future__ import annotations

from typing import ClassVar

import pytest

from tests.conftest import slow

from . import all_rows, brokers, peers, rows_of, workers
from .conftest import Hold, cases
from .running import run
from .world import Grounds

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


def test_every_row_is_run_and_compared_with_the_peer_or_explained() -> None:
    found = [name for each in Rows.__subclasses__() for name in rows_of(*each.rows)]
    assert sorted(found) == sorted(all_rows())
    cannot = [name for names in peers.CANNOT.values() for name in names]
    assert sorted([*peers.PEERS, *cannot]) == sorted(all_rows())


@pytest.mark.slow
def test_a_row_of_the_peer(grounds: Grounds) -> None:
    """Each event is counted once; what becomes of them is the peer's business."""
    row = peers.PEERS["child-within"]
    result = run(row, grounds, events=30, seed="suite", make=peers.peer_world)
    counts = result.counts
    assert counts is not None
    assert not result.error, result.error
    assert result.hit, result
    assert counts.published == 30
    assert counts.handled + counts.archived + counts.waiting + counts.lost == 30, counts
    assert counts.cut, counts
