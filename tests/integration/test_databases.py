"""What databases do differently, and the app does not: each test runs on each of them."""

from __future__ import annotations

import io
from contextlib import closing
from datetime import UTC, datetime
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest
from django.contrib import admin
from django.core.checks import Tags
from django.core.management import call_command
from django.db import DatabaseError, OperationalError, connections, transaction
from django.test.utils import CaptureQueriesContext

from django_amqp_events import databases
from django_amqp_events.apps import CHECKS
from django_amqp_events.archive import replay, row_writer, selection, states
from django_amqp_events.archive.eligibility import Examined
from django_amqp_events.archive.selection import Selection
from django_amqp_events.databases import delete_by_id, error_kind, is_passing
from django_amqp_events.message.types import Message, derived_id
from django_amqp_events.models import (
    ArchivedEvent,
    ArchivedFailure,
    FailureGroup,
    InboxEntry,
    OutboxEvent,
)
from django_amqp_events.monitor import alerts
from django_amqp_events.service_loop import ServiceLoop
from tests.archive_rows import make
from tests.conftest import POSTGRESQL, ROW_LOCKS, Database

from .archiving import archived, received, taken
from .archiving import store as store_all
from .conftest import SHORT_LOCKS

MEBIBYTE = 1024 * 1024

pytestmark = pytest.mark.usefixtures("archive_database")


@pytest.fixture(autouse=True)
def _billing(settings: Any) -> None:
    settings.AMQP_EVENTS = {"SERVICE": "billing", "AUTODISCOVER": []}


def store(*messages: Message) -> row_writer.Counts:
    return store_all([taken(each) for each in messages])


def test_migrate_prints_no_warning(archive_database: Database) -> None:
    said = io.StringIO()
    # What `migrate` checks, without the tests' settings for the admin.
    tags = [Tags.models, Tags.database, CHECKS]
    call_command("check", databases=[archive_database.alias], tags=tags, stdout=said, stderr=said)
    assert "no issues" in said.getvalue()


def test_derived_ids_are_valid(archive_database: Database) -> None:
    """MariaDB refuses some UUIDs of every version but 7; a thousand would show it.

    Of version 8, those whose byte 8 is 0x80.
    """
    ids = [derived_id("a test", number) for number in range(1000)]
    now = datetime.now(UTC)
    InboxEntry.objects.bulk_create(InboxEntry(id=each, handled_at=now) for each in ids)
    # Locks are taken in the order of the ids, whoever sorts them.
    found = list(InboxEntry.objects.order_by("pk").values_list("pk", flat=True))
    assert found == sorted(ids)
    assert {each.version for each in ids} == {8}
    assert 0x80 not in {each.bytes[8] for each in ids}


@POSTGRESQL
def test_large_columns_are_stored_fast(archive_database: Database) -> None:
    """Not escaped one by one by psycopg."""
    connection = connections[archive_database.alias]
    with CaptureQueriesContext(connection) as captured:
        store(*(archived(received(f"order-{n}", headers={"q": '"'})) for n in range(2)))
    table = ArchivedFailure._meta.db_table
    [insert] = [q["sql"] for q in captured if q["sql"].startswith(f'INSERT INTO "{table}"')]
    assert "UNNEST" not in insert


@ROW_LOCKS
def test_a_service_reaches_a_database_again_that_only_its_receivers_use(
    archive_database: Database,
) -> None:
    connections[archive_database.alias].ensure_connection()
    assert archive_database.server is not None
    with archive_database.server.refusing(archive_database.settings["NAME"]):
        pass
    with pytest.raises(DatabaseError):  # a signal logs it, so the loop does not see it
        OutboxEvent.objects.count()
    told: list[str] = []
    loop = ServiceLoop(work="relaying", tell=told.append, stop=lambda: bool(told))
    loop.run(lambda: told.append(str(OutboxEvent.objects.count())))
    assert told == ["0"]


def test_texts_that_differ_in_case_or_blanks_and_begin_alike() -> None:
    ids = ["order", "order ", "order\t1", "order\n1", "order\x1f", "order 1", "order1"]
    ids += ["Order", "Order1", "ördér1", "order😀"]
    for number, each in enumerate(ids):
        make(number, event_id=each)
    for each in ids:
        assert [row.event_id for row in Selection(ids=[each]).queryset()] == [each]
        starts = ArchivedEvent.objects.filter(selection.starts_with("event_id", each))
        wanted = {other for other in ids if other.startswith(each)}
        assert set(starts.values_list("event_id", flat=True)) == wanted


def test_groups_are_searched_in_any_case() -> None:
    store(archived(received("order-1")))
    pages: Any = admin.site._registry[FailureGroup]
    for term, found in (("TAXERROR", 1), ("billing.Errors", 1), ("nothing", 0)):
        matching = pages.column_matches("exception", term, "archive")
        assert FailureGroup.objects.filter(matching).count() == found, term


