"""The table of docs/guarantees.md, row by row, in each pool: a batch of events, judged afterwards.

Every case is one event with a plan: what the handler does on its first attempt, on its second,
and so on. What became of it is read from the ledger (what ran), from the archive queue and from
the queues' depths.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest

from django_amqp_events.message.types import Message

from ..conftest import Make
from ..harness import (
    Archive,
    Eyes,
    Service,
    until,
)

POOLS = ("prefork", "threads", "solo")

ACT, ONCE, PICKY, LIMITED = "core.act", "core.act.once", "core.act.picky", "core.act.limited"


@dataclass(frozen=True)
class Case:
    """An event, how often its handler runs, and how it ends."""

    name: str
    event: str
    plan: tuple[str, ...]
    runs: int
    archived: str = ""  # the reason
    exception: str = ""  # a part of its type or message
    pools: tuple[str, ...] = POOLS
    finished: int | None = None  # runs that reached their end


CASES = [
    Case("returns", ACT, ("ok",), 1, finished=1),
    Case("ignore", ACT, ("ignore",), 1, finished=0),
    Case("fails once", ACT, ("fail", "ok"), 2, finished=1),
    Case("used up", ACT, ("fail:used up",), 3, "exhausted", "ValueError"),
    Case("no retries", ONCE, ("fail:at once",), 1, "exhausted", "ValueError"),
    Case("never retried", PICKY, ("never",), 1, "failed", "steps.Never"),
    Case("retry(countdown)", ACT, ("countdown:1", "ok"), 2, finished=1),
    Case("retry(eta)", ACT, ("eta:1.5", "ok"), 2, finished=1),
    Case("retry(exc)", ACT, ("retry_exc", "ok"), 2, finished=1),
    Case("retry(exc) used up", ONCE, ("retry_exc",), 1, "exhausted", "KeyError"),
    Case("retry(new exc) used up", ONCE, ("retry_new_exc",), 1, "exhausted", "KeyError"),
    Case("retry(max_retries) below", PICKY, ("retry_limit:1",), 2, "exhausted", "Retry"),
    Case("retry(max_retries) above", ONCE, ("retry_limit:2", "retry_limit:2", "ok"), 3, finished=1),
    Case("retry(args)", ACT, ("retry_args",), 1, "unsupported", "retry()"),
    Case("reject", ACT, ("reject", "ok"), 2, finished=1),
    Case("reject used up", ONCE, ("reject",), 1, "exhausted", "rejected"),
    Case("requeue", ACT, ("requeue_once:{pool}",), 2, finished=1),
    Case("replace", ACT, ("replace",), 1, "unsupported", "replace()"),
    Case("add_to_chord", ACT, ("chord",), 1, "unsupported", "add_to_chord()"),
    Case("MemoryError", ACT, ("memory", "ok"), 2, finished=1),
    Case("MemoryError used up", ONCE, ("memory",), 1, "exhausted", "MemoryError"),
    Case("sys.exit", ACT, ("sysexit", "ok"), 2, finished=1),
    Case("sys.exit used up", ONCE, ("sysexit:4",), 1, "exhausted", "SystemExit"),
    Case("KeyboardInterrupt", ACT, ("interrupt", "ok"), 2, finished=1),
    Case("unpicklable", ONCE, ("unpicklable",), 1, "exhausted", "Unpicklable"),
    Case("unspeakable", ONCE, ("unspeakable",), 1, "exhausted", "Unspeakable"),
    Case("frozen", ACT, ("frozen_dataclass", "ok"), 2, finished=1),
    Case("frozen used up", ONCE, ("frozen_dataclass",), 1, "exhausted", "OutOfStock"),
    Case("attributes looked up", ONCE, ("looked_up",), 1, "exhausted", "LookedUp"),
    Case("a megabyte of words", ONCE, ("big",), 1, "exhausted", "ValueError"),
    Case("soft limit", LIMITED, ("sleep:30", "ok"), 2, finished=1, pools=("prefork",)),
    Case("soft limit used up", LIMITED, ("sleep:30",), 2, "exhausted", "SoftTimeLimitExceeded",
         pools=("prefork",)),
    Case("hard limit", LIMITED, ("deaf:30", "ok"), 2, finished=1, pools=("prefork",)),
    Case("hard limit used up", LIMITED, ("deaf:30",), 2, "exhausted",
         "exceptions.TimeLimitExceeded", pools=("prefork",)),
    Case("child killed", ACT, ("kill_once:core",), 2, finished=1, pools=("prefork",)),
    Case("os._exit", ACT, ("exit_once:core",), 2, finished=1, pools=("prefork",)),
    Case("coroutine", "core.async", ("fail", "ok"), 2, finished=1),
    Case("coroutine used up", "core.async", ("fail",), 2, "exhausted", "ValueError"),
    Case("coroutine, soft limit", "core.async.limited", ("sleep",), 2, "exhausted",
         "SoftTimeLimitExceeded", pools=("prefork",), finished=0),
    Case("coroutine, hard limit", "core.async.deaf", ("sleep",), 1, "exhausted",
         "exceptions.TimeLimitExceeded", pools=("prefork",)),
]  # fmt: skip


#: Cases that end their process in the first of two runs.
KILLERS = frozenset({"child killed", "os._exit"})


@dataclass
class Batch:
    """All cases of a pool, when nothing is left to happen."""

    pool: str
    service: Service
    archive: list[dict[str, Any]]
    totals: dict[str, int]
    ids: dict[str, str]
    exit_code: int
    log: str

    def archived(self, event_id: str) -> list[dict[str, Any]]:
        return [entry for entry in self.archive if entry["event_id"] == event_id]


def run(pool: str, eyes: Eyes, service: Service) -> Batch:
    service.declare()
    archive = Archive(eyes)
    cases = [case for case in CASES if pool in case.pools]
    ids: dict[str, str] = {}
    # Events in the job of one that ends the process run again, so those come last.
    messages: list[Message] = []
    killers: list[Message] = []
    for case in cases:
        plan = [step.format(pool=pool) for step in case.plan]
        message = eyes.message(case.event, {"plan": plan, "case": case.name})
        ids[case.name] = message.event_id
        (killers if case.name in KILLERS else messages).append(message)
    worker = service.worker(pool, 1 if pool == "solo" else 3)

    expected = sum(bool(case.archived) for case in cases)

    def settled(ended: int) -> bool:
        assert worker.alive, worker.log[-5000:]
        archived = len(archive.collect()) >= expected
        left = {name: n for name, n in eyes.totals("core").items() if n and ":archive" not in name}
        # Depths of queues are half a second old.
        return len(service.ledger(what="start")) >= ended and archived and not left

    runs = sum(case.runs for case in cases)
    eyes.send(*messages)
    until(lambda: settled(runs - 2 * len(killers)), 60, f"the events of {pool} are settled")
    if killers:
        eyes.send(*killers)
        until(lambda: settled(runs), 60, "those that end their process are settled")
    exit_code = worker.stop()
    return Batch(pool, service, archive.collect(), eyes.totals(), ids, exit_code, worker.log)


@pytest.fixture(scope="module")
def batches(eyes: Eyes, module_service: Make) -> Callable[[str], Batch]:
    """Run a pool's batch when it is first asked for, whatever the order of the tests."""
    return lru_cache(maxsize=None)(lambda pool: run(pool, eyes, module_service(eyes)))


