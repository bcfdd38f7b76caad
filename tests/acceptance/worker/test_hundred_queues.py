"""A worker that dies with one unacknowledged message from each of a hundred queues."""

from __future__ import annotations

from collections import Counter

import pytest

from ..conftest import Make
from ..harness import Archive, Eyes, until
from ..isolation import reaper

pytestmark = pytest.mark.timeout(300)


def test_killed_seven_times(fresh_eyes: Eyes, service: Make) -> None:
    """Only the poison message is archived."""
    eyes = fresh_eyes
    core = service(eyes, handlers="hundred")
    core.declare()
    ids = [eyes.event(f"hundred.{number}", {"plan": ["file:go"]}) for number in range(100)]
    queues = [f"core.testproject.h{number}" for number in range(100)]

    def prefetched() -> bool:
        return not any(eyes.ready(queue) for queue in queues)

    for kill in range(7):
        worker = core.worker("prefork", 2).wait_ready()
        until(lambda worker=worker: "consuming 100 queues" in worker.log, 60)  # type: ignore[misc]
        until(prefetched, 60, "a message from each queue is prefetched")
        if kill == 6:
            # The seventh finds them where they are run alone.
            assert eyes.ready("core:graveyard") == len(ids)
        worker.kill()
        if kill < 5:
            until(lambda: all(eyes.ready(queue) == 1 for queue in queues), 60, "all are back")
        else:
            until(lambda: eyes.ready("core:graveyard") == len(ids), 60, "all are in the graveyard")
    (core.where / "go").touch()
    core.worker("prefork", 2)
    reaper(core)
    until(lambda: {line["event"] for line in core.ledger(what="end")} == set(ids), 120)
    eyes.empty("core")
    assert Counter(line["event"] for line in core.ledger(what="end")) == Counter(ids)
    assert not Archive(eyes).collect()
