"""Publish with dramatiq; runs in the peers' virtual environment."""

from __future__ import annotations

from typing import Any

from .given import payload
from .service_dramatiq import QUEUE, broker, of_nothing
from .serving import serve, timed


def declare() -> dict[str, Any]:
    """Declare the queue, as dramatiq does with the first message."""
    broker.declare_queue(QUEUE, ensure=True)
    return {"queues": [QUEUE]}


def one_by_one(number: int, size: int = 500) -> dict[str, Any]:
    """Call ``send`` *number* times; each call returns when RabbitMQ has confirmed."""
    given = payload(size)
    with timed() as answer:
        for _ in range(number):
            of_nothing.send(**given)
    return answer


if __name__ == "__main__":
    serve(declare=declare, one_by_one=one_by_one)
