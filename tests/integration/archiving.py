"""Archive messages as workers make them, and the ends of replays, on a real broker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from django_amqp_events.archive import row_writer
from django_amqp_events.archive.entries import Item, read_entries
from django_amqp_events.archive.mirror import Mirror
from django_amqp_events.archive.row_writer import Counts
from django_amqp_events.broker.confirms import ConfirmChannel
from django_amqp_events.conf import get_settings
from django_amqp_events.context import ReceivedEvent
from django_amqp_events.message import archive_message, decoding, encoding
from django_amqp_events.message.types import (
    Failure,
    Message,
    Progress,
    Received,
)
from django_amqp_events.models import ArchivedEvent
from tests.acceptance import harness
from tests.event_messages import delivered, published
from tests.integration.conftest import Service

FAILURE = Failure(
    exception="billing.errors.TaxError",
    message="there is no tax rate for the country 'XX'\nask the tax office",
    traceback="Traceback (most recent call last):\n  …\nbilling.errors.TaxError: no rate\n",
    frames=(
        {"file": "/srv/billing/tax.py", "line": 28, "function": "rate", "module": "billing.tax"},
        {
            "file": "/srv/.venv/lib/python3.11/site-packages/requests/api.py",
            "line": 59,
            "function": "get",
            "module": "requests.api",
        },
    ),
)


def store_items(items: Sequence[Item]) -> Counts:
    """Store items as a mirror does whose errors end it."""

    def blame(error: Exception, _item: Item | None) -> None:
        raise error

    return row_writer.store_items(items, blame)


def store(messages: Sequence[Received]) -> Counts:
    return store_items(read_entries(messages, get_settings()))


def received(
    event_id: str | None = None,
    *,
    name: str = "shop.order.created",
    payload: Mapping[str, Any] | None = None,
    queue: str = "billing.send_invoice",
    source: str = "shop",
    headers: Mapping[str, Any] | None = None,
    body: bytes | None = None,
) -> Received:
    """A delivery as the handler's queue had it."""
    message = published(
        name, payload or {"order_id": 7}, body=body, event_id=event_id or "", service=source,
        headers=headers,
    )  # fmt: skip
    return delivered(message, queue)


def publish_past(made: Service, first: int, end: int) -> None:
    """Publish orders with these numbers, one a minute, the last one now."""
    now = datetime.now(UTC)
    messages = []
    for number in range(first, end):
        at = now - timedelta(minutes=end - 1 - number)
        messages.append(published(payload={"order_id": number}, event_id=f"e{number}", at=at))
    publish(made, *messages)


def archived(
    delivery: Received | None = None,
    *,
    service: str = "billing",
    handler: str | None = "send_invoice",
    reason: str = "exhausted",
    attempt: int = 3,
    replay_id: str | None = None,
    at: datetime | None = None,
    failure: Failure | None = FAILURE,
    identified: bool = True,
) -> Message:
    """The archive message that a worker would publish of a delivery."""
    delivery = delivery or received()
    event: ReceivedEvent | None = None
    progress = Progress(attempt=attempt, replay_id=replay_id, handler=handler)
    if identified:
        event = decoding.identify(delivery, trusted=False)[0]
    if failure is not None and event is not None:
        moment = at or datetime.now(UTC)
        history = encoding.add_to_history(progress, failure, at=moment, worker="celery@one")
        progress = Progress(attempt=attempt, replay_id=replay_id, handler=handler, history=history)
    return archive_message.build(
        delivery,
        exchange=f"{service}:archive",
        reason=reason,
        detail="attempt 3 failed, and it was the last one",
        at=at or datetime.now(UTC),
        worker="celery@one",
        service=service,
        event=event,
        progress=progress,
        handler=handler,
        failure=failure,
    )


def outcome(
    row: ArchivedEvent, replay_id: str, *, outcome: str = "succeeded", at: datetime | None = None
) -> Message:
    """The report of a worker that a replay of this event succeeded."""
    event = ReceivedEvent(id=row.event_id, name=row.name, service=row.source, replay_id=replay_id)
    return archive_message.build_outcome(
        event,
        exchange=f"{row.service}:archive",
        handler=row.handler,
        service=row.service,
        outcome=outcome,
        at=at or datetime.now(UTC),
        worker="celery@one",
    )


def taken(message: Message, **more: Any) -> Received:
    """The delivery of a message that was published to the archive."""
    return delivered(message, "billing:archive", **more)


def publish(service: Service, *messages: Message) -> None:
    """Publish as a worker does."""
    channel = ConfirmChannel(service.app, timeout=10)
    try:
        errors = channel.publish(messages, mandatory=True)
        assert not any(errors), errors
    finally:
        channel.close()


def mirror_all(service: Service, **options: Any) -> Counts:
    """Run a mirror until the archive is empty."""
    said: list[str] = []
    mirroring = Mirror(app=service.app, settings=service.settings, tell=said.append, **options)
    return mirroring.run(until_empty=True)


def mirror_until_empty(processes: harness.Service, *options: str) -> str:
    """Run ``events_mirror`` until the archive is empty; return what it said."""
    worker = processes.start("events_mirror", "--until-empty", *options)
    assert worker.wait(60) == 0, worker.log
    return worker.log
