"""Hostile messages in the archive queue, on SQLite and PostgreSQL: each is exactly one row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import amqp
import pytest
from amqp.serialization import decode_properties_basic

from django_amqp_events.exceptions import Malformed
from django_amqp_events.message import archive_message, decoding
from django_amqp_events.message.headers import EVENT_UNREADABLE
from django_amqp_events.message.types import Message, Progress, Received
from django_amqp_events.models import ArchivedEvent, ArchivedFailure
from tests.acceptance.worker.test_hostile_doors import DOORS, LOGGED
from tests.acceptance.worker.test_hostile_table import REFUSED, cases
from tests.conftest import EACH, ONE

from ..archiving import mirror_all, publish

pytestmark = [pytest.mark.usefixtures("archive_database"), pytest.mark.timeout(180)]
#: On each kind of database, with time zones; and of what no database has a part in.


def delivered() -> Iterator[Received]:
    """Every message of the table that a broker takes, as a worker gets it."""
    for case in cases(Path("/nowhere"), "events"):
        if case.ends == (REFUSED,) or case.name == "user-id":
            continue
        unreadable = ""
        try:
            properties, _ = decode_properties_basic(case.wire(case.name), 0)
        except Exception as exc:  # noqa: BLE001 - what py-amqp raises
            unreadable = f"{type(exc).__name__}: {exc}"
            properties = {"application_headers": {EVENT_UNREADABLE: case.wire(case.name)}}
        yield Received(
            queue="billing.send_invoice",
            exchange="events",
            routing_key=case.key.decode("utf-8", "surrogatepass")
            if b"\xff" not in case.key
            else "odd",
            body=case.body(case.name),
            headers=properties.pop("application_headers", {}),
            properties=properties,
            unreadable=unreadable,
        )


def archived(delivery: Received) -> Message:
    event, progress = None, Progress()
    if not delivery.unreadable:
        with suppress(Malformed):
            event, progress = decoding.identify(delivery, trusted=False)
    return archive_message.build(
        delivery,
        exchange="billing:archive",
        reason="malformed",
        detail="hostile",
        at=datetime.now(UTC),
        worker="celery@one",
        service="billing",
        event=event,
        progress=progress,
        handler="send_invoice",
    )


@EACH
def test_whatever_a_worker_archives_is_one_row(billing: Any) -> None:
    deliveries = list(delivered())
    assert len(deliveries) > 150
    publish(billing, *(archived(delivery) for delivery in deliveries))
    counts = mirror_all(billing, size=50)
    assert (counts.events, counts.messages) == (len(deliveries), len(deliveries))
    assert (counts.unreadable, billing.ready("billing:archive")) == (0, 0)
    found = Counter(bytes(row.body) for row in ArchivedEvent.objects.all())
    assert found == Counter(delivery.body for delivery in deliveries)
    assert ArchivedFailure.objects.count() == len(deliveries)
    for row in ArchivedEvent.objects.all():
        # Page texts are readable and have no control characters.
        assert row.reason == "malformed"
        assert isinstance(row.headers, dict)
        assert row.failure_set.get().about["reason"] == "malformed"
        for text in (row.name, row.event_id, row.source, row.detail, row.correlation_id):
            assert "\0" not in text
            text.encode()


@ONE
def test_whatever_a_stranger_archives_is_one_row(billing: Any) -> None:
    expected = 0
    wanted: Counter[bytes] = Counter()
    for number, case in enumerate(DOORS["core:archive"]):
        body = case.body(f"{case.name} {number}")
        wire = case.wire(case.name)
        channel = billing.channel()
        channel.confirm_select()
        message = amqp.Message(body)
        message._serialize_properties = lambda wire=wire: wire
        channel.basic_publish_confirm(message, "billing:archive", "x")
        channel.close()
        if case.ends != (LOGGED,):
            expected += 1
            wanted[body] += 1
    counts = mirror_all(billing)
    assert counts.events == ArchivedEvent.objects.count() == expected
    assert Counter(bytes(row.body) for row in ArchivedEvent.objects.all()) == wanted
    assert counts.messages == len(DOORS["core:archive"])
    assert billing.ready("billing:archive") == 0
