"""Publish with celery-amqp-events 0.1.0; runs in the peers' virtual environment.

It has no handlers: in a process with handlers, its publish declares the shared exchange as a direct
one, which RabbitMQ refuses (with Celery 5.7).
"""

from __future__ import annotations

from typing import Any

from .given import payload
from .service_peer import EVENT, app, declare
from .serving import serve, timed


@app.event(EVENT)
def happened(order_id: int, total: str, note: str) -> None:
    """The event."""


def one_by_one(number: int, size: int = 500) -> dict[str, Any]:
    """Call the event *number* times; each call returns when RabbitMQ has confirmed."""
    given = payload(size)
    with timed() as answer:
        for _ in range(number):
            happened(**given)
    return answer


if __name__ == "__main__":
    serve(declare=declare, one_by_one=one_by_one)
