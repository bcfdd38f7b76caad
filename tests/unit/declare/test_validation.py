"""Type hints, enforced when an event is published and when a handler receives it."""

from __future__ import annotations

import importlib
import json
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Generic, NamedTuple, NotRequired, TypeVar
from uuid import UUID

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import TypedDict

from django_amqp_events.declare.contracts import bind_contract
from django_amqp_events.declare.declarations import signature_of
from django_amqp_events.declare.registry import Handler
from django_amqp_events.declare.validation import MAX_ERRORS, Validator, Violation
from django_amqp_events.exceptions import ConfigurationError, InvalidEventError
from django_amqp_events.message.encoding import encode_payload
from django_amqp_events.worker.binding import bind
from django_amqp_events.worker.verdict import ContractViolated

T = TypeVar("T")
ID = UUID("8d4ad1b8-1f0c-4f6e-9d0e-6a4b1f1f0c11")
NOON = datetime(2026, 3, 1, 12, 0, 0, 250_000, tzinfo=UTC)


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    HIGH = 2


class Point(NamedTuple):
    x: int
    y: int


@dataclass
class Line:
    sku: str
    price: Decimal
    sent: datetime | None = None


class Customer(TypedDict):
    name: str
    born: NotRequired[date]


class Strict(pydantic.BaseModel):
    """Strict mode takes a date as text from JSON only."""

    model_config = pydantic.ConfigDict(strict=True)
    number: int = pydantic.Field(alias="orderNumber")
    at: datetime
    label: str = "none"

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def double(self) -> int:
        return 2 * self.number


class Generically(pydantic.BaseModel, Generic[T]):
    value: T


def both_ways(hint: Any, value: Any) -> tuple[Any, Any]:
    """Return a value as it is on the wire, and as a handler with the same hint gets it."""

    def contract(value: Any) -> None: ...

    contract.__annotations__["value"] = hint
    full = bind_contract("a.b", contract, {"value": value}, validate=True)
    wire = json.loads(encode_payload("a.b", full))[1]
    (_, received) = bind(handler_of(contract), (), wire)
    return wire["value"], received["value"]


def handler_of(target: Callable[..., Any], **options: Any) -> Handler:
    return Handler(
        name="shop.h",
        key="k",
        queue="q",
        patterns=("a.b",),
        target=target,
        validate=True,
        **options,
    )


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (int, 5),
        (Decimal, Decimal("9.90")),
        (datetime, NOON),
        (datetime, NOON.replace(tzinfo=None)),
        (date, date(2026, 3, 1)),
        (timedelta, timedelta(days=1, seconds=2, microseconds=3)),
        (UUID, ID),
        (Color, Color.RED),
        (Level, Level.HIGH),
        (Line, Line("s", Decimal("1.10"), NOON)),
        (Customer, {"name": "Ada", "born": date(1815, 12, 10)}),
        (Strict, Strict(orderNumber=1, at=NOON)),
        (Generically[Decimal], Generically[Decimal](value=Decimal(1))),
        (list[Line], [Line("s", Decimal(1)), Line("t", Decimal(2))]),
        (dict[UUID, Color], {ID: Color.BLUE}),
        (Point, Point(1, 2)),
        (bytes, b"abc"),
        (Decimal | None, None),
        (Any, {"free": [1, None]}),
    ],
    ids=str,
)
def test_values_go_to_json_and_back(hint: Any, value: Any) -> None:
    _, received = both_ways(hint, value)
    assert received == value
    assert type(received) is type(value)


def test_a_handler_gets_the_type_of_what_is_published_as_it_is() -> None:
    """pydantic's lax mode, unless the hint is strict."""
    assert both_ways(int, "5") == ("5", 5)
    assert both_ways(Decimal, 9) == (9, Decimal(9))
    assert both_ways(Line, {"sku": "s", "price": "1"})[1] == Line("s", Decimal(1))
    with pytest.raises(InvalidEventError, match="value: Input should be a valid integer"):
        both_ways(pydantic.StrictInt, "5")


