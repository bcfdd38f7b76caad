"""Which changes of a service break the consumers of its events."""

from __future__ import annotations

import copy
import enum
import json
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from decimal import Decimal
from typing import Any, Literal

import pytest

from django_amqp_events import conf
from django_amqp_events.catalogue import asyncapi, entries
from django_amqp_events.catalogue.compatibility import Change, compare
from django_amqp_events.catalogue.entries import Catalogue
from django_amqp_events.declare.declarations import EventDeclaration, HandlerDeclaration
from django_amqp_events.declare.registry import build
from django_amqp_events.exceptions import IncomparableError

EVENT = "billing.invoice.issued"
Shape = Callable[[Catalogue], dict[str, Any]]


class Status(enum.Enum):
    OPEN = "open"
    PAID = "paid"


class More(enum.Enum):
    PAID = "paid"
    OPEN = "open"
    VOID = "void"


@dataclass
class Tree:
    name: str
    children: list[Tree]


@dataclass
class LabelledTree:
    name: str
    children: list[LabelledTree]
    label: str = ""


def service(
    contracts: dict[str, Callable[..., Any] | None],
    *handlers: HandlerDeclaration,
    **settings: Any,
) -> Catalogue:
    parsed, _ = conf.parse({"SERVICE": "billing", **settings})
    events = [EventDeclaration(name=name, contract=each) for name, each in contracts.items()]
    registry = build(parsed, events, handlers)
    assert not registry.problems
    return entries.build(parsed, registry)


def handled(target: Callable[..., Any], *patterns: str) -> HandlerDeclaration:
    return HandlerDeclaration(target=target, name="handle", options={"events": patterns})


@pytest.fixture(params=[entries.document, asyncapi.document], ids=["json", "asyncapi"])
def saved(request: pytest.FixtureRequest) -> Shape:
    """The form of the saved document, read from a file; the current one is the catalogue's."""

    def write(found: Catalogue) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(json.dumps(request.param(found)))
        return document

    return write


def changes(saved: Shape, old: Catalogue, new: Catalogue) -> list[Change]:
    assert compare(saved(old), entries.document(old)) == []
    assert compare(entries.document(new), saved(new)) == []
    return compare(saved(old), entries.document(new))


def payload(
    saved: Shape, old: Callable[..., Any], new: Callable[..., Any]
) -> list[tuple[str, bool]]:
    """Return kind and compatibility of the changes of a contract."""
    found = changes(saved, service({EVENT: old}), service({EVENT: new}))
    assert all(each.event == EVENT and each.text for each in found)
    return [(each.kind, each.compatible) for each in found]


def test_order_and_wording_change_nothing(saved: Shape) -> None:
    def old(a: int | str, b: Literal["x", "y"] = "x") -> None:
        """Say it."""

    def new(*, b: Literal["y", "x"] = "x", a: str | int) -> None:
        """Say it in other words."""

    assert payload(saved, old, new) == []


def test_arguments(saved: Shape) -> None:
    def old(kept: int, gone: int, gone_default: int = 1) -> None: ...
    def new(kept: int, new: int, optional: int = 1, **more: Any) -> None: ...

    assert payload(saved, old, new) == [
        ("argument_removed", False),
        ("argument_removed", False),
        ("argument_required", False),
        ("argument_added", True),
        ("argument_added", True),
    ]
    assert payload(saved, new, old)[2:4] == [
        ("argument_required", False),
        ("argument_removed", False),
    ]


