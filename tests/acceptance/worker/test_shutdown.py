"""Workers that are stopped: what has finished is never run again, nothing is lost.

The fault table has rolling restarts under load.
"""

from __future__ import annotations

import dataclasses
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SLOW

from ..conftest import Make
from ..harness import Archive, Eyes, Service, until

pytestmark = pytest.mark.timeout(300)

ACT = "core.act"
QUEUE = "core.testproject.act"
POOLS = (
    ("prefork", 3),
    pytest.param("threads", 4, marks=SLOW),
    pytest.param("solo", 1, marks=SLOW),
)


def again(service: Service, what: str = "end") -> dict[str, list[dict[str, Any]]]:
    """Events that have more than one such line, with all their lines."""
    lines = Counter(line["event"] for line in service.ledger(what=what))
    repeated = {event_id for event_id, count in lines.items() if count > 1}
    return {event_id: service.ledger(event=event_id) for event_id in repeated}


def test_solo_answers_before_the_next_run(core: Service, fresh_eyes: Eyes) -> None:
    """Its main thread is in the next handler, for an hour or until that ends the worker."""
    handled, failing = fresh_eyes.events(1, ACT, "ok") + fresh_eyes.events(1, ACT, "countdown:600")
    rubbish = fresh_eyes.message(ACT, {}, event_id="rubbish")
    fresh_eyes.send(dataclasses.replace(rubbish, body=b"{"))
    (held,) = fresh_eyes.events(1, ACT, "file:go")
    # A measured prefetch count would change after the first run, which may reorder the others.
    worker = core.worker("solo", 1, "-Q", QUEUE, "--prefetch-multiplier", "8")
    until(lambda: core.runs(held), 30)
    until(lambda: fresh_eyes.totals()[QUEUE] == 1, 20, "the others are acked")
    worker.kill()
    (core.where / "go").touch()
    core.worker("threads", 1, "-Q", QUEUE)
    until(lambda: core.ended([held]), 30)
    fresh_eyes.empty(QUEUE)
    starts = Counter(line["event"] for line in core.ledger(what="start"))
    assert starts == {handled: 1, failing: 1, held: 2}
    assert sum(fresh_eyes.totals("core:delay").values()) == 1
    assert len(Archive(fresh_eyes).of("rubbish")) == 1


def test_a_cold_shutdown_of_solo_runs_nothing_within_a_run(core: Service, fresh_eyes: Eyes) -> None:
    """Celery's signal handler waits for an answer of RabbitMQ, and reads deliveries meanwhile."""
    worker = core.worker("solo", 1, "-Q", f"{QUEUE},ordinary").wait_ready()
    (held,) = fresh_eyes.events(1, ACT, "sleep:2")
    until(lambda: core.runs(held))
    behind = fresh_eyes.events(1, ACT, "ok")
    until(lambda: not fresh_eyes.ready(QUEUE), 20, "it is delivered")
    worker.signal(signal.SIGQUIT)
    worker.wait(30)
    assert not any(core.runs(event_id) for event_id in behind)
    assert "could not be read" not in worker.log
    core.worker("threads", 1, "-Q", QUEUE)
    until(lambda: core.ended([held, *behind]))
    fresh_eyes.empty(QUEUE)
    assert [len(core.runs(event_id)) for event_id in behind] == [1]


@pytest.mark.parametrize("soft", [0, 4])
@pytest.mark.parametrize(("pool", "concurrency"), POOLS)
def test_cold_and_soft_shutdowns(
    pool: str, concurrency: int, soft: int, fresh_eyes: Eyes, service: Make
) -> None:
    """SIGQUIT: what has finished is not run again, what is ended in its midst is; none is lost.

    Only prefork can end a run; in the others it continues, and its verdict counts.
    """
    core = service(fresh_eyes, celery={"worker_soft_shutdown_timeout": soft}).declare()
    worker = core.worker(pool, concurrency, "-Q", QUEUE).wait_ready()
    done = [fresh_eyes.event(ACT, {"plan": ["ok"]}) for _ in range(20)]
    until(lambda: len(core.ledger(what="end")) == len(done))
    fresh_eyes.empty(QUEUE)
    held = fresh_eyes.event(ACT, {"plan": ["file:go"]})
    until(lambda: core.runs(held), what="it runs")
    # Shorter than a soft shutdown; without one it is to be running still.
    short = fresh_eyes.event(ACT, {"plan": ["sleep:1" if soft or pool != "prefork" else "file:go"]})
    if pool != "solo":
        until(lambda: core.runs(short), what="it runs too")
    worker.signal(signal.SIGQUIT)
    if pool != "prefork":
        until(lambda: "Ctrl+C again" in worker.log)
        (core.where / "go").touch()
    worker.wait(60)
    (core.where / "go").touch()
    second = core.worker("threads", 2, "-Q", QUEUE).wait_ready()
    ids = [*done, held, short]
    until(lambda: {line["event"] for line in core.ledger(what="end")} == set(ids), 40)
    fresh_eyes.empty("core")
    assert not again(core)
    expected = dict.fromkeys(ids, 1)
    if pool == "prefork":
        expected[held] = 2
        expected[short] = 1 if soft else 2
    assert Counter(line["event"] for line in core.ledger(what="start")) == expected
    assert not Archive(fresh_eyes).collect()
    assert second.stop() == 0


def test_a_solo_worker_begins_nothing_when_it_is_asked_to_stop(
    fresh_eyes: Eyes, service: Make
) -> None:
    """Prefetched messages are requeued, including those that arrive during the shutdown."""
    eyes, core = fresh_eyes, service(fresh_eyes, celery={"worker_prefetch_multiplier": 8}).declare()
    ids = [eyes.message(ACT, {"plan": ["file:go"]}) for _ in range(8)]
    eyes.send(*ids)
    worker = core.worker("solo", 1, "-Q", QUEUE).wait_ready()
    until(lambda: core.ledger(what="start"))
    worker.signal(signal.SIGTERM)
    until(lambda: not pending(worker.pid, signal.SIGTERM), what="the signal has come")
    (core.where / "go").touch()
    assert worker.wait(30) == 0
    assert len(core.ledger(what="start")) == 1
    following = core.worker("solo", 1, "-Q", QUEUE).wait_ready()
    until(lambda: len(core.ledger(what="end")) == len(ids), 40)
    assert following.stop() == 0
    assert not again(core, "start")


def pending(pid: int, number: int) -> bool:
    """Return True if a process has a signal that it has not dealt with."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = [line.split()[1] for line in status.splitlines() if line[:6] in ("SigPnd", "ShdPnd")]
    return any(int(mask, 16) & 1 << number - 1 for mask in masks)


@pytest.mark.parametrize("remote", [False, pytest.param(True, marks=SLOW)])
def test_the_connection_lives_while_threads_are_waited_for(
    service: Make, fresh_eyes: Eyes, remote: bool
) -> None:
    """RabbitMQ closes one without heartbeats, and delivers again what has run."""
    core = service(fresh_eyes, celery={"broker_heartbeat": 2}).declare()
    worker = core.worker("threads", 1, "-Q", QUEUE)
    (held,) = fresh_eyes.events(1, ACT, "sleep:10")
    until(lambda: core.runs(held))
    if remote:
        fresh_eyes.app.control.shutdown()
        assert worker.wait(30) == 0
    else:
        assert worker.stop() == 0
    assert core.ended([held])
    fresh_eyes.empty(QUEUE)
