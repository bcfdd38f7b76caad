"""Several new events in one pool job behave as if each had its own."""

from __future__ import annotations

import json
import signal
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from broker import BrokerError
from django_amqp_events.conf import FAST_PATHS

from ..conftest import Make
from ..harness import Archive, Eyes, Service, Worker, task_id, until

pytestmark = pytest.mark.timeout(240)

ACT = "core.act"
QUEUE = "core.testproject.act"
#: Prefetched for each process, so that much waits for it.
MANY = ("--prefetch-multiplier", "20", "-Q", QUEUE)
#: Enough for the worker to know how long the handler takes.
LEARN = 40


@pytest.fixture
def core(service: Make, fresh_eyes: Eyes) -> Service:
    made = service(fresh_eyes, events={"FAST_PATHS": list(FAST_PATHS)})
    made.declare()
    return made


def publish(eyes: Eyes, *plans: list[str]) -> list[str]:
    messages = [eyes.message(ACT, {"plan": plan}) for plan in plans]
    eyes.send(*messages)
    return [message.event_id for message in messages]


def handed(core: Service) -> dict[str, int]:
    """Jobs and events that the worker has given to its pool."""
    said = core.control("inspect", "stats", "--json")
    stats: dict[str, Any] = json.loads(said[said.index("{") :])
    (found,) = [stat["amqp_events"]["chunks"] for stat in stats.values()]
    assert isinstance(found, dict)
    return found


def learn(core: Service, eyes: Eyes, concurrency: int = 1) -> Worker:
    """Start a worker that knows how long its handler takes."""
    ids = publish(eyes, *[["ok"]] * LEARN)
    worker = core.worker("prefork", concurrency, *MANY).wait_ready()
    until(lambda: ended(core) >= set(ids), 60)
    return worker


def ended(core: Service) -> set[str]:
    return {line["event"] for line in core.ledger(what="end")}


def counts(core: Service, what: str) -> dict[str, int]:
    return dict(Counter(line["event"] for line in core.ledger(what=what)))


def test_a_backlog_goes_in_few_jobs(service: Make, fresh_eyes: Eyes) -> None:
    # A handler that waits for the disk would soon get jobs of its own.
    core = service(
        fresh_eyes,
        environ={"TESTPROJECT_UNSYNCED": "yes"},
        events={"FAST_PATHS": list(FAST_PATHS)},
    )
    core.declare()
    ids = publish(fresh_eyes, *[["ok"]] * 300)
    core.worker("prefork", 2, *MANY).wait_ready()
    until(lambda: ended(core) >= set(ids), 60)
    fresh_eyes.empty(QUEUE)
    assert counts(core, "start") == counts(core, "end") == dict.fromkeys(ids, 1)
    told = handed(core)
    # Events behind a slow one are dispatched and counted again.
    assert told["events"] >= 300
    assert told["jobs"] < 200


def test_it_can_be_switched_off(service: Make, fresh_eyes: Eyes) -> None:
    others = [path for path in FAST_PATHS if path != "chunks"]
    core = service(fresh_eyes, events={"FAST_PATHS": others})
    core.declare()
    (event_id,) = publish(fresh_eyes, ["ok"])
    core.worker("prefork", 1, *MANY).wait_ready()
    until(lambda: core.runs(event_id, "end"))
    said = core.control("inspect", "stats", "--json")
    assert '"chunks": null' in said
    assert '"reads": "used"' in said


def test_failure_in_a_chunk_is_retried_and_the_rest_runs(core: Service, fresh_eyes: Eyes) -> None:
    learn(core, fresh_eyes)
    plans = [["fail", "ok"] if number % 7 == 3 else ["ok"] for number in range(60)]
    ids = publish(fresh_eyes, *plans)
    until(lambda: ended(core) >= set(ids), 60)
    fresh_eyes.empty(QUEUE)
    runs = counts(core, "start")
    assert [runs[event_id] for event_id in ids] == [len(plan) for plan in plans]
    assert set(counts(core, "end").values()) == {1}


