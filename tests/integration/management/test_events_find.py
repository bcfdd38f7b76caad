"""``events_find`` on a real broker: the rows and the queues of an event, and the exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest

from ..archiving import archived, mirror_all, publish, received
from ..conftest import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

HANDLERS = {"send_invoice": ["shop.order.created"], "book": ["shop.#"]}
EVENTS = {"shop.order.created": {"SEARCH": ["order_id"]}}


@pytest.fixture
def billing(service: Any, fresh_vhost: Any) -> Any:
    made = service(fresh_vhost, HANDLERS=HANDLERS, EVENTS=EVENTS)
    made.import_topology()
    return made


def test_an_event_is_found_and_its_queues_are_not_read(billing: Any) -> None:
    publish(billing, archived(received("order-7", payload={"order_id": 7})))
    mirror_all(billing)
    # Another handler's copy of it, which stays as it is.
    billing.publish("events", "shop.order.paid")
    wait_until(lambda: billing.ready("billing.book") == 1, "the copy is in its queue")
    code, out, err = billing.command("events_find", "order_id=7")
    assert (code, err) == (0, "")
    assert "shop.order.created order-7" in out
    assert "archive  billing send_invoice, archived" in out
    assert "handler  book: may still get it from queue billing.book" in out
    code, out, _ = billing.command("events_find", "7", "--format", "json")
    document = json.loads(out)
    assert (code, document["result"]) == (0, "found")
    assert [row["kind"] for row in document["events"][0]["rows"]] == ["archive"]
    waiting = {each["handler"]: each["waiting"] for each in document["events"][0]["handlers"]}
    assert waiting == {"send_invoice": False, "book": True}
    assert billing.take("billing.book").delivery_info["redelivered"] is False


def test_an_event_that_only_the_history_has(service: Any, fresh_vhost: Any) -> None:
    billing = service(fresh_vhost, HANDLERS=HANDLERS, HISTORY={"MAX_AGE": "14d"})
    billing.declare()
    at = datetime.now(UTC).isoformat()
    headers = {"event-id": "order-8", "event-published-at": at}
    billing.publish("events", "shop.order.paid", headers=headers)
    # Other programs need not say when: it counts as published when the one before was.
    billing.publish("events", "shop.order.paid", headers={"event-id": "order-10"})
    code, out, err = billing.command("events_find", "order-8", "--since", "1h")
    assert (code, err) == (0, "")
    assert "shop.order.paid order-8\n  history  published 20" in out
    assert "2 events of the history read" in out
    assert billing.command("events_find", "order-10", "--since", "1h")[0] == 0
    billing.publish(
        "events", "shop.order.paid", headers={"event-id": "=17", "event-published-at": at}
    )
    for value, found in (("=17", 0), ("order_id=", 1), ("a b=1", 1)):
        assert billing.command("events_find", value, "--since", "1h")[0] == found
    uuid = uuid4()
    headers = {"event-id": str(uuid), "event-published-at": at}
    billing.publish("events", "shop.order.paid", headers=headers)
    assert billing.command("events_find", uuid.hex.upper(), "--since", "1h")[0] == 0
    code, out, _ = billing.command("events_find", "order-9", "--since", "1h", "--format", "json")
    assert (code, json.loads(out)["scanned"]) == (1, 4)


def test_a_history_that_there_is_not(billing: Any) -> None:
    code, _, err = billing.command("events_find", "order-8", "--since", "1h")
    assert code == 2
    assert "set AMQP_EVENTS['HISTORY']" in err


def test_an_event_that_no_row_has(billing: Any) -> None:
    code, out, err = billing.command("events_find", "order-99")
    assert (code, err) == (1, "")
    assert "no row of 'order-99'\n" in out
    code, out, _ = billing.command("events_find", "order=99")
    assert code == 1
    assert "no row of 'order=99': no event has 'order' in its SEARCH" in out


def test_rows_are_found_while_the_broker_is_unreachable(billing: Any) -> None:
    publish(billing, archived(received("order-7", payload={"order_id": 7})))
    mirror_all(billing)
    billing.vhost = replace(billing.vhost, url="amqp://u:p@127.0.0.1:9/x", management_url="")
    code, out, err = billing.command("events_find", "order-7")
    assert code == 0
    assert "archive  billing send_invoice" in out
    assert err == ""
