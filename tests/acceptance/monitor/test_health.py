"""``events_health`` beside real workers: alive, hanging, waiting for RabbitMQ."""

from __future__ import annotations

import itertools
import json
import os
from typing import Any
from urllib.parse import urlsplit

import pytest

from broker import Node

from ..conftest import POOLS, Make
from ..harness import Eyes, Service, until
from ..worker.test_children import events_worker

pytestmark = pytest.mark.timeout(180)

_numbers = itertools.count(1)


@pytest.fixture
def name() -> str:
    """A service of its own: processes of another test, or of another process of the suite, may run
    beside it."""
    return f"probed-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def core(service: Make, fresh_eyes: Eyes, name: str) -> Service:
    made = service(fresh_eyes, name, handlers="core").declare()
    made.migrate()
    return made


def health(core: Service, *arguments: str) -> tuple[int, dict[str, str]]:
    """Return the exit code, and the problem of each part."""
    code, told = core.command("events_health", "--format", "json", *arguments)
    found: list[dict[str, Any]] = json.loads(told)["processes"]
    return code, {each["part"]: each["problem"] for each in found}


def ready(core: Service, *arguments: str) -> bool:
    return health(core, "--ready", *arguments)[0] == 0


def test_a_worker_and_its_services(core: Service, name: str) -> None:
    nothing = {"": f"no process of service {name!r} runs in this container"}
    assert health(core, "--live") == (1, nothing)
    worker = events_worker(core)
    parts = ("worker", "reaper", "companion")
    options = [option for part in parts for option in ("--part", part)]
    until(lambda: ready(core, *options), 60, "everything is ready")
    code, found = health(core, "--live")
    assert code == 0
    services = {"reaper", "mirror", "snapshots", "relay", "batches"}
    assert set(found) == {"worker", "companion", *services}
    assert set(found.values()) == {""}
    assert worker.stop() == 0
    until(lambda: health(core, "--live")[0] == 1, what="nothing runs")


def test_a_missing_queue(core: Service, fresh_eyes: Eyes, name: str) -> None:
    queue = f"{name}.testproject.act"
    core.worker("prefork", 1).wait_ready()
    until(lambda: ready(core), 30)
    fresh_eyes.http("DELETE", f"/api/queues/{{vhost}}/{queue}")
    until(lambda: not ready(core), 30)
    problem = f"queue {queue} is missing or cannot be read. Run `manage.py events_declare`"
    until(lambda: health(core, "--ready") == (1, {"worker": problem}), 30)
    assert health(core, "--live")[0] == 0


@pytest.mark.parametrize("pool", POOLS)
def test_a_broker_that_is_away_restarts_nothing(core: Service, pool: str) -> None:
    """A worker that has never been connected; the services are paused."""
    given = urlsplit(core.url)
    core.url = given._replace(netloc="guest:guest@127.0.0.1:1").geturl()
    core.worker(pool, 1)
    until(lambda: health(core, "--live", "--part", "worker")[0] == 0, 30)
    code, found = health(core, "--ready")
    assert (code, found) == (
        1, {"worker": "it is not connected to RabbitMQ: check the broker, and the worker's log"}
    )  # fmt: skip


@pytest.mark.slow
def test_a_broker_that_stops(private_node: Node, node_eyes: Eyes, service: Make, name: str) -> None:
    core = service(node_eyes, name, handlers="core").declare()
    core.migrate()
    events_worker(core, "--no-batches")
    parts = ("--part", "worker", "--part", "relay", "--part", "mirror")
    until(lambda: ready(core, *parts), 60)
    node_eyes.close()
    private_node.stop()
    until(lambda: not ready(core, "--part", "worker"), 30)
    until(lambda: not ready(core, "--part", "mirror"), 30)
    assert "RabbitMQ is unreachable" in health(core, "--ready")[1]["mirror"]
    assert health(core, "--live", *parts) == (0, dict.fromkeys(("worker", "relay", "mirror"), ""))
    private_node.start_again()
    until(lambda: ready(core, *parts), 90)


def test_solo_answers_while_it_handles(core: Service, fresh_eyes: Eyes) -> None:
    core.worker("solo", 1)
    until(lambda: ready(core), 30)
    event_id = fresh_eyes.event("core.act", {"plan": ["file:go"]})
    until(lambda: core.runs(event_id))
    assert health(core, "--ready") == (0, {"worker": ""})
    (core.where / "go").touch()
