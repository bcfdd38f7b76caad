"""``events_recover`` on a real broker: what the dead-letter chain keeps comes into the archive."""

from __future__ import annotations

import os
import signal
import struct
import time
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest

from django_amqp_events.archive import recovery
from django_amqp_events.broker import confirms
from django_amqp_events.message import decoding, encoding
from django_amqp_events.models import ArchivedEvent, State
from tests.acceptance.worker.test_hostile_table import put as put_raw
from tests.acceptance.worker.test_hostile_table import short

from ..archiving import (
    archived,
    mirror_all,
    publish,
    received,
)
from ..conftest import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

HANDLERS = {"send_invoice": ["shop.order.created"], "book": ["shop.refund.*"]}


@pytest.fixture
def billing(service, fresh_vhost):
    made = service(fresh_vhost, HANDLERS=HANDLERS)
    made.import_topology()
    return made


def put(billing, number: int, *, name: str = "shop.order.created", **options) -> None:
    """Publish an event as its service does."""
    delivery = received(f"order-{number}", name=name, payload={"order_id": number}, **options)
    billing.publish("events", name, delivery.body, dict(delivery.headers))


def kill(billing, queue: str, then: str, count: int = 1) -> None:
    """Take messages and cut the connection, until the broker gives up and moves them on."""
    deadline = time.monotonic() + 60
    while billing.ready(then) < count:
        assert time.monotonic() < deadline, f"{queue} does not lead to {then}"
        connection = billing.connect()
        channel = connection.channel()
        channel.basic_consume(queue, callback=lambda message: None)
        wait_until(lambda: not billing.ready(queue), "all are in hand")
        connection.collect()
        wait_until(
            lambda: billing.ready(queue) + billing.ready(then) == count, "the broker has them back"
        )


def bury(billing, count: int = 1, *, handler: str = "send_invoice", until: str = "abyss") -> None:
    """Let a handler's messages kill every worker and the reaper."""
    way = [f"billing.{handler}", "billing:graveyard", "billing:dead", "billing:abyss"]
    for queue, then in pairwise(way):
        kill(billing, queue, then, count)
        if then == f"billing:{until}":
            return


# -- the abyss ----------------------------------------------------------------------------


def test_poison_is_a_row_of_the_handler_that_it_killed(billing):
    put(billing, 1, headers={"traceparent": "00-1"})
    bury(billing)
    before = datetime.now(UTC)
    code, out, err = billing.command("events_recover")
    assert (code, err) == (0, "")
    assert (
        "billing:abyss: 1 message archived (1 poison); events_mirror copies them into the database"
        in out
    )
    assert billing.ready("billing:abyss") == 0
    mirror_all(billing)
    row = ArchivedEvent.objects.get()
    assert (row.event_id, row.name, row.source) == ("order-1", "shop.order.created", "shop")
    assert (row.handler, row.queue) == ("send_invoice", "billing.send_invoice")
    assert (row.reason, row.state) == ("poison", State.ARCHIVED)
    assert "found in 'billing:abyss'" in row.detail
    assert row.payload == {"order_id": 1}
    assert row.headers["traceparent"] == "00-1"
    assert "x-death" not in row.headers
    # It failed when it was dead-lettered, not when it was recovered.
    assert row.last_failed_at <= before
    [failure] = row.failure_set.all()
    assert {death["queue"] for death in failure.about["deaths"]} == {
        "billing.send_invoice", "billing:graveyard", "billing:dead",
    }  # fmt: skip


def test_dead_lettered_replay_returns_to_its_row(billing):
    publish(billing, archived(received("order-1")))
    mirror_all(billing)
    billing.command("events_replay", "--all")
    bury(billing, until="graveyard")
    billing.command("events_recover", "billing:graveyard")
    assert mirror_all(billing).failures == 1
    row = ArchivedEvent.objects.get()
    assert (row.state, row.reason, row.attempts) == (State.ARCHIVED, "poison", 4)
    assert row.replay_set.get().state == "failed"


def test_progress_headers_are_believed_after_the_return_exchange_only(billing):
    delivery = received("order-1")
    event = decoding.identify(delivery, trusted=False)[0]
    retry = encoding.retry_message(
        delivery,
        event,
        exchange="billing:delay.1s",
        routing_key="billing.send_invoice",
        service="billing",
        handler="send_invoice",
        attempt=3,
        due_at=datetime.now(UTC),
        replay_id=None,
        history=({"attempt": 1, "at": "2026-01-01T00:00:00Z", "exception": "E"},),
    )
    publish(billing, retry)
    headers = {"event-handler": "book", "event-attempt": 99, "event-replay-id": "x"}
    put(billing, 2, headers=headers)
    billing.wait_for_ready("billing.send_invoice", 2)
    bury(billing, 2, until="graveyard")
    billing.command("events_recover", "billing:graveyard")
    mirror_all(billing)
    ours, forged = ArchivedEvent.objects.order_by("event_id")
    assert (ours.handler, ours.attempts, ours.reason) == ("send_invoice", 3, "poison")
    assert ours.first_failed_at == datetime(2026, 1, 1, tzinfo=UTC)
    assert (forged.handler, forged.attempts) == ("send_invoice", 1)


