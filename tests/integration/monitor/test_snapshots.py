"""Snapshots and alerts with a live or unreachable broker and database."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

from django_amqp_events import signals
from django_amqp_events.broker.provisioning import inspection
from django_amqp_events.exceptions import BrokerUnavailableError
from django_amqp_events.models import Alert, Snapshot
from django_amqp_events.monitor import alerts, queue_status, snapshots
from django_amqp_events.monitor.snapshots import SnapshotLoop
from django_amqp_events.reasons import Reason
from tests.conftest import ONE
from tests.doubles.receivers import connected

from ..archiving import archived, mirror_all, mirror_until_empty, publish, received
from ..conftest import wait_until
from ..wire import in_threads

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
QUEUE = "billing.send_invoice"
pytestmark = pytest.mark.usefixtures("archive_database")


def watcher(made: Any, **options: Any) -> SnapshotLoop:
    return SnapshotLoop(made.app, made.settings, made.topology, **options)


def unacked(made: Any, queue: str) -> int | None:
    """Return the management API's number of unacknowledged messages."""
    api = inspection.management(made.app, made.settings)
    found = queue_status.status(made.app, made.settings, made.topology, api=api)
    return next(each.unacked for each in found.queues if each.name == queue)


@pytest.fixture
def told() -> Any:
    """The signals that were sent."""
    said: list[tuple[str, str, str]] = []

    def raised(sender: str, *, kind: str, key: str, **_: Any) -> None:
        said.append(("raised", kind, key))

    def ended(sender: str, *, kind: str, key: str, **_: Any) -> None:
        said.append(("ended", kind, key))

    with connected(raised, signals.alert_raised), connected(ended, signals.alert_ended):
        yield said


@ONE
@pytest.mark.parametrize("exact", [True, False])
def test_snapshot_contains_queues_and_open_events(billing, exact, monkeypatch):
    if not exact:
        monkeypatch.setitem(billing.raw, "MANAGEMENT_URL", "")
        object.__setattr__(billing.settings, "management_url", "")
    publish(billing, archived(received("1")))
    mirror_all(billing)
    for _ in range(2):
        billing.publish("events", "shop.order.created")
    channel = billing.consume(QUEUE, prefetch=1)
    wait_until(lambda: billing.ready(QUEUE) == 1, "one is in hand")
    if exact:
        wait_until(
            lambda: unacked(billing, QUEUE) == 1, "the API, which is seconds behind, knows too"
        )
    now = datetime.now(UTC)
    taken = watcher(billing).look(now)
    assert taken is not None
    assert taken.seen
    assert taken.open == 1
    about = Snapshot.objects.get().about
    assert set(about["queues"]) == {queue.name for queue in billing.topology.queues}
    found = about["queues"][QUEUE]
    assert (found["ready"], found["consumers"], found["severity"]) == (1, 1, "ok")
    assert found.get("unacked") == (1 if exact else None)
    assert about["broker"]["error"] == ""
    assert about["broker"].get("alarms") == ([] if exact else None)
    assert about["archive"]["new_hour"] == 1
    assert about["mirror"] == {"empty_at": now.isoformat(), "waiting": 0, "lag": 0.0}
    channel.close()
    later = now + timedelta(minutes=1)
    wait_until(lambda: billing.ready(QUEUE) == 2, "both are back")
    if exact:
        wait_until(lambda: unacked(billing, QUEUE) == 0, "the API knows it")
    watcher(billing).look(later)
    about = Snapshot.objects.latest("at").about
    assert about["queues"][QUEUE]["severity"] == "error"
    assert "start a worker" in str(Reason.from_json(about["queues"][QUEUE]["meaning"]))


@ONE
def test_snapshot_without_management_api_uses_amqp(billing):
    object.__setattr__(billing.settings, "management_url", "http://guest:secret@127.0.0.1:1")
    taken = watcher(billing).take(NOW, {})
    assert taken.seen
    assert taken.about["queues"][QUEUE]["ready"] == 0
    assert "does not answer" in taken.about["broker"]["api_error"]
    assert "secret" not in taken.document


def test_the_mirror_lags_since_its_queue_was_empty(billing):
    watch = watcher(billing)
    watch.look(NOW)
    publish(billing, archived())
    billing.wait_for_ready("billing:archive", 1)
    later = NOW + timedelta(minutes=2)
    watch.look(later)
    assert Snapshot.objects.latest("at").about["mirror"]["lag"] == 120
    publish(billing, archived(received("2"), at=NOW + timedelta(minutes=3)))
    # A mirror that is at work leaves messages that are younger than what it has brought.
    mirror_all(billing)
    publish(billing, archived())
    billing.wait_for_ready("billing:archive", 1)
    watch.look(NOW + timedelta(minutes=4))
    assert Snapshot.objects.latest("at").about["mirror"]["lag"] == 60


def test_rabbitmq_is_unreachable_only_while_mirrors_ask(billing, monkeypatch):
    watch = watcher(billing)
    watch.look(NOW)
    monkeypatch.setattr(queue_status, "status", Mock(side_effect=BrokerUnavailableError("no")))
    for seconds, away in ((40, 40), (80, 80), (30_000, 0), (30_040, 40)):
        watch.look(NOW + timedelta(seconds=seconds))
        assert Snapshot.objects.latest("at").about["broker"]["away"] == away


def test_of_two_mirrors_one_takes_it(billing):
    assert watcher(billing).look(NOW) is not None
    assert watcher(billing).look(NOW + timedelta(seconds=10)) is None
    assert watcher(billing).look(NOW + timedelta(seconds=30)) is not None
    assert Snapshot.objects.count() == 2


def test_a_snapshot_from_a_clock_that_was_ahead_hides_no_later_one(billing):
    """Such as that of a database before a failover."""
    ahead = watcher(billing).look(NOW + timedelta(hours=2))
    later = watcher(billing).look(NOW)
    assert snapshots.rows("billing").first() == later
    assert None not in (ahead, later)


def test_concurrent_processes_alert_once(billing, told):
    barrier = threading.Barrier(8)
    news: list[bool] = []

    def run(troubled: bool, _: int) -> None:
        barrier.wait()
        news.append(alerts.update_alert("abyss", "q", "poison", now=NOW, troubled=troubled))

    for troubled in (True, False):
        assert not in_threads(8, partial(run, troubled))
        assert news.count(True) == 1
        assert len(news) == 8
        news.clear()
    assert told == [("raised", "abyss", "q"), ("ended", "abyss", "q")]
    assert Alert.objects.count() == 1


@ONE
def test_events_mirror_takes_them_in_a_thread(billing, processes):
    mirror = processes.start("events_mirror")
    publish(billing, archived())
    wait_until(Snapshot.objects.exists, "one is taken", 60)
    assert mirror.stop() == 0
    assert Snapshot.objects.get().seen
    Snapshot.objects.all().delete()
    mirror_until_empty(processes)
    assert not Snapshot.objects.exists()
