"""Replays from one end to the other: real workers, a real mirror, processes that are killed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from ..conftest import Make
from ..harness import Eyes, Service, until
from ..replaying import (
    fix,
    make,
    mirror,
    mirrored,
    replay,
    rows,
    wait_for,
)

# Many processes, one after the other.
pytestmark = pytest.mark.timeout(300)

ACT, SHARED, BULK = "replays.act", "replays.shared", "replays.bulk"
FAILING, KEPT = "testproject.failing", "testproject.kept"


@pytest.fixture
def replays(fresh_eyes: Eyes, service: Make) -> Service:
    return make(service, fresh_eyes)


def replayed(service: Service, event_id: str, **wanted: Any) -> list[dict[str, Any]]:
    """Runs of replays."""
    return [line for line in service.runs(event_id, **wanted) if line["replay"]]


# -- end to end ---------------------------------------------------------------------------


def test_an_event_fails_is_archived_replayed_and_succeeds(
    fresh_eyes: Eyes, replays: Service
) -> None:
    """Before the fix a replay fails again, on the same row; after it it succeeds, by a retry.

    The retry that lies between waits in a delay queue, and is of the same replay.
    """
    worker = replays.worker("threads", 2)
    mirror(replays)
    event_id = fresh_eyes.event(ACT, {"plan": ["fail", "unless:fixed"]})
    (first,) = wait_for(replays, state="archived")
    assert (first["attempts"], first["replays"], first["exception"]) == (
        2,
        0,
        "ValueError",
    )
    assert replay(replays) == {"published": 1, "returned": [], "skipped": [], "stopped": ""}
    (second,) = wait_for(replays, state="archived", replays=1)
    assert (second["id"], second["attempts"], second["failures"]) == (first["id"], 4, 2)
    assert second["replay_set"][0]["state"] == "failed"
    fix(replays)
    replay(replays)
    (third,) = wait_for(replays, state="succeeded")
    assert (third["id"], third["replays"], third["attempts"]) == (first["id"], 2, 4)
    assert [each["state"] for each in third["replay_set"]] == ["failed", "succeeded"]
    lines = replays.runs(event_id)
    assert [line["attempt"] for line in lines] == [1, 2] * 3
    ids = [each["id"] for each in third["replay_set"]]
    assert [line["replay"] for line in lines] == [None, None, ids[0], ids[0], ids[1], ids[1]]
    logged = [line for line in worker.log.splitlines() if f"({event_id}) for" in line]
    received = [line.endswith(", replayed") for line in logged if " received, attempt " in line]
    assert received == [False] * 2 + [True] * 4
    fresh_eyes.empty("replays.testproject.act", "replays:archive")


def test_only_the_handler_that_failed_sees_the_replay(
    fresh_eyes: Eyes, service: Make, replays: Service
) -> None:
    """Three handlers of one event, in two services."""
    watching = service(fresh_eyes, "watching", handlers="watching")
    watching.declare()
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
