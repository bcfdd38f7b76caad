"""The mirror on a real broker: what becomes of each kind of archive message."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from django_amqp_events.archive import eligibility, replay
from django_amqp_events.models import (
    ArchivedEvent,
    ArchivedFailure,
    State,
)

from ..archiving import (
    archived,
    mirror_all,
    outcome,
    publish,
    received,
)

pytestmark = pytest.mark.usefixtures("archive_database")
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
    assert not eligibility.is_overdue(row, None)
    publish(billing, outcome(row, str(row.replay_set.get().pk), outcome="superseded"))
    assert mirror_all(billing).outcomes == 1
    assert row.replay_set.get().superseded