def test_defaults(saved: Shape) -> None:
    def old(lost: int = 1, other: int = 1, won: int = 5, same: object = object()) -> None: ...
    def new(lost: int, won: int = 5, other: int = 2, same: object = object()) -> None: ...
    def last(lost: int = 3, won: int = 5, other: int = 2, same: object = object()) -> None: ...

    assert payload(saved, old, new) == [("default_removed", False), ("default_changed", True)]
    # Publishing fills it in, so handlers get it all the same.
    assert payload(saved, new, last) == [("default_added", True)]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (int, int, []),
        (int, float, ["type_changed"]),
        (float, int, ["type_changed"]),
        (Decimal, str, ["type_changed"]),
        (int, int | None, ["type_changed"]),
        (int | None, int, ["type_changed"]),
        (int | str, int | Decimal, ["type_changed"]),
        (list[int], list[str], ["type_changed"]),
        (list[int], list, ["type_changed"]),
        (list[int] | None, None | list[int], []),
        (list[list[int]], list[list[int | None]], ["type_changed"]),
        (dict[str, int], dict[str, str], ["type_changed"]),
        (dict[str, int], list[int], ["type_changed"]),
        (Literal["a", "b"], Literal["b", "a"], []),
        (Literal["a", "b"], Literal["a"], ["enum_narrowed"]),
        (Literal["a"], Literal["a", "b"], ["enum_widened"]),
        (Literal["a", "b"], Literal["b", "c"], ["enum_narrowed", "enum_widened"]),
        (Status, More, ["enum_widened"]),
        (More, Status, ["enum_narrowed"]),
        (Literal["open", "paid"], Status, []),
        (list[Status], list[More], ["enum_widened"]),
        (dict[str, More], dict[str, Status], ["enum_narrowed"]),
        (Status | None, More | None, ["enum_widened"]),
        (str, Literal["a"], ["type_changed"]),
        (Literal["a"], str, ["type_changed"]),
        (int, Any, ["type_changed"]),
    ],
)  # fmt: skip
def test_types_may_neither_be_wider_nor_narrower(
    saved: Shape, old: Any, new: Any, expected: list[str]
) -> None:
    assert payload(saved, contract(old), contract(new)) == [(kind, False) for kind in expected]


@pytest.mark.parametrize(
    ("old", "new"),
    [(Any, int), (dict, dict[str, int]), (list, list[Status]), (list[Any], list[int])],
)
def test_a_type_may_be_added(saved: Shape, old: Any, new: Any) -> None:
    assert payload(saved, contract(old), contract(new)) == [("type_added", True)]


def contract(hint: Any) -> Callable[..., Any]:
    def made(value: Any) -> None: ...

    made.__annotations__["value"] = hint
    return made


def test_models_are_compared_field_by_field(saved: Shape) -> None:
    node = make_dataclass("Line", [("sku", str), ("count", int), ("note", str, "")])
    more = make_dataclass("Line", [("sku", str), ("count", int), ("note", str, ""), ("x", int, 1)])
    less = make_dataclass("Line", [("sku", int), ("note", str)])
    wider = make_dataclass("Line", [("sku", str), ("count", int, 1), ("note", str, "")])
    wraps: list[Callable[[Any], Any]] = [
        lambda each: each,
        list.__class_getitem__,
        lambda each: each | None,
    ]
    for wrap in wraps:
        assert payload(saved, contract(wrap(node)), contract(wrap(node))) == []
        assert payload(saved, contract(wrap(node)), contract(wrap(more))) == [
            ("argument_added", True)
        ]
        assert payload(saved, contract(wrap(node)), contract(wrap(less))) == [
            ("type_changed", False),
            ("argument_removed", False),
            ("default_removed", False),
        ]
        # Nobody fills in the default of a field.
        assert payload(saved, contract(wrap(node)), contract(wrap(wider))) == [
            ("default_added", False)
        ]


def test_models_that_contain_themselves_are_compared(saved: Shape) -> None:
    assert payload(saved, contract(Tree), contract(Tree)) == []
    assert payload(saved, contract(Tree), contract(LabelledTree)) == [("argument_added", True)]
    assert payload(saved, contract(LabelledTree), contract(Tree)) == [("argument_removed", False)]


def test_events(saved: Shape) -> None:
    def other(a: int) -> None: ...

    held = "shop.order.held"
    old = service(
        {EVENT: other, held: other, "shop.b": other, "billing.a": None, "billing.b": other}
    )
    new = service({"billing.new": other, "billing.a": other, "billing.b": None, "shop.b": None})
    assert [(each.event, each.kind, each.compatible) for each in changes(saved, old, new)] == [
        ("billing.b", "contract_removed", False),
        (EVENT, "event_removed", False),
        ("billing.a", "contract_added", True),
        ("billing.new", "event_added", True),
        # Its own service publishes it, so its consumers lose nothing.
        ("shop.b", "contract_removed", True),
        (held, "event_removed", True),
    ]


