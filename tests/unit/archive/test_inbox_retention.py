"""Which versions of ``newest`` are pruned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from django_amqp_events.archive import eligibility, inbox_retention, retention, tables
from django_amqp_events.conf import INBOX_MIN
from django_amqp_events.declare.newest import Version
from django_amqp_events.declare.registry import Handler, get_registry
from django_amqp_events.models import LatestVersion, OutboxEvent, State
from django_amqp_events.publish import outbox_rows
from django_amqp_events.testing import override_events
from django_amqp_events.worker import inbox
from tests.archive_rows import make
from tests.conftest import ONE
from tests.event_messages import published
from tests.services import handling

pytestmark = pytest.mark.usefixtures("archive_database")
OLD = timedelta(days=40)
BEFORE = timedelta(days=31)


@pytest.fixture
def copy() -> Iterator[Handler]:
    newest = handling("shop.order.#", NEWEST=["order", "version"], USING="archive")
    with override_events(
        SERVICE="billing", AUTODISCOVER=[], DATABASE="archive", HANDLERS={"copy": newest},
        RENAMED_HANDLERS={"write": "copy"},
    ):  # fmt: skip
        yield get_registry().handlers["copy"]


def handled() -> None:
    thing = Version("1", 5, is_time=False)
    LatestVersion.objects.using("archive").create(
        id=inbox.latest_key("billing", get_registry().handlers["copy"], thing), service="billing",
        handler="copy",
        thing="1", version=5, is_time=False, event_id="x", handled_at=datetime.now(UTC) - OLD,
    )  # fmt: skip


def pruned() -> int:
    before = datetime.now(UTC) - BEFORE
    due = inbox_retention.due(before=before, service="billing")
    assert sum(inbox_retention.prune(before=before, service="billing")) == due
    return due


@ONE
@pytest.mark.parametrize("name", ["copy", "write", ""], ids=["own", "renamed", "none"])
def test_a_version_stays_while_an_older_event_may_be_replayed(copy: Handler, name: str) -> None:
    handled()
    body = json.dumps([[], {"order": 1, "version": 4}, {}]).encode()
    more: dict[str, Any] = {"name": "shop.order.updated", "queue": copy.queue, "body": body}
    row = make(1, handler=name, **more)
    assert eligibility.target(row) == copy
    assert pruned() == 0
    tables.rows().filter(pk=row.pk).update(state=State.SUCCEEDED)
    assert pruned() == 1


@ONE
def test_a_version_stays_while_an_older_event_is_in_the_outbox(copy: Handler) -> None:
    handled()
    at = datetime.now(UTC) - OLD
    message = published("shop.order.updated", event_id="4", service="billing", at=at)
    [held] = outbox_rows.insert([message], alias="archive", service="billing")
    rows = OutboxEvent.objects.using("archive").filter(pk=held.id)
    rows.update(created_at=datetime.now(UTC) - OLD)
    assert pruned() == 0
    # One that is on its way is newer than the version.
    rows.update(created_at=datetime.now(UTC))
    assert pruned() == 1


@ONE
def test_a_database_whose_clock_is_ahead_is_pruned(
    copy: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled()
    real = tables.clock
    monkeypatch.setattr(tables, "clock", lambda: real() + timedelta(minutes=1))
    done = retention.prune({"inbox": INBOX_MIN}, service="billing")
    assert done.counts["inbox"] == 1
