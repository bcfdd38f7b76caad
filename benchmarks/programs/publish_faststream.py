"""Publish with FastStream; runs in the peers' virtual environment."""

from __future__ import annotations

import asyncio
from typing import Any

from .given import payload
from .service_faststream import EXCHANGE, QUEUE, broker
from .serving import serve, timed

#: Publishes that wait for their confirms at the same time.
CONCURRENT = 100
loop = asyncio.new_event_loop()


async def _declare() -> None:
    await broker.connect()
    exchange = await broker.declare_exchange(EXCHANGE)
    queue = await broker.declare_queue(QUEUE)
    await queue.bind(exchange, routing_key=QUEUE.routing_key)


def declare() -> dict[str, Any]:
    """Connect; declare exchange and queue."""
    loop.run_until_complete(_declare())
    return {"queues": [QUEUE.name]}


async def _publish(number: int, size: int) -> None:
    given = payload(size)
    for _ in range(number):
        await broker.publish(
            given, exchange=EXCHANGE, routing_key="bench.happened0", persist=True, mandatory=True
        )


def one_by_one(number: int, size: int = 500) -> dict[str, Any]:
    """Publish *number* messages, each awaited until RabbitMQ has confirmed."""
    with timed() as answer:
        loop.run_until_complete(_publish(number, size))
    return answer


async def _concurrent(number: int, size: int) -> None:
    share = number // CONCURRENT
    await asyncio.gather(*(_publish(share, size) for _ in range(CONCURRENT)))


def many(number: int, size: int = 500) -> dict[str, Any]:
    """Publish by :data:`CONCURRENT` coroutines side by side."""
    with timed() as answer:
        loop.run_until_complete(_concurrent(number, size))
    return answer


if __name__ == "__main__":
    serve(declare=declare, one_by_one=one_by_one, many=many)
