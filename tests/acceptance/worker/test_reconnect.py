"""Connections that break, brokers that go, queues and exchanges that are not there."""

from __future__ import annotations

import signal

import pytest

from tests.integration.wire import Proxy

from ..conftest import POOLS, Make
from ..harness import (
    Eyes,
    Service,
    until,
)

ACT, ONCE = "core.act", "core.act.once"
NAMES = ("act", "once", "picky", "limited", "slow", "strict", "coroutine")
QUEUES = tuple(f"core.testproject.{name}" for name in NAMES)


def each_once(eyes: Eyes) -> bool:
    """Say whether every handler's queue has one consumer."""
    return all(eyes.consumers(queue) == 1 for queue in QUEUES)


@pytest.mark.parametrize("pool", POOLS)
def test_all_queues_are_consumed_immediately(fresh_eyes: Eyes, core: Service, pool: str) -> None:
    """An idle worker does not wait for its event loop between queues."""
    core.worker(pool, 1).wait_ready()
    until(lambda: each_once(fresh_eyes), 3)


@pytest.mark.parametrize("pool", POOLS[:2])
def test_only_runs_in_progress_are_repeated_after_a_cut(
    fresh_eyes: Eyes, core: Service, pool: str
) -> None:
    """What waited in the worker for a process or thread begins on its new delivery only."""
    core.worker(pool, 2, "-Q", QUEUES[0])
    ids = fresh_eyes.events(8, ACT, "file:go")
    until(lambda: len(core.ledger(what="start")) == 2, 30)
    until(lambda: fresh_eyes.queue(QUEUES[0]).get("messages_unacknowledged") == 4, 30)
    name = fresh_eyes.consuming(QUEUES[0])
    fresh_eyes.cut({"name": name})
    until(
        lambda: fresh_eyes.consumers(QUEUES[0]) == 1 and fresh_eyes.consuming(QUEUES[0]) != name, 30
    )
    (core.where / "go").touch()
    until(lambda: core.ended(ids), 30)
    fresh_eyes.empty(QUEUES[0])
    assert len(core.ledger(what="start")) <= 8 + 2


@pytest.mark.parametrize("passes", [3, 8, 12], ids=["first", "steps", "later"])
def test_the_broker_falls_silent_during_the_start(
    fresh_eyes: Eyes, service: Make, passes: int
) -> None:
    """The connection is open, the event loop does not run yet, and no answer arrives any more."""
    with Proxy.to(fresh_eyes.url) as proxy:
        core = service(
            fresh_eyes,
            celery={"broker_heartbeat": 2, "broker_channel_error_retry": True},
            events={"TOPOLOGY": "external"},
            constants={"worker.connection_errors.SILENCE_SECONDS": 1},
        ).declare()
        core.url = proxy.url
        proxy.everything, proxy.passes = True, passes
        core.worker("prefork", 1)
        until(lambda: any(link.held for link in proxy.links), 30, "the worker waits for an answer")
        proxy.everything = False
        proxy.forget()
        (event_id,) = fresh_eyes.events(1, ACT, "ok")
        until(lambda: core.ended([event_id]), 30, "the worker connects again")


@pytest.mark.parametrize("pool", POOLS[:2])
@pytest.mark.parametrize("passes", [12, None], ids=["starting", "running"])
def test_a_worker_ends_while_the_broker_is_silent(
    fresh_eyes: Eyes, service: Make, pool: str, passes: int | None
) -> None:
    """When it stops it asks for about ten answers, on two connections, and waits for one."""
    with Proxy.to(fresh_eyes.url) as proxy:
        core = service(
            fresh_eyes,
            # Heartbeats would find the dead connection first.
            celery={"broker_heartbeat": 0, "broker_channel_error_retry": True},
            constants={"worker.connection_errors.SILENCE_SECONDS": 3},
        ).declare()
        core.url = proxy.url
        if passes is not None:
            proxy.everything, proxy.passes = True, passes
        worker = core.worker(pool, 2)
        if passes is None:
            until(lambda: each_once(fresh_eyes), 30)
            proxy.flowing.clear()
        else:
            until(lambda: any(link.held for link in proxy.links), 30, "it waits for an answer")
        worker.signal(signal.SIGTERM)
        assert worker.wait(60) == 0
    assert worker.log.count("RabbitMQ does not answer") == 1, worker.log


