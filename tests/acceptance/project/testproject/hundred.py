"""A hundred handlers, each with its own event and queue."""

from __future__ import annotations

from typing import Any

from django_amqp_events import handler

from .steps import perform

NUMBER = 100


def _run(self: Any, plan: list[str]) -> str:
    return perform(self, plan)


for number in range(NUMBER):
    handler(f"hundred.{number}", name=f"testproject.h{number}", bind=True)(_run)
