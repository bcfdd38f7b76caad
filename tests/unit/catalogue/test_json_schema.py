"""Type hints as JSON Schema, with and without pydantic."""

from __future__ import annotations

import enum
import functools
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Literal, NewType, Optional
from uuid import UUID

import pytest

from django_amqp_events.catalogue.json_schema import Schema, in_draft_7, object_schema, type_schema

if TYPE_CHECKING:
    from nowhere import Missing  # type: ignore[import-not-found]

Number = NewType("Number", str)


class Status(enum.Enum):
    OPEN = "open"
    PAID = "paid"


class Weight(enum.IntEnum):
    LIGHT = 1
    HEAVY = 2


@dataclass
class Line:
    sku: str
    price: Decimal
    parts: list[Line] | None = None


@pytest.fixture(params=["with pydantic", "without pydantic"])
def pydantic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "with pydantic":
        return True
    monkeypatch.setitem(sys.modules, "pydantic", None)
    return False


STRING = {"type": "string"}
INTEGER = {"type": "integer"}
NULL = {"type": "null"}


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (str, STRING),
        (int, INTEGER),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (None, NULL),
        (Any, {}),
        (object, {}),
        (Decimal, {"type": "string", "format": "decimal"}),
        (datetime, {"type": "string", "format": "date-time"}),
        (date, {"type": "string", "format": "date"}),
        (time, {"type": "string", "format": "time"}),
        (timedelta, {"type": "string", "format": "duration"}),
        (UUID, {"type": "string", "format": "uuid"}),
        (list, {"type": "array"}),
        (dict, {"type": "object"}),
        (list[int], {"type": "array", "items": INTEGER}),
        (Sequence[str], {"type": "array", "items": STRING}),
        (tuple[int, ...], {"type": "array", "items": INTEGER}),
        (frozenset[int], {"type": "array", "items": INTEGER}),
        (dict[str, Any], {"type": "object"}),
        (Mapping[str, int], {"type": "object", "additionalProperties": INTEGER}),
        (
            list[dict[str, list[int]]],
            {
                "type": "array",
                "items": {
                    "type": "object",
                    "additionalProperties": {"type": "array", "items": INTEGER},
                },
            },
        ),
        (Optional[int], {"anyOf": [INTEGER, NULL]}),  # noqa: UP045
        (int | str | None, {"anyOf": [INTEGER, STRING, NULL]}),
        (int | Any, {}),
        (Status, {"enum": ["open", "paid"]}),
        (Weight, {"enum": [1, 2]}),
        (Literal["a", 1, None], {"enum": ["a", 1, None]}),  # noqa: PYI061
        (Literal[Status.OPEN], {"enum": ["open"]}),
        (Number, STRING),
        (Annotated[Decimal, "in euros"], {"type": "string", "format": "decimal"}),
    ],
)
def test_plain_types_do_not_depend_on_pydantic(hint: Any, schema: Schema, pydantic: bool) -> None:
    definitions: Schema = {}
    found = type_schema(hint, definitions)
    if pydantic and hint == Annotated[Decimal, "in euros"]:
        assert found.pop("type") == "string"
        return
    assert (found, definitions) == (schema, {})


def test_models_are_described_by_pydantic(pydantic: bool) -> None:
    definitions: Schema = {}
    found = type_schema(list[Line], definitions)
    if not pydantic:
        assert (found, definitions) == ({"type": "array"}, {})
        return
    assert found == {"type": "array", "items": {"$ref": "#/definitions/Line"}}
    line = definitions["Line"]
    assert set(line["properties"]) == {"sku", "price", "parts"}
    assert line["required"] == ["sku", "price"]
    # Its own references start from the same place.
    assert line["properties"]["parts"]["anyOf"][0]["items"] == {"$ref": "#/definitions/Line"}


def test_models_of_the_same_name_have_their_own_definitions() -> None:

    def make(hint: Any) -> Any:
        address = make_dataclass("Address", [("value", hint)])
        return make_dataclass("Customer", [("address", address)])

    definitions: Schema = {}
    found = [type_schema(make(hint), definitions) for hint in (int, str, int)]
    assert [each["properties"]["address"] for each in found] == [
        {"$ref": "#/definitions/Address"},
        {"$ref": "#/definitions/Address.2"},
        {"$ref": "#/definitions/Address"},
    ]
    assert definitions["Address"]["properties"]["value"]["type"] == "integer"
    assert definitions["Address.2"]["properties"]["value"]["type"] == "string"