@pytest.mark.parametrize("deed", ["kill", "exit"])
def test_only_the_event_that_kills_is_delivered_again(
    core: Service, fresh_eyes: Eyes, deed: str
) -> None:
    """Events before it are settled and events behind it have not begun."""
    learn(core, fresh_eyes)
    deadly = {20, 45}
    plans = [[deed, "ok"] if number in deadly else ["ok"] for number in range(60)]
    ids = publish(fresh_eyes, *plans)
    victims = {ids[number] for number in deadly}
    others = set(ids) - victims
    # Each delivery ends a process until the broker dead-letters it.
    until(lambda: fresh_eyes.ready("core:graveyard") == len(victims), 60)
    until(lambda: ended(core) >= others, 60)
    fresh_eyes.empty(QUEUE)
    runs = counts(core, "start")
    assert {event_id: runs[event_id] for event_id in others} == dict.fromkeys(others, 1)
    assert not any(
        line["redelivered"] for line in core.ledger(what="start") if line["event"] in others
    )
    assert {runs[event_id] for event_id in victims} == {6}
    assert not ended(core) & victims


def test_hanging_event_delays_no_other(core: Service, fresh_eyes: Eyes) -> None:
    """All others are handled once, in the other process."""
    worker = learn(core, fresh_eyes, concurrency=2)
    plans = [["file:go"] if number == 5 else ["ok"] for number in range(40)]
    ids = publish(fresh_eyes, *plans)
    until(lambda: ended(core) >= {*ids} - {ids[5]}, 40)
    (core.where / "go").touch()
    until(lambda: ids[5] in ended(core), 40)
    assert set(counts(core, "end").values()) == set(counts(core, "start").values()) == {1}
    worker.stop()
    fresh_eyes.empty(QUEUE)


def test_hanging_in_both_processes_loses_and_doubles_nothing(
    core: Service, fresh_eyes: Eyes
) -> None:
    worker = learn(core, fresh_eyes, concurrency=2)
    plans = [["sleep:0.2"] if number % 9 == 5 else ["ok"] for number in range(200)]
    ids = publish(fresh_eyes, *plans)
    until(lambda: ended(core) >= set(ids), 60)
    assert set(counts(core, "end").values()) == set(counts(core, "start").values()) == {1}
    worker.stop()
    fresh_eyes.empty(QUEUE)


def test_one_is_terminated_by_remote_control(core: Service, fresh_eyes: Eyes) -> None:
    """Its neighbours are handled; it is archived as revoked."""
    learn(core, fresh_eyes)
    plans = [["sleep:60"] if number == 4 else ["ok"] for number in range(20)]
    ids = publish(fresh_eyes, *plans)
    until(lambda: core.runs(ids[4]))
    number = task_id(ids[4], ACT, "testproject.act")
    fresh_eyes.app.control.terminate(number, signal="SIGKILL")
    entry = Archive(fresh_eyes).wait(ids[4])
    assert entry["reason"] == "revoked"
    others = {*ids} - {ids[4]}
    until(lambda: ended(core) >= others, 60)
    assert set(counts(core, "start").values()) == {1}
    fresh_eyes.empty(QUEUE)


def test_a_cold_shutdown_archives_nothing(core: Service, fresh_eyes: Eyes) -> None:
    """The killed event is delivered again, whichever one the worker recorded as running."""
    worker = learn(core, fresh_eyes)
    for number in range(4):
        ids = publish(fresh_eyes, *[["sleep:0.009"]] * 60)
        until(partial(core.runs, ids[7 * number + 5]), 30)
        worker.signal(signal.SIGQUIT)
        worker.wait(30)
        worker = core.worker("prefork", 1, *MANY).wait_ready()
        until(lambda: ended(core) >= set(ids), 60)  # noqa: B023
    fresh_eyes.empty(QUEUE)
    assert Archive(fresh_eyes).collect() == []


