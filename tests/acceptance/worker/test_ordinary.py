"""Ordinary tasks of the same Celery app and Celery's remote control work as before."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from celery.concurrency import prefork, solo
from celery.concurrency.base import BasePool

from django_amqp_events.worker.pools import pool_problem
from tests.forked import REAL_START

from ..conftest import POOLS, Make
from ..harness import Eyes, Service, until

ONE, TWO = "mixed.testproject.one", "mixed.testproject.two"
ALL = {ONE, TWO, *(f"mixed.testproject.{name}" for name in ("sink", "calls"))}


class CustomPrefork(prefork.TaskPool):
    """A pool of the project's own."""


def started(service: Service, name: str) -> list[dict[str, Any]]:
    return service.ledger(what="ordinary", task=name)


def call(eyes: Eyes, queue: str, task: str, name: str, **options: Any) -> None:
    """Send an ordinary task as a client of the project would."""
    eyes.app.send_task(f"testproject.tasks.{task}", args=[name], queue=queue, **options)


@pytest.fixture(scope="module")
def mixed(eyes: Eyes, module_service: Make) -> Service:
    """A worker with beat in it, for events and ordinary tasks."""
    schedule = {"tick": {"task": "testproject.tasks.ordinary", "schedule": 1.0, "args": ["beat"]}}
    mixed = module_service(eyes, "mixed", handlers="mixed", celery={"beat_schedule": schedule})
    mixed.declare()
    mixed.worker("prefork", 4, "--beat", "--schedule", str(mixed.where / "beat")).wait_ready()
    return mixed


def test_ordinary_tasks_run_in_the_same_worker(mixed: Service, eyes: Eyes) -> None:
    call(eyes, "ordinary", "ordinary", "plain")
    at = time.time()
    call(eyes, "ordinary", "ordinary", "later", countdown=1)
    call(eyes, "ordinary", "retried", "retried")
    event_id = eyes.event("mixed.one", {"plan": ["fail", "ok"]})
    until(lambda: started(mixed, "plain") and started(mixed, "later"))
    until(lambda: len(started(mixed, "retried")) == 3)
    until(lambda: mixed.runs(event_id, "end"))
    assert started(mixed, "later")[0]["at"] >= at + 1
    assert [line["retries"] for line in started(mixed, "retried")] == [0, 1, 2]
    until(lambda: len(started(mixed, "beat")) >= 2)


def test_task_message_with_a_handlers_name_is_rejected(mixed: Service, eyes: Eyes) -> None:
    """As by send_task() in another service: it is no event, and must not end the worker."""
    eyes.app.send_task("testproject.one", queue="ordinary")
    call(eyes, "ordinary", "ordinary", "behind it")
    until(lambda: started(mixed, "behind it"))
    log = "".join(path.read_text() for path in mixed.where.glob("*.log"))
    assert "handler 'testproject.one' was called as a Celery task" in log
    assert not log.count("Unrecoverable error")


def test_a_handler_starts_an_ordinary_task(mixed: Service, eyes: Eyes) -> None:
    event_id = eyes.event("mixed.calls", {"plan": ["ok"]})
    until(lambda: started(mixed, "from a handler"))
    assert len(until(lambda: mixed.runs(event_id))) == 1


def test_cancel_and_add_consumer(mixed: Service, eyes: Eyes) -> None:
    """Remote control of a handler's queue, without a 406 and without a lost connection."""
    worker_log = next(mixed.where.glob("*.log"))
    control = eyes.app.control
    until(lambda: eyes.consumers(TWO) == 1)
    assert control.cancel_consumer(TWO, reply=True, timeout=10, limit=1)
    until(lambda: eyes.consumers(TWO) == 0)
    event_id = eyes.event("mixed.two", {"plan": ["ok"]})
    assert control.cancel_consumer(TWO, reply=True, timeout=10, limit=1), "again is harmless"
    other = eyes.event("mixed.one", {"plan": ["ok"]})
    until(lambda: mixed.runs(other, "end"))
    assert not mixed.runs(event_id)
    for _ in range(2):
        assert control.add_consumer(TWO, reply=True, timeout=10, limit=1)
    until(lambda: mixed.runs(event_id, "end"))
    # The first run may have changed the prefetch count, and with it the consumer.
    until(lambda: eyes.consumers(TWO) == 1)
    log = worker_log.read_text()
    assert "PRECONDITION" not in log
    assert "onnection to broker lost" not in log


