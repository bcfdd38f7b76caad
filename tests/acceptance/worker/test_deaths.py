"""Workers that stop, are killed, or lose a child: nothing is lost, and what doubles is named."""

from __future__ import annotations

import dataclasses
import signal
from collections import Counter

import pytest

from django_amqp_events.worker.prefetch import JOB_EVENTS

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


@pytest.mark.parametrize("pool", POOLS)
def test_a_killed_worker_loses_nothing(pool: str, fresh_eyes: Eyes, service: Make) -> None:
    """SIGKILL with events in flight, failing ones among them: each is handled in the end."""
    eyes, core = fresh_eyes, service(fresh_eyes)
    core.declare()
    worker = core.worker(pool, 1 if pool == "solo" else 3, "-Q", QUEUE)
    ids = publish(eyes, 30, "sleep:0.05") + publish(eyes, 10, "fail", "ok")
    until(lambda: len(core.ledger(what="start")) >= 8)
    worker.kill()
    before = {line["event"] for line in core.ledger(what="start")}
    core.worker("threads", 8, "-Q", QUEUE)
    until(lambda: ended(core, ids), 30)
    eyes.empty(QUEUE)
    starts = Counter((line["event"], line["attempt"]) for line in core.ledger(what="start"))
    doubled = {event_id for (event_id, _), count in starts.items() if count > 1}
    assert doubled <= before, "only prefetched events may run twice"
    assert max(starts.values()) <= 2
    assert not Archive(eyes).collect()
    assert eyes.totals()["core:graveyard"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_a_handler_that_takes_the_worker_with_it(
    pool: str, fresh_eyes: Eyes, service: Make
) -> None:
    """Without children a dying handler ends the worker; the next one gets the event again."""
    eyes, core = fresh_eyes, service(fresh_eyes)
    core.declare()
    worker = core.worker(pool, 1)
    (event_id,) = publish(eyes, 1, "exit_once:worker")
    assert worker.wait() == 3
    core.worker("threads", 1)
    until(lambda: ended(core, [event_id]))
    first, second = core.runs(event_id)
    assert (first["attempt"], second["attempt"]) == (1, 1)
    assert (first["redelivered"], second["redelivered"]) == (False, True)


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


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_finished_events_survive_a_kill(pool: str, fresh_eyes: Eyes, service: Make) -> None:
    """All deliveries have been read, so the kernel still sends a written ack."""
    eyes = fresh_eyes
    core = service(eyes)
    core.declare()
    (failing,) = publish(eyes, 1, "fail", "ok")
    (first,) = publish(eyes, 1, "kill_once:first")
    assert core.worker(pool, 1, "-Q", QUEUE).wait() == -signal.SIGKILL
    until(lambda: eyes.ready(QUEUE) == 2, 20, "the retry and the killer are back")
    (handled,) = publish(eyes, 1, "ok")
    (second,) = publish(eyes, 1, "kill_once:second")
    assert core.worker(pool, 1, "-Q", QUEUE).wait() == -signal.SIGKILL
    core.worker(pool, 1, "-Q", QUEUE)
    until(lambda: ended(core, [failing, handled, first, second]), 30)
    eyes.empty(QUEUE, "core:delay.1s")
    starts = Counter((line["event"], line["attempt"]) for line in core.ledger(what="start"))
    assert starts == {
        (failing, 1): 1, (failing, 2): 1, (handled, 1): 1, (first, 1): 2, (second, 1): 2,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_a_kill_repeats_a_few_quick_events(pool: str, fresh_eyes: Eyes, service: Make) -> None:
    """Those that share a job with the one that kills; none a third time."""
    eyes = fresh_eyes
    core = service(eyes)
    core.declare()
    quick, failing, killers = publish(eyes, 20, "ok"), publish(eyes, 5, "fail", "ok"), []
    for number in range(2):
        killers += publish(eyes, 1, f"kill_once:{number}")
        assert core.worker(pool, 1, "-Q", QUEUE).wait() == -signal.SIGKILL
    core.worker(pool, 1, "-Q", QUEUE)
    until(lambda: ended(core, [*quick, *failing, *killers]), 30)
    eyes.empty(QUEUE, "core:delay.1s")
    starts = Counter((line["event"], line["attempt"]) for line in core.ledger(what="start"))
    repeated = {key for key, number in starts.items() if number > 1} - {(k, 1) for k in killers}
    assert max(starts.values()) == 2
    assert len(repeated) <= 2 * (JOB_EVENTS - 1)
    told = {line["event"] for line in core.ledger(what="start") if line["redelivered"]}
    assert {event_id for event_id, _ in repeated} <= told, "its second run says so"


@pytest.fixture(scope="module")
def prefork(eyes: Eyes, module_service: Make) -> Service:
    """A prefork worker for all tests of this module that only kill its children."""
    core = module_service(eyes)
    core.declare()
    # Celery replaces dead children every five seconds: enough of them to die one after another.
    # RabbitMQ counts what is on its way while the prefetch count changes (QueueStep.renew).
    core.worker("prefork", 8, "-Q", QUEUE, "--prefetch-multiplier", "8").wait_ready()
    return core


def test_beyond_the_delivery_limit(prefork: Service, eyes: Eyes) -> None:
    """Six deliveries, then the graveyard, with its death in it; a neighbour is not touched."""
    (event_id,) = publish(eyes, 1, "kill")
    (neighbour,) = publish(eyes, 1, "ok")
    until(lambda: eyes.ready("core:graveyard"), 40)
    (dead,) = eyes.take("core:graveyard")
    assert dead.headers["event-id"] == event_id
    assert dead.headers["x-death"][0]["queue"] == QUEUE
    assert dead.headers["x-death"][0]["reason"] == "delivery_limit"
    assert dead.delivery_info["routing_key"] == QUEUE
    runs = prefork.runs(event_id)
    assert len(runs) == 6
    assert {line["attempt"] for line in runs} == {1}, "being killed is no attempt"
    until(lambda: ended(prefork, [neighbour]))
    assert not Archive(eyes).of(event_id)


def test_requeued_for_ever(prefork: Service, eyes: Eyes) -> None:
    """Reject(requeue=True) each time ends in the graveyard too."""
    (event_id,) = publish(eyes, 1, "requeue")
    until(lambda: eyes.ready("core:graveyard"), 20)
    (dead,) = eyes.take("core:graveyard")
    assert dead.headers["event-id"] == event_id
    assert len(prefork.runs(event_id)) == 6


def test_a_child_killed_from_outside(prefork: Service, eyes: Eyes) -> None:
    """After an out-of-memory kill the event runs again as the same attempt."""
    import os

    (event_id,) = publish(eyes, 1, "file:go")
    (line,) = until(lambda: prefork.runs(event_id))
    os.kill(line["pid"], signal.SIGKILL)
    until(lambda: len(prefork.runs(event_id)) == 2)
    (prefork.where / "go").touch()
    until(lambda: ended(prefork, [event_id]))
    first, second = prefork.runs(event_id)
    assert (first["attempt"], second["attempt"]) == (1, 1)
    assert second["redelivered"]
    assert second["pid"] != first["pid"]