def test_the_exchange(saved: Shape) -> None:
    old = service({EVENT: None}, PREFIX="staging-")
    assert changes(saved, old, service({EVENT: None})) == []
    (change,) = changes(saved, old, service({EVENT: None}, EXCHANGE="facts"))
    assert (change.kind, change.compatible) == ("exchange_changed", False)


def test_the_format(saved: Shape) -> None:
    old = service({EVENT: None, "shop.order.held": None}, FORMAT="json")
    same = service({EVENT: None, "shop.order.held": None}, EVENTS={EVENT: {"FORMAT": "json"}})
    assert changes(saved, old, same) == []
    new = service({EVENT: None, "shop.order.held": None}, FORMAT="cloudevents")
    (change,) = changes(saved, old, new)
    assert (change.event, change.kind, change.compatible) == (EVENT, "format_changed", False)


def test_handlers(saved: Shape) -> None:
    def order_created(order_id: int, total: int = 0) -> None: ...
    def few(order_id: int) -> None: ...
    def more(order_id: int, total: int, note: str = "") -> None: ...
    def most(order_id: int, total: int, country: str) -> None: ...

    contracts: dict[str, Any] = {"shop.order.created": order_created}

    def kinds(old: Any, new: Any, *patterns: str, **known: Any) -> list[tuple[str, bool]]:
        return [
            (each.kind, each.compatible)
            for each in changes(
                saved,
                service(known, *([handled(old, *patterns)] if old else [])),
                service(known, *([handled(new, *patterns)] if new else [])),
            )
            if each.kind.startswith("handler")
        ]

    for pattern in ("shop.order.created", "shop.#"):
        assert kinds(few, more, pattern, **contracts) == []
        assert kinds(more, few, pattern, **contracts) == []
    # No contract had it, so events in the queue lack it.
    assert kinds(few, most, "shop.order.created", **contracts) == [("handler_requires", False)]
    assert kinds(few, more, "shop.order.created") == [("handler_requires", False)]
    assert kinds(None, few, "shop.order.created", **contracts) == [("handler_added", True)]
    assert kinds(few, None, "shop.order.created", **contracts) == [("handler_removed", True)]


def test_texts_name_what_breaks(saved: Shape) -> None:
    def old(total: int, status: Literal["open", "paid"], paid: int) -> None: ...
    def new(total: int | None, status: Literal["open", "void"], paid: str, note: str) -> None: ...

    found = changes(saved, service({EVENT: old}), service({EVENT: new}))
    assert [str(each) for each in found] == [
        f"{EVENT}: argument 'total' can also be null now, which handlers may not expect",
        f"{EVENT}: argument 'status' can no longer be \"paid\", which earlier events may contain",
        f"{EVENT}: argument 'status' can also be \"void\" now, which handlers may not know",
        f"{EVENT}: argument 'paid' is string instead of integer, which handlers may not expect",
        f"{EVENT}: argument 'note' is new and required: events published before lack it",
    ]


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda each: each.update(version=2), "version 2"),
        (lambda each: each.pop("version"), "KeyError"),
        (lambda each: each.update(service="shop"), "it is of service 'shop'"),
        (lambda each: each.update(events=5), "TypeError"),
        (lambda each: each["events"][0].pop("publisher"), "KeyError"),
        (lambda each: each["events"][0].update(payload={"properties": 5}), "differs"),
        (
            lambda each: each["events"][0]["payload"]["properties"].update(a={"$ref": "#/x/y"}),
            "KeyError",
        ),
        (
            lambda each: each["events"][0]["payload"]["properties"].update(
                a={"$ref": "#/properties/a"}
            ),
            "more than 20",
        ),
    ],
)
def test_another_document_cannot_be_compared(
    break_it: Callable[[dict[str, Any]], object], reason: str
) -> None:
    def order(a: int) -> None: ...

    current = entries.document(service({EVENT: order}))
    broken = copy.deepcopy(current)
    break_it(broken)
    with pytest.raises(IncomparableError, match=reason):
        compare(broken, current)


@pytest.mark.parametrize("document", [None, [], 5, "text", {}, {"asyncapi": "3.0.0"}])
def test_what_is_no_document_cannot_be_compared(document: Any) -> None:
    with pytest.raises(IncomparableError):
        compare(document, entries.document(service({EVENT: None})))
