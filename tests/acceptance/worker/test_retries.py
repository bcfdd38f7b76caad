"""Who sees a retry, and when: two services on one exchange, a worker each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest

from django_amqp_events.message.types import Message

from ..conftest import Make
from ..harness import (
    Archive,
    Eyes,
    Service,
    until,
)

#: Seconds that a loaded machine may take beside the schedule.
SLACK = 4.0


@dataclass
class Scene:
    """Everything is published."""

    billing: Service
    stock: Service
    order: str
    schedule: str
    countdowns: dict[int, str]
    early: str
    many: dict[str, int]


@pytest.fixture(scope="module")
def scene(eyes: Eyes, module_service: Make) -> Scene:
    billing = module_service(eyes, "billing", handlers="billing")
    stock = module_service(eyes, "stock", handlers="stock")
    billing.declare()
    stock.declare()
    billing.worker("prefork", 2)
    stock.worker("threads", 2)
    order = eyes.event("shop.order", {"plan": ["fail", "fail", "fail", "ok"]})
    schedule = eyes.event("retry.schedule", {"plan": ["fail"] * 4 + ["ok"]})
    countdowns = {
        seconds: eyes.event("retry.long", {"plan": [f"countdown:{seconds}", "ok"]})
        for seconds in (100, 3600)
    }
    early = eyes.event("retry.long", {"plan": ["countdown:6", "ok"]})
    many = {}
    messages = []
    for number in range(200):
        # The last one must not inherit a limit that others used up.
        failures = 3 if number == 199 else 2 if number % 21 == 0 else 1 if number % 7 == 0 else 0
        message = eyes.message("retry.many", {"plan": ["fail"] * failures + ["ok"]})
        many[message.event_id] = failures
        messages.append(message)
    eyes.send(*messages)
    return Scene(billing, stock, order, schedule, countdowns, early, many)


def test_only_the_failing_handler_sees_the_retry(scene: Scene) -> None:
    """Three handlers in two services, one fails three times: 4, 1 and 1 calls."""
    until(lambda: scene.billing.runs(scene.order, "end", handler="testproject.invoice"), 30)
    lines = [*scene.billing.runs(scene.order), *scene.stock.runs(scene.order)]
    assert Counter(line["handler"] for line in lines) == {
        "testproject.invoice": 4,
        "testproject.mail": 1,
        "testproject.reserve": 1,
    }
    assert [line["attempt"] for line in lines if line["handler"] == "testproject.invoice"] == [
        1, 2, 3, 4
    ]  # fmt: skip


def test_declared_delays_are_kept(scene: Scene) -> None:
    """An event that fails four times waits 1, 2, 4 and 8 seconds: never less, little more."""
    until(lambda: scene.billing.runs(scene.schedule, "end"), 60)
    starts = [line["at"] for line in scene.billing.runs(scene.schedule)]
    waits = [later - earlier for earlier, later in pairwise(starts)]
    assert len(waits) == 4
    for wait, declared in zip(waits, (1, 2, 4, 8), strict=True):
        assert declared <= wait < declared + 1 + SLACK, waits


def test_attempts_are_exact_over_many_events(scene: Scene, eyes: Eyes) -> None:
    """Each event has its own count: one that fails changes nothing for the next."""
    expected = {event_id: min(n, 2) + 1 for event_id, n in scene.many.items()}
    total = sum(expected.values())
    until(lambda: len(scene.billing.ledger(what="start", name="retry.many")) >= total, 40)
    until(lambda: len(scene.billing.ledger(what="end", name="retry.many")) >= 199)
    eyes.empty("billing.testproject.many")
    attempts: dict[str, list[int]] = {}
    for line in scene.billing.ledger(what="start", name="retry.many"):
        attempts.setdefault(line["event"], []).append(line["attempt"])
    assert attempts == {event_id: list(range(1, n + 1)) for event_id, n in expected.items()}
    last = next(event_id for event_id, failures in scene.many.items() if failures == 3)
    entry = Archive(eyes, "billing").wait(last)
    assert (entry["reason"], entry["attempt"]) == ("exhausted", 3)
    assert len(scene.billing.ledger(what="end", name="retry.many")) == 199


def waiting(eyes: Eyes, event_id: str, *delays: int) -> Any:
    """Take the event off a delay queue, where it is the only one of its length."""

    def take() -> Any:
        found = [m for seconds in delays for m in eyes.take(f"billing:delay.{seconds}s")]
        return next((m for m in found if m.headers["event-id"] == event_id), None)

    return until(take, 30, f"{event_id} is in a queue for {delays} s")


def by_hand(eyes: Eyes, message: Any) -> None:
    """Do what the delay queue does when the time has come."""
    eyes.send(
        Message(
            exchange="billing:return",
            routing_key=message.delivery_info["routing_key"],
            body=bytes(message.body),
            headers=message.headers,
            properties={"delivery_mode": 2, "message_id": "m", "content_type": "application/json"},
        )
    )


@pytest.mark.parametrize(
    ("seconds", "first", "second"), [(100, (64,), (64, 32)), (3600, (2048,), (2048,))]
)
def test_a_long_countdown_goes_round_until_due(
    scene: Scene, eyes: Eyes, seconds: int, first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    """The largest queue not above what remains; returned too early, it is not run but waits."""
    event_id = scene.countdowns[seconds]
    message = waiting(eyes, event_id, *first)
    (line,) = scene.billing.runs(event_id)
    due = datetime.fromisoformat(message.headers["event-due-at"])
    asked = due.timestamp() - line["at"]
    assert seconds <= asked < seconds + SLACK
    assert message.headers["event-attempt"] == 2
    by_hand(eyes, message)
    again = waiting(eyes, event_id, *second)
    assert again.headers["event-due-at"] == message.headers["event-due-at"]
    assert again.headers["event-attempt"] == 2
    assert again.headers.get("event-history") == message.headers.get("event-history")
    assert "x-death" not in again.headers
    assert len(scene.billing.runs(event_id)) == 1


def test_an_event_returned_early_by_hand_is_not_run_early(scene: Scene, eyes: Eyes) -> None:
    def take() -> Any:
        found = None
        for message in eyes.take("billing:delay.4s"):
            if message.headers["event-id"] == scene.early:
                found = message
            else:
                by_hand(eyes, message)
        return found

    # If this test was late, it may have resumed already; then it was on time.
    def found() -> Any:
        return scene.billing.runs(scene.early, "end") or take()

    message = until(found, 30)
    if not isinstance(message, list):
        due = datetime.fromisoformat(message.headers["event-due-at"])
        by_hand(eyes, message)
        until(lambda: scene.billing.runs(scene.early, "end"), 30)
        first, second = scene.billing.runs(scene.early)
        assert second["at"] >= due.timestamp()
        assert due > datetime.fromtimestamp(first["at"], UTC)
