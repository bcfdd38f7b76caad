"""Which changes of a service may break the consumers of its events."""

from __future__ import annotations

import copy
import enum
import json
import typing
from collections.abc import Callable
from dataclasses import make_dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal, NotRequired, Optional, Union

import pytest
from pydantic import BaseModel, Discriminator, Field, create_model
from typing_extensions import TypedDict

from django_amqp_events import conf
from django_amqp_events.catalogue import entries
from django_amqp_events.catalogue.compatibility import Change, compare
from django_amqp_events.declare.declarations import EventDeclaration, HandlerDeclaration
from django_amqp_events.declare.registry import build

EVENT = "billing.invoice.issued"


class Color(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class MoreColors(enum.StrEnum):
    RED = "red"
    BLUE = "blue"
    GREEN = "green"


def model(name: str = "Model", *, extra: str = "ignore", **fields: Any) -> Any:
    """Return a pydantic model; a field is a type, or a type and a default."""
    given = {key: each if isinstance(each, tuple) else (each, ...) for key, each in fields.items()}
    return create_model(name, __config__={"extra": extra}, **given)  # type: ignore[call-overload]


def typed_dict(name: str = "Words", **fields: Any) -> Any:
    untyped: Any = TypedDict
    return untyped(name, fields)


def tagged(*members: Any) -> Any:
    return Annotated[Union[members], Discriminator("kind")]  # noqa: UP007 - a tuple


def recursive(hint: Any) -> Any:
    annotations = {"value": hint, "others": "list[Node]", "parent": "Node | None"}
    return type("Node", (BaseModel,), {"__annotations__": annotations, "__module__": __name__})


def contract(hint: Any) -> Callable[..., Any]:
    def made(value: Any) -> None: ...

    made.__annotations__["value"] = hint
    return made


def service(
    contracts: dict[str, Callable[..., Any] | None],
    *handlers: HandlerDeclaration,
    upcasters: dict[str, str] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Describe a service; *upcasters* lead from an older event to a newer one."""
    parsed, _ = conf.parse({"SERVICE": "billing", **settings})
    sources = {newer: older for older, newer in (upcasters or {}).items()}
    events = [
        EventDeclaration(
            name=name, contract=each, upcasters=((sources[name], dict),) if name in sources else ()
        )
        for name, each in contracts.items()
    ]
    registry = build(parsed, events, handlers)
    assert not registry.problems
    return entries.document(parsed, registry)


def handled(target: Callable[..., Any], *patterns: str) -> HandlerDeclaration:
    return HandlerDeclaration(target=target, name="handle", options={"events": patterns})


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    saved = json.loads(json.dumps(old))
    assert compare(saved, old) == []
    return compare(saved, new)


def of_contract(old: Callable[..., Any], new: Callable[..., Any]) -> list[Change]:
    return changes(service({EVENT: old}), service({EVENT: new}))


def listed(found: list[Change]) -> list[tuple[str, bool]]:
    return [(change.path, change.compatible) for change in found]


# -- types ----------------------------------------------------------------------------------

A, B = (model(name, kind=Literal[name.lower()], value=int) for name in ("A", "B"))
A_STR = model("A", kind=Literal["a"], value=str)
A_MORE = model("A", kind=Literal["a"], value=int, more=(str, ""))
B_MORE = model("B", kind=Literal["b"], value=int, more=(str, ""))
C = model("C", kind=Literal["c"], value=int)
LINE: Any = model("Line", sku=str)
LINE_MORE: Any = model("Line", sku=str, more=(str, ""))

BROKEN: list[tuple[Any, Any]] = [
    (int, str), (int, float), (Decimal, str), (int, int | None), (int, Any),
    (int, Callable[[int], str]), (Literal["a"], Literal["a", "b"]), (Literal[1], Literal["1"]),
    (Color, MoreColors), (Color, str), (list[int], list[str]), (typing.List[int], list),  # noqa: UP006
    (list[int], tuple[int, int]), (tuple[int, int], tuple[int, int, int]),
    (list[list[Color]], list[list[MoreColors]]), (dict[str, int], dict[str, str]),
    (dict[Color, int], dict[MoreColors, int]), (Any, int), (set[int], list[int]),
    (dict[str, Color], dict[str, MoreColors]), (Annotated[int, Field(gt=0)], int),
    (LINE, model("Line", sku=int)), (LINE, model("Line", sku=str, more=int)),
    (LINE, model("Line", sku=(str, ""))), (model("Line", sku=(str, "")), LINE),
    (LINE, model("Line")), (LINE, model("Line", extra="forbid", sku=str)),
    (LINE, dict[str, str]), (typed_dict(a=int), typed_dict(a=NotRequired[int])),
    (A | B, A_STR | B), (A | B, A | B | C), (A | B, A), (tagged(A, B), tagged(A, B, C)),
    (make_dataclass("Data", [("a", int)]), make_dataclass("Data", [("a", str)])),
    (recursive(int), recursive(str)),
    (model("Outer", line=list[LINE]), model("Outer", line=list[int])),
]  # fmt: skip
COMPATIBLE: list[tuple[Any, Any]] = [
    (LINE, LINE_MORE), (LINE, model("Line", sku=str, more=(Any, 1))),
    (A | B, A_MORE | B), (A | B, A_MORE | B_MORE), (tagged(A, B), tagged(A_MORE, B_MORE)),
    (typed_dict(a=int), typed_dict(a=int, b=NotRequired[str])), (list[LINE], list[LINE_MORE]),
    (make_dataclass("Data", [("a", int)]), make_dataclass("Data", [("a", int), ("b", int, 1)])),
    (model("Outer", line=LINE), model("Outer", line=LINE_MORE)),
    (recursive(LINE), recursive(LINE_MORE)),
]  # fmt: skip
LISTS: list[Any] = [{"tags": []}, {"tags": [1]}, {"tags": [{}, 1]}]
SAME: list[tuple[Any, Any]] = [
    (int | str, str | int), (Optional[int], Union[None, int]), (int | str, Union[int, str, int]),  # noqa: PYI016, UP007, UP045
    (Literal["a", "b"], Literal["b", "a"]), (Literal["red", "blue"], Color),
    (model(sku=(str, "a")), model(sku=(str, "b"))),
    (typing.List[int], list[int]), (list[int], typing.Sequence[int]),  # noqa: UP006
    (typing.Dict[str, int], typing.Mapping[str, int]), (dict, dict[str, Any]),  # noqa: UP006
    (A | B, B | A), (A | B, model("A", value=int, kind=Literal["a"]) | B),
    (A, model("Renamed", value=int, kind=Literal["a"])),
    (A | B, model("B", kind=Literal["a"], value=int) | model("A", kind=Literal["b"], value=int)),
    (object, Any), (Annotated[int, "metadata"], int),
    (recursive(int), recursive(int)), (LINE, typed_dict("Line", sku=str)),
    *((Annotated[str, Field(json_schema_extra=extra)],) * 2 for extra in LISTS),
]  # fmt: skip

TABLE = [
    (*pair, expected)
    for expected, pairs in (("broken", BROKEN), ("compatible", COMPATIBLE), ("same", SAME))
    for pair in pairs
]


@pytest.mark.parametrize(("old", "new", "expected"), TABLE)
def test_each_change_is_classified(old: Any, new: Any, expected: str) -> None:
    found = of_contract(contract(old), contract(new))
    if expected == "broken":
        assert not all(change.compatible for change in found)
    else:
        assert bool(found) is (expected == "compatible"), found
        assert all(change.compatible for change in found), found


# -- contracts and events ------------------------------------------------------------


def test_order_and_wording_change_nothing() -> None:
    def old(a: int, b: Literal["x", "y"] = "x") -> None:
        """Say it."""

    def new(*, b: Literal["y", "x"] = "y", a: int) -> None:
        """Say it in other words."""

    assert of_contract(old, new) == []


def test_changes_are_told_by_their_path() -> None:
    def old(kept: int, gone: int, lost: int = 1, other: str = "") -> None: ...
    def new(kept: str, new: int, lost: int, other: str = "", optional: int = 1) -> None: ...

    found = of_contract(old, new)
    place = f"events/{EVENT}/payload/properties"
    assert listed(found) == [
        (f"{place}/kept/type", False),
        (f"{place}/gone", False),
        (f"{place}/lost/optional", False),
        (f"{place}/new", False),
        (f"{place}/optional", True),
    ]
    assert [str(change).removeprefix(place) for change in found] == [
        '/kept/type is "string" instead of "integer"',
        '/gone was removed: {"type": "integer"}',
        "/lost/optional was removed: true",
        '/new is new: {"type": "integer"}',
        '/optional is new: {"type": "integer", "optional": true}',
    ]


def test_other_arguments() -> None:
    def few(a: int) -> None: ...
    def more(a: int, **others: int) -> None: ...
    def typed(a: int, b: str = "", **others: int) -> None: ...

    place = f"events/{EVENT}/payload"
    assert listed(of_contract(few, more)) == [(f"{place}/additionalProperties", False)]
    # It was a number, if there was one.
    assert listed(of_contract(more, typed)) == [(f"{place}/properties/b", False)]


def test_events() -> None:
    def other(a: int) -> None: ...

    old = service({EVENT: other, "shop.b": other, "billing.a": None, "billing.b": other})
    new = service({"billing.new": other, "billing.a": other, "billing.b": None, "shop.b": None})
    # The catalogue of the shop has the shop's events.
    assert listed(changes(old, new)) == [
        ("events/billing.b/payload", False),
        (f"events/{EVENT}", False),
        ("events/billing.a/payload", True),
        ("events/billing.new", True),
    ]


def test_the_exchange_and_the_format() -> None:
    old = service({EVENT: None, "shop.held": None}, PREFIX="staging-")
    assert changes(old, service({EVENT: None})) == []
    new = service({EVENT: None, "shop.held": None}, EXCHANGE="facts", FORMAT="json")
    assert listed(changes(old, new)) == [("exchange", False), (f"events/{EVENT}/format", False)]


def test_a_new_version_with_an_upcaster_is_compatible() -> None:
    def one(order_id: int) -> None: ...
    def two(order_id: int, currency: str) -> None: ...

    first, second = "billing.paid", "billing.paid.v2"
    old = service({first: one}, handled(one, first))
    new = service({first: one, second: two}, handled(two, second), upcasters={first: second})
    assert listed(changes(old, new)) == [(f"events/{second}", True)]


# -- what is no such document ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda document: document.update(version=2), "'version' is 2"),
        (lambda document: document.pop("version"), "KeyError"),
        (lambda document: document.update(service="shop"), "'service' is 'shop'"),
        (lambda document: document.update(types="annotations"), "'types' is 'annotations'"),
        (lambda document: document.update(events=5), "TypeError"),
        (lambda document: document["events"][0].pop("publisher"), "KeyError"),
        (
            lambda document: document["events"][0].update(payload={"properties": 5}),
            "not a document",
        ),
        (
            lambda document: document["events"][0]["payload"].update(items={"$ref": "#/$defs/x"}),
            "KeyError",
        ),
    ],
)
def test_another_document_cannot_be_compared(
    break_it: Callable[[dict[str, Any]], object], reason: str
) -> None:
    current = service({EVENT: contract(int)})
    broken = copy.deepcopy(current)
    break_it(broken)
    with pytest.raises(ValueError, match=reason):
        compare(broken, current)