def test_remote_control_ends_only_the_named_task(core: Service, fresh_eyes: Eyes) -> None:
    """If that task has ended, nothing is terminated, least of all its neighbour."""
    learn(core, fresh_eyes)
    archive, doomed = Archive(fresh_eyes), set()
    for number in range(4):
        ids = publish(fresh_eyes, *[["sleep:0.009"]] * 60)
        until(partial(core.runs, ids[10 * number + 5]), 30)
        chosen = ids[10 * number + 8]
        doomed.add(chosen)
        name = task_id(chosen, ACT, "testproject.act")
        fresh_eyes.app.control.terminate(name, signal="SIGKILL")
        until(lambda: ended(core) >= {*ids} - doomed, 60)  # noqa: B023
    fresh_eyes.empty(QUEUE)
    assert {entry["event_id"] for entry in archive.collect()} <= doomed


@pytest.mark.parametrize("handler", ["act", "rated"])
def test_remote_control_ends_an_event_outside_chunks(
    service: Make, fresh_eyes: Eyes, handler: str
) -> None:
    """An event with a time or rate limit is in no chunk."""
    limits = {"task_annotations": {"testproject.act": {"time_limit": 60}}}
    options = service(fresh_eyes, "options", handlers="options", celery=limits)
    options.declare()
    options.worker("prefork", 2, "-Q", f"options.testproject.{handler}").wait_ready()
    event_id = fresh_eyes.event(f"options.{handler}", {"plan": ["sleep:60"]})
    until(lambda: options.runs(event_id))
    number = task_id(event_id, f"options.{handler}", f"testproject.{handler}", "options")
    fresh_eyes.app.control.terminate(number, signal="SIGKILL")
    assert Archive(fresh_eyes, "options").wait(event_id)["reason"] == "revoked"


def test_a_warm_shutdown_that_is_cut_short_runs_nothing_again(
    core: Service, fresh_eyes: Eyes
) -> None:
    """Finished events are acked while the next one in the same process still runs."""
    for _ in range(3):
        worker = learn(core, fresh_eyes)
        plans = [["ok"]] * 16 + [["sleep:8"]] + [["ok"]] * 20
        ids = publish(fresh_eyes, *plans)
        until(partial(core.runs, ids[16]), 30)
        worker.signal(signal.SIGTERM)
        # Long before the one that runs has ended, and those behind it begin.
        until(lambda: fresh_eyes.totals()[QUEUE] == 1 + 20, 6, "what has ended is acked")
        before = ended(core)
        assert ids[16] not in before
        worker.kill()
        worker = core.worker("prefork", 1, *MANY).wait_ready()
        until(lambda: ended(core) >= set(ids), 60)  # noqa: B023
        worker.stop()
        assert {counts(core, "end")[event_id] for event_id in before} == {1}
    fresh_eyes.empty(QUEUE)


def test_ordinary_tasks_keep_no_event_from_its_turn(core: Service, fresh_eyes: Eyes) -> None:
    """Both wait for the same processes: neither is served twice as often as the other."""
    publish(fresh_eyes, *[["sleep:0.02"]] * 60)
    core.python(
        "from testproject.celery import app\n"
        "for _ in range(200): app.send_task('testproject.tasks.nap', [0.05], queue='ordinary')"
    )
    # As many of each are taken in advance.
    core.worker("prefork", 2, "--prefetch-multiplier", "16", "-Q", f"{QUEUE},ordinary").wait_ready()
    until(lambda: len(core.ledger(what="end")) >= 40, 60)
    fortieth = sorted(line["at"] for line in core.ledger(what="end"))[39]
    naps = [line for line in core.ledger(what="nap") if line["at"] <= fortieth]
    assert 10 < len(naps) < 100


def test_the_connection_is_lost(core: Service, fresh_eyes: Eyes) -> None:
    """Unacknowledged events are delivered again, acknowledged ones are not."""
    eyes = fresh_eyes
    learn(core, eyes)
    ids = publish(eyes, *[["ok"]] * 200)
    until(lambda: len(ended(core)) > LEARN + 20)
    for connection in until(eyes.connections):
        with suppress(BrokerError):  # the first one may have taken others along
            eyes.cut(connection)
    until(lambda: ended(core) >= set(ids), 90)
    eyes.empty(QUEUE)
    again = {event_id for event_id, count in counts(core, "end").items() if count > 1}
    in_hand = {line["event"] for line in core.ledger(what="start") if line["redelivered"]}
    assert again <= in_hand
