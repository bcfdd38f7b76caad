"""Reading a queue in batches, and what RabbitMQ says of a queue that is busy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from broker import Node
from django_amqp_events.broker import batch_reader
from django_amqp_events.broker import queue_depth as module
from django_amqp_events.broker.batch_reader import BatchReader
from django_amqp_events.broker.history import LULL, StreamReader
from django_amqp_events.broker.provisioning.binding_records import read_records
from django_amqp_events.broker.queue_depth import queue_depth
from django_amqp_events.worker.acks import IN_FLIGHT
from tests.conftest import _vhost
from tests.waiting import stopped

from ..conftest import Service, wait_until

QUEUE = "billing.send_invoice"


@pytest.fixture
def billing(service: Callable[..., Service], private_node: Node) -> Iterator[Service]:
    with _vhost(private_node, "reading") as vhost:
        made = service(vhost, HANDLERS={"send_invoice": ["shop.order.created"]})
        made.declare()
        yield made


def suspend(node: Node, billing: Service, seconds: float) -> None:
    """Let the queue answer nobody for some seconds, as if its disk were slow."""
    node.ctl(
        "eval",
        f'Leader = whereis(binary_to_atom(<<"{billing.vhost.name}_{QUEUE}">>, utf8)), '
        "spawn(fun() -> true = erlang:suspend_process(Leader), "
        f"timer:sleep({1000 * seconds:.0f}) end).",
    )


def test_a_busy_queue_is_not_taken_for_an_empty_one(
    billing: Service, private_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RabbitMQ answers for a leader that is late, and says that the queue has nothing."""
    monkeypatch.setattr(module, "TRIES", 100)
    for _ in range(3):
        billing.publish("", QUEUE)
    channel = billing.channel()
    suspend(private_node, billing, 3.0)
    answer = channel.queue_declare(QUEUE, passive=True)
    assert (answer.message_count, answer.consumer_count) == (0, 0)
    assert queue_depth(channel, QUEUE).ready == 3


@pytest.mark.timeout(60)
def test_heartbeats_are_no_messages(billing: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait of ten seconds and more never ended, as RabbitMQ sends one every ten."""
    monkeypatch.setattr(batch_reader, "HEARTBEAT", 2)
    with closing(BatchReader(billing.app, QUEUE, billing.settings, size=10)) as reader:
        assert reader.batch(wait=4.0) is None


@pytest.mark.parametrize("number", [IN_FLIGHT, 2 * IN_FLIGHT])
def test_rabbitmq_forgets_acks_when_a_channel_closes(
    billing: Service, private_node: Node, number: int
) -> None:
    """It holds back what exceeds the limit until the queue has applied the others."""
    for _ in range(number + 1):
        billing.publish("", QUEUE)
    channel = billing.channel()
    tags = [channel.basic_get(QUEUE).delivery_tag for _ in range(number + 1)]
    suspend(private_node, billing, 2.0)
    for tag in tags[1:]:
        channel.basic_ack(tag)
    channel.close()
    wait_until(lambda: billing.ready(QUEUE) > 0, "the one without an ack is back")
    assert (billing.ready(QUEUE) > 1) == (number > IN_FLIGHT)


def test_single_acks_before_the_end_are_not_lost(billing: Service, private_node: Node) -> None:
    for _ in range(1 + 4 + 16 + 64):
        billing.publish("", QUEUE)
    with closing(BatchReader(billing.app, QUEUE, billing.settings, size=64)) as reader:
        for size, left_out in ((1, 1), (4, 0), (16, 0), (64, 0)):
            batch = reader.batch(wait=20)
            assert batch is not None
            assert len(batch.messages) == size
            if size == 64:
                suspend(private_node, billing, 2.0)
            reader.ack(batch, range(left_out, size))
    wait_until(lambda: billing.ready(QUEUE) > 0, "the one that was left out is back")
    assert billing.ready(QUEUE) == 1


def test_a_silence_of_rabbitmq_is_not_the_end_of_the_records(
    billing: Service,
    service: Callable[..., Service],
    private_node: Node,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handlers = {f"h{number}": ["shop.order.created"] for number in range(14)}
    made = service(billing.vhost, HISTORY={"MAX_AGE": "14d"}, HANDLERS=handlers)
    made.declare()
    ack, pid = StreamReader.ack, private_node.pid
    assert pid is not None

    def silence(begun: threading.Event) -> None:
        with stopped(pid):
            begun.set()
            time.sleep(2 * LULL)

    def ack_in_silence(reader: StreamReader, *args: Any) -> None:
        begun = threading.Event()
        threading.Thread(target=silence, args=[begun]).start()
        assert begun.wait(60)
        ack(reader, *args)

    monkeypatch.setattr(StreamReader, "ack", ack_in_silence)
    assert len(read_records(made.app, made.settings)) == 14


def test_large_messages_do_not_fill_the_memory(
    billing: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_reader, "BATCH_BYTES", 3000)
    for _ in range(40):
        billing.publish("", QUEUE, b"x" * 1000)
    sizes: list[int] = []
    with closing(BatchReader(billing.app, QUEUE, billing.settings, size=64)) as reader:
        while sum(sizes) < 40:
            batch = reader.batch(wait=20)
            assert batch is not None
            sizes.append(len(batch.messages))
            reader.ack(batch, range(len(batch.messages)))
    assert max(sizes) <= 4, sizes
