"""The reaper runs unanswered events alone; only an event that kills it alone is poison."""

from __future__ import annotations

import pytest

from ..harness import (
    Archive,
    Eyes,
    Service,
    Worker,
    until,
)

pytestmark = pytest.mark.timeout(240)

ACT = "core.act"
QUEUE = "core.testproject.act"
#: Deliveries without an answer after which the broker takes a message from its handler's queue.
LOSSES = 6
#: Where the broker moves a message to that was delivered too often.
BEHIND = {"core:graveyard": ("core:dead",), "core:dead": ("core:abyss",)}


def bury(
    core: Service, eyes: Eyes, *plans: list[str], name: str = ACT, queue: str = QUEUE
) -> list[str]:
    """Bring events to the graveyard as the broker does: deliveries that end without an answer."""
    before, ids = eyes.ready("core:graveyard"), []
    for plan in plans:
        ids.append(eyes.event(name, {"plan": plan}))
        for _ in range(LOSSES):
            lose(eyes, queue)
    buried = before + len(plans)
    until(lambda: eyes.ready("core:graveyard") == buried, 20, "they are in the graveyard")
    return ids


def lose(eyes: Eyes, queue: str) -> None:
    """Take a delivery and go without an answer."""
    channel = eyes.channel()
    channel.auto_decode = False
    until(lambda: channel.basic_get(queue), 10, "a delivery")
    channel.close()


def dies(core: Service, eyes: Eyes, queue: str) -> Worker:
    """Run a reaper until what it finds in *queue* has killed it; the message is back or further."""
    before = eyes.ready(queue)
    assert before == 1
    worker = core.start("events_reaper")
    assert worker.wait(60) == -9
    worker.kill()
    back(eyes, queue)
    return worker


def back(eyes: Eyes, queue: str) -> None:
    """Wait until the broker has a message of *queue* again, there or behind it."""
    until(lambda: any(eyes.ready(name) for name in (queue, *BEHIND[queue])), 20)


def test_message_that_kills_the_reader_is_forwarded_undecoded(service, fresh_eyes):
    core = service(fresh_eyes, environ={"TESTPROJECT_DIES": "reading"}).declare()
    (victim,) = bury(core, fresh_eyes, ["ok"])
    for _ in range(2):
        if fresh_eyes.ready("core:graveyard"):
            dies(core, fresh_eyes, "core:graveyard")
    # The other times a plain loss, which is the same to the broker.
    while fresh_eyes.ready("core:graveyard"):
        lose(fresh_eyes, "core:graveyard")
        until(lambda: fresh_eyes.ready("core:graveyard") + fresh_eyes.ready("core:dead"), 20)
    assert fresh_eyes.ready("core:dead") == 1
    core.start("events_reaper")
    entry = Archive(fresh_eyes).wait(victim, 40)
    assert entry["reason"] == "poison"
    assert entry["handler"] == "testproject.act"
    assert entry["queue"] == QUEUE
    assert {death["queue"] for death in entry["deaths"]} == {QUEUE, "core:graveyard"}
    assert not core.ledger()
    fresh_eyes.empty("core:graveyard", "core:dead", "core:abyss", QUEUE)


def test_unforwardable_message_ends_in_the_abyss(service, fresh_eyes):
    core = service(fresh_eyes, environ={"TESTPROJECT_DIES": "reading forwarding"}).declare()
    (victim,) = bury(core, fresh_eyes, ["ok"])
    innocent = ""
    for queue in ("core:graveyard", "core:dead"):
        if queue == "core:dead":
            (innocent,) = bury(core, fresh_eyes, ["ok"])
        for _ in range(2):
            if fresh_eyes.ready(queue):
                dies(core, fresh_eyes, queue)
        while fresh_eyes.ready(queue):
            lose(fresh_eyes, queue)
            back(fresh_eyes, queue)
    assert fresh_eyes.ready("core:abyss") == 1
    # It has no consumer, so peeking loses nothing.
    for _ in range(25):
        lose(fresh_eyes, "core:abyss")
    until(lambda: fresh_eyes.ready("core:abyss") == 1, 20)
    (message,) = fresh_eyes.take("core:abyss")
    assert message.headers["event-id"] == victim
    assert {death["queue"] for death in message.headers["x-death"]} == {
        QUEUE,
        "core:graveyard",
        "core:dead",
    }
    assert message.delivery_info["routing_key"] == QUEUE
    assert not core.ledger()
    sound = service(fresh_eyes, where=core.where)
    sound.start("events_reaper")
    until(lambda: core.runs(innocent, "end"), 40, "it is run")


def test_the_reapers_time_limit_is_not_the_handlers(core, fresh_eyes):
    """Only a handler without a limit gets the reaper's. Another's of the same length is its own."""
    (unlimited,) = bury(core, fresh_eyes, ["deaf:60"])
    limited = {"name": "core.act.limited", "queue": "core.testproject.limited"}
    (own,) = bury(core, fresh_eyes, ["deaf:60", "deaf:60"], **limited)
    core.worker("prefork", 1, "-Q", limited["queue"])
    core.start("events_reaper", "--time-limit", "3")
    archive = Archive(fresh_eyes)
    assert archive.wait(unlimited, 60)["reason"] == "poison"
    assert archive.wait(own, 60)["reason"] == "exhausted"
