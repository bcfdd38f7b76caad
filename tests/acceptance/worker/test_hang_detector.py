"""Hanging handlers are named in the log and by a signal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..conftest import POOLS, Make
from ..harness import (
    Eyes,
    Service,
    Worker,
    until,
)
from .test_children import events_worker

pytestmark = pytest.mark.timeout(240)

ACT = "core.act"
QUEUE = "core.testproject.act"
NAME = "watched@localhost"


def hang(core: Service, eyes: Eyes, worker: Worker) -> str:
    """Let a handler hang beside one that does not, until it is reported; return its event's id."""
    eyes.event(ACT, {"plan": ["ok"]})
    event_id = eyes.event(ACT, {"plan": ["file:go"]})
    until(lambda: core.runs(event_id, "hanging"), 40, "it is reported")
    (start,) = core.runs(event_id)
    first = core.runs(event_id, "hanging")[0]
    assert first["handler"] == "testproject.act"
    assert first["worker_pid"] == start["pid"]
    assert first["seconds"] >= 1
    text = f"event 'core.act' ({event_id}) for testproject.act has not ended after"
    until(lambda: text in worker.log, 30, "a thread writes the log")
    assert f"in process {start['pid']}" in worker.log
    return event_id


def watched(core: Service, pool: str, seconds: float) -> Worker:
    beside = ("--no-mirror", "--no-reaper", "--no-relay", "--no-batches")
    arguments = ("-P", pool, "-c", "2", "--hang-after", str(seconds), "-n", NAME, *beside)
    return events_worker(core, *arguments, "--", "-Q", QUEUE).wait_ready()


def test_a_log_handler_delays_no_event(service: Make, fresh_eyes: Eyes, tmp_path: Path) -> None:
    """One that sends mail would stop the event loop for as long as its server does not answer."""
    go = tmp_path / "go"
    core = service(fresh_eyes, environ={"TESTPROJECT_SLOW_LOG": str(go)}).declare()
    worker = core.worker("prefork", 2, "-Q", QUEUE)
    killed = fresh_eyes.event(ACT, {"plan": ["kill_once:x"]})
    until(lambda: core.ledger(what="logging"), 30, "the lost process is logged")
    others = fresh_eyes.events(3, ACT, "ok")
    until(lambda: core.ended([killed, *others]), 30, "all events are handled meanwhile")
    assert not core.ledger(what="logged")
    go.touch()
    assert worker.stop() == 0
    assert len(core.ledger(what="logged")) == len(core.ledger(what="logging"))
    assert all(line["pid"] == worker.pid for line in core.ledger(what="logged"))


@pytest.mark.parametrize("pool", POOLS)
def test_hanging_handler_is_named_and_not_ended(pool: str, core: Service, fresh_eyes: Eyes) -> None:
    worker = watched(core, pool, 1)
    event_id = hang(core, fresh_eyes, worker)
    # Not at each look: again when it has gone on for twice as long.
    until(lambda: len(core.runs(event_id, "hanging")) >= 2, 30, "it is reported again")
    first, second = core.runs(event_id, "hanging")[:2]
    assert second["seconds"] >= 2 * first["seconds"]
    if pool == "prefork":  # one is enough
        told = core.command("events_status", "--workers", "5", "--format", "json")[1]
        (queue,) = (each for each in json.loads(told)["queues"] if each["name"] == QUEUE)
        ((why, count),) = queue["prefetch"].items()
        assert f"  {count} {why}  " in core.command("events_status", "--workers", "5")[1]
    (core.where / "go").touch()
    until(lambda: core.runs(event_id, "end"), 20, "it continues")
    fresh_eyes.empty(QUEUE)
    assert {line["event"] for line in core.ledger(what="hanging")} == {event_id}
