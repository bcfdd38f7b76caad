"""Generated contracts: a document equals itself, and each change is classified anywhere."""

from __future__ import annotations

import collections.abc
import enum
import inspect
import json
import typing
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import make_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Optional, Union, Unpack
from uuid import UUID

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Discriminator, Field, PydanticUserError, create_model
from typing_extensions import TypedDict

from django_amqp_events import conf
from django_amqp_events.archive.search_values import pairs  # noqa: F401 - the check's own import
from django_amqp_events.catalogue import asyncapi, entries
from django_amqp_events.catalogue.compatibility import Change, compare
from django_amqp_events.catalogue.entries import Catalogue
from django_amqp_events.checks import handlers as checks
from django_amqp_events.declare.declarations import EventDeclaration
from django_amqp_events.declare.registry import build

EVENT = "billing.invoice.issued"


class Color(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class MoreColors(enum.StrEnum):
    RED = "red"
    BLUE = "blue"
    GREEN = "green"


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 2


class Marker(BaseModel):
    """The other member of a union."""

    kind: Literal["marker"] = "marker"
    marker: str


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


def unpacked(hint: Any) -> Callable[..., Any]:
    def made(**payload: Any) -> None: ...

    made.__annotations__["payload"] = Unpack[hint]
    return made


def service(function: Callable[..., Any], search: tuple[str, ...] = ()) -> Catalogue:
    settings, _ = conf.parse({"SERVICE": "billing"})
    event = EventDeclaration(name=EVENT, contract=function, options={"search": search})
    registry = build(settings, [event])
    assert not registry.problems
    return entries.build(settings, registry)


FORMS = {"json": entries.document, "asyncapi": asyncapi.document}


def changes(old: Callable[..., Any], new: Callable[..., Any], form: str) -> list[Change]:
    saved = json.loads(json.dumps(FORMS[form](service(old))))
    return compare(saved, entries.document(service(new)))


def dangling(value: Any, document: Any) -> Iterator[str]:
    """Yield the references of a document that lead nowhere."""
    if isinstance(value, str) and value.startswith("#/"):
        place = document
        for part in value.removeprefix("#/").split("/"):
            if part not in place:
                yield value
                return
            place = place[part]
    for each in value.values() if isinstance(value, dict) else value if type(value) is list else ():
        yield from dangling(each, document)


# -- a document and itself ------------------------------------------------------------------

BARE: list[Any] = [
    *(typing.List, typing.Dict, typing.Set, typing.FrozenSet, typing.Tuple, typing.Type),  # noqa: UP006
    *(typing.Mapping, typing.MutableMapping, typing.Sequence, typing.MutableSequence),
    *(typing.Iterable, typing.Collection, typing.AbstractSet, typing.Deque, typing.DefaultDict),  # noqa: UP006
    *(typing.OrderedDict, typing.Counter, typing.Callable, typing.Iterator, typing.Awaitable),
    *(typing.Optional, typing.Union, typing.Pattern, typing.Any, typing.Hashable),
    *(collections.abc.Mapping, collections.abc.Sequence, collections.abc.Set),
]
SCALARS = [
    *(str, int, float, bool, None, bytes, Decimal, datetime, date, time, timedelta, UUID, object),
    *(list, dict, tuple, set, frozenset, Color, Size, Marker, complex, inspect.Parameter),
    *("not a hint", "list[", Literal["a", 1, True], Literal[b"x"]),
    *(Annotated[int, Field(gt=1)], Annotated[Decimal, Field(max_digits=5)]),
]
NAMES = st.sampled_from(["a", "b", "kind", "items", "$ref", "definitions", "enum"])
KEYS = st.sampled_from([str, int, bool, Color, Size, date, UUID, Literal["a"], Literal[1], Any])


def _inner(hints: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    fields = st.dictionaries(NAMES.filter(str.isidentifier), hints, max_size=3)
    made: list[st.SearchStrategy[Any]] = [
        hints.map(lambda each: list[each]),  # type: ignore[valid-type]
        hints.map(lambda each: typing.List[each]),  # type: ignore[valid-type]  # noqa: UP006
        hints.map(lambda each: tuple[each, int]),  # type: ignore[valid-type]
        hints.map(lambda each: tuple[each, ...]),  # type: ignore[valid-type]
        hints.map(lambda each: Optional[each]),  # noqa: UP045
        st.tuples(hints, hints).map(lambda two: Union[two]),  # noqa: UP007
        st.tuples(KEYS, hints).map(lambda two: dict[two]),  # type: ignore[misc, valid-type]
        st.tuples(KEYS, hints).map(lambda two: typing.Mapping[two]),  # type: ignore[misc, valid-type]
        fields.map(lambda each: model(**each)),
        fields.map(lambda each: model(extra="forbid", **each)),
        fields.map(lambda each: make_dataclass("Data", [*each.items()])),
        fields.map(lambda each: attrs.make_class("Attrs", {k: attrs.field(type=v) for k, v in each.items()})),  # noqa: E501
        st.dictionaries(NAMES, hints, max_size=3).map(lambda each: typed_dict(**each)),
        fields.map(lambda each: NamedTuple("Named", [*each.items()])),
        hints.map(recursive),
        hints.map(lambda each: tagged(model(kind=Literal["a"], value=each), Marker)),
        hints.map(lambda each: Annotated[each, "metadata"]),
    ]  # fmt: skip

    def safely(make: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        @st.composite
        def drawn(draw: st.DrawFn) -> Any:
            try:
                return draw(make)
            # No such hint in Python, or no such field in pydantic.
            except (TypeError, ValueError, NameError, SyntaxError, PydanticUserError):
                return int

        return drawn()

    return st.one_of([*map(safely, made)])


HINTS = st.recursive(st.sampled_from(SCALARS + BARE), _inner, max_leaves=5)


@given(hint=HINTS, form=st.sampled_from([*FORMS]), words=st.booleans())
def test_a_document_has_no_changes_from_itself(hint: Any, form: str, words: bool) -> None:
    function = contract(hint)
    if words:
        # What typing itself refuses there cannot be written in a project either.
        with suppress(TypeError, SyntaxError):
            function = unpacked(typed_dict(value=NotRequired[hint], other=int))
    assert changes(function, function, form) == []
    for write in FORMS.values():
        document = write(service(function))
        assert json.loads(json.dumps(document)) == document
        root = document if write is asyncapi.document else document["events"][0]["payload"]
        assert not list(dangling(root, root))
    # What `manage.py check` does with SEARCH.
    checks._has_value(function, "value.a")


# -- changes --------------------------------------------------------------------------------

A, B = (model(name, kind=Literal[name.lower()], value=int) for name in ("A", "B"))
A_STR = model("A", kind=Literal["a"], value=str)
A_MORE = model("A", kind=Literal["a"], value=int, more=(str, ""))
B_MORE = model("B", kind=Literal["b"], value=int, more=(str, ""))
C = model("C", kind=Literal["c"], value=int)
LINE = model("Line", sku=str)

BROKEN: list[tuple[Any, Any]] = [
    (int, str), (int, float), (bool, int), (Decimal, str), (UUID, str), (date, datetime),
    (int, int | None), (int | str, int | str | None), (int, Any), (int, Callable[[int], str]),

    (Literal["a"], Literal["a", "b"]), (Literal["a"], Literal["b"]), (Literal["a"], str),
    (Literal[1], Literal[True]), (Literal[1], Literal["1"]),  # type: ignore[valid-type, unused-ignore]
    (Color, MoreColors), (Color, str), (Size, int), (Color | int, MoreColors | int),
    (list[int], list[str]), (typing.List[int], list), (list[int], list[int | None]),  # noqa: UP006
    (list[int], dict[str, int]), (list[int], tuple[int, int]), (tuple[int, int], tuple[int, str]),
    (tuple[int, int], tuple[int, int, int]), (list[list[Color]], list[list[MoreColors]]),
    (dict[str, int], dict[str, str]), (dict[Color, int], dict[MoreColors, int]),
    (dict[Color, int], dict[str, int]), (dict[int, int], dict[str, int]),
    (dict[Literal["a"], int], dict[Literal["b"], int]), (dict[date, int], dict[UUID, int]),
    (dict[Size, int], dict[Color, int]), (dict[str, Color], dict[str, MoreColors]),
    (Annotated[int, Field(gt=0)], int), (Annotated[int, Field(gt=0)], Annotated[int, Field(gt=1)]),
    (Annotated[Decimal, Field(gt=0)], Decimal), (Annotated[str, Field(max_length=5)], str),
    (LINE, model("Line", sku=int)), (LINE, model("Line", sku=str, more=int)),
    (LINE, model("Line", sku=(str, ""))), (model("Line", sku=(str, "")), LINE),
    (LINE, model("Line")), (LINE, model("Line", extra="forbid", sku=str)),
    (model(extra="forbid", sku=str), model(extra="forbid", sku=str, more=(str, ""))),
    (LINE, dict[str, str]), (dict[str, int], typed_dict(a=NotRequired[str])),
    (typed_dict(a=int), typed_dict(a=NotRequired[int])),
    (typed_dict(a=Color), typed_dict(a=MoreColors)),
    (A | B, A_STR | B), (A | B, A | B | C), (A | B | C, A | C), (A | B, A),
    (tagged(A, B), tagged(A_STR, B)), (tagged(A, B), tagged(A, B, C)), (tagged(A, B, C), A | C),
    (make_dataclass("Data", [("a", int)]), make_dataclass("Data", [("a", str)])),
    (recursive(int), recursive(str)),
]  # fmt: skip
COMPATIBLE: list[tuple[Any, Any]] = [
    (Any, int), (Any, A | B), (list, list[int]), (typing.List, list[Color]),  # noqa: UP006
    (LINE, model("Line", sku=str, more=(str, ""))), (LINE, model("Line", sku=str, more=(Any, 1))),
    (model(sku=(str, "a")), model(sku=(str, "b"))),
    (A | B, A_MORE | B), (A | B, A_MORE | B_MORE), (tagged(A, B), tagged(A_MORE, B_MORE)),
    (typed_dict(a=int), typed_dict(a=int, b=NotRequired[str])),
    (make_dataclass("Data", [("a", int)]), make_dataclass("Data", [("a", int), ("b", int, 1)])),
]  # fmt: skip
SAME: list[tuple[Any, Any]] = [
    (int | str, str | int), (Optional[int], Union[None, int]), (int | str, Union[int, str, int]),  # noqa: PYI016, UP007, UP045
    (Literal["a", "b"], Literal["b", "a"]), (Literal["red", "blue"], Color),
    (Literal["a"] | None, Literal["a", None]), (Literal["a"] | Literal["b"], Literal["a", "b"]),  # noqa: PYI061, PYI030
    (typing.List[int], list[int]), (list[int], typing.Sequence[int]), (set[int], list[int]),  # noqa: UP006
    (typing.Dict[str, int], typing.Mapping[str, int]), (dict, dict[str, Any]),  # noqa: UP006
    (A | B, B | A), (A | B, tagged(B, A)), (A, model("Renamed", value=int, kind=Literal["a"])),
    (A | B, model("B", kind=Literal["a"], value=int) | model("A", kind=Literal["b"], value=int)),
    (Any, Any | int), (object, Any), (Annotated[int, "metadata"], int),
    (recursive(int), recursive(int)), (LINE, typed_dict("Line", sku=str)),
]  # fmt: skip

#: Where a type can stand, and an attrs class too.
OUTER: dict[str, Callable[[Any], Any]] = {
    "item": lambda hint: list[hint],  # type: ignore[valid-type]
    "value": lambda hint: dict[str, hint],  # type: ignore[valid-type]
    "tuple": lambda hint: tuple[int, hint],  # type: ignore[valid-type]
    "union": lambda hint: Union[hint, Marker],  # noqa: UP007
    "attrs": lambda hint: attrs.make_class("Outer", {"field": attrs.field(type=hint)}),
}
#: Where a type can stand, but no attrs class: pydantic does not know it there.
INNER: dict[str, Callable[[Any], Any]] = {
    "field": lambda hint: model("Outer", field=hint, other=int),
    "dataclass": lambda hint: make_dataclass("Outer", [("field", hint)]),
    "words": lambda hint: typed_dict("Outer", field=hint),
    "recursive": recursive,
    "tagged": lambda hint: tagged(model("Outer", kind=Literal["outer"], value=hint), Marker),
}
PLACES = OUTER | INNER
TABLE = [
    (*pair, expected)
    for expected, pairs_ in (("broken", BROKEN), ("compatible", COMPATIBLE), ("same", SAME))
    for pair in pairs_
]


def classified(
    old: Any, new: Any, expected: str, places: list[str], form: str = "json", words: bool = False
) -> None:
    for place in places:
        old, new = PLACES[place](old), PLACES[place](new)
    if words:
        functions = [unpacked(typed_dict(value=each, other=int)) for each in (old, new)]
    else:
        functions = [contract(old), contract(new)]
    found = changes(functions[0], functions[1], form)
    if expected == "same":
        assert found == []
    else:
        assert {each.compatible for each in found} >= {expected == "compatible"}, found
        assert expected == "broken" or all(each.compatible for each in found), found
        assert all(each.text for each in found)


@pytest.mark.parametrize(("old", "new", "expected"), TABLE)
def test_each_change_is_classified(old: Any, new: Any, expected: str) -> None:
    for places in [], *([place] for place in PLACES):
        classified(old, new, expected, places)


@given(
    row=st.sampled_from(TABLE),
    inner=st.lists(st.sampled_from([*INNER]), max_size=2),
    outer=st.lists(st.sampled_from([*OUTER]), max_size=2),
    form=st.sampled_from([*FORMS]),
    words=st.booleans(),
)
def test_each_change_is_classified_wherever_it_is(
    row: tuple[Any, Any, str], inner: list[str], outer: list[str], form: str, words: bool
) -> None:
    classified(*row, inner + outer, form, words)


def test_unpacked_words_are_arguments() -> None:
    def plain(a: int, b: str = "x") -> None: ...

    Words = typed_dict(a=int, b=NotRequired[str])  # noqa: N806
    # Publishing fills in the default of an argument, but none of a TypedDict.
    assert [str(each) for each in changes(plain, unpacked(Words), "json")] == [
        f"{EVENT}: the default of argument 'b' is null instead of \"x\""
    ]
    assert changes(unpacked(typed_dict(a=int)), contract_of(a=int), "json") == []


def contract_of(**hints: Any) -> Callable[..., Any]:
    def made(a: Any) -> None: ...

    made.__annotations__.update(hints)
    return made
