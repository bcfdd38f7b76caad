"""Filters of the list of archived events, each read from an index."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ..archive import eligibility
from ..archive.groups import failure_groups
from ..archive.selection import parse_uuid
from ..conf import Settings, get_settings
from ..declare.registry import Registry, get_registry
from ..exceptions import AmqpEventsError
from ..models import FailureGroup, State
from ..templatetags.amqp_events import line
from .lists import OptionalFilter, StateFilter, ValueFilter


class EventStateFilter(StateFilter):
    titles: ClassVar = {
        "archived": _("archived: open"),
        "going": _("in progress: queued, replaying"),
        "overdue": _("overdue: no outcome"),
        "succeeded": _("succeeded"),
        "discarded": _("discarded"),
        "all": _("all"),
    }
    counted = frozenset({"archived", "going", "succeeded", "discarded"})
    #: Those whose rows are in one state.
    single = frozenset({"archived", "overdue", "succeeded", "discarded"})

    def matching(self, rows: QuerySet[Any], state: str) -> QuerySet[Any]:
        if state == "going":
            return rows.filter(state__in=(State.QUEUED, State.REPLAYING))
        if state == "overdue":
            return rows.filter(eligibility.overdue())
        return rows.filter(state=state) if state in State.values else rows.none()


class EventFilter(ValueFilter):
    title = _("event")
    parameter_name = "event"
    column = "name"


class ReasonFilter(ValueFilter):
    title = _("reason")
    parameter_name = "reason"


class GroupFilter(OptionalFilter):
    """Filter by failure group; shown when a link selects one."""

    title = _("failure group")
    parameter_name = "group"

    def lookups(
        self, request: HttpRequest, model_admin: admin.ModelAdmin[Any]
    ) -> list[tuple[str, str]]:
        chosen = self.value()
        if chosen is None:
            return []
        group = self.found(chosen)
        return [(chosen, line(group, 80) if group is not None else str(_("(no such group)")))]

    @staticmethod
    def found(chosen: str) -> FailureGroup | None:
        """Return the group that a value of this filter names."""
        pk = parse_uuid(chosen)
        return failure_groups.groups().filter(pk=pk).first() if pk is not None else None

    def matching(self, rows: QuerySet[Any], value: str) -> QuerySet[Any]:
        pk = parse_uuid(value)
        return rows.filter(group=pk) if pk is not None else rows.none()


class TimeFilter(OptionalFilter):
    """Filter by the time of the last failure."""

    title = _("last failure")
    parameter_name = "failed"
    AGES: ClassVar = {
        "hour": (_("in the last hour"), timedelta(hours=1)),
        "day": (_("in the last 24 hours"), timedelta(days=1)),
        "week": (_("in the last 7 days"), timedelta(days=7)),
    }

    def lookups(
        self, request: HttpRequest, model_admin: admin.ModelAdmin[Any]
    ) -> list[tuple[str, Any]]:
        return [(value, title) for value, (title, _age) in self.AGES.items()]

    def matching(self, rows: QuerySet[Any], value: str) -> QuerySet[Any]:
        since = self.since(value, datetime.now(UTC))
        return rows.none() if since is None else rows.filter(last_failed_at__gte=since)

    @classmethod
    def since(cls, chosen: str, now: datetime) -> datetime | None:
        """Return the start of the time that a value selects."""
        return now - cls.AGES[chosen][1] if chosen in cls.AGES else None


def settings_and_registry() -> tuple[Settings, Registry] | None:
    """Return this service's settings and handlers, ``None`` where they are wrong."""
    try:
        return get_settings(), get_registry()
    except AmqpEventsError:
        return None
