"""Replays on real brokers and databases: claims and lost confirms."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import connections
from django.test import override_settings

from broker import Node
from django_amqp_events.archive import replay, states, tables
from django_amqp_events.archive.replay import Report
from django_amqp_events.models import (
    ArchiveAction,
    ArchivedEvent,
    Replay,
    State,
)
from tests.archive_rows import again, seen
from tests.conftest import KINDS, SERVERS, Database, Vhost

from ..archiving import (
    archived,
    mirror_all,
    outcome,
    publish,
    received,
)
from ..conftest import Service, wait_until
from ..wire import (
    ACK,
    NACK,
    Proxy,
    close_pools,
    in_threads,
)

pytestmark = pytest.mark.usefixtures("archive_database")

QUEUE = "billing.send_invoice"
HANDLERS = {"send_invoice": ["shop.order.created"]}


def kind(*names: str) -> Any:
    return pytest.mark.parametrize("archive_database", names, indirect=True)


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
EACH = kind(*KINDS, "pgbouncer")
ONE = kind("sqlite")


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


@kind(*SERVERS)
def test_repeatable_read(billing: Service, archive_database: Database) -> None:
    """PostgreSQL aborts the second transaction, which retries and is refused."""
    level = "TRANSACTION ISOLATION LEVEL REPEATABLE READ"
    if archive_database.kind == "postgresql":
        level = f"CHARACTERISTICS AS {level}"
    rows = archive(billing, 5)
    together = threading.Barrier(20)
    reports: list[Report] = []

    def work(number: int) -> None:
        with connections[archive_database.alias].cursor() as cursor:
            cursor.execute(f"SET SESSION {level}")
        together.wait(30)
        reports.append(run(*rows))

    assert in_threads(20, work) == []
    billing.wait_for_ready(QUEUE, 5)
    assert not [report.stopped for report in reports if report.stopped]
    assert sum(len(report.published) for report in reports) == 5
    assert sum(len(report.skipped) for report in reports) == 95


# -- what is left queued ------------------------------------------------------------------


def leave_queued(*rows: ArchivedEvent, hours: int = 1) -> dict[UUID, str]:
    """Claim as a process did, some time ago, that died before it published."""
    claimed = states.claim(
        seen(*rows),
        handlers={row.pk: "send_invoice" for row in rows},
        by="ada",
        reason="",
        now=tables.clock() - timedelta(hours=hours),
    )
    assert len(claimed) == len(rows)
    return {each.event.pk: str(each.replay.pk) for each in claimed}


@EACH
def test_concurrent_sweepers_publish_each_event_once(
    billing: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In small chunks, so that they collide."""
    monkeypatch.setattr(replay, "CHUNK", 5)
    rows = archive(billing, 60)
    left = leave_queued(*rows)
    together = threading.Barrier(4)
    counts: list[int] = []

    def work(number: int) -> None:
        together.wait(30)
        counts.append(replay.resume())

    assert in_threads(4, work) == []
    assert sum(counts) == 60
    billing.wait_for_ready(QUEUE, 60)
    assert sorted(replay_ids(billing)) == sorted(left.values())
    assert {row.state for row in ArchivedEvent.objects.all()} == {State.REPLAYING}


def test_active_claim_is_respected(billing: Service) -> None:
    leave_queued(*archive(billing, 3), hours=0)
    assert replay.resume() == 0
    assert billing.ready(QUEUE) == 0
    assert replay.resume(lease=0) == 3


@kind(*SERVERS)
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


# -- not published ------------------------------------------------------------------------


def comes_back(row: ArchivedEvent, error: str, *, unconfirmed: bool = False) -> None:
    """Replay; it is back in the archive, and says why there and in the report."""
    report = run(row)
    assert [each.id for each in report.returned] == [row.pk]
    assert error in str(report.returned[0].why)
    now = again(row)
    assert (now.state, now.unconfirmed) == (State.ARCHIVED, unconfirmed)
    assert error in str(now.error)
    last = row.replay_set.latest("number")
    assert last.state == ("unconfirmed" if unconfirmed else "returned")
    assert error in str(last.error)


@ONE
def test_the_exchange_is_missing(billing: Service) -> None:
    (row,) = archive(billing)
    billing.channel().exchange_delete("billing:replay")
    comes_back(row, "run `manage.py events_declare`")
    assert replay.replay(seen(again(row)), by="ada").stopped, "the next one would fail like it"
    billing.declare()
    assert run(again(row)).published == [row.pk]


@ONE
def test_nacked(billing: Service) -> None:
    """A policy with a limit, which events_declare refuses, fills the queue."""
    row, *others = archive(billing, 4)
    billing.set_policy(
        "full", "^billing.send_invoice$", {"max-length": 1, "overflow": "reject-publish"}
    )

    def refuses() -> bool:
        # A quorum queue may exceed its limit until its channels are notified.
        return any(run(again(other)).returned for other in others)

    wait_until(refuses, "the queue refuses")
    comes_back(row, "RabbitMQ refused", unconfirmed=True)