@pytest.fixture(params=POOLS)
def batch(request: pytest.FixtureRequest, batches: Callable[[str], Batch]) -> Batch:
    return batches(request.param)


# Time limits, and children to be killed, are prefork's alone.
ROWS = [
    pytest.param(pool, case, id=f"{pool}-{case.name}")
    for pool in POOLS
    for case in CASES
    if pool in case.pools
]


@pytest.mark.parametrize(("batch", "case"), ROWS, indirect=["batch"])
def test_row(batch: Batch, case: Case) -> None:
    """The handler ran as often as its row says, and the event ended where its row says."""
    event_id = batch.ids[case.name]
    runs = batch.service.runs(event_id)
    assert len(runs) == case.runs, runs
    attempts = [line["attempt"] for line in runs]
    if case.name == "requeue" or case.name in KILLERS:
        # The broker's redelivery is no retry of ours.
        assert attempts == [1, 1]
        # The first may be one too, if another such event was in its job.
        assert runs[-1]["redelivered"]
    else:
        assert attempts == list(range(1, case.runs + 1))
    if case.finished is not None:
        assert len(batch.service.runs(event_id, "end")) == case.finished
    archived = batch.archived(event_id)
    if not case.archived:
        assert not archived
        return
    (entry,) = archived
    assert entry["reason"] == case.archived
    assert entry["attempt"] == case.runs
    exception = entry["exception"]
    assert case.exception in f"{exception['type']}: {exception['message']}"
    assert entry["handler"]
    assert entry["queue"] == f"core.{entry['handler']}"
    assert entry["event_name"] == case.event
    assert entry["source"] == "tests"
    assert len(entry["history"]) == case.runs
    assert json.loads(entry["message"].body) == [
        [], {"plan": list(case.plan), "case": case.name}, {}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("used up", "_fail"),
        ("never retried", "run"),
        ("retry(exc) used up", "_retry_exc"),
        ("retry(new exc) used up", "_retry_new_exc"),
        ("reject used up", "run"),
        ("MemoryError used up", "run"),
        ("sys.exit used up", "<lambda>"),
        ("unpicklable", "run"),
        ("unspeakable", "run"),
        ("coroutine used up", "coroutine"),
    ],
)
def test_the_archive_names_the_place(batch: Batch, name: str, function: str) -> None:
    """The real exception with its traceback and frames, down to the line that raised."""
    (entry,) = batch.archived(batch.ids[name])
    functions = [frame["function"] for frame in entry["frames"]]
    assert function in functions, functions
    assert entry["traceback"].startswith("Traceback"), entry["traceback"]
    assert "testproject" in entry["traceback"]
    assert entry["exception"]["type"].rpartition(".")[2] in entry["traceback"]


def test_nothing_is_left_and_nothing_is_archived_beside(batch: Batch) -> None:
    assert not {name: n for name, n in batch.totals.items() if n and name != "core:archive"}
    expected = [c for c in CASES if c.archived and batch.pool in c.pools]
    assert len(batch.archive) == len(expected)
    assert batch.exit_code == 0
    assert "Traceback" not in batch.log.split("Warm shutdown")[-1]
