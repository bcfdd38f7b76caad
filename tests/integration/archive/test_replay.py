"""Replays on real brokers and databases."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

import pytest

from django_amqp_events.archive import replay
from django_amqp_events.archive.replay import Report
from django_amqp_events.models import (
    ArchiveAction,
    ArchivedEvent,
    Replay,
    State,
)
from tests.archive_rows import seen
from tests.conftest import KINDS, Database, on

from ..archiving import (
    archived,
    mirror_all,
    publish,
    received,
)
from ..conftest import Service
from ..wire import (
    in_threads,
)

pytestmark = pytest.mark.usefixtures("archive_database")

QUEUE = "billing.send_invoice"


#: On each kind of database, with time zones, and through a pool.
EACH = on(*KINDS, "pgbouncer")


def archive(billing: Service, number: int = 1) -> list[ArchivedEvent]:
    publish(billing, *[archived(received(f"order-{n}")) for n in range(number)])
    assert mirror_all(billing).events == number
    return list(ArchivedEvent.objects.order_by("event_id"))


def run(*rows: ArchivedEvent, **options: Any) -> Report:
    return replay.replay(seen(*rows), by=options.pop("by", "ada"), **options)


def replay_ids(billing: Service) -> list[str]:
    """Take what the handler's queue has."""
    return [message.headers["event-replay-id"] for message in billing.take_all(QUEUE)]


@EACH
def test_overlapping_bulks_publish_each_event_once(
    billing: Service, archive_database: Database
) -> None:
    """Many bulks of random parts of a hundred events, in random order; none waits for another.

    SQLite has one writer at a time, and gives up one that finds its turn too late.
    """
    rows = archive(billing, 100)
    number = 10 if archive_database.kind == "sqlite" else 50
    together = threading.Barrier(number)
    reports: list[Report] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        mine = rng.sample(rows, rng.randint(50, 100))
        together.wait(30)
        reports.append(run(*mine))

    assert in_threads(number, work) == []
    billing.wait_for_ready(QUEUE, 100)
    taken = Counter(pk for report in reports for pk in report.published)
    assert taken == {row.pk: 1 for row in rows}
    assert not [report.stopped for report in reports if report.stopped]
    assert not [each for report in reports for each in report.returned]
    ids = replay_ids(billing)
    assert len(set(ids)) == len(ids) == Replay.objects.count() == ArchiveAction.objects.count()
    assert {row.state for row in ArchivedEvent.objects.all()} == {State.REPLAYING}