@ONE
def test_the_broker_is_in_alarm(service: Callable[..., Service], private_node: Node) -> None:
    """The first publish is not known; it may be stored when the alarm is over."""
    url = private_node.management_url
    assert url
    vhost = Vhost(name="/", url=private_node.amqp_url(), management_url=url, node=private_node)
    billing = service(vhost, HANDLERS=HANDLERS)
    billing.declare()
    (row,) = archive(billing)
    private_node.ctl("set_vm_memory_high_watermark", "absolute", "1")
    try:
        wait_until(private_node.alarm, "an alarm")
        with through(billing, vhost.url, CONFIRM_TIMEOUT=3):
            comes_back(row, "RabbitMQ blocks publishers", unconfirmed=True)
            assert run(again(row)).stopped
            assert again(row).unconfirmed
    finally:
        private_node.ctl("set_vm_memory_high_watermark", "0.8")
        close_pools()
    wait_until(lambda: not private_node.alarm(), "no alarm")
    assert run(again(row)).published == [row.pk]
    assert set(replay_ids(billing)) == {str(Replay.objects.get().pk)}, "one id, however often"
    close_pools()


# -- on its way, perhaps ------------------------------------------------------------------


@pytest.fixture
def unconfirmed(billing: Service) -> ArchivedEvent:
    """An event whose replay is in the handler's queue, and whose confirm did not arrive."""
    (row,) = archive(billing)
    with Proxy.to(billing.vhost.url) as proxy, through(billing, proxy.url, CONFIRM_TIMEOUT=3):
        proxy.hold = {ACK, NACK}
        comes_back(row, "no confirm", unconfirmed=True)
    billing.wait_for_ready(QUEUE, 1)
    return again(row)


@ONE
def test_the_next_replay_of_an_unconfirmed_one_has_its_id(
    billing: Service, unconfirmed: ArchivedEvent
) -> None:
    assert run(unconfirmed).published == [unconfirmed.pk]
    replayed = Replay.objects.get()
    assert replay_ids(billing) == [str(replayed.pk)] * 2
    assert (replayed.publishes, replayed.state, replayed.error) == (2, "published", None)
    assert (again(unconfirmed).replays, again(unconfirmed).unconfirmed) == (1, False)
    publish(billing, outcome(unconfirmed, str(replayed.pk)), outcome(unconfirmed, str(replayed.pk)))
    assert mirror_all(billing).outcomes >= 1
    assert again(unconfirmed).state == State.SUCCEEDED


@ONE
def test_an_unconfirmed_one_is_settled_by_its_outcome(
    billing: Service, unconfirmed: ArchivedEvent
) -> None:
    publish(billing, outcome(unconfirmed, str(Replay.objects.get().pk)))
    mirror_all(billing)
    now = again(unconfirmed)
    assert (now.state, now.unconfirmed, now.error) == (State.SUCCEEDED, False, None)


@ONE
def test_failure_of_an_unconfirmed_replay_is_recorded(
    billing: Service, unconfirmed: ArchivedEvent
) -> None:
    first = Replay.objects.get()
    publish(billing, archived(received("order-0"), attempt=1, replay_id=str(first.pk)))
    mirror_all(billing)
    now = again(unconfirmed)
    assert (now.state, now.unconfirmed, now.error, now.attempts) == (State.ARCHIVED, False, None, 4)
    billing.take_all(QUEUE)
    run(now)
    assert replay_ids(billing) != [str(first.pk)], "that one is over"


@ONE
def test_a_second_try_in_vain_keeps_the_id(billing: Service, unconfirmed: ArchivedEvent) -> None:
    """An unroutable second publish says nothing about the first."""
    channel = billing.channel()
    channel.queue_unbind(QUEUE, "billing:replay", QUEUE)
    comes_back(unconfirmed, "no queue is bound", unconfirmed=True)
    channel.queue_bind(QUEUE, "billing:replay", QUEUE)
    run(again(unconfirmed))
    assert replay_ids(billing) == [str(Replay.objects.get().pk)] * 2


# -- around it ----------------------------------------------------------------------------


@ONE
def test_bodies_of_any_size_in_one_go(billing: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte, a window of a bounded size at a time."""
    monkeypatch.setattr(replay, "CHUNK_BYTES", 1024 * 1024)
    deliveries = [
        received(f"order-{n}", payload={"text": chr(65 + n) * size})
        for n, size in enumerate([10, 400_000, 700_000, 20, 1_000_000, 30])
    ]
    publish(billing, *map(archived, deliveries))
    mirror_all(billing)
    report = run(*ArchivedEvent.objects.all())
    assert len(report.published) == 6
    bodies = []
    for message in billing.take_all(QUEUE):
        bodies.append(message.body if isinstance(message.body, bytes) else message.body.encode())
    assert sorted(bodies) == sorted(delivery.body for delivery in deliveries)