@pytest.mark.parametrize(
    ("arguments", "ours"),
    [
        (("-Q", "images"), set()),
        (("-Q", TWO), {TWO}),
        (("-Q", f"images,{TWO}"), {TWO}),
        (("-X", f"{ONE},{TWO}"), ALL - {ONE, TWO}),
        ((), ALL),
    ],
    ids=["another queue", "one of ours", "one of each", "without two of ours", "all"],
)
def test_choosing_queues(
    fresh_eyes: Eyes, service: Make, arguments: tuple[str, ...], ours: set[str]
) -> None:
    """A worker consumes what -Q and -X say, ordinary queues and handlers' queues alike."""
    mixed = service(fresh_eyes, "mixed", handlers="mixed").declare()
    theirs = {"-Q": set(arguments[-1].split(",")) - ALL if arguments else set()}.get(
        arguments[0] if arguments else "", {"ordinary"}
    )
    mixed.worker("threads", 2, *arguments).wait_ready()
    until(lambda: all(fresh_eyes.consumers(queue) == 1 for queue in ours | theirs))
    for queue in theirs:
        call(fresh_eyes, queue, "ordinary", queue)
    until(lambda: {line["task"] for line in mixed.ledger(what="ordinary")} == theirs)
    for queue in (ALL | {"ordinary", "images"}) - ours - theirs:
        assert fresh_eyes.consumers(queue) == 0, queue
    ids = {queue: fresh_eyes.event(f"mixed.{queue[-3:]}", {"plan": ["ok"]}) for queue in (ONE, TWO)}
    for queue in ours & set(ids):
        until(lambda: mixed.runs(ids[queue], "end"))  # noqa: B023
    for queue in set(ids) - ours:
        assert not mixed.runs(ids[queue])
    if not ours:
        # Asked for later: ours to answer here too, or Celery would declare it its own way.
        (worker,) = mixed.where.glob("*.log")
        (line,) = (each for each in worker.read_text().splitlines() if "handles no events" in each)
        assert "WARNING/" in line
        assert ONE in line
        assert fresh_eyes.app.control.add_consumer(ONE, reply=True, timeout=10, limit=1)
        until(lambda: mixed.runs(ids[ONE], "end"))
        assert "PRECONDITION" not in worker.read_text()


def test_quorum_queues_with_native_delayed_delivery(fresh_eyes: Eyes, service: Make) -> None:
    """The project's own countdowns go through Celery's delay queues, our events through ours."""
    mixed = service(
        fresh_eyes, "mixed", handlers="mixed", celery={"quorum_queues": ["project.own"]}
    )
    mixed.declare()
    mixed.worker("prefork", 2).wait_ready()
    event_id = fresh_eyes.event("mixed.one", {"plan": ["fail", "ok"]})
    at = time.time()
    queues = mixed.value(
        "list(app.amqp.queues)",
        "from testproject import app\n"
        "from testproject.tasks import ordinary\n"
        "ordinary.apply_async(['delayed'], countdown=2, queue='project.own')",
    )
    until(lambda: started(mixed, "delayed"))
    assert started(mixed, "delayed")[0]["at"] >= at + 2
    until(lambda: mixed.runs(event_id, "end"))
    assert [line["attempt"] for line in mixed.runs(event_id)] == [1, 2]
    assert any(name.startswith("celery_delayed_") for name in fresh_eyes.totals()), "it was native"
    assert "project.own" in queues
    assert not ALL & set(queues)


def test_task_queues_that_name_one_of_ours_are_refused(fresh_eyes: Eyes, service: Make) -> None:
    eyes = fresh_eyes
    mixed = service(eyes, "mixed", handlers="mixed", celery={"quorum_queues": [ONE]}).declare()
    worker = mixed.worker("threads", 1)
    assert worker.wait() != 0
    assert "since workers consume them anyway" in worker.log


@pytest.mark.parametrize(
    ("pool", "autoscale", "problem"),
    [
        ("prefork", "3,1", ""),
        ("processes", None, ""),
        ("threads", None, ""),
        ("solo", None, ""),
        ("celery.concurrency.thread:TaskPool", None, ""),
        (prefork.TaskPool, (3, 1), ""),
        (CustomPrefork, (3, 1), ""),
        ("threads", "3,1", "--autoscale is not possible with the pool threads"),
        (
            solo.TaskPool,
            (3, 1),
            "--autoscale is not possible with the pool celery.concurrency.solo",
        ),
        ("gevent", None, "the gevent pool is not supported"),
        ("celery.concurrency.eventlet:TaskPool", None, "the eventlet pool is not supported"),
        (BasePool, None, "the pool celery.concurrency.base:BasePool is not supported"),
        ("celery:Celery", None, "the pool celery:Celery is not supported"),
        ("no.such:Pool", None, "the pool no.such:Pool cannot be imported"),
    ],
)
def test_pools_that_can_handle_events(pool: Any, autoscale: Any, problem: str) -> None:
    found = pool_problem(pool, autoscale)
    assert found.startswith(problem)
    assert bool(found) is bool(problem)


