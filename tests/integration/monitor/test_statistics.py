"""Extended statistics on PostgreSQL of the first migration."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

from django.db import connections, transaction

from django_amqp_events.models import ArchivedEvent
from tests.archive_rows import build
from tests.conftest import POSTGRESQL, Database

pytestmark = POSTGRESQL

ROWS = 1_000


def expected(database: Database) -> int:
    """Return how many rows PostgreSQL expects of a handler and an event that it is not for."""
    with connections[database.alias].cursor() as cursor:
        cursor.execute("ANALYZE django_amqp_events_archivedevent")
    found = ArchivedEvent.objects.using(database.alias).filter(handler="book", name="shop.paid")
    (plan,) = json.loads(found.explain(format="json"))
    rows: int = plan["Plan"]["Plan Rows"]
    return rows


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
    with transaction.atomic(using=archive_database.alias):
        with connections[archive_database.alias].cursor() as cursor:
            cursor.execute("DROP STATISTICS amqp_events_handler_name")
        assert expected(archive_database) > ROWS / 10, "without them a quarter of all rows"
        transaction.set_rollback(True, using=archive_database.alias)
