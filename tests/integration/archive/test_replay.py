"""Replays on real brokers and databases: claims and lost confirms."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.test import override_settings

from django_amqp_events.archive import replay, tables
from django_amqp_events.archive.replay import Report
from django_amqp_events.models import (
    ArchiveAction,
    ArchivedEvent,
    Replay,
    State,
)
from tests.archive_rows import seen
from tests.conftest import KINDS, ROW_LOCKS, Database, on

from ..archiving import (
    archived,
    mirror_all,
    publish,
    received,
)
from ..conftest import Service
from ..wire import (
    close_pools,
    in_threads,
)

pytestmark = pytest.mark.usefixtures("archive_database")

QUEUE = "billing.send_invoice"


@contextmanager
def through(billing: Service, url: str, **keys: Any) -> Iterator[None]:
    """Publish over another URL, and with further settings, for a block."""
    before = billing.app.conf.broker_url
    close_pools()
    billing.app.conf.broker_url = url
    try:
        with override_settings(AMQP_EVENTS={**billing.raw, **keys}):
            yield
    finally:
        close_pools()
        billing.app.conf.broker_url = before


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


# -- who gets it --------------------------------------------------------------------------


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


# -- what is left queued ------------------------------------------------------------------


@ROW_LOCKS
def test_clocks_of_hosts_do_not_matter(
    billing: Service, archive_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a host waits for its confirm, another one sweeps; no host's own clock is asked."""
    (row,) = archive(billing, 1)
    confirmed = replay._confirmed
    monkeypatch.setattr(tables, "datetime", None)
    swept: list[int] = []

    def meanwhile(*args: Any) -> Any:
        monkeypatch.setattr(replay, "_confirmed", confirmed)
        swept.append(replay.resume())
        return confirmed(*args)

    monkeypatch.setattr(replay, "_confirmed", meanwhile)
    assert len(run(row).published) == 1
    assert swept == [0]
    billing.wait_for_ready(QUEUE, 1)
    assert len(replay_ids(billing)) == 1


# -- around it ----------------------------------------------------------------------------
