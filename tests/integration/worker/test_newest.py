"""``newest`` on SQLite, PostgreSQL and MariaDB: stale events do not win."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connections

from django_amqp_events import handler, publish_event, signals
from django_amqp_events.archive import inbox_retention
from django_amqp_events.context import ReceivedEvent
from django_amqp_events.declare.newest import Version
from django_amqp_events.declare.registry import Handler, get_registry
from django_amqp_events.models import InboxEntry, LatestVersion
from django_amqp_events.testing import memory_events, override_events
from django_amqp_events.worker.verdict import InvalidArguments
from tests.conftest import Database
from tests.doubles.receivers import connected

from .handled import once

ALIAS = "archive"
ORDERS, VERSIONS, WORKERS = 4, 12, 3


@pytest.fixture
def books(archive_database: Database) -> Iterator[Handler]:
    with connections[ALIAS].cursor() as cursor:
        cursor.execute("CREATE TABLE orders (id integer primary key, version integer)")
    renamed = {"books.former": "books.write"}
    with override_events(SERVICE="billing", AUTODISCOVER=[], RENAMED_HANDLERS=renamed):

        @handler("shop.order", name="books.write", newest=("order", "version"), using=ALIAS)
        def write(**payload: Any) -> None: ...

        yield get_registry().handlers["books.write"]


def received(event_id: str, **more: Any) -> ReceivedEvent:
    return ReceivedEvent(id=event_id, name="shop.order", service="shop", **more)


def update(order: int, version: int) -> str:
    """Write an order, unless it would become older."""
    with connections[ALIAS].cursor() as cursor:
        cursor.execute("SELECT version FROM orders WHERE id = %s", [order])
        row = cursor.fetchone()
        assert row is None or row[0] < version, "a stale event overwrote a newer one"
        cursor.execute("DELETE FROM orders WHERE id = %s", [order])
        cursor.execute("INSERT INTO orders VALUES (%s, %s)", [order, version])
    return "written"


def handle(books: Handler, order: int, version: int, **more: Any) -> str | None:
    event = received(f"{order}-{version}", **more)
    thing = Version(str(order), version, is_time=False)
    return once(books, event, lambda: update(order, version), thing)


def orders() -> dict[int, int]:
    with connections[ALIAS].cursor() as cursor:
        cursor.execute("SELECT id, version FROM orders")
        return dict(cursor.fetchall())


def test_an_event_that_is_not_newer_is_skipped_and_told(books: Handler) -> None:
    told: list[tuple[str, bool]] = []

    def hear(event: ReceivedEvent, superseded: bool, **_: Any) -> None:
        told.append((event.id, superseded))

    with connected(hear, signals.event_skipped):
        assert handle(books, 1, 5) == "written"
        assert handle(books, 1, 5) is None  # delivered again
        assert handle(books, 1, 3) is None
        assert handle(books, 2, 3) == "written", "another order"
        same = Version("1", 5, is_time=False)
        assert once(books, received("other"), lambda: update(1, 5), same) is None
        assert handle(books, 1, 3) is None  # delivered again
    assert told == [("1-5", False), ("1-3", True), ("other", True), ("1-3", True)]
    superseded = InboxEntry.objects.using(ALIAS).filter(superseded=True)
    assert {row.event_id for row in superseded} == {"1-3", "other"}


def test_the_outcome_of_a_superseded_replay_says_so(archive_database: Database) -> None:
    """The archive must not take it for a run that succeeded."""
    with (
        override_events(HISTORY={"MAX_AGE": "1d"}, PUBLISH="immediate", handlers=[], events=[]),
        memory_events() as broker,
    ):
        publish_event("shop.order", {"order": 1, "version": 1})

        @handler("shop.order", name="books.write", newest=("order", "version"), using=ALIAS)
        def write(**payload: Any) -> None: ...

        publish_event("shop.order", {"order": 1, "version": 2})
        broker.run()
        assert broker.backfill("books.write") == 1
        broker.run()
        assert [outcome.outcome for outcome in broker.outcomes] == ["superseded"]


def test_a_failed_run_does_not_count(books: Handler) -> None:
    def fail() -> None:
        update(1, 9)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        once(books, received("1-9"), fail, Version("1", 9, is_time=False))
    assert not LatestVersion.objects.using(ALIAS).exists()
    assert handle(books, 1, 5) == "written"
    assert orders() == {1: 5}


def test_a_forced_replay_runs_and_keeps_the_newest(books: Handler) -> None:
    handle(books, 1, 5)
    ran: list[str] = []
    forced = received("1-3", replay_id="r", replay_forced=True)
    once(books, forced, lambda: ran.append("1-3"), Version("1", 3, is_time=False))
    assert ran == ["1-3"]
    assert LatestVersion.objects.using(ALIAS).get().version == 5


def test_a_version_of_another_type_is_archived(books: Handler) -> None:
    handle(books, 1, 5)
    later = Version("1", 10**15, is_time=True)
    with pytest.raises(InvalidArguments, match="is a time, and that of an earlier event is an int"):
        once(books, received("x"), lambda: None, later)
    assert LatestVersion.objects.using(ALIAS).get().version == 5


def test_other_paths_have_other_versions(books: Handler) -> None:
    """Customer 1 is not order 1, and a time follows no integer."""
    handle(books, 1, 5)
    customers = replace(books, newest=("customer", "version"))
    customer = Version("1", 3, is_time=False)
    assert once(customers, received("c"), lambda: "ran", customer) == "ran"
    assert once(customers, received("again"), lambda: "ran", customer) is None
    times = replace(books, newest=("order", "time"))
    later = Version("1", 10**15, is_time=True)
    assert once(times, received("t"), lambda: "ran", later) == "ran"


def test_old_versions_are_pruned(books: Handler) -> None:
    handle(books, 1, 5)
    handle(books, 2, 5)
    old = datetime.now(UTC) - timedelta(days=60)
    LatestVersion.objects.using(ALIAS).filter(thing="1").update(handled_at=old)
    before = datetime.now(UTC) - timedelta(days=40)
    assert inbox_retention.due(before=before, service="billing") == 1
    assert sum(inbox_retention.prune(before=before, service="billing")) == 1
    assert LatestVersion.objects.using(ALIAS).get().thing == "2"