def test_an_exclusively_consumed_queue_is_left_out(fresh_eyes: Eyes, service: Make) -> None:
    """RabbitMQ refuses and closes the channel, once; later, remote control adds the queue."""
    core = service(fresh_eyes, events={"TOPOLOGY": "external"}).declare()
    # Quorum queues take no notice of an exclusive consumer.
    fresh_eyes.http("DELETE", f"/api/queues/{{vhost}}/{QUEUES[2]}")
    fresh_eyes.http("PUT", f"/api/queues/{{vhost}}/{QUEUES[2]}", {"durable": True})
    channel = fresh_eyes.channel()
    channel.basic_consume(QUEUES[2], exclusive=True)
    worker = core.worker("threads", 2)
    until(lambda: "ACCESS_REFUSED" in worker.log, 20)
    channel.close()
    until(lambda: "restart the worker" in worker.log and "consuming 8 queues" in worker.log, 30)
    core.control("control", "add_consumer", QUEUES[2], seconds=10)
    until(lambda: each_once(fresh_eyes), 60)
    (event_id,) = fresh_eyes.events(1, ACT, "ok")
    until(lambda: core.runs(event_id, "end"))


def test_a_missing_queue_at_the_start(fresh_eyes: Eyes, service: Make) -> None:
    """TOPOLOGY external: it is reported and looked for, while the rest is handled."""
    eyes = fresh_eyes
    core = service(eyes, events={"TOPOLOGY": "external"}).declare()
    eyes.http("DELETE", f"/api/queues/{{vhost}}/{QUEUES[0]}")
    worker = core.worker("prefork", 2)
    until(lambda: f"queue '{QUEUES[0]}' is missing" in worker.log, 30)
    assert "events_declare" in worker.log
    other = eyes.event(ONCE, {"plan": ["ok"]})
    until(lambda: core.runs(other, "end"))
    assert eyes.declared(QUEUES[0]) is None, "external never declares"
    eyes.close()

    def channels() -> int:
        return sum(channel["vhost"] == eyes.vhost for channel in eyes.http("GET", "/api/channels"))

    def looks() -> int:
        return worker.log.count(f"queue '{QUEUES[0]}' is missing")

    until(lambda: looks() >= 2)
    before = channels()
    until(lambda: looks() >= 4, 20)
    # One of them may have been closed, and not yet opened again, when they were first counted.
    assert channels() <= before + 1, "the channel that RabbitMQ closed is opened, not one more"
    core.declare()
    until(lambda: each_once(eyes), 20)
    (event_id,) = eyes.events(1, ACT, "ok")
    until(lambda: core.runs(event_id, "end"))


# -- an exchange that is not there -----------------------------------------------------------------


ACT = "core.act"


def test_held_until_the_limit_then_given_back(fresh_eyes: Eyes, service: Make) -> None:
    """Shortly before the consumer timeout the broker gets the delivery back, to deliver again."""
    core = service(fresh_eyes, constants={"worker.jobs.HOLDING": 2 / 1800})
    worker = core.worker("threads", 2, "-Q", ",".join(QUEUES[:2])).wait_ready()
    fresh_eyes.http("DELETE", "/api/exchanges/{vhost}/core:delay.1s")
    event_id = fresh_eyes.event(ACT, {"plan": ["fail", "ok"]})
    until(lambda: len(core.runs(event_id)) == 2, 30)
    core.declare()
    until(lambda: core.runs(event_id, "end"), 30)
    runs = core.runs(event_id)
    assert [line["attempt"] for line in runs[:2]] == [1, 1]
    assert [line["redelivered"] for line in runs[:2]] == [False, True]
    assert runs[1]["at"] - runs[0]["at"] >= 0.5, "it was held first"
    assert "is requeued after" in worker.log
    assert [line["attempt"] for line in core.runs(event_id, "end")] == [2]
