"""Handlers that outlast the broker's consumer timeout."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import pytest

from broker import Node

from ..conftest import Make
from ..harness import Eyes, Service, Worker, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


#: Seconds after which RabbitMQ closes the channel of a consumer.
TIMEOUT = 6
#: A third of it.
LONG = ("sleep:2",)
SHORT = ("ok",)


@pytest.fixture
def short_timeout(private_node: Node) -> Iterator[None]:
    """Let the node close the channels of consumers after :data:`TIMEOUT`."""
    # Who looks at the timeout is the channel up to RabbitMQ 4.2, and then the queue (0.5 s).
    change = "[application:set_env(rabbit, K, V) || {{K, V}} <- [{{consumer_timeout, {}}}, {}]]."
    private_node.ctl("eval", change.format(1000 * TIMEOUT, "{channel_tick_interval, 500}"))
    yield
    private_node.ctl("eval", change.format(1_800_000, "{channel_tick_interval, 60000}"))


def timeouts(service: Make, eyes: Eyes) -> Service:
    core: Service = service(
        eyes,
        handlers="timeouts",
        events={"CONSUMER_TIMEOUT": TIMEOUT},
        celery={"worker_cancel_long_running_tasks_on_connection_loss": True},
    ).declare()
    return core


def runs(core: Service, worker: Worker, eyes: Eyes, ids: list[str]) -> Counter[str]:
    """Wait until all events are handled, and return how often each has run."""
    until(lambda: {line["event"] for line in core.ledger(what="end")} >= set(ids), 180)
    eyes.drained(core.name)
    assert "Connection to broker lost" not in worker.log
    return Counter(line["event"] for line in core.ledger(what="start"))


@pytest.mark.parametrize(
    ("pool", "processes", "multiplier"),
    [("prefork", 1, 4), ("prefork", 2, 4), ("prefork", 2, 32), ("threads", 2, 4), ("solo", 1, 4)],
)
def test_a_backlog_of_runs_that_are_shorter_each(
    pool: str, processes: int, multiplier: int, short_timeout: None, node_eyes: Eyes, service: Make
) -> None:
    """What waits for a process waits on the broker: nothing runs twice, of three queues either."""
    core = timeouts(service, node_eyes)
    number = 5 * processes
    ids = node_eyes.events(number, "timeouts.slow", *LONG)
    for name in ("other", "third"):
        ids += node_eyes.events(processes, f"timeouts.{name}", *LONG)
    worker = core.worker(pool, processes, "--prefetch-multiplier", str(multiplier))
    assert runs(core, worker, node_eyes, ids) == dict.fromkeys(ids, 1)


@pytest.mark.parametrize(("pool", "processes"), [("prefork", 2), ("threads", 16), ("solo", 1)])
def test_events_wait_on_the_broker_for_their_rate_limit(
    pool: str, processes: int, short_timeout: None, node_eyes: Eyes, service: Make
) -> None:
    """A wait that is longer than the timeout ends no run, of unrelated handlers neither."""
    core = timeouts(service, node_eyes)
    brisk = node_eyes.events(24, "timeouts.brisk", *SHORT)
    others = node_eyes.events(8, "timeouts.other", *LONG) if pool != "solo" else []
    worker = core.worker(pool, processes)
    ids = [*brisk, *others]
    assert runs(core, worker, node_eyes, ids) == dict.fromkeys(ids, 1)
    starts = sorted(core.runs(event_id)[0]["at"] for event_id in brisk)
    assert starts[-1] - starts[0] >= 11


def test_what_waits_behind_an_unusually_long_run_goes_back(
    short_timeout: None, node_eyes: Eyes, service: Make
) -> None:
    """Once: nothing is consumed until a process is free."""
    core = timeouts(service, node_eyes)
    worker = core.worker("prefork", 1, "-Q", f"{core.name}.testproject.slow")
    short = node_eyes.events(20, "timeouts.slow", *SHORT)
    assert runs(core, worker, node_eyes, short) == dict.fromkeys(short, 1)
    long = node_eyes.events(4, "timeouts.slow", *LONG)
    ids = [*short, *long]
    assert runs(core, worker, node_eyes, ids) == dict.fromkeys(ids, 1)
    assert "requeued 3 events of" in worker.log
    assert worker.log.count("that had waited too long") <= 2
    again = [line["redelivered"] for line in core.ledger(what="start") if line["event"] in long]
    assert again == [False, True, True, True]


def _lose_connection(core: Service, worker: Worker, eyes: Eyes, queue: str) -> None:
    eyes.cut({"name": eyes.consuming()})
    until(lambda: "Connection to broker lost" in worker.log, 30, "it has noticed")


def _delete_for_a_while(core: Service, worker: Worker, eyes: Eyes, queue: str) -> None:
    eyes.http("DELETE", f"/api/queues/{{vhost}}/{queue}")
    (core.where / "go").touch()
    until(lambda: f"queue '{queue}' is missing" in worker.log, 60, "it has noticed")
    core.declare()


def _by_remote_control(*commands: str) -> Callable[[Service, Worker, Eyes, str], None]:
    def change(core: Service, worker: Worker, eyes: Eyes, queue: str) -> None:
        for command in commands:
            name = f"{worker.name}@localhost"
            answers = eyes.app.control.broadcast(
                command, {"queue": queue}, destination=[name], reply=True, timeout=10, limit=1
            )
            assert answers, command

    return change


def _restart(core: Service, worker: Worker, eyes: Eyes, queue: str) -> None:
    worker.signal(signal.SIGTERM)
    until(lambda: "Warm shutdown" in worker.log or not worker.alive, 30)
    (core.where / "go").touch()
    assert worker.stop(60) == 0


#: What may happen while a worker has paused a queue.
CHANGES: dict[str, Callable[[Service, Worker, Eyes, str], object]] = {
    "nothing": lambda *_: None,
    "connection": _lose_connection,
    "deleted": _delete_for_a_while,
    "added": _by_remote_control("add_consumer"),
    "cancelled": _by_remote_control("cancel_consumer", "add_consumer"),
    "restart": _restart,
}


@pytest.mark.parametrize(
    ("pool", "change"),
    [
        *product(["prefork"], CHANGES),
        *product(["threads", "autoscale"], ["nothing", "connection", "restart"]),
    ],
)
def test_what_happens_while_a_queue_is_paused(
    pool: str, change: str, fresh_eyes: Eyes, service: Make
) -> None:
    """No event is lost and none runs twice; the queue is consumed again."""
    eyes, core = fresh_eyes, timeouts(service, fresh_eyes)
    arguments = ["--autoscale", "2,1"] if pool == "autoscale" else []
    start = partial(core.worker, "prefork" if arguments else pool, 1, *arguments)
    worker = start()
    queue = f"{core.name}.testproject.other"
    running = eyes.events(1, "timeouts.slow", "file:go")
    if arguments:
        running += eyes.events(1, "timeouts.third", "file:go")
    until(lambda: all(map(core.runs, running)), 60)
    ids = [
        *running,
        *eyes.events(3, "timeouts.slow", *SHORT),
        *eyes.events(3, "timeouts.other", *SHORT),
    ]
    until(lambda: not eyes.consumers(queue), 60, "it is paused")
    if change != "deleted":
        ids += eyes.events(2, f"timeouts.{queue.rpartition('.')[2]}", *SHORT)
    else:
        until(lambda: eyes.ready(queue) >= 3, 30)
        ids = ids[:-3]
    if change == "nothing":
        _, out = core.command("events_status", "--format", "json")
        found = next(each for each in json.loads(out)["queues"] if each["name"] == queue)
        assert (found["severity"], found["consumers"], found["paused"]) == ("ok", 0, True)
    CHANGES[change](core, worker, eyes, queue)
    if change == "deleted":
        ids += eyes.events(2, f"timeouts.{queue.rpartition('.')[2]}", *SHORT)
    (core.where / "go").touch()
    if change == "restart":
        worker = start()
    until(lambda: {line["event"] for line in core.ledger(what="end")} >= set(ids), 90)
    eyes.drained(core.name)
    counts = Counter(line["event"] for line in core.ledger(what="start"))
    again = running if change == "connection" else []
    others = set(ids) - set(again)
    assert {event_id: counts[event_id] for event_id in others} == dict.fromkeys(others, 1)
