"""Workers that stop, are killed, or lose a child: nothing is lost, and what doubles is named."""

from __future__ import annotations

import dataclasses
import signal
from collections import Counter

import pytest

from ..conftest import POOLS, Make
from ..harness import Archive, Eyes, Service, until

ACT = "core.act"
QUEUE = "core.testproject.act"


def publish(eyes: Eyes, number: int, *plan: str) -> list[str]:
    messages = [eyes.message(ACT, {"plan": list(plan)}) for _ in range(number)]
    eyes.send(*messages)
    return [message.event_id for message in messages]


def ended(service: Service, ids: list[str]) -> bool:
    return {line["event"] for line in service.ledger(what="end")} >= set(ids)


@pytest.mark.parametrize("pool", POOLS)
def test_warm_shutdown(pool: str, fresh_eyes: Eyes, service: Make) -> None:
    """Finished events never run again; retries in flight are neither lost nor doubled."""
    eyes, core = fresh_eyes, service(fresh_eyes)
    core.declare()
    worker = core.worker(pool, 1 if pool == "solo" else 3, "-Q", QUEUE)
    failing = publish(eyes, 5, "fail", "ok")
    until(lambda: len(core.ledger(what="start", attempt=1)) >= 2)
    slow = publish(eyes, 6, "sleep:0.7")
    until(lambda: any(line["event"] in slow for line in core.ledger(what="start")))
    assert worker.stop() == 0
    finished = {line["event"] for line in core.ledger(what="end")}
    started = {line["event"] for line in core.ledger(what="start")}
    begun = {event_id for event_id in slow if event_id in started}
    assert begun, "nothing was in progress"
    assert begun <= finished, "a warm shutdown lets the handlers finish"
    core.worker("threads", 8, "-Q", QUEUE)
    until(lambda: ended(core, failing + slow), 30)
    eyes.empty(QUEUE)
    ends = Counter(line["event"] for line in core.ledger(what="end"))
    assert ends == dict.fromkeys(failing + slow, 1)
    for event_id in slow:
        assert len(core.runs(event_id)) == 1
    for event_id in failing:
        assert [line["attempt"] for line in core.runs(event_id)] == [1, 2]
    assert not Archive(eyes).collect()


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_a_handler_that_exits_as_if_it_were_terminated(
    pool: str, fresh_eyes: Eyes, service: Make
) -> None:
    """The exit code is that of billiard's signal handler, so there is no verdict."""
    eyes, core = fresh_eyes, service(fresh_eyes)
    core.declare()
    worker = core.worker(pool, 1, "-Q", QUEUE)
    _, healthy = publish(eyes, 1, "sysexit:-200") + publish(eyes, 1, "ok")
    until(lambda: eyes.totals()["core:graveyard"] == 1, 30, "it is left to the reaper")
    until(lambda: ended(core, [healthy]))
    eyes.empty(QUEUE)
    assert worker.stop() == 0


def test_solo_answers_before_the_next_run(fresh_eyes: Eyes, service: Make) -> None:
    """Its main thread is in the next handler, for an hour or until that ends the worker."""
    eyes, core = fresh_eyes, service(fresh_eyes)
    core.declare()
    handled, failing = publish(eyes, 1, "ok") + publish(eyes, 1, "countdown:600")
    rubbish = eyes.message(ACT, {}, event_id="rubbish")
    eyes.send(dataclasses.replace(rubbish, body=b"{"))
    (held,) = publish(eyes, 1, "file:go")
    # A measured prefetch count would change after the first run, which may reorder the others.
    worker = core.worker("solo", 1, "-Q", QUEUE, "--prefetch-multiplier", "8")
    until(lambda: core.runs(held), 30)
    until(lambda: eyes.totals()[QUEUE] == 1, 20, "the others are acked")
    worker.kill()
    (core.where / "go").touch()
    core.worker("threads", 1, "-Q", QUEUE)
    until(lambda: ended(core, [held]), 30)
    eyes.empty(QUEUE)
    starts = Counter(line["event"] for line in core.ledger(what="start"))
    assert starts == {handled: 1, failing: 1, held: 2}
    assert sum(eyes.totals("core:delay").values()) == 1
    assert len(Archive(eyes).of("rubbish")) == 1


def test_a_cold_shutdown_of_solo_runs_nothing_within_a_run(fresh_eyes: Eyes, service: Make) -> None:
    """Celery's signal handler waits for an answer of RabbitMQ, and reads deliveries meanwhile."""
    eyes, core = fresh_eyes, service(fresh_eyes)
    core.declare()
    worker = core.worker("solo", 1, "-Q", f"{QUEUE},ordinary").wait_ready()
    (held,) = publish(eyes, 1, "sleep:2")
    until(lambda: core.runs(held))
    behind = publish(eyes, 1, "ok")
    until(lambda: not eyes.ready(QUEUE), 20, "it is delivered")
    worker.signal(signal.SIGQUIT)
    worker.wait(30)
    assert not any(core.runs(event_id) for event_id in behind)
    assert "could not be read" not in worker.log
    core.worker("threads", 1, "-Q", QUEUE)
    until(lambda: ended(core, [held, *behind]))
    eyes.empty(QUEUE)
    assert [len(core.runs(event_id)) for event_id in behind] == [1]
