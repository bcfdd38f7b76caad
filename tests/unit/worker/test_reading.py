"""Whose a delivery is."""

from __future__ import annotations

import struct
from typing import Any

import amqp
import pytest
from celery.app.task import Context

from django_amqp_events.broker.topology import Names
from django_amqp_events.conf import Settings
from django_amqp_events.declare.registry import build
from django_amqp_events.message.types import Delivered, Payload, Received
from django_amqp_events.worker.delivery import Delivery, Item
from django_amqp_events.worker.reading import MAX_REPR, Dispatcher, Reading, celery_headers
from django_amqp_events.worker.verdict import Verdict


def handle(**payload: object) -> None: ...


SETTINGS = Settings(
    service="billing",
    handlers={
        "m.moved": {"handler": handle, "events": ["shop.paid"]},
        "m.mail": {"handler": handle, "events": ["shop.sent"], "queue": "mail"},
        "m.once": {"handler": handle, "events": ["shop.once"], "once": True},
    },
)
OWN, MAIL = "billing.m.moved", "billing.mail"


def delivery(**fields: Any) -> Received:
    """Return a delivery of plain JSON in the handler's queue."""
    usual = {"queue": OWN, "exchange": "events", "routing_key": "shop.paid", "body": b"[[],{},{}]"}
    json = {"content_type": "application/json"}
    return Received(**{**usual, "headers": {"event-id": "1"}, "properties": json, **fields})


def read(received: Received, settings: Settings = SETTINGS) -> tuple[Reading, Payload | Verdict]:
    reading = Reading(received=received)
    return reading, Dispatcher(settings, build(settings), Names.of(settings)).read(reading)


def handler_of(queue: str, exchange: str, key: str, *, handler: str | None = "m.moved") -> str:
    """Return the name of its handler, or the reason why it has none."""
    headers = {"event-id": "1", "event-name": "shop.paid", "event-attempt": 2}
    if handler:
        headers["event-handler"] = handler
    reading, payload = read(
        delivery(queue=queue, exchange=exchange, routing_key=key, headers=headers)
    )
    if isinstance(payload, Verdict):
        assert reading.handler is None
        return payload.reason
    return reading.known[1].name


@pytest.mark.parametrize("exchange", ["billing:return", "billing:replay"])
@pytest.mark.parametrize("header", ["m.moved", None])
def test_retry_returns_to_the_handlers_queue(exchange: str, header: str | None) -> None:
    """A queue that it has left is still bound: run from both, each retry would make two."""
    assert handler_of(OWN, exchange, OWN, handler=header) == "m.moved"
    assert handler_of(MAIL, exchange, OWN, handler=header) == "unknown"
    # And at a first delivery.
    assert handler_of(OWN, "events", "shop.paid") == "m.moved"
    assert handler_of(MAIL, "events", "shop.paid") == "unknown"
    assert handler_of(MAIL, "events", "shop.sent") == "m.mail"


def test_unreadable_message_is_malformed() -> None:
    unreadable = "the headers cannot be read: year 53872825 is out of range"
    reading, verdict = read(delivery(headers={}, unreadable=unreadable))
    assert isinstance(verdict, Verdict)
    assert (reading.event, reading.handler, verdict.reason) == (None, None, "malformed")
    assert "53872825" in verdict.detail


def test_events_without_an_id_are_handled_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dispatcher = Dispatcher(SETTINGS, build(SETTINGS), Names.of(SETTINGS))
    for _ in range(3):
        reading = Reading(received=delivery(headers={}, body=b'{"a": 1}'))
        assert dispatcher.read(reading) == Payload(args=[], kwargs={"a": 1})
    assert ["'shop.paid' is published without an id" in line for line in caplog.messages] == [True]


def test_a_handler_with_once_refuses_an_event_without_an_id() -> None:
    """It would skip the second of two events of the same content."""
    plain = delivery(queue="billing.m.once", routing_key="shop.once", headers={}, body=b'{"a": 1}')
    reading, verdict = read(plain)
    assert isinstance(verdict, Verdict)
    assert (verdict.reason, reading.event) == ("malformed", None)
    assert "publish it with a message_id" in verdict.detail
    assert reading.handler is not None, "a replay goes to it, with the id of the row"


