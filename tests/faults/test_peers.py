"""The rows of :mod:`tests.faults.peers`: that the sum is right, not what the peer makes of them."""

from __future__ import annotations

from pprint import pformat

import pytest

from . import all_rows, peers
from .counts import Counts
from .running import run
from .world import Grounds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

EVENTS = 30


def counted(name: str, grounds: Grounds) -> Counts:
    """Run a row; every event is counted once, and the fault hit."""
    result = run(peers.PEERS[name], grounds, events=EVENTS, seed="suite", make=peers.peer_world)
    counts = result.counts
    assert counts is not None
    assert not result.error, result.error
    assert result.hit, pformat(result)
    assert counts.published == EVENTS
    ends = counts.handled + counts.archived + counts.waiting + counts.lost
    assert ends == counts.published, counts
    return counts


def test_killed_worker_is_restarted(grounds: Grounds) -> None:
    counts = counted("child-within", grounds)
    assert counts.handled + counts.archived == EVENTS, counts
    assert counts.cut, counts


def test_unconsumed_events_wait(grounds: Grounds) -> None:
    assert counted("handler-removed", grounds).waiting == EVENTS


def test_every_fault_row_is_compared_or_explained() -> None:
    cannot = [name for names in peers.CANNOT.values() for name in names]
    assert sorted([*peers.PEERS, *cannot]) == sorted(all_rows())
