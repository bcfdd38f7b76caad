"""The dashboard: status, search for an event, topology; read-only.

The pages read only the database. Broker data comes from the snapshots of
:mod:`django_amqp_events.monitor.snapshots`, and the pages show its age.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from django.contrib.admin.views.main import SEARCH_VAR
from django.core.exceptions import PermissionDenied
from django.db import Error
from django.db.models import Model
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern
from django.utils.timezone import localtime
from django.utils.translation import gettext as _

from ..archive import eligibility, tables
from ..archive.selection import parse_uuid
from ..broker import topology
from ..broker.topology import Topology
from ..conf import Settings
from ..declare.registry import Registry
from ..exceptions import AmqpEventsError
from ..models import (
    Alert,
    ArchivedEvent,
    FailureGroup,
    OutboxEvent,
    ReplayBatch,
)
from ..monitor import alerts, event_locations, snapshots, statistics
from ..monitor.event_locations import LocatedEvent, Record, RecordKind
from ..monitor.state_texts import PREFETCH_REASONS
from ..reasons import Reason
from ..templatetags.amqp_events import TEXT, duration, line, moment, text
from . import backfill_pages
from .base import WATCHED_SECONDS, Pages
from .charts import Chart, bars, throughput
from .filters import settings_and_registry
from .formatting import number as formatted

#: Seconds after which the newest snapshot is stale: two are missing.
STALE_SECONDS: Final = 3 * snapshots.SNAPSHOT_SECONDS
#: Alerts and queues that the page shows.
ALERTS: Final = 50
QUEUES: Final = 200
BINDINGS: Final = 1_000
VALUE_CHARACTERS: Final = 1_000
#: The permission to find rows of the inbox.
INBOX: Final = "view_inboxentry"
#: Bars of the chart of open events.
QUARTERS: Final = 96
#: What is found, by the model whose pages show it; the inbox has none.
_KINDS: Final[Mapping[type[Model], tuple[RecordKind, ...]]] = {
    OutboxEvent: ("outbox",),
    ArchivedEvent: ("archive", "replay"),
    ReplayBatch: ("batch",),
}


class DashboardAdmin(Pages):
    """Three pages for users with the permission ``view_dashboard``."""

    def get_urls(self) -> list[URLPattern]:
        return [
            self._path("", self.changelist_view, "changelist"),
            self._path("find/", self.find_view, "find"),
            self._path("topology/", self.topology_view, "topology"),
        ]

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the status of the service."""
        self._check(request)
        now = snapshots.clock()
        configured = settings_and_registry()
        service = configured[0].service if configured else ""
        seen = _Seen(service, now)
        opened = statistics.open_events()
        declared = topology.build(*configured) if configured else None
        late = statistics.capped(
            tables.rows().filter(eligibility.overdue(now)), statistics.READ_ROWS
        )
        queues = _queues(seen, declared, configured)
        opened_alerts = list(alerts.open_alerts(service)[:ALERTS])
        context = {
            **self._tiles(opened, seen, late),
            "alerts": [
                (alert, alerts.title(alert), alerts.alert_text(alert), self._cause(request, alert))
                for alert in opened_alerts
            ],
            # An alert has the text of its outbox.
            "alerted": {alert.key for alert in opened_alerts if alert.kind == "outbox_lag"},
            "queues": [queue for queue in queues if not queue["dull"]][:QUEUES],
            "dull": sum(queue["dull"] for queue in queues),
            "charts": [throughput(statistics.hourly_series(now)), _backlog(service, now)],
            "groups": self._groups(request),
            **(extra_context or {}),
        }
        return self._page(request, "changelist", seen, context)

    def find_view(self, request: HttpRequest) -> HttpResponse:
        """Show where the events are that a value finds."""
        self._check(request)
        value = request.GET.get(SEARCH_VAR, "").strip()[:VALUE_CHARACTERS]
        configured = settings_and_registry()
        context: dict[str, Any] = {
            "value": value,
            "configured": configured is not None,
            # Not again and again through the history.
            "live": WATCHED_SECONDS if value and "since" not in request.GET else 0,
        }
        if value and configured is not None:
            try:
                context |= self._locate(request, value, *configured)
            except (AmqpEventsError, Error) as exc:
                # Of the history, or of another database.
                context["problem"] = text(exc, 1_000)
        return self._page(request, "find", None, context)

    def topology_view(self, request: HttpRequest) -> HttpResponse:
        """Show queues, what waits in them, their handlers' retries, and bindings."""
        self._check(request)
        configured = settings_and_registry()
        seen = _Seen(configured[0].service if configured else "", snapshots.clock())
        declared = topology.build(*configured) if configured else None
        # Many queues have an exchange of their own, with their name.
        routes = [
            binding
            for binding in (declared.bindings if declared else ())
            if binding.exchange != binding.queue
        ]
        context = {
            "queues": _queues(seen, declared, configured)[:QUEUES] if declared else [],
            "bindings": routes[:BINDINGS],
            "schedules": True,
            "configured": configured is not None,
        }
        return self._page(request, "topology", seen, context)

    # -- helpers

    def _check(self, request: HttpRequest) -> None:
        self.require(request, None)
        if request.method not in ("GET", "HEAD"):
            raise PermissionDenied

    def _page(
        self, request: HttpRequest, name: str, seen: _Seen | None, context: Mapping[str, Any]
    ) -> HttpResponse:
        titles = {
            "changelist": _("Dashboard"),
            "find": _("Find an event"),
            "topology": _("Topology"),
        }
        context = {
            "tabs": [(self._url(tab), title, tab == name) for tab, title in titles.items()],
            "seen": seen,
            "now": snapshots.clock(),
            "live": WATCHED_SECONDS if seen else 0,
            "archive_url": self.list_url(request, ArchivedEvent),
            "outbox_url": self.list_url(request, OutboxEvent),
            **{f"{tab}_url": self._url(tab) for tab in titles},
            **context,
        }
        template = "dashboard" if name == "changelist" else name
        return self._render(request, template, titles[name], context)

    def _locate(
        self, request: HttpRequest, value: str, settings: Settings, registry: Registry
    ) -> dict[str, Any]:
        """Return the rows that a value finds, of the tables that this user may view."""
        allowed = {model: self.pages_of(request, model) for model in _KINDS}
        archive, waiting = allowed[ArchivedEvent], allowed[OutboxEvent]
        if archive is None:
            allowed[ReplayBatch] = None
        kinds = [kind for model, kinds in _KINDS.items() if allowed[model] for kind in kinds]
        if self.granted(request, INBOX):
            kinds.append("inbox")
        located = event_locations.locate(
            value,
            settings,
            registry,
            kinds=kinds,
            events=archive.get_queryset(request) if archive else None,
            by_value=archive is not None and archive.allows(request, None, "view_payload"),
            waiting=lambda alias: waiting.get_queryset(request).using(alias),
            since=moment(request.GET.get("since")) if settings.history and archive else None,
        )
        batches = allowed[ReplayBatch]
        runs = settings.history and batches and batches.has_bulk_replay_permission(request)
        day = snapshots.clock() - backfill_pages.BEFORE
        return {
            "located": [
                (
                    event,
                    [(record, self._record_url(record)) for record in event.records],
                    _earliest(event),
                )
                for event in located.events
            ],
            "run_url": self.url_of(ReplayBatch, "backfill") if runs else "",
            "scanned": located.scanned,
            "history_url": self._url("find", q=value, since=day.isoformat())
            if settings.history and archive
            else "",
            "more": event_locations.ROWS if located.more else None,
        }

    def _record_url(self, record: Record) -> str:
        row: Any = record.row
        if record.kind == "batch":
            return self.url_of(ReplayBatch, "change", record.id)
        if record.kind == "replay":
            return self.url_of(ArchivedEvent, "change", row.event_id)
        return self.url_of(type(row), "change", row.pk)

    def _cause(self, request: HttpRequest, alert: Alert) -> str:
        """Return the URL of the page that shows what an alert is about, ``""`` if there is none."""
        if alert.kind in alerts.OF_GROUPS:
            group = parse_uuid(alert.key) if self.pages_of(request, FailureGroup) else None
            return self.url_of(FailureGroup, "change", group) if group else ""
        if alert.kind == "growth":
            return self.list_url(request, ArchivedEvent, failed="hour")
        if alert.kind == "outbox_lag":
            return self.list_url(request, OutboxEvent, database=alert.key)
        return self._url("topology") if alert.kind in ("abyss", "mirror_lag") else ""

    def _groups(self, request: HttpRequest) -> list[tuple[FailureGroup, str]]:
        """Return the groups with the most open events, and the URLs of their pages."""
        linked = self.pages_of(request, FailureGroup) is not None
        return [
            (group, self.url_of(FailureGroup, "change", group.pk) if linked else "")
            for group in statistics.top_groups()
        ]

    def _tiles(self, opened: statistics.OpenEvents, seen: _Seen, late: int) -> dict[str, Any]:
        """Return the values of the tiles."""
        outboxes = seen.newest.get("outbox", ())
        lags = [outbox["lag"] for outbox in outboxes if "lag" in outbox]
        mirror = seen.document.get("mirror", {})
        waiting = mirror.get("waiting")
        pending = sum(outbox.get("total", 0) for outbox in outboxes)
        return {
            "opened": opened,
            "open": _capped(opened.open, statistics.READ_ROWS),
            "late": late,
            "overdue": _capped(late, statistics.READ_ROWS),
            "mirror_lag": duration(mirror["lag"]) if "lag" in mirror else "?",
            "mirror_waiting": formatted(waiting) if waiting else "",
            "outbox_lag": duration(max(lags)) if lags else "?",
            "outbox_waiting": formatted(pending) if pending else "",
        }