# -- other queues -------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", ["", "legacy"])
def test_a_celery_task_that_became_a_handler(service, fresh_vhost, exchange):
    """Its messages go to the handler, whatever its queue is called; others have none."""
    billing = service(
        fresh_vhost, HANDLERS=HANDLERS, RENAMED_HANDLERS={"legacy.tasks.invoice": "send_invoice"}
    )
    billing.declare()
    channel = billing.channel()
    channel.queue_declare("legacy", durable=True, auto_delete=False)
    if exchange:
        channel.exchange_declare(exchange, "topic", durable=True, auto_delete=False)
        channel.queue_bind("legacy", exchange, "order.created")
    key = "order.created" if exchange else "legacy"
    for number, task in enumerate(["legacy.tasks.invoice", "legacy.tasks.other", ["a", "list"]]):
        headers = {"lang": "py", "id": f"task-{number}", "task": task, "retries": 3, "eta": "2030"}
        billing.publish(exchange, key, b'[[1], {"total": "2"}, {}]', headers)
    assert "3 messages archived" in billing.command("events_recover", "legacy")[1]
    mirror_all(billing)
    rows = {row.event_id: row for row in ArchivedEvent.objects.all()}
    assert rows["task-0"].handler == "legacy.tasks.invoice"
    assert {row.handler for key, row in rows.items() if key != "task-0"} == {""}
    assert billing.command("events_replay", "--handler", "legacy.tasks.invoice")[0] == 0
    message = billing.take("billing.send_invoice")
    assert (message.headers["event-id"], message.body) == ("task-0", b'[[1], {"total": "2"}, {}]')
    assert not {"eta", "retries"} & set(message.headers)


def test_queues_and_arguments_that_are_refused(billing):
    publish(billing, archived())
    billing.channel().queue_declare("mine", exclusive=True)
    for queue, text in (
        ("billing:archive", "is the archive queue; run `manage.py events_mirror`"),
        ("events:history", "is a stream, which keeps its messages; `manage.py events_backfill`"),
        ("billing:bindings", "is a stream"),
        ("billing.nobody", "there is no queue 'billing.nobody'; `manage.py events_status` lists"),
        ("mine", "queue 'mine' cannot be inspected"),
    ):
        code, _, err = billing.command("events_recover", queue)
        assert (code, text in err) == (2, True), err
    billing.channel().queue_declare(
        "other:stream", durable=True, auto_delete=False, arguments={"x-queue-type": "stream"}
    )
    billing.publish("", "other:stream")
    wait_until(lambda: billing.ready("other:stream") == 1, "it is stored")
    code, _, err = billing.command("events_recover", "other:stream")
    assert (code, "does not deliver the messages of the queue 'other:stream'" in err) == (
        1,
        True,
    ), err
    assert billing.ready("billing:archive") == 1
    code, _, err = billing.command("events_recover", "--limit", "0")
    assert (code, "--limit: 0 is not a number from 1" in err) == (2, True)
    code, out, _ = billing.command("events_recover")
    assert (code, "billing:abyss: 0 messages archived" in out) == (0, True)
    billing.channel().queue_delete("billing:abyss")
    code, _, err = billing.command("events_recover")
    assert code == 2
    assert "there is no queue 'billing:abyss'; run `manage.py events_declare`" in err


def test_a_queue_with_consumers_is_refused(billing):
    put(billing, 1)
    put(billing, 2)
    billing.consume("billing.send_invoice", prefetch=1)
    wait_until(lambda: billing.ready("billing.send_invoice") == 1, "one is in hand")
    code, _, err = billing.command("events_recover", "billing.send_invoice")
    assert code == 2
    assert "has 1 consumer, which would get some of its messages" in err
    assert billing.ready("billing:archive") == 0


# -- how much -----------------------------------------------------------------------------


