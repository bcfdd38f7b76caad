"""Prometheus metrics: counters and histograms of events, and gauges of the newest snapshot.

With ``METRICS``, each process of a service counts in prometheus_client's default registry. In the
multiprocess mode (``PROMETHEUS_MULTIPROC_DIR``) the processes of a worker share a folder, which
a companion serves. docs/metrics.md lists the metrics.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import lru_cache
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, Final

from celery import current_task
from celery import signals as celery_signals
from django.db import Error, close_old_connections, connections
from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server, values
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.values import MultiProcessValue

from .. import signals
from ..context import ReceivedEvent
from ..databases import error_line
from ..declare.patterns import pattern_matches
from ..declare.registry import get_registry
from ..logs import get_logger
from ..worker.task import HandlerTask, event_of
from . import METRICS_FOLDER, snapshots

logger = get_logger(__name__)

#: States in which Celery's tracer ends a run that the verdict calls handled.
_HANDLED: Final = frozenset({"SUCCESS", "IGNORED"})
_EVENT: Final = ("event", "handler")


def _process() -> str:
    """Return what names this process in the files of the folder.

    prometheus_client keeps the files of each process until the end, so a process continues those of
    one that has ended. No other metrics may be in the same file.
    """
    return _take_place(os.getpid())


@lru_cache(maxsize=1)
def _take_place(pid: int) -> str:
    """Return the first place in the folder that no running process has locked, and lock it."""
    for number in count():
        place = f"events-{number}"
        try:
            # The kernel closes it when the process and those that it has forked are gone.
            lock = os.open(
                Path(os.environ[METRICS_FOLDER]) / f"{place}.lock", os.O_CREAT | os.O_RDWR
            )
        except OSError:
            break  # the folder is missing, which events_companion reports
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
        else:
            return place
    return f"{pid}-events"


#: Not for the metrics of a project: two such classes that write one file destroy it.
_THEIRS: Final[Any] = values.ValueClass
_OURS: Final[Any] = (
    MultiProcessValue(_process)  # type: ignore[no-untyped-call]
    if METRICS_FOLDER in os.environ
    else _THEIRS
)


class _Own:
    """A metric with values of ours."""

    def _metric_init(self) -> None:
        values.ValueClass = _OURS
        try:
            super()._metric_init()  # type: ignore[misc]
        finally:
            values.ValueClass = _THEIRS


class _Counter(_Own, Counter): ...


class _Histogram(_Own, Histogram): ...


PUBLISHED: Final = _Counter(
    "amqp_events_published", "Events that RabbitMQ has confirmed.", ["event"]
)
HANDLED: Final = _Counter("amqp_events_handled", "Runs of handlers that succeeded.", _EVENT)
RETRIED: Final = _Counter("amqp_events_retried", "Failed attempts that are retried.", _EVENT)
ARCHIVED: Final = _Counter(
    "amqp_events_archived", "Events that were archived.", [*_EVENT, "reason"]
)
SUPERSEDED: Final = _Counter(
    "amqp_events_superseded", "Events that were skipped, since a newer one was handled.", _EVENT
)
REPLAYED: Final = _Counter("amqp_events_replayed", "Replays that RabbitMQ has confirmed.", _EVENT)
SECONDS: Final = _Histogram(
    "amqp_events_handler_seconds",
    "Duration of a handler's run.",
    ["handler"],
    buckets=(0.005, 0.02, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900),
)
LAG: Final = _Histogram(
    "amqp_events_start_lag_seconds",
    "Time from when an attempt was due, or the event published, to its start.",
    ["handler"],
    buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 15, 60, 300, 1800, 7200),
)


def connect() -> None:
    """Count what the signals of this package and of Celery report; no other code counts."""
    for signal, receiver in (
        (signals.event_published, _published),
        (signals.event_retried, _retried),
        (signals.event_archived, _archived),
        (signals.event_replayed, _replayed),
        (signals.event_skipped, _skipped),
        (celery_signals.task_prerun, _started),
        (celery_signals.task_postrun, _ended),
    ):
        signal.connect(receiver, dispatch_uid=f"django_amqp_events.{receiver.__name__}")
        if isinstance(signal, signals.Signal):
            signal.quiet = 1


def _event(handler: str, name: str) -> str:
    """Return the label of an event: its name, or the handler's pattern that it matches.

    Publishers choose names, and each label value costs memory in every process and in Prometheus,
    so a name is a label only if the handler names it.
    """
    declared = get_registry().handlers.get(handler)
    patterns = declared.bindings if declared else ()
    if name in patterns:
        return name
    return next((pattern for pattern in patterns if pattern_matches(pattern, name)), "")


def _labels(handler: str | None, event: ReceivedEvent | None) -> tuple[str, str]:
    return _event(handler or "", event.name if event else ""), handler or ""


def _published(name: str, **_: Any) -> None:
    PUBLISHED.labels(name).inc()


def _retried(handler: str | None, event: ReceivedEvent, **_: Any) -> None:
    RETRIED.labels(*_labels(handler, event)).inc()


def _archived(handler: str | None, event: ReceivedEvent | None, reason: str, **_: Any) -> None:
    ARCHIVED.labels(*_labels(handler, event), reason).inc()


def _replayed(handler: str, event: ReceivedEvent, **_: Any) -> None:
    REPLAYED.labels(*_labels(handler, event)).inc()


def _skipped(handler: str, event: ReceivedEvent, superseded: bool, **_: Any) -> None:
    if superseded:
        SUPERSEDED.labels(*_labels(handler, event)).inc()
    if current_task:
        current_task.request.amqp_started = None  # the handler is not called


def _started(task: Any, **_: Any) -> None:
    if not isinstance(task, HandlerTask) or (event := event_of(task)) is None:
        return
    task.request.amqp_started = perf_counter()
    # No header says when a replay was published.
    since = event.due_at or (None if event.replay_id else event.published_at)
    if since is not None:
        LAG.labels(task.name).observe(max(0.0, (datetime.now(UTC) - since).total_seconds()))


def _ended(task: Any, state: str | None = None, **_: Any) -> None:
    if not isinstance(task, HandlerTask) or (event := event_of(task)) is None:
        return
    if (began := getattr(task.request, "amqp_started", None)) is None:
        return
    SECONDS.labels(task.name).observe(perf_counter() - began)
    if state in _HANDLED:
        HANDLED.labels(*_labels(task.name, event)).inc()


class SnapshotCollector(Collector):
    """Yields the newest snapshot as gauges; RabbitMQ is not asked when Prometheus scrapes."""

    def __init__(self, service: str) -> None:
        self.service = service

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering it reads no database."""
        return []

    def collect(self) -> Iterator[Metric]:
        close_old_connections()
        try:
            newest, now = snapshots.rows(self.service).first(), snapshots.clock()
        except Error as exc:
            # The counters need no database.
            logger.warning("metrics have no snapshot: %s", error_line(exc))
            return
        finally:
            # Each scrape has a thread of its own.
            connections.close_all()
        document = newest.about if newest is not None else {}
        if newest is None or document.get("version") != snapshots.FORMAT:
            return
        age = (now - newest.at).total_seconds()
        yield _gauge("snapshot_age_seconds", "Age of the snapshot.", age)
        yield _gauge("broker_up", "1 if RabbitMQ answered.", not document["broker"]["error"])
        yield _gauge("archive_open", "Open archived events.", newest.open)
        if "lag" in document["mirror"]:
            yield _gauge(
                "mirror_lag_seconds",
                "Upper bound of the mirror's delay.",
                document["mirror"]["lag"],
            )
        for name, text, key in (
            ("queue_messages", "Messages that are ready.", "ready"),
            ("queue_consumers", "Consumers of a queue.", "consumers"),
            ("queue_paused", "1 if its workers consume it later.", "paused"),
        ):
            gauge = GaugeMetricFamily(f"amqp_events_{name}", text, labels=["queue", "role"])
            for queue, figures in document["queues"].items():
                if figures.get(key) is not None:
                    gauge.add_metric([queue, figures["role"]], figures[key])
            yield gauge
        gauge = GaugeMetricFamily(
            "amqp_events_queue_prefetch",
            "Events that the workers may take in advance.",
            labels=["queue", "why"],
        )
        for queue, figures in document["queues"].items():
            for why, number in figures.get("prefetch", {}).items():
                gauge.add_metric([queue, why], number)
        yield gauge
        for name, text, key in (
            ("outbox_pending", "Events of the outbox that are not published.", "total"),
            ("outbox_lag_seconds", "Age of the oldest event in the outbox.", "lag"),
        ):
            gauge = GaugeMetricFamily(f"amqp_events_{name}", text, labels=["database"])
            for outbox in document["outbox"]:
                if key in outbox:
                    gauge.add_metric([outbox["database"]], outbox[key])
            yield gauge


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"amqp_events_{name}", text, value=float(value))


def serve(port: int, service: str) -> Any:
    """Serve the counters of all processes of a worker, and the snapshot; return server and thread.

    Raises:
        OSError: the port is in use.
        ValueError: the folder is missing.
    """
    registry = CollectorRegistry()
    if os.environ.get(METRICS_FOLDER):
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    registry.register(SnapshotCollector(service))
    return start_http_server(port, registry=registry)
