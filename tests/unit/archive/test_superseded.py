"""Archived events that a newer one has superseded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from weakref import WeakSet

import pytest
from django.db import DatabaseError, InterfaceError, connections
from django.test.utils import CaptureQueriesContext

from django_amqp_events.archive import superseded, tables
from django_amqp_events.declare.newest import Version
from django_amqp_events.declare.registry import Handler, get_registry
from django_amqp_events.models import ArchivedEvent, LatestVersion
from django_amqp_events.testing import override_events
from django_amqp_events.worker import inbox
from tests.archive_rows import make
from tests.conftest import ONE
from tests.services import handling

pytestmark = pytest.mark.usefixtures("archive_database")


@pytest.fixture
def copy() -> Iterator[Handler]:
    both = handling("shop.order.#")
    newest = {**both, "NEWEST": ["order", "version"], "USING": "archive", "QUEUE": "copy"}
    with override_events(
        SERVICE="billing", AUTODISCOVER=[], HANDLERS={"copy": newest, "plain": both}
    ):
        yield get_registry().handlers["copy"]


def handled(order: int, version: int) -> None:
    LatestVersion.objects.using("archive").create(
        id=inbox.latest_key(
            "billing", get_registry().handlers["copy"], Version(str(order), version, is_time=False)
        ),
        service="billing", handler="copy", thing=str(order), version=version, is_time=False,
        event_id="x", handled_at=datetime.now(UTC),
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
    found = [superseded.is_superseded(row.name, row.payload or {}, copy) for row in rows]
    assert found == wanted
    with CaptureQueriesContext(connections["archive"]) as captured:
        assert superseded.count_superseded({row.pk: copy for row in rows}) == 2
    assert [q["sql"] for q in captured if LatestVersion._meta.db_table in q["sql"]][1:] == []
    plain = get_registry().handlers["plain"]
    assert superseded.count_superseded({row.pk: plain for row in rows}) == 0


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
        assert superseded.count_superseded({row.pk: copy}) is None


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
    assert superseded.count_superseded({row.pk: copy for row in rows}) == 0
    assert len(most) == 20
    assert max(most) <= 3
    monkeypatch.setattr(superseded, "BYTES", 50_000)
    assert superseded.count_superseded({row.pk: copy for row in rows}) is None
    assert len(most) < 30
