"""Publish tasks of plain Celery, with confirms."""

from __future__ import annotations

import time
from typing import Any

from .given import payload
from .service_plain import TASKS, app, queue, tasks
from .serving import at_a_pace, serve, timed


def declare() -> dict[str, Any]:
    """Declare the queues, as Celery does with the first publish."""
    with app.connection_for_write() as connection:
        for declared in app.amqp.queues.values():
            declared(connection.default_channel).declare()
    return {"queues": [queue(number) for number in range(TASKS)]}


def one_by_one(number: int, size: int = 500) -> dict[str, Any]:
    """Call ``apply_async`` *number* times; each call returns when RabbitMQ has confirmed."""
    given = payload(size)
    publish = tasks[0].apply_async
    with timed() as answer:
        for _ in range(number):
            publish(kwargs=given)
    return answer


def each() -> dict[str, Any]:
    """Publish one message for each task."""
    for task in tasks:
        task.apply_async(kwargs=payload())
    return {}


def paced(number: int, rate: float) -> dict[str, Any]:
    """Publish at a steady pace, each with the start time of its call."""
    given = payload()
    publish = tasks[0].apply_async
    for _ in at_a_pace(number, rate):
        publish(kwargs={**given, "sent": time.monotonic()})
    return {}


if __name__ == "__main__":
    serve(declare=declare, one_by_one=one_by_one, each=each, paced=paced)
