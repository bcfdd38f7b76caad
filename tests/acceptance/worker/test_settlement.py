"""A message cannot be published: the delivery is held, and the handler is not run again."""

from __future__ import annotations

from collections import Counter

from ..conftest import Make
from ..harness import (
    Eyes,
    Service,
    until,
)

ACT, ONCE = "core.act", "core.act.once"
QUEUES = "core.testproject.act,core.testproject.once"


def delete_exchange(eyes: Eyes, name: str) -> None:
    eyes.http("DELETE", f"/api/exchanges/{{vhost}}/{name}")


def held(service: Service, event_id: str, times: int) -> bool:
    """Return True if the log has so many failed publishes of an event."""
    log = "".join(path.read_text() for path in service.where.glob("*.log"))
    return (
        sum(event_id in line and "it is repeated in" in line for line in log.splitlines()) >= times
    )


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
