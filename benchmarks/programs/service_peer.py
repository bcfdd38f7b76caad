"""celery-amqp-events 0.1.0: its service and its publisher; runs in the peers' virtual environment.

Configured as its README says, except that its queue is a quorum queue like all others. It cannot
declare one, so the benchmark does, with the same bindings and dead-letter exchange.
"""

from __future__ import annotations

import os
from typing import Any

# Its archive is a lazy queue with limits, which is not measured.
os.environ.setdefault("AMQP_EVENTS_ARCHIVED_MESSAGE_TTL", "0")
os.environ.setdefault("AMQP_EVENTS_ARCHIVED_QUEUE_LENGTH", "0")

from amqp_events.celery import events_app  # type: ignore[import-not-found]
from kombu import Exchange, Queue, binding

from . import work
from .given import BROKER, GIVEN

EVENT, QUEUE = "bench.happened0", "bench.bench.happened0"

HANDLES: bool = GIVEN.get("handlers", 1) > 0
QUEUES = [
    Queue(
        QUEUE,
        bindings=[
            binding(exchange=Exchange("events", type="topic"), routing_key=EVENT),
            binding(exchange=Exchange("bench:recover", type="topic"), routing_key=EVENT),
        ],
        queue_arguments={
            "x-queue-type": GIVEN.get("queue_type", "quorum"),
            "x-dead-letter-exchange": "bench:retry",
        },
    )
]
app = events_app(
    "bench",
    broker_url=BROKER,
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=GIVEN.get("prefetch", 4),
    worker_enable_remote_control=False,
    task_ignore_result=True,
    # With queues, a publish declares the shared exchange as a direct one.
    task_queues=QUEUES if HANDLES else [],
)

if HANDLES and work.WORK == "fail_once":

    @app.handler(EVENT, bind=True)
    def of_failing(self: Any, order_id: int, total: str, note: str) -> None:
        work.fail_once(self, self.request.retries + 1)

elif HANDLES:

    @app.handler(EVENT)
    def of_nothing(order_id: int, total: str, note: str) -> None:
        work.nothing()


def declare() -> dict[str, Any]:
    """Declare what a worker declares when it starts."""
    app.finalize(auto=True)
    with app.connection_for_write() as connection:
        for queue in QUEUES:
            queue(connection.default_channel).declare()
    return {"queues": [QUEUE]}
