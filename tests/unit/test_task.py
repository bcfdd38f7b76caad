"""Running a handler in the pool: what Celery's tracer does not decide."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Task
from celery.backends.filesystem import FilesystemBackend

from django_amqp_events.context import ReceivedEvent
from django_amqp_events.exceptions import ConfigurationError, DirectCallError
from django_amqp_events.registry import Handler
from django_amqp_events.worker.task import register, task_class, trace_event

calls: list[int] = []


def count(order_id: int) -> None:
    calls.append(order_id)


HANDLER = Handler(
    name="shop.count",
    key="shop.shop.count",
    queue="shop.shop.count",
    patterns=("shop.order.created",),
    target=count,
    ignore_result=False,
)


class PersistentBackend(FilesystemBackend):
    persistent = True


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Celery]:
    calls.clear()
    app = Celery("deduplicating", set_as_current=False)
    app.conf.update(
        result_backend=f"{__name__}:PersistentBackend+file://{tmp_path}",
        worker_deduplicate_successful_tasks=True,
    )
    app.set_current()
    task_class.cache_clear()
    register(app, {HANDLER.name: HANDLER})
    yield app
    app.close()
    Celery("nobody").set_current()


def run(task_id: str, *, redelivered: bool) -> str:
    request: dict[str, Any] = {
        "id": task_id,
        "task": HANDLER.name,
        "amqp_event": ReceivedEvent(id="1", name="shop.order.created"),
        "delivery_info": {"redelivered": redelivered},
        "ignore_result": False,
    }
    return trace_event(HANDLER.name, task_id, request, [[], {"order_id": 7}, {}]).kind


def test_a_redelivered_success_is_handled_without_a_second_run(app: Celery) -> None:
    task_id = str(uuid.uuid4())
    assert run(task_id, redelivered=False) == "handled"
    assert calls == [7]
    assert run(task_id, redelivered=True) == "handled"
    assert calls == [7]


def test_a_handler_is_not_run_like_a_task(app: Celery) -> None:
    task = app.tasks[HANDLER.name]
    for call in (task.delay, task.apply_async, task.s(order_id=1).apply_async):
        with pytest.raises(DirectCallError, match="publish its event"):
            call()
    assert task(order_id=3) is None
    assert calls == [3]


def test_an_ordinary_task_of_the_same_name_is_refused(app: Celery) -> None:
    class Ordinary(Task):
        name = "shop.other"

        def run(self) -> None: ...

    app.register_task(Ordinary())
    other = Handler(**{**{f: getattr(HANDLER, f) for f in HANDLER.__slots__}, "name": "shop.other"})
    with pytest.raises(ConfigurationError, match=r"shop\.other"):
        register(app, {"shop.other": other})
