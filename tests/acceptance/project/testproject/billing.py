"""A handler whose retries take long."""

from __future__ import annotations

from typing import Any

from django_amqp_events import handler

from .steps import perform


@handler("retry.long", bind=True, max_retries=4)
def long(self: Any, plan: list[str]) -> str:
    return perform(self, plan)
