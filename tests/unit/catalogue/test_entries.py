"""The catalogue of a service as JSON."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from celery import Task

from django_amqp_events import conf
from django_amqp_events.catalogue import entries
from django_amqp_events.declare.declarations import EventDeclaration, HandlerDeclaration
from django_amqp_events.declare.registry import build


def order_created(order_id: int, total: Decimal = Decimal(0), **more: Any) -> None:
    """An order was accepted.

    Its total includes taxes.
    """


def anything(order_id: int, note: str = "") -> None:
    """Handle it."""


class Invoice(Task):
    """Write the invoice."""

    def run(self, order_id: int, *, total: Decimal) -> None: ...


def described(*handlers: HandlerDeclaration, **settings: Any) -> dict[str, Any]:
    read, problems = conf.parse({"SERVICE": "billing", **settings})
    events = [EventDeclaration(name="shop.order.created", contract=order_created)]
    registry = build(read, events, handlers)
    assert not [each for each in (*problems, *registry.problems) if each.is_error]
    return entries.document(read, registry)


def handler(name: str, *patterns: str, target: Any = anything, **options: Any) -> Any:
    return HandlerDeclaration(target=target, name=name, options={**options, "events": patterns})


@pytest.fixture
def whole() -> dict[str, Any]:
    return described(
        handler("mail", "shop.order.*", "shop.refund.paid", once=True, rate_limit="5/m"),
        handler("invoice", "shop.order.created", target=Invoice, max_retries=2, queue="invoices"),
        EVENTS={
            "billing.invoice.issued": {},
            "invoice.printed": {"PUBLISHER": "billing"},
        },
        PREFIX="staging-",
    )


def test_declared_and_subscribed_events_are_known(whole: dict[str, Any]) -> None:
    events = whole["events"]
    assert {each["name"]: (each["publisher"], each["handlers"]) for each in events} == {
        "billing.invoice.issued": ("billing", []),
        "invoice.printed": ("billing", []),
        "shop.order.*": ("", ["mail"]),
        "shop.order.created": ("shop", ["invoice", "mail"]),
        "shop.refund.paid": ("shop", ["mail"]),
    }
    assert [each["name"] for each in events] == sorted(each["name"] for each in events)


def test_json_document(whole: dict[str, Any]) -> None:
    assert json.loads(json.dumps(whole)) == whole
    events = {each["name"]: each for each in whole["events"]}
    assert events["shop.refund.paid"]["contract"] is None
    assert events["shop.order.created"] == {
        "name": "shop.order.created",
        "publisher": "shop",
        "format": "celery",
        "contract": {
            "function": f"{__name__}.order_created",
            "docstring": "An order was accepted.\n\nIts total includes taxes.",
        },
        "payload": {
            "type": "object",
            "properties": {
                "order_id": {"type": "integer"},
                "total": {"type": "string", "format": "decimal"},
            },
            "required": ["order_id"],
            "additionalProperties": {},
        },
        "handlers": ["invoice", "mail"],
    }