HINTS: list[Any] = [
    int, float, bool, str, Decimal, datetime, date, time, timedelta, UUID, Color, Level, Line,
    Customer, Strict, Generically[int], list[Line], dict[str, Any], dict[int, Decimal], set[str],
    tuple[int, ...], Point, int | None, Line | dict[str, int], pydantic.SecretStr, Path, object,
]  # fmt: skip
TEXTS = ["", "5", "1.50", "red", "2026-03-01", "2026-03-01T12:00:00.123456Z", "PT1H", str(ID)]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-3, 3) | st.sampled_from(TEXTS),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["sku", "price", "sent", "name", "more", "value", "orderNumber", "at", "5"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=6,
)
python_values = json_values | st.sampled_from(
    [
        Decimal("1.50"), NOON, NOON.replace(microsecond=123_456), date(2026, 3, 1),
        time(1, 2, 3, 4), timedelta(hours=1), ID, (1, 2), [Decimal(5)], Level.HIGH,
        {"sku": "s", "price": Decimal(1), "more": NOON},
    ]
)  # fmt: skip


@given(hint=st.sampled_from(HINTS), value=python_values)
def test_validation_refuses_or_changes_nothing(hint: Any, value: Any) -> None:
    """A handler with the same hint reads back whatever is accepted."""

    def contract(value: Any) -> None: ...

    without = encode_payload("a.b", bind_contract("a.b", contract, {"value": value}))
    contract.__annotations__["value"] = hint
    try:
        full = bind_contract("a.b", contract, {"value": value}, validate=True)
    except InvalidEventError:
        return
    assert encode_payload("a.b", full) == without
    bind(handler_of(contract), (), json.loads(without)[1])


class Account(pydantic.BaseModel):
    password: pydantic.SecretStr


class Base(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    sku: str


class Derived(Base):
    price: Decimal


@dataclass
class Boxed:
    base: Base
    at: datetime


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (pydantic.SecretStr, pydantic.SecretStr("x")),
        (pydantic.SecretBytes, pydantic.SecretBytes(b"x")),
        (Account, Account(password=pydantic.SecretStr("x"))),
        (list[Account], [Account(password=pydantic.SecretStr("x"))]),
        (dict[str, pydantic.SecretStr], {"a": pydantic.SecretStr("x")}),
        (object, object()),
        (list[Any], [SimpleNamespace()]),
    ],
)
def test_what_would_not_be_read_back_is_refused(hint: Any, value: Any) -> None:
    with pytest.raises(InvalidEventError, match="violates the type hints"):
        both_ways(hint, value)


@pytest.mark.parametrize(
    ("hint", "value", "wire"),
    [
        (Base, Derived(sku="s", price=Decimal(1)), {"sku": "s", "price": "1"}),
        (Base, {"sku": "s", "more": {"x": 1}}, {"sku": "s", "more": {"x": 1}}),
        (
            list[Base],
            [Base.model_validate({"sku": "s", "more": NOON})],
            [{"sku": "s", "more": "2026-03-01T12:00:00.250Z"}],
        ),
        (
            Boxed,
            Boxed(Derived(sku="s", price=Decimal(1)), NOON),
            {"base": {"sku": "s", "price": "1"}, "at": "2026-03-01T12:00:00.250Z"},
        ),
        (pydantic.HttpUrl, pydantic.HttpUrl("https://x.example/a"), "https://x.example/a"),
        (deque[int], deque([1, 2]), [1, 2]),
    ],
    ids=repr,
)
def test_objects_are_published_with_all_their_fields(hint: Any, value: Any, wire: Any) -> None:
    assert both_ways(hint, value)[0] == wire


def contract(
    order_id: int,
    lines: list[Line] = [],  # noqa: B006 - not changed
    *more: int,
    customer: Customer | None = None,
    unchecked="",
    **prices: Decimal,
) -> None:
    assert isinstance(order_id, int)
    assert all(isinstance(price, Decimal) for price in prices.values())


@pytest.mark.parametrize(
    ("payload", "errors"),
    [
        ({"order_id": "x"}, ["order_id: Input should be a valid integer"]),
        (
            {"order_id": 1, "lines": [{"sku": "s", "price": 1}, {"sku": 1}]},
            ["lines.1.sku: Input should be a valid string", "lines.1.price: Field required"],
        ),
        ({"order_id": 1, "lines": [Line("s", "y")]}, ["lines.0.price: "]),  # type: ignore[arg-type]
        ({"order_id": None, "customer": {}}, ["order_id: ", "customer.name: Field required"]),
        ({"order_id": 1, "extra": "no"}, ["prices.extra: Input should be a valid decimal"]),
        ({"order_id": 1, "prices": "no"}, ["prices.prices: Input should be a valid decimal"]),
    ],
)
def test_each_error_is_named_by_its_path(payload: dict[str, Any], errors: list[str]) -> None:
    with pytest.raises(InvalidEventError) as refused:
        bind_contract("a.b", contract, payload, validate=True)
    assert "event 'a.b' violates the type hints of its contract" in str(refused.value)
    with pytest.raises(ContractViolated) as archived:
        bind(handler_of(contract), (), json.loads(json.dumps(payload, default=vars)))
    assert "handler 'shop.h'" in str(archived.value)
    assert archived.value.reason == "contract"
    for error in errors:
        assert error in str(refused.value)
        assert error in str(archived.value)


