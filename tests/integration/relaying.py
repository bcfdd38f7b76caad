"""Rows of the outbox that a test's :class:`.wire.Wire` publishes to, and a relay of them."""

from __future__ import annotations

from typing import Any

from django_amqp_events import Options
from django_amqp_events.conf import get_settings
from django_amqp_events.databases import Now
from django_amqp_events.models import OutboxEvent
from django_amqp_events.publish import outbox_rows, publisher
from django_amqp_events.publish.relay import Relay, RelayCounts

from . import wire

ALIAS = "archive"
NAME = "shop.order.created"


def table() -> Any:
    return OutboxEvent.objects.using(ALIAS)


def make_due() -> None:
    table().update(due_at=Now())


def leave(count: int = 1, *, columns: dict[str, Any] | None = None, **options: Any) -> list[Any]:
    """Commit events as a process does that dies before it publishes them; return their rows."""
    settings = get_settings()
    now = publisher.backend(settings).now()
    messages = [
        publisher._message(settings, NAME, {"n": n}, Options(**options), now, validate=True)
        for n in range(count)
    ]
    made = outbox_rows.insert(messages, alias=ALIAS, service=settings.service)
    rows = table().filter(pk__in=[row.id for row in made])
    rows.update(**(columns or {"due_at": Now()}))
    return list(rows.order_by("pk"))


def relay(**options: Any) -> RelayCounts:
    """Run a relay until nothing is due."""
    made = Relay(app=wire.app, settings=get_settings(), alias=ALIAS, tell=lambda _: None, **options)
    return made.run(until_empty=True)
