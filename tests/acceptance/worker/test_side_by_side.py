"""Events, ordinary tasks and a step of the project's own in one worker: each is handled once."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from django_amqp_events.message.types import Message

from ..conftest import POOLS, Make
from ..harness import Eyes, Service, until

#: Of each kind in a batch: before the worker starts, and while it runs.
BATCH = 60
QUEUE, ONE, ORDINARY = "erp.orders", "mixed.testproject.one", "ordinary"


def publish(eyes: Eyes, batch: int) -> set[str]:
    """Publish a batch of each kind in turn; return what is to be handled."""
    published: set[str] = set()
    for number in range(batch * BATCH, (batch + 1) * BATCH):
        event_id = eyes.event("mixed.one", {"plan": ["ok"]})
        eyes.app.send_task("testproject.tasks.ordinary", args=[f"task {number}"], queue=ORDINARY)
        eyes.send(
            Message(
                exchange="",
                routing_key=QUEUE,
                body=json.dumps({"number": number}).encode(),
                headers={},
                properties={
                    "content_type": "application/json",
                    "content_encoding": "utf-8",
                    "delivery_mode": 2,
                },
            )
        )
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


def connection_of_the_step(eyes: Eyes) -> str:
    """Return the name of the worker's connection; the management API is late."""
    for consumer in eyes.http("GET", "/api/consumers/{vhost}"):
        if consumer["queue"]["name"] == QUEUE and consumer["channel_details"]:
            return str(consumer["channel_details"]["connection_name"])
    return ""


@pytest.mark.parametrize("pool", POOLS)
def test_each_is_handled_once(fresh_eyes: Eyes, service: Make, pool: str) -> None:
    eyes = fresh_eyes
    mixed = service(eyes, "mixed", handlers="mixed", environ={"TESTPROJECT_STEP": QUEUE}).declare()
    mixed.worker(pool, 2).wait_ready().stop()  # the step has declared its queue
    expected = publish(eyes, 0)
    worker = mixed.worker(pool, 2).wait_ready()
    expected |= publish(eyes, 1)
    until(lambda: handled(mixed).keys() >= expected, 60, "all are handled")
    eyes.empty(ONE, ORDINARY, QUEUE)
    assert worker.stop() == 0
    assert handled(mixed) == handled(mixed, "start") == dict.fromkeys(expected, 1)
    assert "onnection to broker lost" not in worker.log


@pytest.mark.parametrize("pool", POOLS)
def test_all_are_consumed_after_a_lost_connection(
    fresh_eyes: Eyes, service: Make, pool: str
) -> None:
    """Nothing is lost; what was unacknowledged is handled again."""
    # By default, threads of Celery's pool read the new connection beside the main thread
    # (_restore_prefetch_count_after_connection_restart), and a worker may wait for an answer that
    # another thread has read.
    celery = {"worker_enable_prefetch_count_reduction": False}
    step = {"TESTPROJECT_STEP": QUEUE}
    mixed = service(fresh_eyes, "mixed", handlers="mixed", celery=celery, environ=step).declare()
    worker = mixed.worker(pool, 2).wait_ready()
    expected = publish(fresh_eyes, 0)
    until(lambda: len(handled(mixed)) > BATCH)
    fresh_eyes.cut({"name": until(lambda: connection_of_the_step(fresh_eyes))})
    until(lambda: "onnection to broker lost" in worker.log)
    expected |= publish(fresh_eyes, 1)
    until(lambda: handled(mixed).keys() >= expected, 60, "all are handled")
    fresh_eyes.empty(ONE, ORDINARY, QUEUE)
    assert worker.stop() == 0
