"""A message cannot be published: the delivery is held, and the handler is not run again."""

from __future__ import annotations

from ..conftest import Make
from ..harness import Eyes, until

ACT = "core.act"
QUEUES = "core.testproject.act,core.testproject.once"


def test_held_until_the_limit_then_given_back(fresh_eyes: Eyes, service: Make) -> None:
    """Shortly before the consumer timeout the broker gets the delivery back, to deliver again."""
    core = service(fresh_eyes, constants={"worker.jobs.HOLDING": 2 / 1800})
    worker = core.worker("threads", 2, "-Q", QUEUES).wait_ready()
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
