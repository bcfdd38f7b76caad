"""FastStream: a subscriber; runs in the peers' virtual environment, ``faststream run …:app``."""

from __future__ import annotations

from faststream import AckPolicy, FastStream  # type: ignore[import-not-found]
from faststream.rabbit import (  # type: ignore[import-not-found]
    Channel,
    ExchangeType,
    QueueType,
    RabbitBroker,
    RabbitExchange,
    RabbitQueue,
)

from . import work
from .given import BROKER, GIVEN

EXCHANGE = RabbitExchange("events", type=ExchangeType.TOPIC, durable=True)
QUEUE = RabbitQueue(
    "faststream",
    queue_type=QueueType(GIVEN.get("queue_type", "quorum")),
    durable=True,
    routing_key="bench.#",
)

broker = RabbitBroker(
    BROKER,
    # Per worker process: two of them have as many deliveries as Celery's two children.
    default_channel=Channel(prefetch_count=GIVEN.get("prefetch", 4)),
    logger=None,
)
app = FastStream(broker)

if GIVEN.get("handlers", 1):

    @broker.subscriber(QUEUE, EXCHANGE, ack_policy=AckPolicy.NACK_ON_ERROR)
    async def of_nothing(order_id: int, total: str, note: str) -> None:
        """Count the call."""
        work.nothing()