def test_alerts_are_told_apart_by_case_and_told_once() -> None:
    now = datetime.now(UTC)
    assert alerts.update_alert("abyss", "Queue", "full", now=now)
    assert alerts.update_alert("abyss", "queue", "full", now=now)
    assert not alerts.update_alert("abyss", "queue", "full", now=now)
    for _ in range(2):
        assert alerts.update_alert("abyss", "queue", now=now, troubled=False)
        assert alerts.update_alert("abyss", "queue", "full", now=now)


def test_a_batch_larger_than_a_packet(
    archive_database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """The mirror reads 32 MiB at once; MariaDB takes 16 MiB in a statement."""
    body = b"[[],{},{}]" + b" " * MEBIBYTE
    messages = [archived(received(f"order-{number}", body=body)) for number in range(24)]
    assert store(*messages).events == 24
    assert "cannot be stored" not in caplog.text
    assert ArchivedEvent.objects.filter(body_size=len(body)).count() == 24


@pytest.mark.parametrize("tries", [1, 3, None])
def test_a_lock_is_waited_for_and_not_called_an_unreachable_database(
    archive_database: Database, monkeypatch: pytest.MonkeyPatch, tries: int | None
) -> None:
    """Another writer ends after so many tries, or never."""
    row = make(1)
    connection = connections[archive_database.alias]
    with connection.cursor() as cursor:
        cursor.execute(SHORT_LOCKS[connection.vendor])
    if tries is None:
        monkeypatch.setattr(databases, "LOCKED_SECONDS", 0.0)
    with closing(connections.create_connection(archive_database.alias)) as other:
        other.set_autocommit(False)
        other.cursor().execute("UPDATE django_amqp_events_archivedevent SET version = version")
        left = tries

        def sleep(_seconds: float) -> None:
            nonlocal left
            assert left is not None
            left -= 1
            if not left:
                other.rollback()

        monkeypatch.setattr("django_amqp_events.databases.time.sleep", sleep)
        now = datetime.now(UTC)
        if tries is not None:
            assert states.discard({row.pk: row.version}, by="ada", reason="", now=now) == [row.pk]
            return
        with pytest.raises(OperationalError) as caught:
            states.discard({row.pk: row.version}, by="ada", reason="", now=now)
        assert error_kind(caught.value) == "locked"
        assert is_passing(caught.value)
        examined = Examined(events={row.pk: row})
        monkeypatch.setattr(replay, "examine", lambda *_, **__: examined)
        monkeypatch.setattr(replay, "_claim", Mock(side_effect=caught.value))
        monkeypatch.setattr(replay, "_require_broker", lambda: None)
        report = replay.replay({row.pk: row.version}, by="ada")
        assert report.stopped is not None
        assert report.stopped.code == "database-locked"
        other.rollback()


@pytest.mark.parametrize("change", ["RENAME TO other", "RENAME COLUMN attempts TO other"])
def test_a_missing_table_or_column_is_not_taken_for_another_error(
    archive_database: Database, change: str
) -> None:
    alias = archive_database.alias
    with connections[alias].cursor() as cursor:
        cursor.execute(f"ALTER TABLE django_amqp_events_outboxevent {change}")
    assert _kind("SELECT attempts FROM django_amqp_events_outboxevent", alias) == "missing"


def _kind(sql: str, alias: str) -> str:
    """Return what the error of a statement is called in the transaction that it has broken."""
    with transaction.atomic(using=alias):
        with pytest.raises(DatabaseError) as caught:
            connections[alias].cursor().execute(sql)
        transaction.set_rollback(True, using=alias)
        return error_kind(caught.value)


@ROW_LOCKS
def test_a_deletion_does_not_wait_for_rows_that_others_insert(archive_database: Database) -> None:
    """The direct publisher deletes rows while a long transaction has inserted others."""
    now = datetime.now(UTC)
    ids = [uuid4() for _ in range(4)]
    InboxEntry.objects.bulk_create(InboxEntry(id=each, handled_at=now) for each in ids)
    connection = connections[archive_database.alias]
    with connection.cursor() as cursor:
        cursor.execute(SHORT_LOCKS[connection.vendor])
    with closing(connections.create_connection(archive_database.alias)) as other:
        other.set_autocommit(False)
        cursor = other.cursor()
        cursor.execute(
            "INSERT INTO django_amqp_events_inboxentry "
            "SELECT %s, service, handler, source, event_id, name, handled_at, superseded "
            "FROM django_amqp_events_inboxentry WHERE id = %s",
            [uuid4(), ids[0]],
        )
        assert delete_by_id(InboxEntry, archive_database.alias, ids) == 4
        other.rollback()
