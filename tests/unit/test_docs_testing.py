"""The examples of docs/testing.md, collected as tests of this module."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from django.contrib.auth.models import Group
from django.db import transaction

from django_amqp_events import event
from django_amqp_events.declare.declarations import declarations
from django_amqp_events.pytest_plugin import captured_events, memory_events_fixture  # noqa: F401
from django_amqp_events.testing import override_events

DOC = Path(__file__).resolve().parents[2] / "docs" / "testing.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)

_before = declarations.snapshot()


@event("shop.order.created")
def order_created(order_id: int, total: Decimal) -> None: ...


@order_created.handler(
    name="billing.send_invoice", retry_backoff=30, dont_autoretry_for=[ValueError]
)
def send_invoice(order_id: int, total: str) -> None:
    if not order_id:
        raise ValueError("no order has this number")
    sys.modules["billing.handlers"].mail(f"Invoice for order {order_id}: {total}")


@transaction.atomic
def place_order(order_id: int) -> None:
    Group.objects.create(name=f"order {order_id}")
    order_created.publish(order_id=order_id, total=Decimal("9.90"))
    if order_id < 0:
        raise ValueError


def _module(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    return module


# The project of the examples.
_handlers = _module("billing.handlers", mail=mock.Mock())
MODULES = {
    "shop": _module("shop"),
    "shop.orders": _module("shop.orders", place_order=place_order),
    "shop.events": _module("shop.events", order_created=order_created),
    "billing": _module("billing", handlers=_handlers),
    "billing.handlers": _handlers,
}

with mock.patch.dict(sys.modules, MODULES):
    _text = DOC.read_text()
    for _found in BLOCK.finditer(_text):
        _line = _text[: _found.start(1)].count("\n")
        exec(compile("\n" * _line + _found[1], str(DOC), "exec"))  # noqa: S102 - the examples
_declared = declarations.snapshot()
declarations.restore(_before)


@pytest.fixture(autouse=True)
def project(own_declarations: None) -> Iterator[None]:
    declarations.restore(_declared)
    with (
        mock.patch.dict(sys.modules, MODULES),
        override_events(SERVICE="billing", BACKEND="memory"),
    ):
        yield