@pytest.mark.parametrize("size", [10, 5000])
def test_argument_repr_is_bounded(size: int) -> None:
    body = b'[[5],{"note":"' + b"x" * size + b'","deep":{"a":[1,null,true]}},{}]'
    reading, payload = read(delivery(body=body))
    assert isinstance(payload, Payload)
    headers = celery_headers("billing", reading, payload)
    assert headers["argsrepr"] == "(5,)"
    words = headers["kwargsrepr"]
    assert words.startswith("{'note': 'xxx")
    assert len(words) <= MAX_REPR + 20
    assert (words == repr(dict(payload.kwargs))) == (size == 10)


def test_each_replay_is_another_task() -> None:
    """A result backend keeps the result of each."""
    ids = set()
    for replay in ({}, {"event-replay-id": "1"}, {"event-replay-id": "2"}):
        reading, payload = read(
            delivery(
                exchange="billing:replay", routing_key=OWN, headers={"event-id": "1", **replay}
            )
        )
        assert isinstance(payload, Payload)
        ids.add(celery_headers("billing", reading, payload)["id"])
    assert len(ids) == 3


def test_publisher_headers_reach_the_request_and_change_nothing_else() -> None:
    """Whatever a publisher names: a field of Celery's, of a result backend, or of ours."""

    def request(headers: dict[str, object]) -> Context:
        reading, payload = read(delivery(headers={**headers, "event-id": "1"}))
        assert isinstance(payload, Payload)
        return Context(celery_headers("billing", reading, payload))

    names = {*vars(Context), "meta", "periodic_task_name", "amqp_event", "amqp_run", "task", "lang"}
    plain = request({})
    assert plain.headers == {}
    evil = request(dict.fromkeys(names, "evil"))
    assert "evil" not in [value for key, value in vars(evil).items() if key != "headers"]
    assert vars(evil).keys() == vars(plain).keys()
    assert "eta" not in evil.headers
    assert evil.headers["meta"] == "evil"
    traced = request(
        {"traceparent": "00-1", "uber-trace-id": "1:2", "b3": "0", "x-shop": 7, "x-table": {}}
    )
    assert traced.headers == {
        "traceparent": "00-1", "uber-trace-id": "1:2", "b3": "0", "x-shop": 7, "x-table": {},
    }  # fmt: skip
    fields = vars(traced).keys() - vars(plain).keys()
    assert fields == {"traceparent", "uber-trace-id", "b3"}


@pytest.mark.parametrize("events", [["shop.paid"], ["shop.*"], ["shop.paid", "shop.sent"]])
def test_a_message_that_was_moved_is_the_only_event_of_its_queue(events: list[str]) -> None:
    """A shovel and "Move messages" publish to the default exchange, by the name of the queue."""
    settings = Settings(
        service="billing", handlers={"m.moved": {"handler": handle, "events": events}}
    )
    moved = delivery(exchange="", routing_key=OWN, body=b"{}", headers={}, properties={})
    reading, result = read(moved, settings)
    if events == ["shop.paid"]:
        assert reading.known[0].name == "shop.paid"
    else:
        assert isinstance(result, Verdict)
        assert result.reason == "unknown"


def test_a_dead_letter_is_named_as_it_was_delivered() -> None:
    """Logs, signals and `inspect` of a reaper would show its queue in place of the event."""
    names = Names.of(SETTINGS)
    dispatcher = Dispatcher(SETTINGS, build(SETTINGS), names)
    death = {
        "queue": OWN, "reason": "delivery_limit", "exchange": "events", "count": 1,
        "routing-keys": ["shop.paid"],
    }  # fmt: skip
    body = b"{}"
    properties = amqp.Message(
        content_type="application/json", message_id="1", application_headers={"x-death": [death]}
    )._serialize_properties()
    header = struct.pack(">HHQ", 60, 0, len(body)) + properties
    delivered = Delivered(names.graveyard, names.graveyard, OWN, False, header, body)
    delivery = Delivery(Item(delivered), 1, None, dispatcher, None, None, 0.0)  # type: ignore[arg-type]
    assert delivery.title == "event 'shop.paid' (1) for m.moved"
    assert delivery.headers()["task"] == "m.moved"
