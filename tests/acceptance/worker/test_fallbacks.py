"""A worker without private names of its libraries: it refuses to start, or works more slowly."""

from __future__ import annotations

import json
import signal
from collections import Counter
from importlib.metadata import version

import pytest

from django_amqp_events.conf import FAST_PATHS

from ..conftest import Make
from ..harness import Archive, Eyes, Service, task_id, until

ACT = "core.act"
QUEUE = "core.testproject.act"
#: Fast paths, and names in celery_internals and billiard_internals.
FEATURES = (
    "reads",
    "acks",
    "chunks",
    "retries",
    "ONE_ERROR",
    "COLD_SHUTDOWN",
    "KEEP_RESULTS",
    "TIME_LIMITS",
    "FINISH_WRITES",
    "WAKING",
)
FOUND_AT_START = FEATURES[:5]


@pytest.mark.parametrize("name", ["_announce_revoked", "_context"])
def test_a_worker_refuses_to_start_without_a_name_that_it_needs(
    fresh_eyes: Eyes, service: Make, name: str
) -> None:
    core: Service = service(fresh_eyes, environ={"TESTPROJECT_RENAMED": name})
    core.declare()
    worker = core.worker("prefork", 1)
    assert worker.wait(60) == 1
    assert "this worker does not start: celery 5" in worker.log
    assert f"celery.worker.request:Request.{name} does not exist" in worker.log
    assert "archive an event that remote control revokes" in worker.log
    assert "Install another version of celery" in worker.log
    assert fresh_eyes.consumers(QUEUE) == 0


def core_with(service: Make, eyes: Eyes, missing: str) -> Service:
    """A service whose workers do without a feature, or without any fast path."""
    if missing == "FAST_PATHS":
        made = service(eyes, events={"FAST_PATHS": []})
    else:
        # Whatever --fast-paths says.
        events = {"FAST_PATHS": list(FAST_PATHS)}
        made = service(eyes, events=events, environ={"TESTPROJECT_WITHOUT": missing})
    made.declare()
    return made


@pytest.mark.parametrize("missing", [*FEATURES, "FAST_PATHS", " ".join(FEATURES)])
def test_events_are_handled_retried_archived_and_revoked(
    fresh_eyes: Eyes, service: Make, missing: str
) -> None:
    core = core_with(service, fresh_eyes, missing)
    plans = [["ok"] for _ in range(40)] + [["fail", "ok"], ["fail"], ["file:go"]]
    messages = [fresh_eyes.message(ACT, {"plan": plan}) for plan in plans]
    *handled, retried, failed, running = [message.event_id for message in messages]
    revoked = fresh_eyes.message(ACT, {"plan": ["ok"]})
    worker = core.worker("prefork", 2, "-Q", QUEUE, "--prefetch-multiplier", "20").wait_ready()
    name = task_id(revoked.event_id, ACT, "testproject.act")
    assert fresh_eyes.app.control.revoke(name, reply=True, timeout=5, limit=1)

    fresh_eyes.send(*messages, revoked)
    archive = Archive(fresh_eyes)
    assert archive.wait(failed)["reason"] == "exhausted"
    assert archive.wait(revoked.event_id)["reason"] == "revoked"
    until(lambda: core.runs(retried, "end") and core.runs(running))
    # The event that runs is handled and acked before the worker ends.
    worker.signal(signal.SIGTERM)
    until(lambda: "Warm shutdown" in worker.log)
    (core.where / "go").touch()
    assert worker.wait(60) == 0

    fresh_eyes.empty(QUEUE)
    ends = Counter(line["event"] for line in core.ledger(what="end"))
    assert ends == Counter([*handled, retried, running])
    for feature in missing.split():
        if feature in FOUND_AT_START:
            assert worker.log.count(f"celery.no:{feature} does not exist") == 1


@pytest.mark.parametrize("missing", ["COLD_SHUTDOWN", "FINISH_WRITES"])
def test_a_cold_shutdown(fresh_eyes: Eyes, service: Make, missing: str) -> None:
    core = core_with(service, fresh_eyes, missing)
    event_id = fresh_eyes.event(ACT, {"plan": ["file:go"]})
    worker = core.worker("prefork", 1, "-Q", QUEUE).wait_ready()
    until(lambda: core.runs(event_id))
    worker.signal(signal.SIGQUIT)
    worker.wait(60)
    assert f"celery.no:{missing} does not exist" in worker.log
    (core.where / "go").touch()
    core.worker("prefork", 1, "-Q", QUEUE).wait_ready()
    until(lambda: core.runs(event_id, "end"))
    fresh_eyes.empty(QUEUE)


def test_stats_show_why_fast_paths_are_not_used(fresh_eyes: Eyes, service: Make) -> None:
    core = service(
        fresh_eyes,
        events={"FAST_PATHS": ["reads", "acks", "chunks"]},
        environ={"TESTPROJECT_WITHOUT": "acks"},
    )
    core.declare()
    core.worker("prefork", 1, "-Q", QUEUE, "--max-tasks-per-child", "9").wait_ready()
    said = core.control("inspect", "stats", "--json")
    (stats,) = (stats["amqp_events"] for stats in json.loads(said[said.index("{") :]).values())
    assert stats["chunks"] is None
    assert stats["fast_paths"] == {
        "reads": "used",
        "acks": f"celery {version('celery')} does not support it: celery.no:acks does not exist",
        "deletes": "FAST_PATHS does not name it",
        "chunks": "the pool replaces its processes",
        "retries": "FAST_PATHS does not name it",
    }