def test_a_limit_takes_the_oldest(billing):
    """Of a handler's queue, whose events are no poison."""
    for number in range(1, 6):
        put(billing, number)
    put(billing, 6, name="shop.refund.paid")
    code, out, _ = billing.command("events_recover", "billing.send_invoice", "--limit", "2")
    assert (code, "2 messages archived (2 recovered)" in out) == (0, True)
    assert billing.ready("billing:archive") == 2
    billing.wait_for_ready("billing.send_invoice", 3)
    mirror_all(billing)
    rows = ArchivedEvent.objects.order_by("event_id")
    assert [row.event_id for row in rows] == ["order-1", "order-2"]
    assert {(row.handler, row.reason) for row in rows} == {("send_invoice", "recovered")}
    assert "found in 'billing.send_invoice'" in rows[0].detail
    assert billing.ready("billing.book") == 1


# -- hostile messages ---------------------------------------------------------------------


def undecodable() -> bytes:
    """Properties with a header that py-amqp cannot read: JavaScript's milliseconds as a time."""
    table = short(b"at") + b"T" + struct.pack(">Q", 1_700_000_000_000_000)
    table += short(b"event-id") + b"S" + struct.pack(">I", 5) + b"mine!"
    return struct.pack(">H", 0x3000) + struct.pack(">I", len(table)) + table + b"\x02"


def test_a_header_that_cannot_be_read_is_left_out(billing):
    assert put_raw(billing, "", b"billing:abyss", undecodable(), b"\xff\x00rubbish")
    billing.publish("billing:abyss", "", b"no identity at all")
    put(billing, 1)
    code, out, _ = billing.command("events_recover")
    assert code == 0
    assert "2 messages archived (2 recovered)" in out
    mirror_all(billing)
    row = ArchivedEvent.objects.get(event_id="mine!")
    assert bytes(row.body) == b"\xff\x00rubbish"
    row = ArchivedEvent.objects.exclude(event_id="mine!").get()
    assert bytes(row.body) == b"no identity at all"
    assert "neither an event-id nor a Celery task id" in row.detail


def test_deaths_that_a_publisher_made_up(billing):
    forged: tuple[Any, ...] = (
        "no list",
        ["no table"],
        [{}],
        [{"queue": 5, "reason": "delivery_limit", "exchange": 7, "routing-keys": 9}],
        [{"queue": "billing.book", "reason": "delivery_limit", "time": "yesterday"}],
    )
    for number, deaths in enumerate(forged):
        delivery = received(f"order-{number}")
        headers = {**delivery.headers, "x-death": deaths}
        billing.publish("billing:abyss", "", delivery.body, headers)
        billing.publish("", "billing:abyss", delivery.body, headers)
    assert billing.command("events_recover")[0] == 0
    assert mirror_all(billing).messages == 2 * len(forged)
    ids = set(ArchivedEvent.objects.values_list("event_id", flat=True))
    assert ids == {f"order-{number}" for number in range(len(forged))}


def test_refused_message_stays_and_blocks_no_other(billing, monkeypatch):
    """RabbitMQ closes the channel over another user's id, and does not say of which message."""

    def send(self, index, message, mandatory):
        if message.event_id == "order-2":
            message = replace(message, properties={**message.properties, "user_id": "nobody"})
        original(self, index, message, mandatory)

    original = confirms.ConfirmChannel._send
    monkeypatch.setattr(confirms.ConfirmChannel, "_send", send)
    for number in range(1, 5):
        put(billing, number)
    code, out, err = billing.command("events_recover", "billing.send_invoice")
    assert code == 1
    assert "3 messages archived" in out
    assert "not recovered: " in err
    assert "order-2" in err
    billing.wait_for_ready("billing.send_invoice", 1)
    assert billing.take("billing.send_invoice").headers["event-id"] == "order-2"


# -- whatever stops it --------------------------------------------------------------------


def test_an_archive_that_takes_nothing_leaves_all_where_it_was(billing):
    put(billing, 1)
    billing.channel().exchange_delete("billing:archive")
    code, _, err = billing.command("events_recover", "billing.send_invoice")
    assert code == 1
    assert "run `manage.py events_declare`" in err
    assert "the rest remains in the queue" in err
    billing.wait_for_ready("billing.send_invoice", 1)
    billing.declare()
    assert billing.command("events_recover", "billing.send_invoice")[0] == 0


def test_ctrl_c_ends_between_windows(billing, monkeypatch):
    for number in range(1, 31):
        put(billing, number)
    archive = recovery._archive

    def interrupted(batch, *args):
        monkeypatch.setattr(recovery, "_archive", archive)
        os.kill(os.getpid(), signal.SIGINT)
        return archive(batch, *args)

    monkeypatch.setattr(recovery, "_archive", interrupted)
    code, out, err = billing.command("events_recover", "billing.send_invoice")
    assert code == 1
    assert "stopped: interrupted" in err
    done = billing.ready("billing:archive")
    assert 1 <= done < 30
    assert f"{done} message" in out
    billing.wait_for_ready("billing.send_invoice", 30 - done)
