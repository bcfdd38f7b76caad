"""Extended statistics on PostgreSQL (migration 0002)."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from django.core.management import call_command
from django.db import connections

from django_amqp_events.models import ArchivedEvent
from tests.archive_rows import build
from tests.conftest import Database

pytestmark = pytest.mark.parametrize("archive_database", ["postgresql"], indirect=True)

ROWS = 1_000


def expected(database: Database) -> int:
    """Return how many rows PostgreSQL expects of a handler and an event that it is not for."""
    with connections[database.alias].cursor() as cursor:
        cursor.execute("ANALYZE django_amqp_events_archivedevent")
    found = ArchivedEvent.objects.using(database.alias).filter(handler="book", name="shop.paid")
    (plan,) = json.loads(found.explain(format="json"))
    rows: int = plan["Plan"]["Plan Rows"]
    return rows


def migrate(database: Database, name: str) -> None:
    call_command("migrate", "django_amqp_events", name, database=database.alias, verbosity=0)


def test_filters_that_exclude_each_other_are_expected_to(archive_database: Database) -> None:
    now = datetime.now(UTC)
    pairs = (("book", "shop.created"), ("send_invoice", "shop.paid"))
    ArchivedEvent.objects.using(archive_database.alias).bulk_create(
        build(
            number,
            at=now - timedelta(seconds=number),
            handler=handler,
            name=name,
            exception=f"Error{number % 5}",
        )
        for number in range(ROWS // 2)
        for handler, name in pairs
    )
    assert expected(archive_database) < ROWS / 100
    migrate(archive_database, "0001")
    assert expected(archive_database) > ROWS / 10, "without them a quarter of all rows"
    migrate(archive_database, "0002")
    assert expected(archive_database) < ROWS / 100
