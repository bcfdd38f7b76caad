"""The AsyncAPI documents, as AsyncAPI's own parser reads them."""

from __future__ import annotations

import copy
import enum
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import pytest

import npm
from django_amqp_events import conf
from django_amqp_events.catalogue import asyncapi, entries
from django_amqp_events.declare.declarations import EventDeclaration, HandlerDeclaration
from django_amqp_events.declare.registry import build
from django_amqp_events.message.encoding import encode_payload, event_message
from django_amqp_events.message.formats import new_attributes
from django_amqp_events.options import Format

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
#: What the parser says about every document of 3.0: there is a newer version.
NEWER = "asyncapi-latest-version"

#: npm installs 170 packages, once for each .venv.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="session")
def packages() -> Path:
    return npm.install(HERE, "AsyncAPI's parser, which validates the documents of events_catalogue")


Validate = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def validate(packages: Path) -> Validate:
    def run(*documents: Mapping[str, Any], deliveries: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Return what the parser says about documents, and about messages that they describe."""
        cases = [{"document": each, "deliveries": deliveries} for each in documents]
        done = subprocess.run(
            ["node", str(HERE / "validate.mjs"), str(packages)],
            input=json.dumps(cases),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found: list[dict[str, Any]] = json.loads(done.stdout)
        for each in found:
            each["diagnostics"] = [one for one in each["diagnostics"] if one["code"] != NEWER]
        return found

    return run


def of_the_example(service: str, data: Path) -> dict[str, Any]:
    """Return the document of a service of the example project."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("AMQP_", "DJANGO_", "EXAMPLE_"))
    }
    settings = {
        "DJANGO_SETTINGS_MODULE": f"example_project.{service}", "EXAMPLE_DATA": str(data)
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "manage.py", "events_catalogue", "--format", "asyncapi"],
        cwd=ROOT,
        env=kept | settings,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.mark.parametrize(
    ("service", "sent", "received"),
    [
        (
            "shop",
            {"publish.shop.order.created", "publish.shop.order.held"},
            {
                "handle.audit.record": ["shop.order.#", "shop.order.created", "shop.order.held"],
                "handle.orders.mark_invoiced": ["billing.invoice.issued"],
                "handle.orders.send_confirmation": ["shop.order.created"],
                "handle.stock.reserve_stock": ["shop.order.created"],
            },
        ),
        (
            "billing",
            {"publish.billing.invoice.issued"},
            {
                "handle.invoices.book_revenue": ["shop.order.created"],
                "handle.invoices.issue_invoice": ["shop.order.created"],
                "handle.invoices.register_sale": ["shop.order.created"],
            },
        ),
    ],
)
def test_the_example_project_is_valid(
    service: str, sent: set[str], received: Mapping[str, Any], validate: Validate, tmp_path: Path
) -> None:
    document = of_the_example(service, tmp_path)
    order = json.loads((ROOT / "example_project" / "orders.jsonl").read_text().splitlines()[0])
    (found,) = validate(document, deliveries=[delivery("shop.order.created", order)])
    assert found["diagnostics"] == []
    assert found["deliveries"] == [[]]
    operations = found["operations"]
    assert {name for name, each in operations.items() if each["action"] == "send"} == sent
    assert {
        name: each["messages"]
        for name, each in operations.items()
        if each["action"] == "receive"
    } == received  # fmt: skip
    for name, each in operations.items():
        queue = f"{service}.{name.removeprefix('handle.')}"
        assert each["channels"] == [queue if name in received else name.removeprefix("publish.")]


class Status(enum.Enum):
    OPEN = "open"
    PAID = "paid"


@dataclass
class Node:
    name: str
    others: list[Node] = field(default_factory=list)


@dataclass
class Order:
    total: Decimal
    pair: tuple[int, str]
    root: Node


def everything(
    order_id: int,
    total: Decimal,
    customer: UUID,
    status: Status,
    day: date,
    at: datetime,
    lines: list[dict[str, int | None]],
    kind: Literal["a", "b"] = "a",
    weight: float | None = None,
    extra: Any = None,
    **more: bool,
) -> None:
    """Have an argument of each type.

    *Markdown*, and <script>alert(1)</script>.
    """


def take(**payload: Any) -> None: ...


PAYLOAD: dict[str, Any] = {
    "order_id": 7,
    "total": Decimal("19.90"),
    "customer": UUID(int=5),
    "status": "paid",
    "day": date(2026, 3, 1),
    "at": datetime(2026, 3, 1, 12, tzinfo=UTC),
    "lines": [{"count": 1, "rest": None}],
    "kind": "b",
    "weight": None,
    "extra": {"any": ["thing"]},
    "gift": True,
}


def delivery(name: str, payload: Mapping[str, Any], form: Format = "celery") -> dict[str, Any]:
    """Return a message as it is published."""
    identity: dict[str, Any] = {
        "event_id": "8d4ad1b8",
        "name": name,
        "service": "shop",
        "published_at": datetime(2026, 3, 1, tzinfo=UTC),
        "correlation_id": None,
        "causation_id": "0",
    }
    attributes = new_attributes(**identity) if form == "cloudevents" else None
    body = encode_payload(name, payload, form=form, attributes=attributes)
    message = event_message(exchange="events", body=body, form=form, **identity)
    return {
        "message": name,
        "headers": dict(message.headers),
        "payload": json.loads(message.body),
    }


