"""The raw floor: py-amqp alone, through the same kind of exchange into the same kind of queue."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import amqp

from benchmarks.window import Window, connect

from .given import BROKER, GIVEN, payload
from .serving import serve, timed

EXCHANGE, KEY, QUEUE = "events", "bench.happened0", "floor"
_PERSISTENT = 2


def declare() -> dict[str, Any]:
    """Declare a topic exchange and a queue that is bound to it."""
    with connect(BROKER) as connection:
        channel = connection.channel()
        channel.exchange_declare(EXCHANGE, "topic", durable=True, auto_delete=False)
        channel.queue_declare(
            QUEUE, durable=True, auto_delete=False,
            arguments={"x-queue-type": GIVEN.get("queue_type", "quorum")},
        )  # fmt: skip
        channel.queue_bind(QUEUE, EXCHANGE, "bench.#")
    return {"queues": [QUEUE]}


def _message(body: str) -> amqp.Message:
    return amqp.Message(
        body, content_type="application/json", content_encoding="utf-8", delivery_mode=_PERSISTENT
    )


def one_by_one(number: int, size: int = 500) -> dict[str, Any]:
    """Publish and wait for the confirm, *number* times."""
    body = json.dumps(payload(size), separators=(",", ":"))
    connection = connect(BROKER)
    channel = connection.channel()
    channel.confirm_select()
    with timed() as answer:
        for _ in range(number):
            channel.basic_publish_confirm(
                _message(body), EXCHANGE, "bench.happened0", mandatory=True
            )
    connection.close()
    return answer


def window(number: int, size: int = 500) -> dict[str, Any]:
    """Publish with a sliding window of confirms."""
    body = json.dumps(payload(size), separators=(",", ":"))
    channel = Window(BROKER)

    def messages() -> Iterator[tuple[amqp.Message, str, str]]:
        for _ in range(number):
            yield _message(body), EXCHANGE, KEY

    with timed() as answer:
        accepted = channel.publish(messages())
    channel.close()
    return {**answer, "accepted": accepted}


def consume(number: int, prefetch: int) -> dict[str, Any]:
    """Read *number* messages and ack each."""
    connection = connect(BROKER)
    channel = connection.channel()
    channel.basic_qos(0, prefetch, False)
    done = 0

    def received(message: Any) -> None:
        nonlocal done
        done += 1
        channel.basic_ack(message.delivery_tag)

    with timed() as answer:
        channel.basic_consume(QUEUE, callback=received)
        while done < number:
            connection.drain_events(timeout=60)
    connection.close()
    return answer


def passive(
    queues: list[str], exchanges: list[str], bindings: Sequence[tuple[str, str, str]] = ()
) -> dict[str, Any]:
    """Ask for queues and exchanges by passive declares, and bind queues, one after another."""
    began = time.perf_counter()
    connection = connect(BROKER)
    channel = connection.channel()
    for name in exchanges:
        channel.exchange_declare(name, "", passive=True)
    for name in queues:
        channel.queue_declare(name, passive=True)
    for queue, exchange, key in bindings:
        channel.queue_bind(queue, exchange, key)
    connection.close()
    return {"seconds": time.perf_counter() - began}


if __name__ == "__main__":
    serve(declare=declare, one_by_one=one_by_one, window=window, consume=consume, passive=passive)
