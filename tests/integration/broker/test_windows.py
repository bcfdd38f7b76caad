"""Many messages in one publish: they arrive as they are, and each has its own answer."""

from __future__ import annotations

import threading
from typing import Any

import amqp
import pytest

from django_amqp_events import (
    PublishError,
    PublishRefusedError,
)
from django_amqp_events.broker.provisioning.amqp_api import version_of
from django_amqp_events.message.types import Message

from ..wire import (
    Wire,
    until,
)


def waiting(wire: Wire) -> int:
    """How many messages are in the queue."""
    count: int = wire.channel.queue_declare(wire.queue, passive=True).message_count
    return count


def arrived(wire: Wire, number: int) -> list[tuple[bytes, dict[str, Any], str]]:
    """Take messages out of the queue, without what the queue adds to them."""
    taken = wire.take(about=number)
    for message in taken:
        (message.properties.get("application_headers") or {}).pop("x-delivery-count", None)
    return [(bytes(m.body or b""), m.properties, m.delivery_info["routing_key"]) for m in taken]


def kinds(results: list[PublishError | None]) -> list[type]:
    return [type(result) for result in results]


def publishing(wire: Wire, messages: list[Message]) -> tuple[threading.Thread, list[Any]]:
    """Publish in a thread; its answers come into the list."""
    results: list[Any] = []
    thread = threading.Thread(
        target=lambda: results.extend(wire.pool.publish(messages, mandatory=True))
    )
    thread.start()
    return thread, results


def test_the_same_messages_arrive(wire: Wire):
    """Of every kind: larger than a frame, empty, unicode, many headers, other types of them."""
    large = {f"header-{n}": "ü" * 100 for n in range(250)}
    given = [
        wire.message(b""),
        wire.message(b"x" * 131_072),
        wire.message(b"y" * 400_000, headers=large),
        wire.message(routing_key="bestellung.größe.訂單"),
        wire.message(headers=large),
        wire.message(headers={"n": 2**40, "m": -1, "f": 1.5, "b": True, "t": "ü", "e": ""}),
        wire.message(headers={"list": [1, "a"], "table": {"a": 1}, "none": None, "raw": b"\xff"}),
        wire.message(properties={"message_id": "p", "priority": 3, "type": "t", "app_id": "a"}),
        wire.message(properties={}),
        *(wire.message(b"z" * n) for n in range(0, 130_000, 10_000)),
        *(wire.message(str(n).encode()) for n in range(300)),
    ]
    assert wire.pool.publish(given, mandatory=True) == [None] * len(given)
    ours = arrived(wire, len(given))
    for message in given:
        wire.channel.basic_publish(
            amqp.Message(
                message.body,
                application_headers=dict(message.headers),
                **dict(message.properties),
            ),
            wire.exchange,
            message.routing_key,
        )
    # Priorities order what is ready.
    until(lambda: waiting(wire) == len(given), "the queue has them")
    assert arrived(wire, len(given)) == ours
    if version_of(wire.channel.connection.server_properties) >= (4, 3):
        # By strict priority, 4 without one: docs/other-programs.md.
        given.sort(key=lambda message: message.properties.get("priority", 4), reverse=True)
    assert [body for body, *_ in ours] == [message.body for message in given]


UNWRITABLE: list[dict[str, Any]] = [
    {"headers": {"object": object()}},
    {"headers": {"large": 2**63}},
    {"headers": {"n" * 256: 1}},
    {"headers": {5: 1}},
    {"properties": {"delivery_mode": 256}},
    {"properties": {"delivery_mode": "2"}},
    {"properties": {"message_id": 5}},
    {"properties": {"message_id": "x" * 256}},
    {"routing_key": "ü" * 128},
    {"exchange": "x" * 256},
]


@pytest.mark.parametrize("size", [10, 400_000])
def test_what_cannot_be_encoded_is_refused(wire: Wire, size: int):
    """Nothing of it is written, and the messages around it are published."""
    good = [wire.message() for _ in UNWRITABLE]
    bad = [wire.message(b"x" * size, **changes) for changes in UNWRITABLE]
    messages = [message for pair in zip(good, bad, strict=True) for message in pair]
    results = wire.pool.publish(messages, mandatory=True)
    assert kinds(results) == [type(None), PublishRefusedError] * len(good)
    assert [error.reason.code for error in results[1::2] if error] == ["message-unwritable"] * 10
    assert sorted(wire.ids()) == sorted(message.event_id for message in good)