@pytest.fixture
def document() -> dict[str, Any]:
    """A document of a service with everything in it, of odd names too."""
    settings, _ = conf.parse({"SERVICE": "shop", "EVENTS": {"shop.plain": {}}})
    handlers = [
        HandlerDeclaration(target=take, name=name, options={"events": patterns, "queue": queue})
        for name, queue, patterns in (
            ("all", "all", ("#",)),
            ("some", "some", ("shop.*", "a.{id}", "a.b?c=1", "ä/ö.~1", "x._2a_", "x.*")),
            ("first", "shared", ("shop.first",)),
            ("second", "shared", ("shop.second",)),
        )
    ]
    events = [EventDeclaration(name="shop.everything", contract=everything)]
    registry = build(settings, events, handlers)
    assert not registry.problems
    return asyncapi.document(entries.build(settings, registry))


def test_all_types_and_odd_names_are_valid(document: dict[str, Any], validate: Validate) -> None:
    (found,) = validate(document, deliveries=[delivery("shop.everything", PAYLOAD)])
    assert found["diagnostics"] == []
    assert found["deliveries"] == [[]]
    assert len(found["operations"]) == 8


def test_another_payload_does_not_match(document: dict[str, Any], validate: Validate) -> None:
    changes: dict[str, dict[str, Any]] = {
        "/1/order_id must be integer": {"order_id": "7"},
        "/1/status must be equal to one of the allowed values": {"status": "void"},
        '/1/day must match format "date"': {"day": "yesterday"},
        '/1/customer must match format "uuid"': {"customer": "5"},
        "/1/lines/0/count must match a schema in anyOf": {"lines": [{"count": "1"}]},
        "/1/gift must be boolean": {"gift": 1},
    }
    deliveries = [delivery("shop.everything", {**PAYLOAD, **each}) for each in changes.values()]
    without_task = delivery("shop.everything", PAYLOAD)
    del without_task["headers"]["task"]
    (found,) = validate(document, deliveries=[*deliveries, without_task])
    wanted = [*changes, " must have required property 'task'"]
    for difference, differences in zip(wanted, found["deliveries"], strict=True):
        assert difference in differences


@pytest.mark.parametrize("form", ["cloudevents", "json"])
def test_other_formats_are_valid(form: Format, validate: Validate) -> None:
    def contract(order_id: int) -> None: ...

    settings, _ = conf.parse({"SERVICE": "shop", "FORMAT": form})
    registry = build(settings, [EventDeclaration(name="shop.placed", contract=contract)])
    document = asyncapi.document(entries.build(settings, registry))
    deliveries = [delivery("shop.placed", {"order_id": each}, form) for each in (1, "1")]
    celery = delivery("shop.placed", {"order_id": 1})
    (found,) = validate(document, deliveries=[*deliveries, celery])
    assert found["diagnostics"] == []
    place = "/data/order_id" if form == "cloudevents" else "/order_id"
    assert found["deliveries"] == [[], [f"{place} must be integer"], [" must be object"]]


def test_a_model_is_valid(validate: Validate) -> None:
    def contract(order: Order, other: Order | None = None) -> None: ...

    settings, _ = conf.parse({"SERVICE": "shop"})
    registry = build(settings, [EventDeclaration(name="shop.model", contract=contract)])
    document = asyncapi.document(entries.build(settings, registry))
    order = {"total": "1.5", "pair": [1, "a"], "root": {"name": "a", "others": [{"name": "b"}]}}
    wrong = copy.deepcopy(order)
    wrong["pair"], wrong["root"]["others"][0]["name"] = ["a", 1], 5  # type: ignore[index]
    deliveries = [delivery("shop.model", {"order": each}) for each in (order, wrong)]
    (found,) = validate(document, deliveries=deliveries)
    assert found["diagnostics"] == []
    assert found["deliveries"] == [
        [],
        [
            "/1/order/pair/0 must be integer",
            "/1/order/pair/1 must be string",
            "/1/order/root/others/0/name must be string",
        ],
    ]


def test_the_parser_refuses_an_invalid_document(
    document: dict[str, Any], validate: Validate
) -> None:
    """Each of these is an error, so no error means something."""
    breaks: list[Callable[[dict[str, Any]], object]] = [
        lambda each: each.pop("info"),
        lambda each: each["operations"]["handle.all"].update(action="consume"),
        lambda each: each["operations"]["handle.all"].update(channel={"$ref": "#/channels/none"}),
        lambda each: each["channels"]["shop.all"]["bindings"]["amqp"].update({"is": "exchange"}),
        lambda each: each["components"]["schemas"]["shop.everything"].update(required="order_id"),
    ]
    broken = [copy.deepcopy(document) for _ in breaks]
    for each, break_it in zip(broken, breaks, strict=True):
        break_it(each)
    for found in validate(*broken):
        assert "Error" in {each["severity"] for each in found["diagnostics"]}
