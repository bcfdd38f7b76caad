"""A replay with real workers: who sees it."""

from __future__ import annotations

from collections import Counter

import pytest

from ..conftest import Make
from ..harness import Eyes, Service, until
from ..replaying import fix, make, mirrored, replay, rows

# Many processes, one after the other.
pytestmark = pytest.mark.timeout(300)

SHARED = "replays.shared"
FAILING, KEPT = "testproject.failing", "testproject.kept"


@pytest.fixture
def replays(fresh_eyes: Eyes, service: Make) -> Service:
    return make(service, fresh_eyes)


def test_only_the_handler_that_failed_sees_the_replay(
    fresh_eyes: Eyes, service: Make, replays: Service
) -> None:
    """Three handlers of one event, in two services."""
    watching = service(fresh_eyes, "watching", handlers="watching").declare()
    watching.worker("threads", 1)
    replays.worker("threads", 2)
    event_id = fresh_eyes.event(SHARED, {"plan": ["unless:fixed"]})
    until(lambda: watching.runs(event_id, "end"))
    until(lambda: len(replays.runs(event_id)) == 2)
    found = mirrored(replays, 2, state="archived")
    assert [(each["handler"], each["state"]) for each in found] == [
        (FAILING, "archived"),
        (KEPT, "archived"),
    ]
    fix(replays)
    replay(replays, handler=FAILING)
    until(lambda: replays.runs(event_id, "end", handler=FAILING))
    mirrored(replays, state="succeeded")
    states = {each["handler"]: each["state"] for each in rows(replays)}
    assert states == {FAILING: "succeeded", KEPT: "archived"}
    calls = Counter(line["handler"] for line in [*replays.runs(event_id), *watching.runs(event_id)])
    assert calls == {FAILING: 2, KEPT: 1, "testproject.watch": 1}