def test_errors_are_limited_in_number_and_length() -> None:
    def contract(numbers: dict[str, int]) -> None: ...

    validator = Validator(signature_of(contract), contract)
    with pytest.raises(Violation, match=r"; and 480 more$") as error:
        validator.from_json({"numbers": {"k" * 1_000 + str(n): "x" for n in range(500)}})
    assert len(str(error.value)) < 320 * MAX_ERRORS


def test_missing_hints_are_not_checked() -> None:
    weird = object()
    full = bind_contract("a.b", contract, {"order_id": 1, "unchecked": weird}, validate=True)
    assert full["unchecked"] is weird

    def none(order_id, **payload): ...

    payload = {"order_id": "x", "lone": "\ud800", "deep": [[1]]}
    assert bind(handler_of(none), (), payload) == ((), payload)
    assert bind_contract("a.b", none, payload, validate=True) == payload


def test_defaults_are_published_and_validated_too() -> None:
    def contract(line: Line = Line("s", Decimal(1)), at: date = date(2026, 1, 1)) -> None: ...  # noqa: B008

    full = bind_contract("a.b", contract, {}, validate=True)
    assert full == {"line": {"sku": "s", "price": "1", "sent": None}, "at": "2026-01-01"}

    def wrong(note: str = None) -> None: ...  # type: ignore[assignment]  # noqa: RUF013

    with pytest.raises(InvalidEventError, match="note: Input should be a valid string"):
        bind_contract("a.b", wrong, {}, validate=True)


def test_the_body_of_a_contract_gets_values_of_the_types() -> None:
    seen: list[object] = []

    def contract(total: Decimal, *, line: Line) -> None:
        seen.extend((total, line))
        if total < 0:
            raise ValueError("not negative")

    line = {"sku": "s", "price": 1}
    bind_contract("a.b", contract, {"total": "1.5", "line": line}, validate=True)
    assert seen == [Decimal("1.5"), Line("s", Decimal(1))]
    with pytest.raises(ValueError, match="not negative"):
        bind_contract("a.b", contract, {"total": -1, "line": line}, validate=True)


def test_an_object_that_was_changed_after_its_validation() -> None:
    def contract(item: Strict) -> None: ...

    item = Strict(orderNumber=1, at=NOON)
    item.at = "later"  # type: ignore[assignment]
    with pytest.raises(InvalidEventError, match=r"item\.at: Input should be a valid datetime"):
        bind_contract("a.b", contract, {"item": item}, validate=True)


def test_arguments_by_position() -> None:
    def handler(order_id: int, at: date, *more: Decimal, note: str = "") -> None: ...

    assert bind(handler_of(handler), [1, "2026-01-01", "2"], {"note": "x"}) == (
        (1, date(2026, 1, 1), Decimal(2)),
        {"note": "x"},
    )
    with pytest.raises(ContractViolated, match=r"more\.0: "):
        bind(handler_of(handler), [1, "2026-01-01", "x"], {})


MODULE = """
from dataclasses import dataclass, field, make_dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nowhere import Missing

def contract(line: Line, *, more: "list[Line] | None" = None) -> Missing: ...
def hidden(line: Line, at: Missing) -> None: ...

@dataclass
class Line:
    price: Decimal
"""
#: Annotations are text, or from Python 3.14 on evaluated when they are read (PEP 649).
DEFERRED = ["from __future__ import annotations"] + [""] * (sys.version_info >= (3, 14))