def test_a_worker_with_a_green_pool_does_not_start(fresh_eyes: Eyes, service: Make) -> None:
    """Without gevent, Celery refuses first; with a stand-in, our refusal is seen."""
    green = {"CELERY_CUSTOM_WORKER_POOL": "testproject.gevent:TaskPool", REAL_START: "1"}
    mixed = service(fresh_eyes, "mixed", handlers="mixed", environ=green).declare()
    worker = mixed.worker("custom", 1)
    assert worker.wait() != 0
    assert "the gevent pool is not supported" in worker.log
    assert fresh_eyes.consumers(ONE) == 0
    other = mixed.worker("custom", 1, "-Q", "images").wait_ready()
    assert fresh_eyes.app.control.add_consumer(ONE, reply=True, timeout=10, limit=1)
    until(lambda: "not consuming" in other.log)
    assert fresh_eyes.consumers(ONE) == 0


# -- events, tasks and a step of the project in one worker -----------------------------------------


#: Of each kind in a batch.
BATCH = 60
QUEUE, ONE, ORDINARY = "erp.orders", "mixed.testproject.one", "ordinary"


def publish(eyes: Eyes, batch: int) -> set[str]:
    """Publish a batch of each kind in turn; return what is to be handled."""
    published: set[str] = set()
    for number in range(batch * BATCH, (batch + 1) * BATCH):
        event_id = eyes.event("mixed.one", {"plan": ["ok"]})
        eyes.app.send_task("testproject.tasks.ordinary", args=[f"task {number}"], queue=ORDINARY)
        body = json.dumps({"number": number}).encode()
        eyes.send(replace(eyes.message("", {}), exchange="", routing_key=QUEUE, body=body))
        published |= {event_id, f"task {number}", f"foreign {number}"}
    return published


def handled(service: Service, what: str = "end") -> Counter[str]:
    """Return how often each was handled, or how often a handler began."""
    return Counter(
        [
            *(line["event"] for line in service.ledger(what=what)),
            *(line["task"] for line in service.ledger(what="ordinary")),
            *(f"foreign {line['number']}" for line in service.ledger(what="foreign")),
        ]
    )


@pytest.mark.parametrize("pool", POOLS)
def test_each_is_handled_once_and_all_after_a_lost_connection(
    fresh_eyes: Eyes, service: Make, pool: str
) -> None:
    """Nothing is lost; what was unacknowledged when the connection was cut is handled again."""
    # By default, threads of Celery's pool read the new connection beside the main thread
    # (_restore_prefetch_count_after_connection_restart), and a worker may wait for an answer that
    # another thread has read.
    celery = {"worker_enable_prefetch_count_reduction": False}
    step = {"TESTPROJECT_STEP": QUEUE}
    mixed = service(fresh_eyes, "mixed", handlers="mixed", celery=celery, environ=step).declare()
    mixed.worker(pool, 2).wait_ready().stop()  # the step has declared its queue
    expected = publish(fresh_eyes, 0)
    worker = mixed.worker(pool, 2).wait_ready()
    expected |= publish(fresh_eyes, 1)
    until(lambda: handled(mixed).keys() >= expected, 60, "all are handled")
    fresh_eyes.empty(ONE, ORDINARY, QUEUE)
    assert handled(mixed) == handled(mixed, "start") == dict.fromkeys(expected, 1)
    assert "onnection to broker lost" not in worker.log

    expected |= publish(fresh_eyes, 2)
    until(lambda: len(handled(mixed)) > 6 * BATCH + BATCH)
    fresh_eyes.cut({"name": fresh_eyes.consuming(QUEUE)})
    until(lambda: "onnection to broker lost" in worker.log)
    expected |= publish(fresh_eyes, 3)
    until(lambda: handled(mixed).keys() >= expected, 60, "all are handled")
    fresh_eyes.empty(ONE, ORDINARY, QUEUE)
    assert worker.stop() == 0
