"""Rows of the tables, and a clock that does as it is told."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

from django_amqp_events.databases import Now
from django_amqp_events.message.types import derived_id
from django_amqp_events.models import (
    ArchivedEvent,
    ArchivedFailure,
    FailureGroup,
    InboxEntry,
    OutboxEvent,
    Replay,
    Revision,
    State,
)
from django_amqp_events.publish import outbox_rows

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


def build(
    number: int = 1, state: State = State.ARCHIVED, *, at: datetime = NOW, **fields: Any
) -> ArchivedEvent:
    """Return an archived event that is not saved; all its times are *at*."""
    body = fields.get("body", b'[[],{"order_id":7},{}]')
    return ArchivedEvent(
        **{
            "id": derived_id(uuid4().hex),
            "service": "billing",
            "handler": "send_invoice",
            "queue": "billing.send_invoice",
            "name": "shop.order.created",
            "event_id": f"order-{number}",
            "source": "shop",
            "first_failed_at": at,
            "last_failed_at": at,
            "mirrored_at": at,
            "state": state,
            "state_since": at,
            "reason": "exhausted",
            "body": body,
            "body_size": len(body),
            "headers_raw": b"",
            "content_type": "application/json",
            "content_encoding": "utf-8",
            **fields,
        }
    )


def make(number: int = 1, state: State = State.ARCHIVED, **fields: Any) -> ArchivedEvent:
    """Return a saved archived event; see :func:`build`."""
    row = build(number, state, **fields)
    row.save(force_insert=True)
    return row


def add_replay(row: ArchivedEvent, number: int = 1, **fields: Any) -> Replay:
    return Replay.objects.create(
        **{
            "pk": uuid4(),
            "event": row,
            "number": number,
            "handler": row.handler,
            "requested_at": row.last_failed_at,
            "requested_by": "ada",
            "reason": "fixed in 1.2",
            **fields,
        }
    )


def add_revision(row: ArchivedEvent, number: int = 1, **fields: Any) -> Revision:
    return Revision.objects.create(
        **{
            "pk": uuid4(),
            "event": row,
            "number": number,
            "body": b'[[], {"order_id": %d}, {}]' % number,
            "by": "ada",
            "at": row.mirrored_at,
            "reason": "a wrong number",
            **fields,
        }
    )


def add_failure(row: ArchivedEvent, **fields: Any) -> ArchivedFailure:
    return ArchivedFailure.objects.create(
        **{
            "pk": uuid4(),
            "event": row,
            "reason": "failed",
            "failed_at": row.last_failed_at,
            "mirrored_at": row.mirrored_at,
            **fields,
        }
    )


def replaying(since: datetime, **fields: Any) -> ArchivedEvent:
    """Return an event whose only replay was published then."""
    row = make(state=State.REPLAYING, state_since=since, replays=1, **fields)
    add_replay(row, state="published", requested_at=since, published_at=since, publishes=1)
    return row


def make_group(**fields: Any) -> FailureGroup:
    return FailureGroup.objects.create(
        **{
            "pk": uuid4(),
            "service": "billing",
            "handler": "send_invoice",
            "exception": "billing.errors.TaxError",
            "first_seen": NOW,
            **fields,
        }
    )


def make_inbox(event_id: str, handler: str = "book", **fields: Any) -> InboxEntry:
    return InboxEntry.objects.create(
        **{
            "id": uuid4(),
            "service": "billing",
            "handler": handler,
            "source": "shop",
            "event_id": event_id,
            "name": "shop.order.created",
            "handled_at": NOW,
            **fields,
        }
    )


def make_outbox(*, due: float = 300, **fields: Any) -> OutboxEvent:
    """Return a row of the outbox that is due in so many seconds."""
    body = fields.get("body", b'[[], {"order_id": 7, "note": "Gr\xc3\xbc\xc3\x9fe"}, {}]')
    envelope = {
        "headers": {"task": "shop.order.created", "event-correlation-id": "basket-5", "weight": 2},
        "properties": {"content_type": "application/json", "content_encoding": "utf-8"},
    }
    row = OutboxEvent.objects.create(
        **{
            "pk": outbox_rows.new_id(),
            "service": "billing",
            "event_id": str(uuid4()),
            "name": "shop.order.created",
            "exchange": "events",
            "envelope": json.dumps(envelope),
            "body": body,
            "size": len(body),
            "created_at": Now() - timedelta(hours=2),
            "due_at": Now() + timedelta(seconds=due),
            **fields,
        }
    )
    return OutboxEvent.objects.get(pk=row.pk)


def again(row: ArchivedEvent) -> ArchivedEvent:
    return ArchivedEvent.objects.get(pk=row.pk)


def seen(*rows: ArchivedEvent) -> dict[UUID, int]:
    return {row.pk: row.version for row in rows}


@dataclass
class Clock:
    """A replacement for the module ``time`` whose sleeps take no time."""

    at: float = 1000.0
    step: float = 0.0
    slept: float = 0.0

    def monotonic(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += max(seconds, self.step)
        self.slept += seconds
