"""What the pictures of the dashboard show."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final

from django.utils.formats import date_format
from django.utils.timezone import localtime
from django.utils.translation import gettext as _
from django.utils.translation import pgettext

from ..declare.registry import Handler, Registry
from ..monitor import snapshots, statistics
from ..templatetags.amqp_events import duration, line
from . import charts
from .charts import Picture, Row

CURVE_POINTS: Final = 96


def throughput(series: statistics.Series) -> Picture:
    return charts.bars(
        _("Archived, succeeded, discarded per hour"),
        [f"{localtime(hour):%H}" for hour in series.hours],
        [
            ("ae-fill-bad", _("archived"), series.archived),
            ("ae-fill", _("succeeded"), series.succeeded),
            ("ae-fill-quiet", _("discarded"), series.discarded),
        ],
        of=_("Hour"),
    )


def backlog(service: str, now: datetime) -> Picture:
    """Draw the open events of the last day, one snapshot per quarter of an hour."""
    since = now - statistics.DAY
    step = statistics.DAY / CURVE_POINTS
    newest: dict[int, tuple[datetime, int]] = {}
    taken = snapshots.rows(service).filter(at__gte=since).order_by("at")
    for at, number in taken.values_list("at", "open")[: statistics.READ_ROWS]:
        newest[int((at - since) / step)] = (at, number)
    return charts.area(
        _("Open events over 24 hours"),
        [(at.timestamp(), f"{localtime(at):%H:%M}", number) for at, number in newest.values()],
        of=(_("Time"), _("Open events")),
    )


def ages(opened: statistics.OpenEvents) -> Picture:
    hour, day = pgettext("hours", "h"), pgettext("days", "d")
    labels = [f"< 1 {hour}", f"< 6 {hour}", f"< 1 {day}", f"< 3 {day}", f"< 7 {day}", f"≥ 7 {day}"]
    return charts.bars(
        _("Age of open events"),
        labels,
        [("ae-fill-bad", _("open events"), opened.ages)],
        of=_("Age"),
    )


def depths(queues: list[dict[str, Any]]) -> Picture:
    deep = [queue for queue in queues if queue["role"] != "delay" and queue["ready"] is not None]
    deep.sort(key=lambda queue: -queue["ready"])
    return charts.lying(
        _("Waiting messages by queue"),
        [
            Row(
                queue["name"],
                queue["ready"],
                css="ae-fill-bad" if queue["severity"] == "error" else "ae-fill",
            )
            for queue in deep[:12]
        ],
        of=(_("Queue"), _("Ready")),
    )


def returning(queues: list[dict[str, Any]], at: datetime | None) -> Picture:
    """Draw the events in delay queues by return time."""
    delayed = [queue for queue in queues if queue["role"] == "delay" and queue["ready"]]
    delayed.sort(key=lambda queue: queue["delay"])
    return charts.lying(
        _("Delayed events by return time"),
        [
            Row(
                _("within %(time)s, by %(when)s")
                % {
                    "time": duration(queue["delay"]),
                    "when": date_format(
                        localtime(at + timedelta(seconds=queue["delay"])), "TIME_FORMAT"
                    )
                    if at
                    else "?",
                }
                if queue["delay"]
                else queue["name"],
                queue["ready"],
            )
            for queue in delayed
        ],
        of=(_("Returns"), _("Events")),
    )


def schedules(registry: Registry) -> list[tuple[Handler, str, Picture]]:
    """Return each handler with the time from its first failure to the archive, and a picture."""
    return [
        (
            handler,
            duration(handler.policy.total()),
            charts.schedule(line(handler.name, 300), handler.policy.schedule()),
        )
        for handler in sorted(registry.handlers.values(), key=lambda handler: handler.name)
    ]
