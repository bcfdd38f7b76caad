"""Take snapshots of broker, archive and outbox for the dashboard.

A page shows the newest snapshot and its age, and never waits for RabbitMQ. A thread of
``events_mirror`` takes them; of several mirrors, the first one does. An unreachable broker or
outbox is part of the snapshot.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

from celery import Celery
from django.db import connections, router
from django.db.models import QuerySet

from .. import databases
from ..broker.provisioning import inspection
from ..broker.provisioning.management_api import ManagementApiError
from ..broker.topology import Topology
from ..conf import Settings
from ..exceptions import AmqpEventsError
from ..logs import get_logger
from ..models import Snapshot, visible
from ..publish import outbox
from ..reasons import Reason
from ..service_loop import ServiceLoop
from . import alerts, queue_status, statistics
from .queue_status import ANSWERS_TIMEOUT, Status

logger = get_logger(__name__)

#: Version of the documents.
FORMAT: Final = 1
SNAPSHOT_SECONDS: Final = 30.0
#: Seconds to wait for the thread to end; RabbitMQ may take longer to answer.
STOP_TIMEOUT: Final = 2.0


def clock() -> datetime:
    """Return the time of the snapshots' database."""
    return databases.clock(router.db_for_write(Snapshot))


def rows(service: str) -> QuerySet[Snapshot]:
    """Return the snapshots of a service, the last stored first."""
    using = router.db_for_write(Snapshot)
    return Snapshot.objects.using(using).filter(service=service).order_by("-pk")


