"""dramatiq: an actor; runs in the peers' virtual environment, ``dramatiq …service_dramatiq``.

A subclass of its broker declares quorum queues, which dramatiq does not support. Confirms are on.
Its retries do not matter, since nothing fails.
"""

from __future__ import annotations

from typing import Any

import dramatiq  # type: ignore[import-not-found]
from dramatiq.brokers.rabbitmq import RabbitmqBroker  # type: ignore[import-not-found]

from . import work
from .given import BROKER, GIVEN

QUEUE = "dramatiq"


class QuorumBroker(RabbitmqBroker):
    """A broker that declares quorum queues."""

    def _build_queue_arguments(self, queue_name: str) -> dict[str, Any]:
        kind = GIVEN.get("queue_type", "quorum")
        return {**super()._build_queue_arguments(queue_name), "x-queue-type": kind}


broker = QuorumBroker(url=BROKER, confirm_delivery=True)
# The default middleware, except Prometheus, which would open a port.
broker.middleware = [each for each in broker.middleware if type(each).__name__ != "Prometheus"]
dramatiq.set_broker(broker)


@dramatiq.actor(queue_name=QUEUE, actor_name="bench")
def of_nothing(order_id: int, total: str, note: str) -> None:
    """Count the call."""
    work.nothing()
