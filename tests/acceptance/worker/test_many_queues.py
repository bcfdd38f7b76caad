"""Workers that consume many queues."""

from __future__ import annotations

from collections import Counter

import pytest

from ..conftest import Make
from ..harness import Archive, Eyes, until
from ..isolation import reaper

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
def test_killed_seven_times(fresh_eyes: Eyes, service: Make) -> None:
    """With an unacknowledged message from each of a hundred queues."""
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


def test_short_events_do_not_wait_for_a_backlog_of_long_ones(
    fresh_eyes: Eyes, service: Make
) -> None:
    """Queues have their turns, so a short one waits for one long run, not for all."""
    core = service(fresh_eyes)
    core.declare()
    for _ in range(12):
        fresh_eyes.event("core.act", {"plan": ["sleep:2"]})
    short = [fresh_eyes.event("core.act.once", {"plan": ["ok"]}) for _ in range(20)]
    core.worker("prefork", 2)
    until(lambda: all(core.runs(event, "end") for event in short), 60, "the short ones have run")
    assert len(core.ledger(name="core.act", what="start")) <= 6


def test_a_backlog_in_one_of_many_queues_occupies_all_processes(
    fresh_eyes: Eyes, service: Make
) -> None:
    core = service(fresh_eyes)
    core.declare()
    core.worker("prefork", 3)
    for _ in range(30):
        fresh_eyes.event("core.act", {"plan": ["sleep:0.3"]})
    until(lambda: len(core.ledger(what="end")) == 30, 60, "all are handled")
    lines = core.ledger(what="start") + core.ledger(what="end")
    running = [0]
    for line in sorted(lines, key=lambda line: line["at"]):
        running.append(running[-1] + (1 if line["what"] == "start" else -1))
    assert max(running) == 3
