"""``events_worker`` and its companion: started, started again, never left behind."""

from __future__ import annotations

import os
import signal
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from django_amqp_events.message.headers import EVENT_HANDLER

from ..conftest import Make
from ..harness import (
    Archive,
    Eyes,
    Service,
    Worker,
    alive,
    until,
)

pytestmark = pytest.mark.timeout(180)


def command(service: Service, *arguments: str, name: str = "", **options: Any) -> Worker:
    """Start a management command."""
    return service.start(*arguments, name=name, TESTPROJECT_OUTLIVES="1", **options)


def events_worker(service: Service, *arguments: str, **options: Any) -> Worker:
    pool = () if "-P" in arguments else ("-P", "solo")
    return command(service, "events_worker", *pool, *arguments, **options)


def children(pid: int) -> list[int]:
    """Return the children that any thread of a process has started."""
    listed = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for text in listed for child in text.split()]


def tree(pid: int) -> list[int]:
    """Return a process and all below it."""
    return [pid, *(each for child in children(pid) for each in tree(child))]


def beside(parent: int, name: str = "events_companion") -> list[int]:
    """Pids of the running commands of this name that a process has started."""
    found = []
    for pid in children(parent):
        with suppress(OSError):
            if name in Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0"):
                found.append(pid)
    return found


@pytest.fixture
def core(service: Make, fresh_eyes: Eyes) -> Service:
    made = service(fresh_eyes, constants={"management.companion.CHECK_INTERVAL": 0.5}).declare()
    made.migrate()
    return made


def test_three_processes(core, fresh_eyes):
    """An idle worker is a Celery worker with its pool process, and one companion."""
    worker = events_worker(core, "-P", "prefork", "-c", "1").wait_ready()
    event_id = fresh_eyes.event("core.act.once", {"plan": ["ok"]})
    until(lambda: core.ended([event_id]), 30, "it is handled")
    until(lambda: "mirroring core:archive" in worker.log, 30, "the companion works")
    [companion] = beside(worker.pid)
    processes = tree(worker.pid)
    assert len(processes) == 3
    assert companion in processes
    assert worker.stop() == 0
    assert not any(map(alive, processes))


def isolate(eyes: Eyes, *plans: list[str]) -> list[str]:
    """Publish events to the graveyard, as retries that return to it."""
    messages = []
    for plan in plans:
        made = eyes.message("core.act", {"plan": plan})
        headers = {**made.headers, EVENT_HANDLER: "testproject.act"}
        made = replace(made, exchange="core:return", routing_key="core:graveyard", headers=headers)
        messages.append(made)
    eyes.send(*messages)
    return [made.event_id for made in messages]


def test_the_reaper_runs_while_there_is_something_to_isolate(core, fresh_eyes):
    core.constants = {"management.companion.CHECK_INTERVAL": 2, "worker.reaper.IDLE_SECONDS": 2}
    worker = events_worker(core).wait_ready()
    [companion] = until(lambda: beside(worker.pid), 30, "its companion runs")
    until(lambda: "mirroring core:archive" in worker.log, 30, "the mirror has begun")
    assert not beside(companion, "events_reaper")
    for plan in ("sleep:3", "ok"):
        (event_id,) = isolate(fresh_eyes, [plan])
        until(lambda: core.ended([event_id]), 40, "it is run")  # noqa: B023
        assert len(core.runs(event_id)) == 1
        until(lambda: not beside(companion, "events_reaper"), 20, "the reaper has ended")
    assert "starting events_reaper" in worker.log
    assert "events_reaper ended" not in worker.log
    assert worker.stop() == 0


def test_several_reapers_share_the_isolated_events(core, fresh_eyes):
    """A reaper has one unacknowledged event, so a killed process affects no other event."""
    reapers = [command(core, "events_reaper") for _ in range(2)]
    poison = isolate(fresh_eyes, *[["kill"]] * 5)
    good = isolate(fresh_eyes, *[["sleep:0.3"]] * 50)
    until(lambda: all("consuming 2 queues" in each.log for each in reapers), 40, "both consume")
    until(lambda: len(core.ledger(what="start")) >= 12, 40, "they work")
    os.kill(reapers[0].pid, signal.SIGKILL)
    until(lambda: core.ended(good), 90, "the good are handled")
    archive = Archive(fresh_eyes)
    assert {archive.wait(each)["reason"] for each in poison} == {"poison"}
    runs = Counter(line["event"] for line in core.ledger(what="start"))
    # The killed reaper may have counted the death of one.
    assert sorted(runs[each] for each in poison)[:-1] == [2] * 4
    assert max(runs[each] for each in poison) <= 4
    assert sum(runs[each] for each in good) <= len(good) + 1
    fresh_eyes.empty("core:graveyard", "core:dead", "core:abyss")
    assert reapers[1].stop() == 0


def test_what_is_killed_leaves_nothing(core, fresh_eyes):
    core.constants["worker.reaper.IDLE_SECONDS"] = 600
    worker = events_worker(core).wait_ready()
    isolate(fresh_eyes, ["ok"])
    until(lambda: core.ledger(what="end"), 40, "the reaper works")
    [companion] = beside(worker.pid)
    [reaper] = beside(companion, "events_reaper")
    os.kill(companion, signal.SIGKILL)
    until(lambda: not alive(reaper), 20, "the reaper has ended")
    [companion] = until(lambda: beside(worker.pid), 30, "another companion runs")
    until(lambda: worker.log.count("mirroring core:archive") == 2, 30, "the mirror has begun")
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    until(lambda: not alive(companion), 20, "the companion has ended")


def test_started_beside_a_module_named_celery(core):
    """As in `cd project/app; ../manage.py events_worker`, beside the app's celery.py."""
    app = core.where / "app"
    app.mkdir()
    (app / "celery.py").write_text("raise RuntimeError('this is not Celery')\n")
    manage = core.where / "manage.py"
    manage.write_text(
        "import sys\n"
        "from django.core.management import execute_from_command_line\n"
        "execute_from_command_line(sys.argv)\n"
    )
    worker = events_worker(core, program=(str(manage),), where=app).wait_ready()
    until(lambda: "mirroring core:archive" in worker.log, 30, "the mirror has begun")
    assert worker.stop() == 0
