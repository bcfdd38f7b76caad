"""Handlers beside the project's ordinary tasks."""

from __future__ import annotations

import threading
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


@handler("mixed.source", bind=True)
def source(self: Any, plan: list[str]) -> None:
    """Publish from a handler, and read the current event in two places."""
    perform(self, plan)
    here = current_event()
    assert here is not None
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(current_event()))
    thread.start()
    thread.join()
    published = chained.publish(number=1)
    ledger.write("published", id=published, bound=self.event.id, elsewhere=seen)


@chained.handler(bind=True)
def sink(self: Any, number: int) -> None:
    here = current_event()
    assert here is not None
    ledger.write(
        "start", handler=self.name, causation=here.causation_id, correlation=here.correlation_id
    )


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
