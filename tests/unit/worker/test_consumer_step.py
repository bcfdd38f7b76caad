"""What an AMQPConsumerStep refuses, and how the thread of one survives; workers have the rest."""

from __future__ import annotations

import logging
import re
import threading
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from amqp.serialization import dumps
from celery.exceptions import Reject
from hypothesis import given
from hypothesis import strategies as st

from django_amqp_events import liveness, worker
from django_amqp_events.conf import Settings
from django_amqp_events.worker import AMQPConsumerStep, Received
from django_amqp_events.worker.bootstep import EventStep


class Orders(AMQPConsumerStep):
    queues = ("erp.orders",)

    def handle(self, message: Received) -> None:
        if message.body:
            raise Reject(message.body, requeue=message.redelivered)


def mistake(cls: type[AMQPConsumerStep], **consumer: Any) -> str:
    queues = SimpleNamespace(consume_from={"celery": None})
    app = SimpleNamespace(amqp=SimpleNamespace(queues=queues))
    step = cls.__new__(cls)
    return step._mistake(SimpleNamespace(**{"hub": object(), "app": app, **consumer}))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"queues": 5}, "queues is 5. Set it to a list"),
        ({"queues": [None]}, "contains None, which is not the name of a queue"),
        ({"queues": ["ü" * 128]}, "which is not the name of a queue"),
        ({"prefetch_count": True}, "prefetch_count is True. Set it to a number from 1 to 65535"),
        ({"prefetch_count": 65536}, "prefetch_count is 65536."),
        ({"concurrency": 0}, "concurrency is 0. Set it to a number from 1 to 1000"),
        ({"handle": AMQPConsumerStep.handle}, "has no method handle(self, message). Define it."),
    ],
)
def test_mistakes(attributes: dict[str, Any], message: str) -> None:
    found = mistake(type("Wrong", (Orders,), {"__module__": __name__, **attributes}))
    assert found.startswith(f"{__name__}.Wrong")
    assert message in found


def test_a_pool_without_an_event_loop_is_refused() -> None:
    assert "needs Celery's event loop. Use --pool prefork, threads or solo" in mistake(
        Orders, hub=None
    )


def test_a_right_one_has_no_mistake() -> None:
    assert not mistake(Orders)
    assert not mistake(type("Other", (Orders,), {"queues": ("a", "b"), "prefetch_count": 65535}))


def test_a_connection_that_cannot_be_closed_requeues(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not end the thread, which would hold its messages for ever."""

    def fail() -> None:
        raise OSError("the database is gone")

    monkeypatch.setattr("django_amqp_events.worker.consumer_step.close_old_connections", fail)
    step = Orders.__new__(Orders)
    message = Received(
        queue="erp.orders", exchange="", routing_key="", body=b"", headers={}, properties={}
    )
    assert step._handle(message) == "requeue"


@pytest.mark.parametrize("redelivered", [True, False])
@pytest.mark.parametrize("body", [b"", b"no"])
def test_a_filter_of_logging_that_raises_does_not_end_the_thread(
    monkeypatch: pytest.MonkeyPatch, body: bytes, redelivered: bool
) -> None:
    def fail(*_: object) -> None:
        raise LookupError("no such field")

    class Failing(Orders):
        def handle(self, message: Received) -> None:
            super().handle(message)
            raise MemoryError

    monkeypatch.setattr("django_amqp_events.worker.consumer_step.close_old_connections", bool)
    monkeypatch.setattr(logging.getLogger(AMQPConsumerStep.__module__), "filter", fail)
    step = Failing.__new__(Failing)
    message = Received(
        queue="erp.orders", exchange="", routing_key="", body=body, headers={}, properties={},
        redelivered=redelivered,
    )  # fmt: skip
    assert step._handle(message) == ("requeue" if redelivered or not body else "reject")


def test_a_stop_waits_for_acks_that_another_thread_writes() -> None:
    """Celery's timer thread may run a flush when the main thread is about to close the channel."""
    writing, may_write = threading.Event(), threading.Event()

    class Acks:
        def ack(self, _: object) -> None:
            writing.set()
            assert may_write.wait(30)

    step: Any = Orders.__new__(Orders)
    message = SimpleNamespace(channel=SimpleNamespace(connection=object()))
    step.acks, step._done, step._errors = Acks(), deque([(message, "ack")]), ()
    step._flushing, step.channel = threading.Lock(), None
    timer, main = (threading.Thread(target=run) for run in (step.flush, step._flush_at_last))
    timer.start()
    assert writing.wait(30)
    main.start()
    main.join(0.2)
    assert main.is_alive()
    may_write.set()
    main.join(30)
    assert not main.is_alive()


def test_the_documentation_has_the_defaults() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "consumers.md").read_text()
    for name in ("prefetch_count", "concurrency", "requeue_on_error"):
        default = str(getattr(AMQPConsumerStep, name))
        assert re.search(rf"^\| `{name}` \| `?{default}`? \|", text, re.MULTILINE), name


def test_the_package_has_public_names_only() -> None:
    assert worker.__all__ == ["AMQPConsumerStep", "Received"]
    with pytest.raises(AttributeError, match="has no attribute 'Consumer'"):
        worker.Consumer  # noqa: B018


@given(
    multiplier=st.integers(-(2**40), 2**40),
    processes=st.integers(0, 2**20),
    queues=st.integers(0, 10),
)
def test_a_prefetch_count_is_one_that_amqp_can_express(
    multiplier: int, processes: int, queues: int
) -> None:
    pool = SimpleNamespace(num_processes=processes)
    worker = SimpleNamespace(initial_prefetch_count=multiplier * processes, pool=pool)
    step: Any = SimpleNamespace(c=worker, queues=range(queues))
    count = EventStep.prefetch_count.fget(step)  # type: ignore[attr-defined]
    assert 1 <= count <= 65535
    assert dumps("lBb", (0, count, False))


def test_a_missing_queue_that_remote_control_cancels_is_no_problem_any_more() -> None:
    step: Any = EventStep.__new__(EventStep)
    step.c = SimpleNamespace(pool=object(), add_task_queue=None, cancel_task_queue=None)
    step.part = liveness.Part(name="worker", problem=step._not_ready, turned=0.0)
    step.settings, step.registry = Settings(), SimpleNamespace(by_queue=lambda: {"shop.mail": []})
    step.queues, step._tags, step.paused, step._missing = {"shop.mail"}, {}, set(), {"shop.mail": 1}
    assert "queue shop.mail is missing" in step.part.problem()
    step._replace_remote_control(step.c)
    step.c.cancel_task_queue("shop.mail")
    assert step.part.problem() == ""
