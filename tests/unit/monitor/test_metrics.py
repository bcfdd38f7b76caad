"""What is served if something is missing; the acceptance suite has the metrics."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from celery import signals as celery_signals
from django.db import OperationalError
from prometheus_client import REGISTRY

from django_amqp_events import signals
from django_amqp_events.models import Snapshot
from django_amqp_events.monitor import METRICS_FOLDER, metrics, snapshots
from django_amqp_events.publish.publisher import Options, publish_event
from django_amqp_events.testing import memory_events, override_events
from tests.commands import run_python
from tests.doubles.receivers import connected


def test_without_a_database_the_counters_remain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def down(_: str) -> None:
        raise OperationalError("the database is down")

    monkeypatch.setattr(metrics, "close_old_connections", bool)
    monkeypatch.setattr(snapshots, "rows", down)
    assert list(metrics.SnapshotCollector("billing").collect()) == []
    assert "the database is down" in caplog.text


def test_a_snapshot_of_another_version_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    newest = Snapshot(at=datetime.now(UTC), document='{"version": 2}')
    monkeypatch.setattr(metrics, "close_old_connections", bool)
    monkeypatch.setattr(snapshots, "rows", lambda _: SimpleNamespace(first=lambda: newest))
    monkeypatch.setattr(snapshots, "clock", lambda: newest.at)
    assert list(metrics.SnapshotCollector("billing").collect()) == []


COUNTING = """
import os, sys
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
import django
django.setup()
from billiard.pool import Pool
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from django_amqp_events.monitor import METRICS_FOLDER, metrics

def count(number):
    metrics.HANDLED.labels("a.b", "billing.h").inc()
    metrics.SECONDS.labels("billing.h").observe(0.01)
    return os.getpid()

if __name__ == "__main__":
    metrics.PUBLISHED.labels("a.b").inc()
    pool = Pool(2, maxtasksperchild=1)
    pids = {pool.apply(count, (number,)) for number in range(12)}
    pool.close()
    pool.join()
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    names = os.listdir(os.environ["PROMETHEUS_MULTIPROC_DIR"])
    print(len(pids), sum(name.endswith(".db") for name in names))
    print(generate_latest(registry).decode())
"""


def test_a_pool_process_continues_the_files_of_the_one_before(tmp_path: Path) -> None:
    """With worker_max_tasks_per_child, each process left two files until the worker ended."""
    ended = run_python(COUNTING, **{METRICS_FOLDER: str(tmp_path)})
    processes, files = map(int, ended.stdout.splitlines()[0].split())
    assert processes == 12
    assert files <= 2 * 5, "of the processes that run at the same time"
    assert 'amqp_events_handled_total{event="a.b",handler="billing.h"} 12.0' in ended.stdout
    assert 'amqp_events_handler_seconds_count{handler="billing.h"} 12.0' in ended.stdout
    assert 'amqp_events_published_total{event="a.b"} 1.0' in ended.stdout


FORKED = """
import os
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

mine = Counter("shop_visits", "Made before ours.")
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
import django
django.setup()
from django_amqp_events.monitor import METRICS_FOLDER, metrics

metrics.PUBLISHED.labels("a").inc()
if not os.fork():  # as gunicorn --preload does
    for name in ("b", "c", "a long name"):
        metrics.PUBLISHED.labels(name).inc()
        mine.inc()
    os._exit(0)
os.wait()
registry = CollectorRegistry()
MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_metrics_of_a_project_keep_their_files(tmp_path: Path) -> None:
    """Two classes of values wrote one file, which could not be read then."""
    ended = run_python(FORKED, **{METRICS_FOLDER: str(tmp_path)})
    assert "shop_visits_total 3.0" in ended.stdout
    assert 'amqp_events_published_total{event="a long name"} 1.0' in ended.stdout


def pay(order: int, version: int) -> None: ...


def counted() -> list[float]:
    of_event = {"event": "shop.paid", "handler": "pay"}
    return [
        REGISTRY.get_sample_value(f"amqp_events_{name}", labels) or 0.0
        for name, labels in (
            ("handled_total", of_event),
            ("superseded_total", of_event),
            ("handler_seconds_count", {"handler": "pay"}),
            ("start_lag_seconds_count", {"handler": "pay"}),
        )
    ]


@pytest.mark.django_db(transaction=True)
def test_an_event_that_is_skipped_is_no_run() -> None:
    handler = {
        "EVENTS": ["shop.paid"],
        "HANDLER": f"{__name__}.pay",
        "NEWEST": ["order", "version"],
    }
    before = counted()
    base = {"SERVICE": "billing", "BACKEND": "memory", "PUBLISH": "immediate"}
    with (
        override_events(**base, HANDLERS={"pay": handler}, HISTORY={"MAX_AGE": "1d"}),
        memory_events() as broker,
        connected(metrics._skipped, signals.event_skipped),
        connected(metrics._started, celery_signals.task_prerun),
        connected(metrics._ended, celery_signals.task_postrun),
    ):
        for event_id, version in (("b", 2), ("a", 1), ("b", 2)):
            options = Options(event_id=event_id)
            publish_event("shop.paid", {"order": 7, "version": version}, options=options)
        broker.run()
        assert [now - then for now, then in zip(counted(), before, strict=True)] == [1, 1, 1, 3]
        broker.backfill("pay", again=True)
        broker.run()
        assert counted()[-1] - before[-1] == 3, "a replay is not late"


STARTED = """
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
import django
django.setup()
from django_amqp_events.monitor import METRICS_FOLDER, metrics

metrics.PUBLISHED.labels("a.b").inc()
metrics.SECONDS.labels("billing.h").observe(0.01)
if not os.fork():
    metrics.PUBLISHED.labels("a.b").inc()
    os.kill(os.getpid(), 9)
os.wait()
metrics.PUBLISHED.labels("a.b").inc()
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
registry = CollectorRegistry()
MultiProcessCollector(registry)
print(generate_latest(registry).decode(), flush=True)
os._exit(0)
"""


def test_a_process_continues_the_files_of_one_that_was_killed(tmp_path: Path) -> None:
    """Such as each reaper, which a companion starts again and again."""
    for start in range(1, 4):
        ended = run_python(STARTED, **{METRICS_FOLDER: str(tmp_path)})
        assert f'amqp_events_published_total{{event="a.b"}} {3 * start}.0' in ended.stdout
        assert len(list(tmp_path.glob("*.db"))) == 2 * 2