@pytest.mark.parametrize("deferred", DEFERRED)
def test_annotations_that_are_evaluated_later(
    deferred: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"deferred_{len(deferred)}"
    (tmp_path / f"{name}.py").write_text(deferred + MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    payload: dict[str, Any] = {"line": {"price": "1"}, "more": [{"price": 2}]}
    full = bind_contract("a.b", module.contract, payload, validate=True)
    assert full == payload
    assert bind(handler_of(module.contract), (), full)[1]["line"] == module.Line(Decimal(1))
    # A name for type checkers only is an error with VALIDATE alone.
    assert bind_contract("a.b", module.hidden, {"line": 1, "at": 2}) == {"line": 1, "at": 2}
    assert list(handler_of(module.hidden).signature.parameters) == ["line", "at"]
    with pytest.raises(ConfigurationError, match="name 'Missing' is not defined"):
        bind_contract("a.b", module.hidden, {"line": 1, "at": 2}, validate=True)


def test_what_an_upcaster_made_may_have_python_values() -> None:
    def handler(total: Decimal, line: Line) -> None: ...

    payload: Mapping[str, Any] = {"total": Decimal(1), "line": {"sku": "s", "price": Decimal(2)}}
    assert bind(handler_of(handler), (), payload)[1]["line"] == Line("s", Decimal(2))
    with pytest.raises(ContractViolated, match="not JSON serializable"):
        bind(handler_of(handler), (), {"total": 1, "line": object()})


# -- fields that are written under one name and read under another --------------------------------


class ByChoice(pydantic.BaseModel):
    number: int | None = pydantic.Field(
        None, validation_alias=pydantic.AliasChoices("orderNumber", "order_number")
    )


class ByTwo(pydantic.BaseModel):
    number: int = pydantic.Field(0, validation_alias="in", serialization_alias="out")


class ByName(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(validate_by_alias=False, validate_by_name=True)
    number: int = pydantic.Field(0, alias="orderNumber")


class ByAlias(pydantic.BaseModel):
    number: int = pydantic.Field(0, alias="orderNumber")


class ByGenerator(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(alias_generator=str.upper, validate_by_name=True)
    number: int = 0


@pydantic.dataclasses.dataclass
class ByDataclass:
    number: int = pydantic.Field(0, validation_alias="in")


class Doubled(pydantic.BaseModel):
    number: Annotated[int, pydantic.BeforeValidator(lambda value: 2 * int(value))]


class Encoded(pydantic.BaseModel):
    number: pydantic.Base64Bytes


class Masked(pydantic.BaseModel):
    number: int

    @pydantic.field_serializer("number")
    def mask(self, _: int) -> int:
        return 0


class Partial(pydantic.BaseModel):
    number: int = 0

    @pydantic.model_serializer
    def nothing(self) -> dict[str, int]:
        return {}


class Excluded(pydantic.BaseModel):
    number: int = pydantic.Field(0, exclude=True)


@dataclass
class Computed:
    number: int = field(init=False, default=0)


@dataclass
class Loose:
    """Nothing has validated its fields."""

    number: int
    at: datetime
    lines: tuple[Line, ...] = ()


def computed() -> Computed:
    made = Computed()
    made.number = 5
    return made


@pytest.mark.parametrize("nested", ["", "list", "model"])
@pytest.mark.parametrize(
    ("value", "is_read"),
    [
        (ByChoice.model_validate({"order_number": 5}), False),
        (ByChoice.model_validate({}), True),
        (ByTwo.model_validate({"in": 5}), False),
        (ByTwo.model_validate({}), True),
        (ByName.model_validate({"number": 5}), False),
        (ByAlias(orderNumber=5), True),
        (ByGenerator(number=5), True),
        (ByDataclass(**{"in": 5}), False),
        (Doubled(number=5), False),
        (Encoded(number=b"YWJjZA=="), False),
        (Masked(number=5), False),
        (Masked(number=0), True),
        (Partial(number=5), False),
        (Partial(), True),
        (Excluded(number=5), False),
        (Excluded(number=0), True),
        (computed(), False),
        (Loose("5", "2026-03-01", [Line("s", "1.5")]), True),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_fields_that_are_not_read_as_written(value: Any, is_read: bool, nested: str) -> None:
    hint: Any = type(value)
    if nested == "list":
        hint, value = list[hint], [value]
    elif nested == "model":
        model = pydantic.create_model("Around", inner=(hint, ...), at=(datetime, NOON))
        hint, value = model, model.model_construct(inner=value, at=NOON)
    if not is_read:
        with pytest.raises(InvalidEventError, match="does not read its fields as it writes them"):
            both_ways(hint, value)
        return
    _, received = both_ways(hint, value)
    assert both_ways(hint, received)[1] == received


def test_keys_that_would_be_one() -> None:
    with pytest.raises(InvalidEventError, match="two keys of a dict"):
        both_ways(dict[Color | str, int], {Color.RED: 1, "red": 2})
