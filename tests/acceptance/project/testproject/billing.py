"""Two handlers of an event that `stock` handles too, and some for retries."""

from __future__ import annotations

from typing import Any

from django_amqp_events import handler

from .steps import perform


@handler("shop.order", bind=True, max_retries=5)
def invoice(self: Any, plan: list[str]) -> str:
    return perform(self, plan)


@handler("shop.*", bind=True)
def mail(self: Any, plan: list[str]) -> str:
    return perform(self, ["ok"])


@handler("retry.schedule", bind=True, max_retries=4)
def schedule(self: Any, plan: list[str]) -> str:
    return perform(self, plan)


@handler("retry.long", bind=True, max_retries=4)
def long(self: Any, plan: list[str]) -> str:
    return perform(self, plan)


@handler("retry.many", bind=True, max_retries=2)
def many(self: Any, plan: list[str]) -> str:
    return perform(self, plan)
