"""Filters of the list of archived events, each read from an index."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ..archive import eligibility
from ..archive.batches import batch_states
from ..archive.groups import failure_groups
from ..archive.selection import parse_uuid
from ..conf import Settings, get_settings
from ..declare.registry import Registry, get_registry
from ..exceptions import AmqpEventsError
from ..models import Replay, State
from ..templatetags.amqp_events import line
from .lists import OptionalFilter, StateFilter, ValueFilter


class EventStateFilter(StateFilter):
    titles: ClassVar = {
        "archived": _("archived: open"),
        "in_progress": _("in progress: queued, replaying"),
        "overdue": _("overdue: no outcome"),
        "succeeded": _("succeeded"),
        "discarded": _("discarded"),
        "all": _("all"),
    }

    def matching(self, rows: QuerySet[Any], state: str) -> QuerySet[Any]:
        if state == "in_progress":
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


class LinkedFilter(OptionalFilter):
    """A filter that is shown only after a link has selected a value."""

    def lookups(
        self, request: HttpRequest, model_admin: admin.ModelAdmin[Any]
    ) -> list[tuple[str, str]]:
        chosen = self.value()
        return [] if chosen is None else [(chosen, self.label(chosen))]

    def label(self, chosen: str) -> str:
        """Return the title of the selected value."""
        raise NotImplementedError


class GroupFilter(LinkedFilter):
    title = _("failure group")
    parameter_name = "group"

    def label(self, chosen: str) -> str:
        pk = parse_uuid(chosen)
        group = failure_groups.groups().filter(pk=pk).first() if pk is not None else None
        return line(group, 80) if group is not None else str(_("(no such group)"))

    def matching(self, rows: QuerySet[Any], value: str) -> QuerySet[Any]:
        pk = parse_uuid(value)
        return rows.filter(group=pk) if pk is not None else rows.none()


class BatchFilter(LinkedFilter):
    """Filter by replay batch, optionally by the state of its replays too: ``<id>.failed``."""

    title = _("replay batch")
    parameter_name = "batch"

    def label(self, chosen: str) -> str:
        state = chosen.partition(".")[2]
        label = str(Replay.State(state).label) if state in Replay.State.values else ""
        return f"{_('batch %(id)s') % {'id': line(chosen)[:8]}} {label}"

    def matching(self, rows: QuerySet[Any], value: str) -> QuerySet[Any]:
        batch, _dot, state = value.partition(".")
        if (pk := parse_uuid(batch)) is None:
            return rows.none()
        replays = batch_states.events(pk)
        if state:
            replays = replays.filter(state=state)
        return rows.filter(pk__in=replays.values("event"))


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
        if value not in self.AGES:
            return rows.none()
        return rows.filter(last_failed_at__gte=datetime.now(UTC) - self.AGES[value][1])


def settings_and_registry() -> tuple[Settings, Registry] | None:
    """Return this service's settings and handlers, ``None`` where they are wrong."""
    try:
        return get_settings(), get_registry()
    except AmqpEventsError:
        return None
