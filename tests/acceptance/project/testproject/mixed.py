"""Handlers beside the project's ordinary tasks."""

from __future__ import annotations

from typing import Any

from celery import current_app

from django_amqp_events import current_event, event, handler

from . import ledger
from .steps import perform


@handler("mixed.one", bind=True, max_retries=1)
def one(self: Any, plan: list[str]) -> str:
    return perform(self, plan)


@handler("mixed.two", bind=True, max_retries=1)
def two(self: Any, plan: list[str]) -> str:
    return perform(self, plan)


@event("mixed.chained")
def chained(number: int) -> None: ...


@chained.handler(bind=True)
def sink(self: Any, number: int) -> None:
    ledger.write("start", handler=self.name)


@handler("mixed.calls", bind=True)
def calls(self: Any, plan: list[str]) -> None:
    """Start an ordinary task from a handler."""
    current_app.send_task("testproject.tasks.ordinary", args=["from a handler"])
    perform(self, plan)


@handler("peer.number.*", bind=True, max_retries=1)
def peer_number(self: Any, number: int) -> None:
    """Handle an event of a service that uses celery-amqp-events; it fails once."""
    here = current_event()
    assert here is not None
    ledger.write("start", handler=self.name, number=number)
    if here.attempt == 1:
        raise ValueError("no")
    ledger.write("end", handler=self.name, number=number)