@dataclass(slots=True)
class SnapshotLoop:
    """Takes a snapshot and updates the alerts every *every* seconds, in a thread.

    Args:
        tell: receives reports of errors and recovery.
    """

    app: Celery
    settings: Settings
    topology: Topology
    every: float = SNAPSHOT_SECONDS
    tell: Callable[[str], object] = logger.info
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        loop = ServiceLoop(
            part="snapshots",
            work="storing dashboard statistics",
            tell=self.tell,
            stop=self._stopping.is_set,
            errors=(Exception,),
            fatal=(),  # the mirror beside it continues
        )
        self._thread = threading.Thread(
            target=loop.run, args=(self._step,), name="amqp-events-snapshots", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread; if RabbitMQ does not answer in time, it ends with the process."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT)

    def _step(self) -> float:
        try:
            self.look()
        finally:
            # Not held open until the next snapshot.
            connections.close_all()
        return self.every

    def look(self, now: datetime | None = None) -> Snapshot | None:
        """Store a snapshot and update the alerts.

        Returns:
            the snapshot, ``None`` if another process has just taken one.
        """
        now = now or clock()
        newest = rows(self.settings.service).first()
        last: Mapping[str, Any] = {}
        if newest is not None:
            if timedelta() <= now - newest.at < timedelta(seconds=self.every * 0.8):
                return None
            if newest.about.get("version") == FORMAT:
                last = newest.about
            if now - newest.at > 3 * timedelta(seconds=self.every):
                # No mirror ran since: RabbitMQ may have answered.
                last = {**last, "broker": {}}
        taken = self.take(now, last)
        taken.save(using=router.db_for_write(Snapshot), force_insert=True)
        conditions = {
            **alerts.gone(taken.about, self.settings),
            **alerts.evaluate(taken.about, self.settings),
            **alerts.evaluate_groups(self.settings, now),
        }
        alerts.update_alerts(conditions, now=now, settings=self.settings)
        return taken

    def take(self, now: datetime, last: Mapping[str, Any]) -> Snapshot:
        """Return a snapshot, which is not saved. Its document has

        ``broker``
            ``error`` (``""`` if it answered), ``away`` (seconds without an answer), ``seen_at``;
            ``alarms`` if known; ``api_error``.
        ``queues``
            by name: role, severity, meaning, state, ready, unacked, total, consumers, paused,
            prefetch, without unknown values. Empty while RabbitMQ is unreachable. A meaning, and
            the broker's error, is a reason (:mod:`django_amqp_events.reasons`).
        ``archive``, ``outbox``, ``mirror``
            statistics of this service. ``archive.new_hour`` is counted to one more than the limit
            of the alert. ``mirror.lag`` is an upper bound in seconds: the time since the archive
            queue was empty, or since the newest mirrored event of this service failed.

        Args:
            last: the document of the snapshot before, for times since then.

        Raises:
            Error: the database is unreachable.
        """
        status, broker = self._ask(now, last.get("broker", {}))
        queues = _queues(status) if status else {}
        document: dict[str, Any] = {
            "version": FORMAT,
            "broker": broker,
            "queues": queues,
            "archive": {"new_hour": self._new_hour(now)},
            "outbox": self._outbox(),
            "mirror": self._mirror(queues, last.get("mirror", {}), now),
        }
        return Snapshot(
            at=now,
            service=self.settings.service,
            seen=status is not None,
            open=statistics.capped(statistics.open_rows(), statistics.CAP),
            document=json.dumps(document, default=_text, separators=(",", ":")),
        )

    def _ask(
        self, now: datetime, before: Mapping[str, Any]
    ) -> tuple[Status | None, dict[str, Any]]:
        """Return the queues and the document's part about the broker."""
        part: dict[str, Any] = {"error": "", "away": 0.0, "seen_at": now}
        read = partial(
            queue_status.status, self.app, self.settings, self.topology, ask=ANSWERS_TIMEOUT
        )
        try:
            try:
                api = inspection.management(self.app, self.settings)
                status = read(api=api)
                if api is not None:
                    part["alarms"] = api.alarms()
            except ManagementApiError as exc:
                # AMQP reports less, but it reports.
                part["api_error"] = visible(exc, 500)
                status = read()
        except Exception as exc:
            if not isinstance(exc, AmqpEventsError):
                logger.exception("cannot read the state of RabbitMQ")
            since = before.get("seen_at") or now
            return None, {
                "error": Reason.of(exc if str(exc) else type(exc).__name__).as_json(),
                "away": (now - _moment(since)).total_seconds(),
                "seen_at": since,
            }
        return status, part

    def _new_hour(self, now: datetime) -> int:
        cap = (self.settings.alerts.growth or 0) + 1
        return statistics.new_since(now - statistics.HOUR, cap, service=self.settings.service)

    def _outbox(self) -> list[dict[str, Any]]:
        if self.settings.backend != "amqp":
            return []
        parts = []
        for status in outbox.read_status(self.settings, empty=True):
            part: dict[str, Any] = {
                "database": status.alias,
                "severity": status.severity,
                "meaning": status.meaning,
            }
            if isinstance(status, outbox.OutboxStatus):
                # Each database has a clock of its own.
                now = databases.clock(status.alias)
                lag = (now - status.oldest).total_seconds() if status.oldest else 0.0
                part |= {"total": status.total, "oldest": status.oldest, "lag": max(0.0, lag)}
            parts.append(part)
        return parts

    def _mirror(
        self, queues: Mapping[str, Any], before: Mapping[str, Any], now: datetime
    ) -> dict[str, Any]:
        ready = queues.get(self.topology.names.archive, {}).get("ready")
        if ready is None:
            return {"empty_at": before.get("empty_at", now)}
        if not ready:
            return {"empty_at": now, "waiting": 0, "lag": 0.0}
        empty_at = _moment(before.get("empty_at", now))
        # The queue keeps the order, so its messages are newer than the mirrored ones.
        newest = statistics.newest_failure(now, service=self.settings.service)
        since = max(empty_at, newest) if newest else empty_at
        return {
            "empty_at": empty_at,
            "waiting": ready,
            "lag": max(0.0, (now - since).total_seconds()),
        }


def _queues(status: Status) -> dict[str, dict[str, Any]]:
    parts = {}
    for queue in status.queues:
        part = {key: value for key, value in asdict(queue).items() if value is not None}
        parts[part.pop("name")] = part
    return parts


def _moment(value: datetime | str) -> datetime:
    return value if isinstance(value, datetime) else datetime.fromisoformat(value)


def _text(value: object) -> Any:
    if isinstance(value, Reason):
        return value.as_json()
    return value.isoformat() if isinstance(value, datetime) else str(value)
