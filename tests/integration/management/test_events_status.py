"""``events_status`` on a real broker: what waits where, what it means, how it exits."""

from __future__ import annotations

import json

import pytest

from django_amqp_events.broker.provisioning.management_api import ManagementApi
from django_amqp_events.models import State
from tests.archive_rows import make
from tests.conftest import ONE

from ..conftest import wait_until

HANDLERS = {"send_invoice": ["shop.order.created"], "book": ["shop.#"]}


@pytest.fixture
def billing(request, service, fresh_vhost):
    """A service with the management API, or without it where a test is parametrised with False."""
    made = service(fresh_vhost, HANDLERS=HANDLERS)
    made.import_topology()
    made.exact = getattr(request, "param", True)
    if not made.exact:
        made = service(fresh_vhost, HANDLERS=HANDLERS, MANAGEMENT_URL="")
        made.exact = False
    return made


BOTH = pytest.mark.parametrize("billing", [True, False], ids=["management", "amqp"], indirect=True)


def line(out: str, queue: str) -> str:
    [found] = [text for text in out.splitlines() if text.split()[:1] == [queue]]
    return found


@BOTH
def test_quiet_service(billing):
    assert billing.command("events_status", verbosity=0) == (0, "", "")
    _, out, _ = billing.command("events_status", verbosity=2)
    assert "empty" in line(out, "billing:delay.1s")
    code, out, err = billing.command("events_status")
    assert (code, err) == (0, "")
    assert "empty, no consumer" in line(out, "billing.book")
    assert line(out, "billing:graveyard").endswith("empty")
    assert "and 13 empty delay queues" in out
    assert ("Without MANAGEMENT_URL" in out) is not billing.exact


@BOTH
def test_events_without_a_worker(billing):
    for _ in range(3):
        billing.publish("events", "shop.order.created")
    code, out, _ = billing.command("events_status", verbosity=0)
    assert code == 1
    assert len(out.splitlines()) == 3
    code, out, _ = billing.command("events_status")
    assert code == 1
    assert line(out, "billing.send_invoice").endswith(
        "3 events wait for billing.send_invoice, no consumer: start a worker"
    )
    # With a consumer it is no error.
    for queue in ("billing.send_invoice", "billing.book"):
        billing.consume(queue, prefetch=1)
    wait_until(lambda: billing.ready("billing.book") == 2, "one is in hand")
    code, out, _ = billing.command("events_status")
    assert code == 0
    assert "2 events wait for billing.book, consumed" in out


def test_a_quorum_queue_without_a_leader(billing, monkeypatch):
    """As RabbitMQ 3.10 answers where it cannot read the queue's log; 4 begins it anew, empty."""
    book = {"name": "billing.book", "type": "quorum", "durable": True, "leader": None}
    found = [each for each in billing.api.queues() if each["name"] != "billing.book"]
    monkeypatch.setattr(ManagementApi, "queues", lambda _: [*found, book])
    code, out, _ = billing.command("events_status")
    assert code == 1
    assert "it has no leader" in line(out, "billing.book")
    assert line(out, "billing.book").split()[1:5] == ["?"] * 4


def test_delayed(billing):
    for _ in range(12):
        billing.publish("billing:delay.64s", "billing.book")
    code, out, _ = billing.command("events_status")
    assert code == 0
    assert "12 delayed, the next returns within 64 s" in line(out, "billing:delay.64s")


@BOTH
def test_archive_graveyard_and_poison_need_attention(billing):
    mirror = "1 message waits to be mirrored, no consumer: run `manage.py events_companion`"
    settled = {
        "archive": mirror,
        "graveyard": "1 isolated event waits to be run alone, no consumer",
    }
    poison = {"dead": "events_reaper", "abyss": "events_recover"}
    for queue in (*settled, *poison):
        billing.publish(f"billing:{queue}", "x")
        code, out, _ = billing.command("events_status")
        assert code == 1
        meaning = line(out, f"billing:{queue}")
        if queue in settled:
            assert settled[queue] in meaning
        else:
            assert "poison: 1 event" in meaning
            assert meaning.endswith(f"run `manage.py {poison[queue]}`")
        billing.consume(f"billing:{queue}")
        wait_until(lambda: not billing.ready(f"billing:{queue}"), "it is in hand")  # noqa: B023
        if queue in settled:
            assert billing.command("events_status")[0] == 0
        elif billing.exact:
            # An unacknowledged message still exists, which only the management API shows.
            wait_until(lambda: billing.command("events_status")[0] == 1, "poison is seen")
            billing.take_all(f"billing:{queue}")


@BOTH
def test_missing_queue(billing):
    billing.channel().queue_delete("billing.book")
    code, out, _ = billing.command("events_status")
    assert code == 1
    assert line(out, "billing.book").endswith("missing: run manage.py events_declare")


def test_unacked_and_stale_by_the_api(service, fresh_vhost):
    service(fresh_vhost, HANDLERS={**HANDLERS, "gone": ["shop.#"]}).declare()
    billing = service(fresh_vhost, HANDLERS=HANDLERS)
    billing.publish("events", "shop.order.created")
    billing.consume("billing.book")

    def seen() -> bool:
        code, out, _ = billing.command("events_status", "--format", "json")
        answer = json.loads(out)
        queues = {queue["name"]: queue for queue in answer["queues"]}
        assert code == answer["exit_code"] == 1
        assert queues["billing.gone"]["state"] == "stale"
        assert "no longer declared, with 1 event" in queues["billing.gone"]["meaning"]
        book = queues["billing.book"]
        return (book["ready"], book["unacked"], book["total"], book["consumers"]) == (0, 1, 1, 1)

    wait_until(seen, "one in hand")


@BOTH
def test_json_is_one_document(billing):
    code, out, err = billing.command("events_status", "--format", "json")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert set(answer) == {
        "version", "service", "prefix", "vhost", "broker", "source", "error", "result",
        "exit_code", "queues", "outbox", "archive",
    }  # fmt: skip
    assert set(answer["queues"][0]) == {
        "name", "role", "state", "severity", "ready", "unacked", "total", "consumers", "paused",
        "prefetch", "meaning",
    }  # fmt: skip
    assert len(answer["queues"]) == 13 + 2 + 4


@ONE
def test_open_archived_events(billing, archive_database):
    for number, state in enumerate((State.ARCHIVED, State.ARCHIVED, State.DISCARDED)):
        make(number, state)
    code, out, _ = billing.command("events_status")
    assert code == 0
    assert "archive: 2 open events, the oldest failed 2026-03-01 12:00:00 UTC" in out
    _, out, _ = billing.command("events_status", "--format", "json")
    assert json.loads(out)["archive"] == {
        "open": 2, "capped": False, "oldest": "2026-03-01T12:00:00+00:00",
    }  # fmt: skip
