"""The other service that handles `shop.order`."""

from __future__ import annotations

from typing import Any

from django_amqp_events import handler

from .steps import perform


@handler("shop.order", bind=True)
def reserve(self: Any, plan: list[str]) -> str:
    return perform(self, ["ok"])
