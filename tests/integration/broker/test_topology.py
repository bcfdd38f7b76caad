"""Facts about RabbitMQ that the topology relies on. Sources: docs/reasons.md."""

from __future__ import annotations

import amqp
import pytest

from django_amqp_events.broker.provisioning.amqp_api import (
    session,
)
from django_amqp_events.broker.topology import (
    NO_LIMIT,
    POWER_DELAYS,
)
from django_amqp_events.monitor import queue_status
from django_amqp_events.options import LONGEST_TTL

from ..conftest import wait_until

SAFE = {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}


@pytest.fixture
def billing(service, fresh_vhost):
    made = service(
        fresh_vhost,
        HANDLERS={
            "send_invoice": ["shop.order.created", "shop.refund.*"],
            "book": {"EVENTS": ["shop.#"], "HANDLER": "tests.integration.handlers.handle",
                     "RETRY_BACKOFF": 3, "RETRY_BACKOFF_MAX": 10},
        },
    )  # fmt: skip
    made.declare()
    return made


def versioned(billing) -> tuple[int, ...]:
    with billing.active(), session(billing.app, billing.settings) as amqp_session:
        return tuple(int(part) for part in amqp_session.server["version"].split(".")[:2])


def test_declared_topology_matches_the_design(billing):
    """Every exchange, queue, argument and binding of the vhost."""
    delays = sorted({*POWER_DELAYS, 3, 6, 10})
    exchanges = {
        "events": ("topic", {}),
        "billing:return": ("direct", {"alternate-exchange": "billing:archive"}),
        "billing:replay": ("direct", {}),
        **{f"billing:{name}": ("fanout", {}) for name in ("archive", "graveyard", "dead", "abyss")},
        **{f"billing:delay.{seconds}s": ("fanout", {}) for seconds in delays},
    }
    found = {
        exchange["name"]: exchange
        for exchange in billing.api.exchanges()
        if exchange["name"] and not exchange["name"].startswith("amq.")
    }
    assert {name: (x["type"], x["arguments"]) for name, x in found.items()} == exchanges
    assert all(x["durable"] and not x["auto_delete"] and not x["internal"] for x in found.values())

    quorum = {"x-queue-type": "quorum"}
    handler = {**quorum, **SAFE, "x-dead-letter-exchange": "billing:graveyard"}
    queues = {
        "billing.send_invoice": {
            **handler, "x-delivery-limit": 5, "x-dead-letter-routing-key": "billing.send_invoice",
        },
        "billing.book": {
            **handler, "x-delivery-limit": 5, "x-dead-letter-routing-key": "billing.book",
        },
        "billing:archive": {**quorum, "x-delivery-limit": NO_LIMIT},
        "billing:abyss": {**quorum, "x-delivery-limit": NO_LIMIT},
        "billing:dead": {
            **quorum, **SAFE, "x-delivery-limit": 11,
            "x-dead-letter-exchange": "billing:abyss",
        },
        "billing:graveyard": {
            **quorum, **SAFE, "x-delivery-limit": 8, "x-dead-letter-exchange": "billing:dead",
        },
        **{
            f"billing:delay.{seconds}s": {
                **quorum, **SAFE, "x-message-ttl": seconds * 1000,
                "x-dead-letter-exchange": "billing:return",
            }
            for seconds in delays
        },
    }  # fmt: skip
    assert {queue["name"]: queue["arguments"] for queue in billing.api.queues()} == queues
    assert all(queue["durable"] for queue in billing.api.queues())

    bindings = {
        ("events", "billing.send_invoice", "shop.order.created"),
        ("events", "billing.send_invoice", "shop.refund.*"),
        ("events", "billing.book", "shop.#"),
        *(
            (exchange, f"billing.{name}", f"billing.{name}")
            for exchange in ("billing:return", "billing:replay")
            for name in ("send_invoice", "book")
        ),
        ("billing:return", "billing:graveyard", "billing:graveyard"),
        *((f"billing:{name}",) * 2 + ("",) for name in ("archive", "graveyard", "dead", "abyss")),
        *((f"billing:delay.{seconds}s",) * 2 + ("",) for seconds in delays),
    }
    assert {
        (found.exchange, found.queue, found.routing_key) for found in billing.api.bindings()
    } == bindings


