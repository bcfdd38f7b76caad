"""Versions of ``newest``: which archived events they supersede, and when they are pruned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from weakref import WeakSet

import pytest
from django.db import DatabaseError, InterfaceError, connections
from django.test.utils import CaptureQueriesContext

from django_amqp_events.archive import eligibility, inbox_retention, retention, risks, tables
from django_amqp_events.conf import INBOX_MIN
from django_amqp_events.declare.newest import Version
from django_amqp_events.declare.registry import Handler, get_registry
from django_amqp_events.models import ArchivedEvent, LatestVersion, OutboxEvent, State
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
    both = handling("shop.order.#")
    newest = {**both, "NEWEST": ["order", "version"], "USING": "archive", "QUEUE": "copy"}
    with override_events(
        SERVICE="billing", AUTODISCOVER=[], DATABASE="archive", RENAMED_HANDLERS={"write": "copy"},
        HANDLERS={"copy": newest, "plain": both},
    ):  # fmt: skip
        yield get_registry().handlers["copy"]


def handled(order: int, version: int, age: timedelta = timedelta()) -> None:
    handler = get_registry().handlers["copy"]
    LatestVersion.objects.using("archive").create(
        id=inbox.latest_key("billing", handler, Version(str(order), version, is_time=False)),
        service="billing", handler="copy", thing=str(order), version=version, is_time=False,
        event_id="x", handled_at=datetime.now(UTC) - age,
    )  # fmt: skip


def archived(payload: object, number: int) -> ArchivedEvent:
    return make(number, handler="copy", body=json.dumps([[], payload, {}]).encode())


@ONE
def test_what_would_be_skipped_is_counted(copy: Handler) -> None:
    handled(1, 5)
    payloads = [
        {"order": 1, "version": 4},  # older
        {"order": 1, "version": 5},  # as new
        {"order": 1, "version": 6},
        {"order": 2, "version": 1},
        {"order": 1, "version": "2026-01-01"},  # of another type: it is archived again
        {"order": 1},
        {},
    ]
    rows = [archived(payload, number) for number, payload in enumerate(payloads)]
    wanted = [True, True, False, False, False, False, False]
    found = [risks.is_superseded(row.name, row.payload or {}, copy) for row in rows]
    assert found == wanted
    with CaptureQueriesContext(connections["archive"]) as captured:
        assert risks.count_superseded({row.pk: copy for row in rows}) == 2
    assert [q["sql"] for q in captured if LatestVersion._meta.db_table in q["sql"]][1:] == []
    plain = get_registry().handlers["plain"]
    assert risks.count_superseded({row.pk: plain for row in rows}) == 0


@ONE
@pytest.mark.parametrize("error", [DatabaseError, InterfaceError])
def test_an_unreachable_database_is_told(
    copy: Handler, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*_: object) -> bool:
        raise error

    row = archived({"order": 1, "version": 4}, 1)
    with monkeypatch.context() as patched:
        patched.setattr("django.db.models.query.QuerySet.in_bulk", fail)
        assert risks.count_superseded({row.pk: copy}) is None


@ONE
def test_large_payloads_are_not_read_together(
    copy: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page read 200 bodies at once, and kept what they decode to."""
    rows = [archived({"order": 1, "version": 4, "x": "x" * 10_000}, each) for each in range(20)]
    alive: WeakSet[ArchivedEvent] = WeakSet()
    most: list[int] = []

    def payload(event: ArchivedEvent) -> dict[str, int]:
        alive.add(event)
        most.append(len(alive))
        return {}

    monkeypatch.setattr(tables, "CHUNK_BYTES", 30_000)
    monkeypatch.setattr(ArchivedEvent, "payload", property(payload))
    assert risks.count_superseded({row.pk: copy for row in rows}) == 0
    assert len(most) == 20
    assert max(most) <= 3
    monkeypatch.setattr(risks, "BYTES", 50_000)
    assert risks.count_superseded({row.pk: copy for row in rows}) is None
    assert len(most) < 30


# -- pruning ---------------------------------------------------------------------------------------


def pruned() -> int:
    before = datetime.now(UTC) - BEFORE
    due = inbox_retention.due(before=before, service="billing")
    assert sum(inbox_retention.prune(before=before, service="billing")) == due
    return due


@ONE
@pytest.mark.parametrize("name", ["copy", "write", ""], ids=["own", "renamed", "none"])
def test_a_version_stays_while_an_older_event_may_be_replayed(copy: Handler, name: str) -> None:
    handled(1, 5, OLD)
    body = json.dumps([[], {"order": 1, "version": 4}, {}]).encode()
    more: dict[str, Any] = {"name": "shop.order.updated", "queue": copy.queue, "body": body}
    row = make(1, handler=name, **more)
    assert eligibility.target(row) == copy
    assert pruned() == 0
    tables.rows().filter(pk=row.pk).update(state=State.SUCCEEDED)
    assert pruned() == 1


@ONE
def test_a_version_stays_while_an_older_event_is_in_the_outbox(copy: Handler) -> None:
    handled(1, 5, OLD)
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
    handled(1, 5, OLD)
    real = tables.clock
    monkeypatch.setattr(tables, "clock", lambda: real() + timedelta(minutes=1))
    done = retention.prune({"inbox": INBOX_MIN}, service="billing")
    assert done.counts["inbox"] == 1
