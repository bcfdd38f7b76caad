"""Handlers that outlast the broker's consumer timeout."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from broker import Node

from ..conftest import Make
from ..harness import Archive, Eyes, until
from ..isolation import Supervisor, fewer_deliveries, reaper

pytestmark = pytest.mark.timeout(300)

ACT = "core.act"
#: Processes or threads.
POOLS = {"prefork": 6, "threads": 4, "solo": 1}


@pytest.fixture
def short_timeout(private_node: Node) -> Iterator[None]:
    """Let the node close the channels of consumers after six seconds."""
    # Who looks at the timeout is the channel up to RabbitMQ 4.2, and then the queue (0.5 s).
    change = "[application:set_env(rabbit, K, V) || {{K, V}} <- [{{consumer_timeout, {}}}, {}]]."
    private_node.ctl("eval", change.format(6000, "{channel_tick_interval, 500}"))
    yield
    private_node.ctl("eval", change.format(1_800_000, "{channel_tick_interval, 60000}"))


@pytest.mark.parametrize("pool", POOLS)
def test_handler_longer_than_the_consumer_timeout_is_archived(
    pool: str, short_timeout: None, node_eyes: Eyes, service: Make
) -> None:
    """After several requeues it runs alone with a time limit and is archived."""
    eyes = node_eyes
    core = service(
        eyes,
        name=f"core{pool}",
        celery={"worker_cancel_long_running_tasks_on_connection_loss": True},
    )
    queue = f"{core.name}.testproject.act"
    core.declare()
    # In solo each lasts as long as the handler.
    fewer_deliveries(eyes, f"^{queue}$", 3)
    slow = eyes.event(ACT, {"plan": ["sleep:12"]})
    main = Supervisor(lambda: core.worker(pool, POOLS[pool], "-Q", queue))
    beside = Supervisor(lambda: reaper(core, "--time-limit", "3"))
    archive = Archive(eyes, core.name)
    try:
        healthy = [eyes.event(ACT, {"plan": ["ok"]}) for _ in range(12)]
        entry = archive.wait(slow, 300)
        until(lambda: all(core.runs(event_id, "end") for event_id in healthy), 60)
        until(lambda: not any(eyes.totals(core.name).values()), 60, "nothing is left")
        after = eyes.event(ACT, {"plan": ["ok"]})
        until(lambda: core.runs(after, "end"), 60, "the worker continues")
    finally:
        main.kill()
        beside.kill()
    assert entry["reason"] == "poison"
    assert "had not ended after 3 seconds" in entry["detail"]
    assert entry["deaths"][0]["queue"] == queue
    assert len(archive.collect()) == 1
