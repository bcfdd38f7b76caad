"""Every way to die: the poison is archived with its death history, its neighbours are handled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.conftest import Vhost

from ..conftest import Make
from ..harness import Archive, Eyes, Service, until
from ..isolation import Supervisor, fewer_deliveries

pytestmark = pytest.mark.timeout(500)

ACT = "core.act"
#: Processes or threads.
POOLS = {"prefork": 6, "threads": 4, "solo": 1}
#: Of what kills, before it is run alone. Each takes a whole worker where there are no children,
#: so there it is half of what a service has; integration/broker/test_topology.py counts six.
DELIVERIES = {"prefork": 6, "threads": 3, "solo": 3}

#: Plans that end the process: poison if they also do so alone. The kernel, out of memory, does what
#: "kill" does.
DEADLY = {"kill": "kill", "exit": "exit", "segfault": "segfault", "crowd": "kill_crowd"}
NEIGHBOURS = 12


@dataclass
class Story:
    """The results of one batch of events in one pool."""

    core: Service
    neighbours: list[str]
    passing: list[str]
    deadly: dict[str, str] = field(default_factory=dict)
    entries: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    deaths: int = 0
    left: dict[str, int] = field(default_factory=dict)


@pytest.fixture(scope="class")
def story(request: pytest.FixtureRequest, vhost: Vhost, module_service: Make) -> Iterator[Story]:
    pool: str = request.cls.pool
    eyes = Eyes(vhost.node, vhost.name)
    yield tell(pool, module_service(eyes, name=f"core{pool}"), eyes)
    eyes.close()


def tell(pool: str, core: Service, eyes: Eyes) -> Story:
    """Publish all events to one worker and a reaper, and wait until they are settled."""
    core.declare()
    deliveries = DELIVERIES[pool]
    fewer_deliveries(eyes, rf"^{core.name}\.testproject\.", deliveries)

    def publish(name: str, *plan: str) -> str:
        return eyes.event(name, {"plan": list(plan)})

    neighbours = [publish(ACT, "sleep:0.05") for _ in range(NEIGHBOURS)]
    passing = [publish(ACT, "fail", "ok") for _ in range(3)]
    main = Supervisor(lambda: core.worker(pool, POOLS[pool], "-Q", f"{core.name}.testproject.act"))
    beside = Supervisor(lambda: core.start("events_reaper"))
    archive = Archive(eyes, core.name)
    good = {*neighbours, *passing}

    def done() -> bool:
        archived = {entry["event_id"] for entry in archive.collect()}
        ended = {line["event"] for line in core.ledger(what="end")}
        return archived >= {*deadly.values()} and ended >= good

    def killed(event_id: str) -> bool:
        return len(core.runs(event_id)) >= deliveries

    story = Story(core, neighbours, passing)
    deadly = story.deadly
    try:
        for way, step in DEADLY.items():
            if way == "crowd" or pool != "prefork":
                # This one takes all others with it, as each does where there are no children:
                # those before it have died of themselves by then.
                until(lambda: all(map(killed, deadly.values())), 90, "those before it kill")
            deadly[way] = publish(ACT, step)
        until(done, 240, "the bad are archived and the good are handled")
        eyes.drained(core.name)
        # The main worker continues.
        after = publish(ACT, "ok")
        until(lambda: core.runs(after, "end"), 60, "the worker continues")
        # Not killed, which its last ack might not survive.
        main.end()
        main.workers[-1].stop()
    finally:
        main.kill()
        beside.kill()
    # The statistics of the last seconds have come, too.
    eyes.drained(core.name)
    for entry in archive.collect():
        story.entries.setdefault(entry["event_id"], []).append(entry)
    story.deaths, story.left = main.deaths, eyes.totals(core.name)
    return story


class Ways:
    """Tests for every pool; one class per pool, so that xdist can distribute them."""

    pool: str

    @pytest.mark.parametrize("way", DEADLY)
    def test_poison_is_archived_with_its_deaths(self, story: Story, way: str) -> None:
        event_id = story.deadly[way]
        (entry,) = story.entries[event_id]
        assert entry["reason"] == "poison"
        assert entry["handler"] == "testproject.act"
        assert entry["queue"] == f"{story.core.name}.testproject.act"
        (death,) = entry["deaths"]
        assert death["queue"] == f"{story.core.name}.testproject.act"
        assert death["reason"] == "delivery_limit"
        runs = story.core.runs(event_id)
        assert not story.core.runs(event_id, "end")
        # All deliveries, and two where it is alone; being killed is no attempt. billiard runs a job
        # again that it believes a dead process has not begun: one run in twenty, so two at most.
        assert 2 < len(runs) <= DELIVERIES[self.pool] + 4
        assert {line["attempt"] for line in runs} == {1}

    def test_neighbours_are_handled_and_keep_their_retries(self, story: Story) -> None:
        ended = {line["event"] for line in story.core.ledger(what="end")}
        assert ended >= {*story.neighbours, *story.passing}
        assert not {*story.neighbours, *story.passing} & set(story.entries)
        for event_id in story.passing:
            assert {line["attempt"] for line in story.core.runs(event_id)} == {1, 2}

    def test_the_worker_was_killed_and_nothing_loops(self, story: Story) -> None:
        assert story.deaths >= 1
        assert not any(story.left.values()), story.left


class TestPrefork(Ways):
    pool = "prefork"


@pytest.mark.slow
class TestThreads(Ways):
    pool = "threads"


@pytest.mark.slow
class TestSolo(Ways):
    pool = "solo"
