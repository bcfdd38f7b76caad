"""Plain Celery's tasks, which do the same as the project's handlers.

Also the application of its workers, ``celery -A benchmarks.programs.service_plain``. In a Django
project (``apps`` was given) Celery's Django fixup is on, as there; else Django is not imported.
"""

from __future__ import annotations

import os
from typing import Any

from .given import GIVEN

if "apps" in GIVEN:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.programs.settings")

from celery import Celery
from kombu import Exchange, Queue

from . import work
from .celery_options import OPTIONS

QUEUE = "plain"
TASKS: int = GIVEN.get("handlers", 1)
#: A queue for all tasks, Celery's default, or one for each.
ONE_QUEUE: bool = GIVEN.get("one_queue", TASKS == 1)

app = Celery("plain")
app.conf.update(OPTIONS, task_default_queue=QUEUE)
if not ONE_QUEUE:
    exchange = Exchange("plain", type="direct", durable=True)
    app.conf.task_queues = [
        Queue(
            f"{QUEUE}{number}", exchange, routing_key=f"{QUEUE}{number}",
            queue_arguments={"x-queue-type": OPTIONS["task_default_queue_type"]},
        )
        for number in range(TASKS)
    ]  # fmt: skip
    app.conf.task_routes = {
        f"plain.task{number}": {"queue": f"{QUEUE}{number}"} for number in range(TASKS)
    }
app.set_default()
if "apps" in GIVEN:
    import django

    django.setup()


def queue(number: int) -> str:
    """Return the queue of a task."""
    return QUEUE if ONE_QUEUE else f"{QUEUE}{number}"


def made(number: int) -> Any:
    """Register a task."""
    options: dict[str, Any] = {"name": f"plain.task{number}"}

    if work.WORK == "row":

        @app.task(**options)
        def of_row(order_id: int, total: str, note: str, sent: float = 0.0) -> None:
            work.row(order_id, note)

        return of_row

    if work.WORK == "since":

        @app.task(**options)
        def of_since(order_id: int, total: str, note: str, sent: float = 0.0) -> None:
            work.since(sent)

        return of_since

    if work.WORK == "lasting":

        @app.task(**options)
        def of_lasting(order_id: int, total: str, note: str, sent: float = 0.0) -> None:
            work.lasting(number)

        return of_lasting

    if work.WORK == "fail_once":

        @app.task(bind=True, max_retries=10, **options)
        def of_failing(self: Any, order_id: int, total: str, note: str, sent: float = 0.0) -> None:
            work.fail_once(self, self.request.retries + 1)

        return of_failing

    @app.task(**options)
    def of_nothing(order_id: int, total: str, note: str, sent: float = 0.0) -> None:
        work.nothing()

    return of_nothing


tasks = [made(_number) for _number in range(TASKS)]
