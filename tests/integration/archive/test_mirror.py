"""The mirror on a real broker: what becomes of each kind of archive message."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from amqp.serialization import decode_properties_basic
from django.db import OperationalError

from django_amqp_events.archive import eligibility, replay, row_writer
from django_amqp_events.exceptions import Malformed
from django_amqp_events.message import archive_message, decoding
from django_amqp_events.message.headers import EVENT_UNREADABLE
from django_amqp_events.message.types import Message, Progress, Received
from django_amqp_events.models import (
    ArchivedEvent,
    ArchivedFailure,
    State,
)
from tests.acceptance.worker.test_hostile_table import REFUSED, cases
from tests.conftest import EACH

from ..archiving import (
    archived,
    mirror_all,
    outcome,
    publish,
    received,
)

pytestmark = [pytest.mark.usefixtures("archive_database"), pytest.mark.timeout(180)]
#: On each kind of database, with time zones; and of what no database has a part in.


def test_archived_event_becomes_a_complete_row(billing):
    delivery = received("order-1", headers={"traceparent": "00-1", "weight": 2})
    publish(billing, archived(delivery))
    counts = mirror_all(billing)
    assert (counts.events, counts.messages) == (1, 1)
    assert billing.ready("billing:archive") == 0
    row = ArchivedEvent.objects.get()
    assert (row.service, row.handler, row.queue) == (
        "billing",
        "send_invoice",
        "billing.send_invoice",
    )
    assert (row.name, row.event_id, row.source) == ("shop.order.created", "order-1", "shop")
    assert bytes(row.body) == delivery.body
    assert row.headers["traceparent"] == "00-1"
    assert row.headers["weight"] == 2
    assert row.payload == {"order_id": 7}
    assert (row.state, row.version, row.attempts) == (State.ARCHIVED, 0, 3)
    assert row.exception == "billing.errors.TaxError"
    assert row.message == "there is no tax rate for the country 'XX'"
    assert row.location == "billing.tax:28 in rate"
    failure = ArchivedFailure.objects.get()
    assert failure.event == row
    assert failure.about["traceback"].startswith("Traceback")
    assert [entry["attempt"] for entry in failure.about["history"]] == [3]


def test_the_hour_that_a_clock_shows_twice(billing, archive_database):
    # In New York, where the tests without time zones are.
    at = datetime(2026, 11, 1, 5, 30, tzinfo=UTC)
    publish(billing, archived(received("order-1"), at=at))
    mirror_all(billing)
    publish(billing, archived(received("order-1"), at=at + timedelta(hours=1)))
    assert mirror_all(billing).failures == 1
    row = ArchivedEvent.objects.get()
    assert (row.first_failed_at, row.last_failed_at) == (at, at + timedelta(hours=1))
    report = replay.replay({row.pk: row.version}, by="ada")
    assert report.published == [row.pk]
    row.refresh_from_db()
    assert not eligibility.is_overdue(row)
    publish(billing, outcome(row, str(row.replay_set.get().pk), outcome="superseded"))
    assert mirror_all(billing).outcomes == 1
    assert row.replay_set.get().superseded


def test_messages_that_cannot_be_stored_stay_and_hold_up_no_other(billing, monkeypatch):
    """More than the smallest prefetch count; and the archive is not empty then."""
    real = row_writer.new_row

    def new_row(entry: Any) -> ArchivedEvent:
        if entry.archived.event is None or entry.archived.event.id.startswith("bad"):
            raise OperationalError("Got a packet bigger than 'max_allowed_packet' bytes")
        return real(entry)

    monkeypatch.setattr(row_writer, "new_row", new_row)
    publish(billing, *(archived(received(each)) for each in ("bad1", "bad2", "bad3", "good")))
    code, _, err = billing.command("events_mirror", "--until-empty", "--batch-size", "1")
    assert (code, ArchivedEvent.objects.get().event_id) == (1, "good")
    assert "3 messages in the archive queue cannot be stored" in err
    monkeypatch.undo()
    assert (mirror_all(billing).events, billing.ready("billing:archive")) == (3, 0)


# -- messages that no worker writes ----------------------------------------------------------------


ARCHIVE = "billing:archive"


def bare(body: Any = b"x", headers: Any = None, **more: Any) -> Any:
    return Message(
        exchange=ARCHIVE,
        routing_key="shop.order.created",
        body=body,
        headers=headers or {},
        properties={"delivery_mode": 2, **more},
    )


def forged(document: Any, **headers: Any) -> Any:
    return bare(b"forged", {"event-archive": json.dumps(document), "event-id": "f", **headers})


WRONG: list[Any] = [
    None, 7, -1, 1.5, True, "", "\0", "\ud800", "x" * 9000, [], [[]], {}, {"a": {"b": []}},
    10**30, "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00",
]  # fmt: skip


@EACH
def test_forged_documents_are_kept(billing):
    whole = json.loads(archived(received("w")).headers["event-archive"])
    messages = [
        forged({**whole, key: value, "n": f"{key}{n}"}, **{"event-id": f"{key}-{n}"})
        for key in whole
        for n, value in enumerate(WRONG)
    ]
    deep = '{"reason":' + "[" * 900 + "]" * 900 + "}"
    frames = [{"file": [1], "line": 10**30, "function": {"a": 1}}, {}, 5]
    messages += [
        forged({**whole, "exception": {"type": value, "message": value}, "n": n})
        for n, value in enumerate(WRONG)
    ]
    messages += [
        bare(b"forged", {"event-id": "deep", "event-archive": deep}),
        bare(b"forged", {"event-id": "text", "event-archive": "no JSON"}),
        bare(b"forged", {"event-id": "list", "event-archive": "[1]"}),
        bare(b"forged", {"event-id": "number", "event-archive": 5}),
        bare(b"forged", {"event-id": "digits", "event-archive": '{"attempt": ' + "9" * 5000 + "}"}),
        forged({**whole, "frames": frames}, **{"event-id": "frames"}),
        archived(received("healthy")),
    ]
    publish(billing, *messages)
    counts = mirror_all(billing)
    assert counts.messages == len(messages)
    assert counts.events + counts.failures == len(messages)
    assert counts.unreadable == 0
    assert ArchivedFailure.objects.count() == len(messages)
    years = {row.last_failed_at.year for row in ArchivedEvent.objects.only("last_failed_at")}
    assert years < set(range(2000, 2100))
    healthy = ArchivedEvent.objects.get(event_id="healthy")
    assert (healthy.state, healthy.attempts) == (State.ARCHIVED, 3)


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


def rejected(delivery: Received) -> Message:
    event, progress = None, Progress()
    if not delivery.unreadable:
        with suppress(Malformed):
            event, progress = decoding.identify(delivery, trusted=False)
    return archive_message.build(
        delivery,
        exchange=ARCHIVE,
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
    publish(billing, *(rejected(delivery) for delivery in deliveries))
    counts = mirror_all(billing, size=50)
    assert (counts.events, counts.messages) == (len(deliveries), len(deliveries))
    assert (counts.unreadable, billing.ready(ARCHIVE)) == (0, 0)
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
