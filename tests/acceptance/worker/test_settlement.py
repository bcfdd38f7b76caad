"""A message cannot be published: the delivery is held, and the handler is not run again."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from broker import Node

from ..conftest import Make
from ..harness import (
    Archive,
    Eyes,
    Service,
    until,
)

ACT, ONCE = "core.act", "core.act.once"
QUEUES = "core.testproject.act,core.testproject.once"


@pytest.fixture(scope="module")
def core(eyes: Eyes, module_service: Make) -> Service:
    """One worker for all tests that leave it as it was."""
    core = module_service(eyes)
    core.declare()
    core.worker("prefork", 2, "-Q", QUEUES).wait_ready()
    return core


def delete_exchange(eyes: Eyes, name: str) -> None:
    eyes.http("DELETE", f"/api/exchanges/{{vhost}}/{name}")


def delete_queue(eyes: Eyes, name: str) -> None:
    eyes.http("DELETE", f"/api/queues/{{vhost}}/{name}")


def held(service: Service, event_id: str, times: int) -> bool:
    """Return True if the log has so many failed publishes of an event."""
    log = "".join(path.read_text() for path in service.where.glob("*.log"))
    return (
        sum(event_id in line and "it is repeated in" in line for line in log.splitlines()) >= times
    )


@pytest.mark.parametrize("what", ["exchange", "queue"])
def test_no_way_to_the_delay_queue(core: Service, eyes: Eyes, what: str) -> None:
    """Missing or unroutable: repeated until the entity is declared again."""
    if what == "exchange":
        delete_exchange(eyes, "core:delay.1s")
    delete_queue(eyes, "core:delay.1s")
    event_id = eyes.event(ACT, {"plan": ["fail", "ok"]})
    until(lambda: held(core, event_id, 2))
    neighbour = eyes.event(ACT, {"plan": ["ok"]})
    until(lambda: core.runs(neighbour, "end"))
    assert len(core.runs(event_id)) == 1, "the publish alone is repeated"
    core.declare()
    until(lambda: core.runs(event_id, "end"))
    assert [line["attempt"] for line in core.runs(event_id)] == [1, 2]
    assert not any(line["redelivered"] for line in core.runs(event_id))
    eyes.empty("core.testproject.act", "core:delay.1s")


def test_refused_copy_does_not_affect_its_neighbours(fresh_eyes: Eyes, service: Make) -> None:
    """A missing exchange closes the channel and loses the confirms of the same window."""
    eyes = fresh_eyes
    core = service(eyes, environ={"TESTPROJECT_BACKOFF": "0.02"})
    core.worker("threads", 8, "-Q", QUEUES).wait_ready()
    delete_exchange(eyes, "core:delay.2s")
    stuck = eyes.event(ACT, {"plan": ["countdown:2", "ok"]})
    until(lambda: held(core, stuck, 2))
    messages = [eyes.message(ACT, {"plan": ["fail", "ok"]}) for _ in range(60)]
    eyes.send(*messages)
    until(lambda: all(core.runs(message.event_id, "end") for message in messages), 30)
    assert not any(held(core, message.event_id, 1) for message in messages)
    core.declare()
    until(lambda: core.runs(stuck, "end"), 30)
    eyes.empty("core.testproject.act", "core:delay.1s", "core:delay.2s")
    starts = Counter((line["event"], line["attempt"]) for line in core.ledger(what="start"))
    assert max(starts.values()) == 1


def test_no_way_to_the_archive(core: Service, eyes: Eyes) -> None:
    delete_exchange(eyes, "core:archive")
    event_id = eyes.event(ONCE, {"plan": ["fail"]})
    until(lambda: held(core, event_id, 2))
    core.declare()
    archive = Archive(eyes)
    assert archive.wait(event_id)["reason"] == "exhausted"
    eyes.empty("core.testproject.once")
    assert len(archive.of(event_id)) == 1
    assert len(core.runs(event_id)) == 1


def test_the_settlement_connection_is_cut(core: Service, eyes: Eyes) -> None:
    """The confirm connection is reopened; deliveries belong to another connection and stay."""
    first = eyes.event(ACT, {"plan": ["fail", "ok"]})
    until(lambda: core.runs(first, "end"))
    eyes.close()  # so that the only confirm channel is the worker's

    def confirming() -> list[str]:
        channels = eyes.http("GET", "/api/channels")
        return [
            channel["connection_details"]["name"]
            for channel in channels
            # An empty list where the channel has just gone.
            if channel.get("confirm")
            and channel.get("vhost") == eyes.vhost
            and channel["connection_details"]
        ]

    # The management API shows a closed channel for a while.
    until(lambda: len(confirming()) == 1)
    (name,) = confirming()
    eyes.cut({"name": name})
    until(lambda: name not in confirming())
    second = eyes.event(ACT, {"plan": ["fail", "ok"]})
    until(lambda: core.runs(second, "end"))
    assert [line["attempt"] for line in core.runs(second)] == [1, 2]


def test_held_until_the_limit_then_given_back(fresh_eyes: Eyes, service: Make) -> None:
    """Shortly before the consumer timeout the broker gets the delivery back, to deliver again."""
    eyes = fresh_eyes
    core = service(eyes, constants={"worker.jobs.HOLDING": 2 / 1800})
    worker = core.worker("threads", 2, "-Q", QUEUES).wait_ready()
    delete_exchange(eyes, "core:delay.1s")
    event_id = eyes.event(ACT, {"plan": ["fail", "ok"]})
    until(lambda: len(core.runs(event_id)) == 2, 30)
    core.declare()
    until(lambda: core.runs(event_id, "end"), 30)
    runs = core.runs(event_id)
    assert [line["attempt"] for line in runs[:2]] == [1, 1]
    assert [line["redelivered"] for line in runs[:2]] == [False, True]
    assert runs[1]["at"] - runs[0]["at"] >= 0.5, "it was held first"
    assert "is requeued after" in worker.log
    assert [line["attempt"] for line in core.runs(event_id, "end")] == [2]


def test_the_broker_blocks_publishers(private_node: Node, node_eyes: Eyes, service: Make) -> None:
    """An alarm, first noticed by the publish itself: waited out, and no copy is doubled."""
    eyes = node_eyes
    core = service(eyes, events={"CONFIRM_TIMEOUT": 1})
    core.declare()
    core.worker("threads", 4, "-Q", QUEUES)
    messages = [eyes.message(ACT, {"plan": [f"file_fail:{n}", "ok"]}) for n in range(2)]
    eyes.send(*messages)
    ids = [message.event_id for message in messages]
    until(lambda: all(core.runs(event_id) for event_id in ids))
    try:
        private_node.ctl("set_vm_memory_high_watermark", "0.00001")
        for n in range(2):
            (core.where / str(n)).touch()
        until(lambda: all(held(core, event_id, 3) for event_id in ids), 40)
        assert [len(core.runs(event_id)) for event_id in ids] == [1, 1]
    finally:
        private_node.ctl("set_vm_memory_high_watermark", "0.4")
    until(lambda: all(core.runs(event_id, "end") for event_id in ids), 60)
    eyes.empty("core.testproject.act", "core:delay.1s")
    # A publish without a confirm may have sent a second one.
    settled = time.monotonic() + 2
    until(lambda: time.monotonic() > settled)
    for event_id in ids:
        attempts = Counter(line["attempt"] for line in core.runs(event_id))
        assert attempts[1] == 1
        # One publish whose confirm did not come, and the one that was confirmed.
        assert attempts[2] <= 2, attempts
