"""Who sees a retry, and when: two services on one exchange, a worker each."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from django_amqp_events.message.types import Message

from ..conftest import Make
from ..harness import (
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
    countdowns: dict[int, str]
    early: str


@pytest.fixture(scope="module")
def scene(eyes: Eyes, module_service: Make) -> Scene:
    billing = module_service(eyes, "billing", handlers="billing")
    billing.declare()
    billing.worker("prefork", 2)
    countdowns = {
        seconds: eyes.event("retry.long", {"plan": [f"countdown:{seconds}", "ok"]})
        for seconds in (100, 3600)
    }
    early = eyes.event("retry.long", {"plan": ["countdown:6", "ok"]})
    return Scene(billing, countdowns, early)


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