def test_delayed_events_of_a_removed_handler_block_nothing(billing):
    """More of them than the dead-letter window of 32, ahead of a healthy one."""
    for number in range(50):
        billing.publish("billing:delay.2s", "billing.removed", b"%d" % number)
    billing.publish("billing:delay.2s", "billing.book", b"healthy")
    # RabbitMQ would wait for the others for three minutes.
    assert billing.take("billing.book").body == b"healthy"
    billing.wait_for_ready("billing:archive", 50)
    assert billing.ready("billing:delay.2s") == 0
    archived = billing.take_all("billing:archive")
    assert {message.delivery_info["routing_key"] for message in archived} == {"billing.removed"}


def _die_with(billing, queue: str, then: str) -> int:
    """Take the message and cut the connection until it is in *then*; return how often."""
    taken = 0
    while not billing.ready(then):
        connection = billing.connect()
        channel = connection.channel()
        received: list[amqp.Message] = []
        channel.basic_consume(queue, callback=received.append)
        while not received:
            connection.drain_events(timeout=5)
        connection.collect()
        taken += 1
        wait_until(
            lambda: billing.ready(queue) or billing.ready(then),
            f"the broker gives the message back to {queue} or on to {then}",
        )
    return taken


def test_dying_workers_send_an_event_down_the_chain(billing):
    """Limit 5 is 6 deliveries; then graveyard, dead, abyss, each naming the way it came."""
    billing.publish("events", "shop.order.created", b"poison")
    billing.take("billing.book")
    assert _die_with(billing, "billing.send_invoice", "billing:graveyard") == 6
    # 4.3 keeps the delivery count of a dead letter; before, each queue starts at zero.
    carried = versioned(billing) >= (4, 3)
    assert _die_with(billing, "billing:graveyard", "billing:dead") == (3 if carried else 9)
    assert _die_with(billing, "billing:dead", "billing:abyss") == (3 if carried else 12)
    message = billing.take("billing:abyss")
    assert message.body == b"poison"
    assert message.delivery_info["routing_key"] == "billing.send_invoice"
    deaths = message.headers["x-death"]
    # Named as a set: the order of the three is not always newest first.
    assert {(death["queue"], death["reason"]) for death in deaths} == {
        ("billing:dead", "delivery_limit"),
        ("billing:graveyard", "delivery_limit"),
        ("billing.send_invoice", "delivery_limit"),
    }


def test_archive_limits_drop_the_oldest(service, fresh_vhost):
    made = service(fresh_vhost, ARCHIVE={"TTL": 3600, "MAX_LENGTH": 3})
    made.declare()
    [archive] = [queue for queue in made.api.queues() if queue["name"] == "billing:archive"]
    assert archive["arguments"]["x-message-ttl"] == 3_600_000
    assert archive["arguments"]["x-overflow"] == "drop-head"
    for number in range(5):
        made.publish("billing:archive", "x", b"%d" % number)
    assert [message.body for message in made.take_all("billing:archive")] == [b"2", b"3", b"4"]


def test_longest_time_to_live(service, fresh_vhost):
    made = service(fresh_vhost, ARCHIVE={"TTL": LONGEST_TTL})
    made.declare()
    longer = {"x-message-ttl": (LONGEST_TTL + 1) * 1000}
    with pytest.raises(amqp.PreconditionFailed):
        made.channel().queue_declare("longer", durable=True, auto_delete=False, arguments=longer)


def test_stuck_dead_letter_shows_in_the_total_only(billing):
    billing.channel().exchange_delete("billing:return")
    billing.publish("billing:delay.1s", "billing.book")

    def stuck() -> bool:
        figures = billing.api.queue("billing:delay.1s") or {}
        return (
            figures.get("messages"),
            figures.get("messages_ready"),
            figures.get("messages_unacknowledged"),
        ) == (1, 0, 0)

    wait_until(stuck, "total 1, ready 0, unacked 0")

    def seen() -> queue_status.QueueStatus:
        with billing.active():
            status = queue_status.status(
                billing.app, billing.settings, billing.topology, api=billing.api
            )
        return next(queue for queue in status.queues if queue.name == "billing:delay.1s")

    queue = seen()
    assert (queue.ready, queue.total, queue.severity) == (0, 1, "error")
    assert "billing:return is missing" in str(queue.meaning)
    # RabbitMQ repeats it after a while, unless its dead-letter workers have ended (issue 16652).
    billing.declare()
    assert "restart the RabbitMQ node that leads the queue" in str(seen().meaning)
