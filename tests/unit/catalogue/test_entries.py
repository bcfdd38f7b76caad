"""The catalogue of a service, in JSON and AsyncAPI."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from celery import Task

from django_amqp_events import conf
from django_amqp_events.broker import topology
from django_amqp_events.broker.topology import Binding
from django_amqp_events.catalogue import asyncapi, entries
from django_amqp_events.catalogue.entries import Catalogue
from django_amqp_events.conf import Settings
from django_amqp_events.declare.declarations import EventDeclaration, HandlerDeclaration
from django_amqp_events.declare.registry import Registry, build
from django_amqp_events.message import headers
from django_amqp_events.message.encoding import event_message
from django_amqp_events.options import EVENT_OPTIONS, HANDLER_OPTIONS


def order_created(order_id: int, total: Decimal = Decimal(0), **more: Any) -> None:
    """An order was accepted.

    Its total includes taxes.
    """


def anything(order_id: int, note: str = "", made: object = object()) -> None:
    """Handle it."""


class Invoice(Task):
    """Write the invoice."""

    def run(self, order_id: int, *, total: Decimal) -> None: ...


def parsed(*handlers: HandlerDeclaration, **settings: Any) -> tuple[Settings, Registry]:
    read, problems = conf.parse({"SERVICE": "billing", **settings})
    events = [EventDeclaration(name="shop.order.created", contract=order_created)]
    registry = build(read, events, handlers)
    assert not [each for each in (*problems, *registry.problems) if each.is_error]
    return read, registry


def described(*handlers: HandlerDeclaration, **settings: Any) -> Catalogue:
    return entries.build(*parsed(*handlers, **settings))


def handler(name: str, *patterns: str, target: Any = anything, **options: Any) -> Any:
    return HandlerDeclaration(target=target, name=name, options={**options, "events": patterns})


@pytest.fixture
def whole() -> Catalogue:
    return described(
        handler("mail", "shop.order.*", "shop.refund.paid", once=True, rate_limit="5/m"),
        handler("invoice", "shop.order.created", target=Invoice, max_retries=2, queue="invoices"),
        EVENTS={
            "billing.invoice.issued": {},
            "invoice.printed": {"PUBLISHER": "billing"},
        },
        PREFIX="staging-",
    )


def test_declared_and_subscribed_events_are_known(whole: Catalogue) -> None:
    assert {
        each.name: (each.publisher, [one.handler.name for one in each.consumers])
        for each in whole.entries
    } == {
        "billing.invoice.issued": ("billing", []),
        "invoice.printed": ("billing", []),
        "shop.order.*": ("", ["mail"]),
        "shop.order.created": ("shop", ["invoice", "mail"]),
        "shop.refund.paid": ("shop", ["mail"]),
    }
    assert [each.name for each in whole.entries] == sorted(each.name for each in whole.entries)


def test_json_document(whole: Catalogue) -> None:
    document = entries.document(whole)
    assert json.loads(json.dumps(document)) == document
    events = {each["name"]: each for each in document["events"]}
    assert events["shop.refund.paid"]["contract"] is None
    assert events["shop.order.created"] == {
        "name": "shop.order.created",
        "publisher": "shop",
        "format": "celery",
        "contract": {
            "function": f"{__name__}.order_created",
            "docstring": "An order was accepted.\n\nIts total includes taxes.",
            "arguments": [
                {"name": "order_id", "type": "int", "required": True, "default": ""},
                {"name": "total", "type": "Decimal", "required": False, "default": '"0"'},
                {"name": "**more", "type": "Any", "required": False, "default": ""},
            ],
        },
        "payload": {
            "type": "object",
            "properties": {
                "order_id": {"type": "integer"},
                "total": {"type": "string", "format": "decimal", "default": "0"},
            },
            "required": ["order_id"],
            "additionalProperties": {},
        },
        "options": {},
        "handlers": ["invoice", "mail"],
    }
    invoice, mail = document["handlers"]
    assert invoice == {
        "name": "invoice",
        "queue": "staging-billing.invoices",
        "patterns": ["shop.order.created"],
        "upcasts": [],
        "function": f"{__name__}.Invoice",
        "docstring": "Write the invoice.",
        "arguments": [
            {"name": "order_id", "type": "int", "required": True, "default": ""},
            {"name": "total", "type": "Decimal", "required": True, "default": ""},
        ],
        "options": {},
        "retries": {
            "max_retries": 2,
            "delays": [1, 2],
            "total": 3,
            "jitter": False,
            "autoretry_for": ["builtins.Exception"],
            "dont_autoretry_for": [],
        },
    }
    assert mail["options"] == {"once": True, "rate_limit": "5/m"}
    assert mail["arguments"][1:] == [
        {"name": "note", "type": "str", "required": False, "default": '""'},
        {"name": "made", "type": "object", "required": False, "default": "…"},
    ]


def test_documents_are_the_same_in_each_process(whole: Catalogue) -> None:
    """A default without JSON would have an address in it."""
    for document in (entries.document(whole), asyncapi.document(whole)):
        assert " at 0x" not in json.dumps(document)


def test_asyncapi_has_a_channel_for_each_event_and_queue(whole: Catalogue) -> None:
    channels = asyncapi.document(whole)["channels"]
    assert list(channels) == [
        "billing.invoice.issued", "invoice.printed", "shop.order.created", "shop.refund.paid",
        "staging-billing.invoices", "staging-billing.mail",
    ]  # fmt: skip
    event, queue = channels["shop.order.created"], channels["staging-billing.mail"]
    assert event["address"] == "shop.order.created"
    assert event["bindings"]["amqp"] == {
        "is": "routingKey",
        "exchange": {
            "name": "staging-events",
            "type": "topic",
            "durable": True,
            "autoDelete": False,
        },
        "bindingVersion": "0.3.0",
    }
    assert queue["bindings"]["amqp"] == {
        "is": "queue",
        "queue": {
            "name": "staging-billing.mail",
            "durable": True,
            "exclusive": False,
            "autoDelete": False,
        },
        "x-bindings": [
            {"exchange": "staging-events", "routingKey": "shop.order.*"},
            {"exchange": "staging-events", "routingKey": "shop.refund.paid"},
        ],
        "bindingVersion": "0.3.0",
    }
    assert list(queue["messages"]) == ["shop.order._2a_", "shop.order.created", "shop.refund.paid"]


def test_asyncapi_sends_what_the_service_publishes_and_receives_what_it_handles(
    whole: Catalogue,
) -> None:
    operations = asyncapi.document(whole)["operations"]
    assert {name: each["action"] for name, each in operations.items()} == {
        "publish.billing.invoice.issued": "send",
        "publish.invoice.printed": "send",
        "handle.invoice": "receive",
        "handle.mail": "receive",
    }
    mail = operations["handle.mail"]
    assert mail["channel"] == {"$ref": "#/channels/staging-billing.mail"}
    assert mail["messages"][1] == {
        "$ref": "#/channels/staging-billing.mail/messages/shop.order.created"
    }
    assert mail[asyncapi.EXTENSION]["retries"]["max_retries"] == 10


def test_asyncapi_has_the_exchange_queues_and_bindings_of_the_topology() -> None:
    handlers = (
        handler("first", "shop.order.created", "shop.refund.#", queue="shared"),
        handler("second", "shop.order.paid", queue="shared"),
        handler("third", "shop.#", "shop.order.paid"),
    )
    service = parsed(*handlers, PREFIX="staging-", EXCHANGE="facts")
    declared = topology.build(*service)
    channels = asyncapi.document(entries.build(*service))["channels"].values()
    bindings = [each["bindings"]["amqp"] for each in channels]
    assert {each["exchange"]["name"] for each in bindings if "exchange" in each} == {
        declared.names.events
    }
    found = {
        Binding(
            exchange=one["exchange"], queue=each["queue"]["name"], routing_key=one["routingKey"]
        )
        for each in bindings
        for one in each.get("x-bindings", ())
    }
    assert len(found) == 5
    assert found == {each for each in declared.bindings if each.exchange == declared.names.events}


def test_all_references_lead_somewhere(whole: Catalogue) -> None:
    document = asyncapi.document(whole)
    found = list(references(document))
    assert len(found) > 20
    for reference in found:
        place: Any = document
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from references(each)


def test_names_that_asyncapi_does_not_allow_have_keys_of_their_own() -> None:
    names = ["a.*", "a._2a_", "a.#", "ä.b", "a.{id}", "a/b"]
    document = asyncapi.document(described(handler("all", *names)))
    messages = document["components"]["messages"]
    assert {each["name"] for each in messages.values()} == {*names, "shop.order.created"}
    assert all(key.isascii() and "/" not in key for key in messages)
    # Braces would be parameters.
    addresses = {each["title"]: each["address"] for each in document["channels"].values()}
    assert addresses == {
        name: None if "{" in name else name
        for name in ("a._2a_", "ä.b", "a.{id}", "a/b", "shop.order.created", "billing.all")
    }


def test_headers_are_those_of_a_message(whole: Catalogue) -> None:
    from datetime import UTC, datetime

    message = event_message(
        exchange="events", name="shop.order.created", body=b"", event_id="1", service="shop",
        published_at=datetime.now(UTC), causation_id="0",
    )  # fmt: skip
    trait = asyncapi.document(whole)["components"]["messageTraits"]["celery"]
    described_ = set(trait["headers"]["properties"])
    assert described_ <= set(message.headers)
    # Others are Celery's, which no consumer needs.
    assert {key for key in message.headers if key.startswith("event-")} <= described_
    assert trait["contentType"] == headers.CONTENT_TYPE


def order_v2(order_id: int, total: Decimal, currency: str) -> None: ...


def with_currency(payload: dict[str, Any]) -> dict[str, Any]:
    return {**payload, "currency": "EUR"}


def test_each_option_is_written_as_in_json() -> None:
    """Of the tables of options, so a new one is either written or named here."""
    values: dict[str, Any] = {
        "time_limit": 30, "soft_time_limit": 1.5, "rate_limit": "5/m", "ignore_result": False,
        "once": True, "using": "default", "bind": True, "strict": True, "validate": True,
        "search": ["order_number", "invoice.number"], "newest": ["order_id", "version"],
    }  # fmt: skip
    elsewhere = {"contract", "format", "publisher", "events", "handler", "enabled", "queue"}
    retries = {name for name in HANDLER_OPTIONS if "retr" in name}
    assert values.keys() | elsewhere | retries == EVENT_OPTIONS.keys() | HANDLER_OPTIONS.keys()
    settings, _ = conf.parse({"SERVICE": "billing"})
    search = values.pop("search")
    event = EventDeclaration(
        name="shop.order.created", contract=order_created, options={"search": search}
    )
    registry = build(settings, [event], [handler("mail", "shop.order.created", **values)])
    assert not registry.problems
    found = entries.build(settings, registry)
    (entry,), (consumer,) = found.entries, found.consumers
    assert (entry.options, consumer.options) == ({"search": search}, values)
    assert entry.options_line == 'search=["order_number", "invoice.number"]'
    assert "ignore_result=false" in consumer.options_line.split(", ")


def test_older_events_have_the_handlers_that_receive_them_upcast() -> None:
    settings, _ = conf.parse({"SERVICE": "billing", "VALIDATE": True})
    events = [
        EventDeclaration(name="shop.order.created", contract=order_created),
        EventDeclaration(
            name="shop.order.created.v2",
            contract=order_v2,
            upcasters=(("shop.order.created", with_currency),),
        ),
    ]
    registry = build(settings, events, [handler("mail", "shop.order.created.v2")])
    assert not registry.problems
    found = entries.build(settings, registry)
    assert {each.name: [one.handler.name for one in each.consumers] for each in found.entries} == {
        "shop.order.created": ["mail"],
        "shop.order.created.v2": ["mail"],
    }
    assert found.entries[0].options == {"validate": True}
    queue = asyncapi.document(found)["channels"]["billing.mail"]
    assert [each["routingKey"] for each in queue["bindings"]["amqp"]["x-bindings"]] == [
        "shop.order.created.v2",
        "shop.order.created",
    ]
