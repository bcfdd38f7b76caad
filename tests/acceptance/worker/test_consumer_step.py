"""AMQPConsumerStep beside handlers in real workers: every message is counted, before and after."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from broker import Node
from django_amqp_events.message.types import Message

from ..conftest import Make
from ..harness import PACKAGE, Eyes, Service, Worker, until
from ..isolation import reaper

pytestmark = pytest.mark.timeout(300)

QUEUE, SECOND, DEAD = "erp.orders", "erp.customers", "erp.dead"
STEP = "testproject.consumers.Other"
ACT = "core.act"
ROOT = Path(__file__).resolve().parents[3]


def declare(eyes: Eyes, *queues: str, **arguments: Any) -> None:
    """Declare queues as another program would."""
    for queue in queues:
        body = {"durable": True, "arguments": {"x-queue-type": "quorum", **arguments}}
        eyes.http("PUT", f"/api/queues/{{vhost}}/{queue}", body)


def publish(eyes: Eyes, number: int, *plan: str, queue: str = QUEUE) -> list[str]:
    """Publish persistent messages, confirmed; return their ids."""
    ids = [str(uuid4()) for _ in range(number)]
    bodies = [json.dumps({"id": id_, "plan": plan or ["ok"]}).encode() for id_ in ids]
    properties = {"delivery_mode": 2, "content_type": "application/json"}
    eyes.send(
        *(
            Message(exchange="", routing_key=queue, body=body, headers={}, properties=properties)
            for body in bodies
        )
    )
    return ids


def stepping(make: Make, eyes: Eyes, **options: Any) -> Service:
    """Make a service with the step, with these attributes of it."""
    celery = options.pop("celery", {})
    step = json.dumps({"queues": [QUEUE], **options})
    return make(eyes, environ={"TESTPROJECT_STEP": step}, celery=celery)


def consuming_connection(eyes: Eyes) -> str:
    """Name of the connection that consumes the queue; the management API is late."""
    for consumer in eyes.http("GET", "/api/consumers/{vhost}"):
        if consumer["queue"]["name"] == QUEUE and consumer["channel_details"]:
            return str(consumer["channel_details"]["connection_name"])
    return ""


def runs(service: Service, ids: Iterable[str], what: str = "end") -> Counter[str]:
    """Number of runs of these messages that have begun (``start``) or ended."""
    lines = Counter(line["event"] for line in service.ledger(what=what))
    return Counter({id_: lines[id_] for id_ in ids})


def handled(service: Service, ids: Iterable[str], seconds: float = 40) -> Counter[str]:
    """Wait until all have been handled; return how often each was."""
    until(lambda: all(runs(service, ids).values()), seconds, "all are handled")
    return runs(service, ids)


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_warm_shutdown_ends_what_is_in_progress_and_begins_nothing(
    fresh_eyes: Eyes, service: Make, pool: str
) -> None:
    """With an event in progress in the pool as well; nothing is lost and nothing runs twice."""
    eyes = fresh_eyes
    declare(eyes, QUEUE)
    core = stepping(service, eyes, prefetch_count=6, concurrency=2)
    core.declare()
    worker = core.worker(pool, 2).wait_ready()
    held = publish(eyes, 2, "file:go")
    until(lambda: sum(runs(core, held, "start").values()) == 2)
    waiting = publish(eyes, 30)
    until(lambda: eyes.queue(QUEUE).get("messages_unacknowledged") == 6, what="more is prefetched")
    event_id = eyes.event(ACT, {"plan": ["file:go"]})
    until(lambda: core.runs(event_id))
    worker.signal(signal.SIGTERM)
    until(lambda: "Warm shutdown" in worker.log)
    (core.where / "go").touch()
    assert worker.wait(60) == 0
    assert runs(core, held) == dict.fromkeys(held, 1), "they were handled, and once"
    begun = sum(runs(core, waiting, "start").values())
    assert begun == sum(runs(core, waiting).values()), "what has begun has ended"
    until(
        lambda: eyes.ready(QUEUE) == len(waiting) - begun,
        what="what has ended is acked, the rest is back",
    )
    if pool != "solo":  # whose event loop, which notices the signal, waits for the event
        assert begun == 0
    # The first worker and its successor have handled each message once.
    following = core.worker(pool, 2).wait_ready()
    assert handled(core, [*held, *waiting]) == dict.fromkeys([*held, *waiting], 1)
    assert len(core.runs(event_id, "end")) == 1
    eyes.empty(QUEUE)
    assert following.stop() == 0


def test_a_long_warm_shutdown_keeps_the_connection(fresh_eyes: Eyes, service: Make) -> None:
    """The event loop has ended, so the step sends the heartbeats; the message is acked."""
    eyes = fresh_eyes
    declare(eyes, QUEUE)
    core = stepping(service, eyes, celery={"broker_heartbeat": 1})
    core.declare()
    worker = core.worker("threads", 1).wait_ready()
    (held,) = publish(eyes, 1, "sleep:6")
    until(lambda: runs(core, [held], "start")[held])
    assert worker.stop() == 0
    assert runs(core, [held]) == {held: 1}
    assert eyes.ready(QUEUE) == 0
    assert "the connection was lost" not in worker.log


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_killed_worker_loses_nothing(fresh_eyes: Eyes, service: Make, pool: str) -> None:
    """Only what was in progress, or whose ack was being written, is handled again."""
    eyes = fresh_eyes
    declare(eyes, QUEUE, SECOND)
    core = stepping(service, eyes, queues=[QUEUE, SECOND], prefetch_count=4, concurrency=2)
    core.declare()
    ids = publish(eyes, 100, "sleep:0.02") + publish(eyes, 100, "sleep:0.02", queue=SECOND)
    events = [eyes.event(ACT, {"plan": ["ok"]}) for _ in range(20)]
    for enough in (20, 70, 120):
        worker = core.worker(pool, 2)
        until(lambda: sum(runs(core, ids).values()) >= enough, 40)  # noqa: B023
        worker.kill()
    last = core.worker(pool, 2)
    counts = handled(core, ids, 60)
    eyes.empty(QUEUE, SECOND)
    begun = runs(core, ids, "start")
    assert len(counts) == 200
    # At most 2 queues times 4 were unacked in each of three workers that were killed.
    assert sum(counts.values()) - 200 <= 3 * 8
    assert sum(begun.values()) - 200 <= 3 * 8
    until(lambda: {line["event"] for line in core.ledger(what="end")} >= set(events), 40)
    assert last.stop() == 0


def test_a_killed_broker_loses_nothing(private_node: Node, service: Make) -> None:
    """All pools at once; each worker consumes again, once."""
    sides = []
    for pool in ("prefork", "threads", "solo"):
        private_node.add_vhost(f"step-{pool}")
        eyes = Eyes(private_node, f"step-{pool}")
        declare(eyes, QUEUE)
        core = stepping(service, eyes, concurrency=2)
        core.declare()
        worker = core.worker(pool, 2)
        ids = publish(eyes, 150, "sleep:0.05")
        sides.append((eyes, core, worker, ids))
    for eyes, core, _worker, ids in sides:
        until(lambda: sum(runs(core, ids).values()) >= 20)  # noqa: B023
        eyes.close()
    private_node.kill()
    private_node.start_again()
    for eyes, core, worker, ids in sides:
        until(lambda: eyes.consumers(QUEUE) == 1, 60)  # noqa: B023
        new = publish(eyes, 10)
        counts = handled(core, ids + new, 60)
        eyes.empty(QUEUE)
        assert sum(counts.values()) - 160 <= 4, "only the prefetched ones may be handled twice"
        until(lambda: eyes.consumers(QUEUE) == 1, 60)  # noqa: B023
        assert worker.alive
        eyes.close()


def test_the_connection_is_cut_while_messages_are_handled(fresh_eyes: Eyes, service: Make) -> None:
    """Acks of the lost channel are not written: they would ack other messages."""
    eyes = fresh_eyes
    declare(eyes, QUEUE)
    core = stepping(service, eyes, concurrency=4)
    core.declare()
    worker = core.worker("threads", 1).wait_ready()
    held = publish(eyes, 4, "file:go", "ok")
    until(lambda: sum(runs(core, held, "start").values()) == 4)
    eyes.cut({"name": until(lambda: consuming_connection(eyes))})
    until(lambda: worker.log.count("Other: consuming 1 queue") == 2, 30)
    until(lambda: eyes.ready(QUEUE) == 0, what="they are delivered again")
    (core.where / "go").touch()
    until(lambda: sum(runs(core, held).values()) == 8, what="all are handled twice")
    more = publish(eyes, 20)
    assert handled(core, more) == dict.fromkeys(more, 1)
    eyes.empty(QUEUE)
    assert worker.stop() == 0
    assert runs(core, held, "start") == dict.fromkeys(held, 2)


def test_a_missing_queue_is_reported_and_the_rest_goes_on(fresh_eyes: Eyes, service: Make) -> None:
    eyes = fresh_eyes
    declare(eyes, SECOND)
    core = stepping(service, eyes, queues=[QUEUE, SECOND])
    core.declare()
    worker = core.worker("prefork", 2).wait_ready()
    missing = f"queue '{QUEUE}' is missing, so its messages are not handled. Declare it."
    until(lambda: worker.log.count(missing) >= 2, 20)
    others = publish(eyes, 5, queue=SECOND)
    event_id = eyes.event(ACT, {"plan": ["ok"]})
    assert handled(core, others) == dict.fromkeys(others, 1)
    until(lambda: core.runs(event_id, "end"))
    assert eyes.declared(QUEUE) is None, "a step declares nothing"
    declare(eyes, QUEUE)
    ids = publish(eyes, 5)
    assert handled(core, ids) == dict.fromkeys(ids, 1)
    # Deleted under the consumer, and declared again.
    eyes.http("DELETE", f"/api/queues/{{vhost}}/{QUEUE}")
    until(lambda: f"cancelled the consumer of '{QUEUE}'" in worker.log)
    declare(eyes, QUEUE)
    ids = publish(eyes, 5)
    assert handled(core, ids) == dict.fromkeys(ids, 1)
    assert "onnection to broker lost" not in worker.log
    stats = json.loads(core.control("inspect", "stats", "--json").splitlines()[0])
    [answer] = stats.values()
    assert answer[STEP]["queues"] == sorted([QUEUE, SECOND])
    [active] = eyes.app.control.inspect(timeout=10, limit=1).active_queues().values()
    assert {QUEUE, SECOND} <= {queue["name"] for queue in active}
    assert worker.stop() == 0


def test_prefetch_count_and_threads_bound_what_a_worker_holds(
    fresh_eyes: Eyes, service: Make
) -> None:
    """The event loop does not wait for handle(): events are handled meanwhile."""
    eyes = fresh_eyes
    declare(eyes, QUEUE)
    core = stepping(service, eyes, prefetch_count=5, concurrency=2)
    core.declare()
    worker = core.worker("solo", 1).wait_ready()
    ids = publish(eyes, 50, "file:go")
    until(lambda: eyes.queue(QUEUE).get("messages_unacknowledged") == 5, 20)
    events = [eyes.event(ACT, {"plan": ["ok"]}) for _ in range(10)]
    until(lambda: {line["event"] for line in core.ledger(what="end")} >= set(events))
    assert sum(runs(core, ids, "start").values()) == 2
    assert eyes.ready(QUEUE) == 45
    (core.where / "go").touch()
    assert handled(core, ids) == dict.fromkeys(ids, 1)
    eyes.empty(QUEUE)
    assert len({line["thread"] for line in core.ledger(what="end") if "thread" in line}) == 2
    assert worker.stop() == 0


def test_one_thread_keeps_the_order(fresh_eyes: Eyes, service: Make) -> None:
    eyes = fresh_eyes
    declare(eyes, QUEUE)
    core = stepping(service, eyes, prefetch_count=50)
    worker = core.worker("prefork", 1)
    ids = publish(eyes, 200)
    handled(core, ids)
    assert [line["event"] for line in core.ledger(what="start")] == ids
    assert worker.stop() == 0


def test_an_exception_requeues_after_a_pause(fresh_eyes: Eyes, service: Make) -> None:
    """Never acked, and no hot loop: 1 s, 2 s …; sys.exit() neither ends the worker nor a thread."""
    eyes = fresh_eyes
    declare(eyes, QUEUE)
    core = stepping(service, eyes)
    worker = core.worker("threads", 1).wait_ready()
    for plan in (["fail", "fail", "ok"], ["exit", "ok"], ["requeue", "ok"]):
        (id_,) = publish(eyes, 1, *plan)
        assert handled(core, [id_]) == {id_: 1}
        starts = [line["at"] for line in core.runs(id_)]
        assert len(starts) == len(plan)
        for number, (first, second) in enumerate(pairwise(starts)):
            assert 2**number <= second - first
    eyes.empty(QUEUE)
    assert worker.log.count("Traceback") == 3
    assert "ValueError: no" in worker.log
    # A stop does not wait for the pause, and the message is back in its queue.
    (id_,) = publish(eyes, 1, "fail")
    until(lambda: len(core.runs(id_)) == 4, 40)
    assert worker.stop(7) == 0  # the pause is 8 s
    until(lambda: eyes.ready(QUEUE) == 1, what="it is back")
    assert not runs(core, [id_])[id_]


def test_a_rejected_message_is_dead_lettered(fresh_eyes: Eyes, service: Make) -> None:
    """With ``requeue_on_error = False``, or by Reject; the next message is not delayed."""
    eyes = fresh_eyes
    declare(eyes, QUEUE, **{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": DEAD})
    declare(eyes, DEAD)
    core = stepping(service, eyes, requeue_on_error=False)
    worker = core.worker("threads", 1).wait_ready()
    failing, rejected, exiting = (
        publish(eyes, 5, "fail"), publish(eyes, 5, "reject"), publish(eyes, 1, "exit")
    )  # fmt: skip
    requeued, fine = publish(eyes, 1, "requeue", "ok"), publish(eyes, 5)
    assert handled(core, fine + requeued) == dict.fromkeys(fine + requeued, 1)
    dead = failing + rejected + exiting
    until(lambda: eyes.ready(DEAD) == len(dead))
    assert {json.loads(message.body)["id"] for message in eyes.take(DEAD)} == set(dead)
    assert runs(core, dead, "start") == dict.fromkeys(dead, 1)
    eyes.empty(QUEUE)
    assert worker.stop() == 0


def test_a_cold_shutdown_does_not_wait(fresh_eyes: Eyes, service: Make) -> None:
    eyes = fresh_eyes
    declare(eyes, QUEUE)
    core = stepping(service, eyes)
    core.declare()
    worker = core.worker("prefork", 1).wait_ready()
    (held,) = publish(eyes, 1, "file:go", "ok")
    until(lambda: runs(core, [held], "start")[held])
    worker.signal(signal.SIGQUIT)
    worker.wait(20)
    assert "Other: shut down with messages in progress (1)" in worker.log
    until(lambda: eyes.ready(QUEUE) == 1, what="it is back")
    (core.where / "go").touch()
    following = core.worker("prefork", 1).wait_ready()
    assert handled(core, [held]) == {held: 1}
    assert following.stop() == 0


def test_a_reaper_consumes_no_queue_of_a_step(fresh_eyes: Eyes, service: Make) -> None:
    eyes = fresh_eyes
    declare(eyes, QUEUE)
    core = stepping(service, eyes)
    core.declare()
    running = reaper(core)
    until(lambda: eyes.consumers("core:graveyard") == 1, 30)
    assert eyes.consumers(QUEUE) == 0
    assert "Other: consuming" not in running.log
    assert running.stop() == 0


@pytest.mark.parametrize(
    ("attributes", "arguments", "message"),
    [
        ({"queues": QUEUE}, (), "Set it to a list"),
        ({"queues": []}, (), "Set it to a list"),
        ({"queues": [""]}, (), "not the name of a queue"),
        ({"prefetch_count": 0}, (), "Set it to a number from 1 to 65535"),
        ({"concurrency": "2"}, (), "Set it to a number from 1 to 1000"),
        ({}, ("-Q", QUEUE), "Celery consumes erp.orders too"),
        ({"queues": ["core.testproject.act"]}, (), "belongs to a handler"),
    ],
)
def test_a_mistake_ends_the_start(
    eyes: Eyes, service: Make, attributes: dict[str, Any], arguments: tuple[str, ...], message: str
) -> None:
    """It names the step, the mistake and the remedy, without a traceback."""
    worker = stepping(service, eyes, **attributes).worker("threads", 1, *arguments)
    assert worker.wait(30) == 1
    assert "this worker does not start: " in worker.log
    assert STEP in worker.log
    assert message in worker.log
    assert "Traceback" not in worker.log


def test_the_examples_of_the_documentation(fresh_eyes: Eyes, service: Make, tmp_path: Path) -> None:
    """In a project without handlers and without AMQP_EVENTS."""
    eyes = fresh_eyes
    first, second = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "consumers.md").read_text(), re.DOTALL
    )
    (tmp_path / "shop.py").write_text(
        f"{first}\n\n{second}\n"
        f"app.steps['consumer'].add(LevelsOfOneWorker)\n"
        f"app.conf.update(broker_url={eyes.url!r}, worker_redirect_stdouts_level='INFO')\n"
    )
    (tmp_path / "plain.py").write_text("SECRET_KEY = 'x'\n")
    declare(
        eyes,
        "warehouse.levels",
        **{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": DEAD},
    )
    declare(eyes, DEAD)
    bodies = [b'{"sku": "S-1", "left": 7}', b"seven", b'{"sku": "S-2", "left": 0}']
    eyes.send(
        *(
            Message(
                exchange="", routing_key="warehouse.levels", body=body, headers={}, properties={}
            )
            for body in bodies
        )
    )
    project = service(eyes, where=tmp_path)
    environ = {"DJANGO_SETTINGS_MODULE": "plain", "PYTHONPATH": f"{tmp_path}:{PACKAGE}"}
    worker = Worker.start(
        [sys.executable, "-m", "celery", "-A", "shop", "worker", "--concurrency", "1",
         "--loglevel", "INFO", "--hostname", "other@localhost"],
        env={**project.env(), **environ}, where=tmp_path, name="example",
    )  # fmt: skip
    until(lambda: "S-1: 7 left" in worker.log and "S-2: 0 left" in worker.log)
    until(lambda: eyes.ready(DEAD) == 1)
    assert "not a stock level: JSONDecodeError('Expecting value" in worker.log
    assert "LevelsOfOneWorker" not in worker.log
    eyes.empty("warehouse.levels")
    assert worker.stop() == 0