def _earliest(event: LocatedEvent) -> str:
    """Return since when the history is read for an event, with its offset."""
    times = [record.at for record in event.records]
    for record in event.records:
        # Its state may have changed since.
        if isinstance(record.row, ArchivedEvent):
            times.append(record.row.published_at or record.row.first_failed_at)
    times += [event.past] if event.past else []
    return (min(times) - backfill_pages.BEFORE).isoformat() if times else ""


class _Seen:
    """The newest snapshot, and the newest with the broker in it.

    Attributes:
        newest, document: their contents, ``{}`` without a snapshot.
        taken, at: their times.
    """

    def __init__(self, service: str, now: datetime) -> None:
        rows = snapshots.rows(service)
        newest, seen = rows.first(), rows.filter(seen=True).first()
        self.newest: dict[str, Any] = newest.about if newest else {}
        self.document: dict[str, Any] = seen.about if seen else {}
        self.taken = newest.at if newest else None
        self.at = seen.at if seen else None
        self.stale = newest is not None and now - newest.at > timedelta(seconds=STALE_SECONDS)
        self.unanswered = newest is not None and not newest.seen


def _backlog(service: str, now: datetime) -> Chart:
    """Draw the open events of the last day, from one snapshot per quarter of an hour."""
    since = now - statistics.DAY
    step = statistics.DAY / QUARTERS
    newest: dict[int, int] = {}
    taken = snapshots.rows(service).filter(at__range=(since, now)).order_by("at")
    for at, number in taken.values_list("at", "open")[: statistics.READ_ROWS]:
        newest[min(int((at - since) / step), QUARTERS - 1)] = number
    return bars(
        _("Open events over 24 hours"),
        [f"{localtime(since + step * place):%H:%M}" for place in newest],
        [("ae-fill-bad", _("Open events"), list(newest.values()))],
        of=_("Time"),
    )