def test_a_type_that_pydantic_does_not_know_matches_anything(pydantic: bool) -> None:
    assert type_schema(Callable[[int], str] | Line, {}) == {} or pydantic
    assert type_schema(inspect.Parameter, {}) == {}
    assert type_schema("not a type", {}) == {}
    assert type_schema([int], {}) == {}
    assert type_schema(Literal[b"bytes"], {}) == {}


def schema_of(function: Callable[..., Any]) -> Schema:
    return object_schema(function, list(inspect.signature(function).parameters.values()))


def test_arguments_are_the_keys_of_the_payload(pydantic: bool) -> None:
    def contract(
        order_id: int,
        total: Decimal = Decimal("1.50"),
        status: Status = Status.OPEN,
        note: str = None,  # type: ignore[assignment]  # noqa: RUF013 - as people write it
        day: date = date(2026, 1, 2),
        made: object = object(),
        *args: int,
        lines: list[int] = [],  # noqa: B006
        untyped=5,
        **more: bool,
    ) -> None: ...

    assert schema_of(contract) == {
        "type": "object",
        "properties": {
            "order_id": {"type": "integer"},
            "total": {"type": "string", "format": "decimal", "default": "1.50"},
            "status": {"enum": ["open", "paid"], "default": "open"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            "day": {"type": "string", "format": "date", "default": "2026-01-02"},
            "made": {},
            "lines": {"type": "array", "items": {"type": "integer"}, "default": []},
            "untyped": {"default": 5},
        },
        "required": ["order_id"],
        "additionalProperties": {"type": "boolean"},
    }


def test_a_hint_that_cannot_be_evaluated_leaves_the_others() -> None:
    def contract(first: Missing, second: int, third: "no type!" = 1) -> None: ...  # type: ignore[valid-type]  # noqa: F722

    properties = schema_of(contract)["properties"]
    assert properties == {"first": {}, "second": {"type": "integer"}, "third": {"default": 1}}


def test_hints_of_a_decorated_contract_are_found() -> None:
    from tests.unit.catalogue import elsewhere

    @functools.wraps(elsewhere.contract)
    def wrapper(*args: Any, **kwargs: Any) -> None: ...

    assert schema_of(wrapper)["properties"] == {"weight": {"enum": [3]}}


def test_definitions_belong_to_the_payload() -> None:

    def contract(line: Line = Line("a", Decimal(1)), other: Line | None = None) -> None: ...  # noqa: B008

    found = schema_of(contract)
    reference = {"$ref": "#/definitions/Line"}
    assert found["properties"]["other"] == {
        "anyOf": [reference, {"type": "null"}],
        "default": None,
    }
    # Draft 7 ignores what stands beside a reference. A dataclass is not one of Django's JSON types.
    assert found["properties"]["line"] == reference
    assert list(found["definitions"]) == ["Line"]


def test_draft_7_leaves_data_alone() -> None:
    newer = {
        "type": "object",
        "properties": {
            "$ref": {"type": "string", "default": {"$ref": "#/definitions/X"}},
            "prefixItems": {"prefixItems": [{"$ref": "#/definitions/X"}], "items": False},
            "items": {"items": {"anyOf": [{"$ref": "#/definitions/X"}]}},
        },
        "required": ["$ref"],
        "additionalProperties": False,
        "definitions": {"X": {"enum": [{"$ref": "#/definitions/X"}]}},
    }
    before = json.dumps(newer)
    assert in_draft_7(newer, base="#/there/") == {
        "type": "object",
        "properties": {
            "$ref": {"type": "string", "default": {"$ref": "#/definitions/X"}},
            "prefixItems": {"items": [{"$ref": "#/there/X"}], "additionalItems": False},
            "items": {"items": {"anyOf": [{"$ref": "#/there/X"}]}},
        },
        "required": ["$ref"],
        "additionalProperties": False,
        "definitions": {"X": {"enum": [{"$ref": "#/definitions/X"}]}},
    }
    assert json.dumps(newer) == before
