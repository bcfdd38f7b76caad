"""Contracts as JSON Schema, with and without pydantic, and the catalogue as JSON."""

from __future__ import annotations

import enum
import functools
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal, NewType

import pytest
from celery import Task

from django_amqp_events import conf
from django_amqp_events.catalogue import entries
from django_amqp_events.catalogue.json_schema import Schema, object_schema, source
from django_amqp_events.declare.declarations import (
    EventDeclaration,
    HandlerDeclaration,
    signature_of,
)
from django_amqp_events.declare.registry import build

if TYPE_CHECKING:
    from nowhere import Missing  # type: ignore[import-not-found]

Number = NewType("Number", str)


class Status(enum.Enum):
    OPEN = "open"
    PAID = "paid"


@dataclass
class Line:
    sku: str
    price: Decimal
    parts: list[Line] | None = None


STRING = {"type": "string"}
INTEGER = {"type": "integer"}
NULL = {"type": "null"}
DECIMAL = {"type": "string", "format": "decimal"}
WORDS = {"type": "object", "additionalProperties": STRING}


def schema_of(hint: Any) -> Schema:
    """Return the schema of an argument with a type hint."""

    def contract(value: Any) -> None: ...

    contract.__annotations__["value"] = hint
    found: Schema = object_schema(signature_of(contract), contract)["properties"]["value"]
    return {key: each for key, each in found.items() if key not in ("title", "description")}


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (str, STRING),
        (Any, {}),
        (Decimal, DECIMAL),
        (datetime, {**STRING, "format": "date-time"}),
        (dict[int, str], WORDS),
        (dict[Status, str], {**WORDS, "propertyNames": {"$ref": "#/$defs/Status"}}),
        (int | str | None, {"anyOf": [INTEGER, STRING, NULL]}),
        (Literal["a", 1, None], {"enum": ["a", 1, None]}),  # noqa: PYI061
        (Number, STRING),
        # What pydantic does not know, as it is written.
        (Callable[[int], str], {"$comment": "collections.abc.Callable[[int], str]"}),
        (inspect.Parameter, {"$comment": "inspect.Parameter"}),
        ("not a type", {"$comment": "not a type"}),
    ],
)
def test_types_are_described_as_they_are_on_the_wire(hint: Any, schema: Schema) -> None:
    assert schema_of(hint) == schema


def contract(
    order_id: int,
    line: Line,
    other: Line | None = None,
    total: Decimal = Decimal("1.50"),
    status: Status = Status.OPEN,
    made: object = object(),
    model: Line = Line("a", Decimal(1)),  # noqa: B008
    *args: int,
    untyped=5,
    **more: bool,
) -> None: ...


def hidden(line: Line, missing: Missing = None, words: "no type!" = 1, **more: bool) -> None: ...  # type: ignore[valid-type]  # noqa: F722


def test_arguments_are_the_keys_of_the_payload() -> None:
    found = object_schema(signature_of(contract), contract)
    line = {"$ref": "#/$defs/Line"}
    assert found["properties"] == {
        "order_id": INTEGER,
        "line": line,
        "other": {"anyOf": [line, NULL]},
        "total": DECIMAL,
        "status": {"$ref": "#/$defs/Status"},
        "made": {},
        "model": line,
        "untyped": {},
    }
    assert found["required"] == ["order_id", "line"]
    assert found["additionalProperties"] == {"type": "boolean"}
    assert set(found["$defs"]) == {"Line", "Status"}
    assert found["$defs"]["Line"]["properties"]["parts"]["anyOf"][0]["items"] == line


@pytest.mark.parametrize("without", [True, False])
def test_what_pydantic_does_not_know_has_names_and_annotations(
    without: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without:
        monkeypatch.setitem(sys.modules, "pydantic", None)
    assert source() == ("annotations" if without else "pydantic")
    assert object_schema(signature_of(hidden), hidden) == {
        "type": "object",
        "properties": {
            "line": {"$comment": "Line"},
            "missing": {"$comment": "Missing"},
            "words": {"$comment": "'no type!'"},
        },
        "required": ["line"],
        "additionalProperties": {"$comment": "bool"},
    }


def test_models_of_the_same_name_have_their_own_definitions() -> None:
    def make(hint: Any) -> Any:
        return make_dataclass("Address", [("value", hint)])

    def two(first: Any, second: Any) -> None: ...

    two.__annotations__.update(first=make(int), second=make(str))
    found = object_schema(signature_of(two), two)
    (first, second) = (found["properties"][name]["$ref"] for name in ("first", "second"))
    assert first != second
    assert len(found["$defs"]) == 2


def test_hints_of_a_decorated_contract_are_found() -> None:
    from tests.unit.catalogue import elsewhere

    @functools.wraps(elsewhere.contract)
    def wrapper(*args: Any, **kwargs: Any) -> None: ...

    weight = object_schema(signature_of(wrapper), wrapper)["properties"]["weight"]
    assert weight.get("const", weight.get("enum")) in (3, [3])


# -- entries of the catalogue ----------------------------------------------------------------------


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