#: What a snapshot has of a queue, and the table shows.
_FIGURES: Final = ("ready", "unacked", "consumers")


def _queues(
    seen: _Seen, declared: Topology | None, configured: tuple[Settings, Registry] | None
) -> list[dict[str, Any]]:
    """Return every queue that is declared or was seen, as the tables show it."""
    planned = {queue.name: queue for queue in declared.queues} if declared else {}
    handlers = configured[1].handlers.values() if configured else ()
    measured = seen.document.get("queues", {})
    queues = []
    for name in dict.fromkeys([*planned, *measured]):
        figures = measured.get(name, {})
        queue = planned.get(name)
        role = queue.role if queue else str(figures.get("role", ""))
        severity = figures.get("severity", "unknown")
        queues.append(
            {
                "name": line(name, 300),
                "role": role,
                "severity": severity,
                "meaning": text(Reason.from_json(figures.get("meaning", _("not read yet"))), TEXT),
                **{key: figures.get(key) for key in _FIGURES},
                "prefetch": [
                    (count, PREFETCH_REASONS.get(why, why))
                    for why, count in figures.get("prefetch", {}).items()
                ],
                "handlers": [handler for handler in handlers if handler.queue == name],
                "dull": role == "delay"
                and severity in ("ok", "unknown")
                and not (figures.get("ready") or figures.get("total")),
            }
        )
    # Handlers first.
    return sorted(queues, key=lambda queue: queue["role"] != "handler")


def _capped(number: int, cap: int) -> str:
    return f"{formatted(number)}+" if number >= cap else formatted(number)
