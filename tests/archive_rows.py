"""Rows of the archive, and a broker and a clock that do as they are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

from django_amqp_events.exceptions import PublishError
from django_amqp_events.message.types import Message, derived_id
from django_amqp_events.models import ArchivedEvent, State

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)

Answer = Callable[[Message], PublishError | None]


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


def again(row: ArchivedEvent) -> ArchivedEvent:
    return ArchivedEvent.objects.get(pk=row.pk)


def seen(*rows: ArchivedEvent) -> dict[UUID, int]:
    return {row.pk: row.version for row in rows}


@dataclass
class Broker:
    """Records messages; *answer* returns the error of each."""

    answer: Answer = lambda message: None
    windows: list[list[Message]] = field(default_factory=list)

    def publish(
        self, messages: Sequence[Message], *, mandatory: bool
    ) -> Sequence[PublishError | None]:
        assert mandatory
        self.windows.append(list(messages))
        return [self.answer(message) for message in messages]

    def now(self) -> datetime:
        return NOW

    @property
    def messages(self) -> list[Message]:
        return [message for window in self.windows for message in window]


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
