"""Filters of the list, each read from an index."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Final

from django.contrib import admin
from django.contrib.admin.views.main import SEARCH_VAR, ChangeList
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..archive import eligibility, states
from ..archive.groups import failure_groups
from ..conf import Settings, get_settings
from ..declare.registry import Handler, Registry, get_registry
from ..exceptions import AmqpEventsError
from ..models import ArchivedEvent, FailureGroup, State
from . import pagination
from .base import uuid_of
from .formatting import line, number

#: The filter of the state counts up to here.
COUNTED: Final = 1_000


class StateFilter(admin.SimpleListFilter):
    """Filter by state: open events by default, all events in a search."""

    title = _("state")
    parameter_name = "state"
    OPEN = State.ARCHIVED.value

    def __init__(
        self,
        request: HttpRequest,
        params: dict[str, Any],
        model: type[ArchivedEvent],
        model_admin: admin.ModelAdmin[ArchivedEvent],
    ) -> None:
        # The state of a search is any: who looks for an id wants to find it.
        self._default = "all" if request.GET.get(SEARCH_VAR, "").strip() else self.OPEN
        super().__init__(request, params, model, model_admin)

    def lookups(
        self, request: HttpRequest, model_admin: admin.ModelAdmin[Any]
    ) -> list[tuple[str, str]]:
        rows = model_admin.get_queryset(request)
        return [
            ("archived", _counted(gettext("archived: open"), rows, state=State.ARCHIVED)),
            (
                "going",
                _counted(
                    gettext("in progress: queued, replaying"),
                    rows,
                    state__in=(State.QUEUED, State.REPLAYING),
                ),
            ),
            ("overdue", gettext("overdue: no outcome")),
            ("succeeded", _counted(gettext("succeeded"), rows, state=State.SUCCEEDED)),
            ("discarded", _counted(gettext("discarded"), rows, state=State.DISCARDED)),
            ("all", gettext("all")),
        ]

    @property
    def chosen(self) -> str:
        """The state that is shown."""
        return self.value() or self._default

    def queryset(
        self, request: HttpRequest, queryset: QuerySet[ArchivedEvent]
    ) -> QuerySet[ArchivedEvent]:
        chosen = self.chosen
        if chosen == "all":
            return queryset
        if chosen == "going":
            return queryset.filter(state__in=(State.QUEUED, State.REPLAYING))
        if chosen == "overdue":
            return queryset.filter(overdue())
        if chosen in State.values:
            return queryset.filter(state=chosen)
        return queryset.none()

    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        chosen = self.chosen
        for value, title in self.lookup_choices:
            yield {
                "selected": chosen == value,
                "query_string": changelist.get_query_string({"state": value}),
                "display": title,
            }


def _counted(title: str, rows: QuerySet[Any], **wanted: Any) -> str:
    found = pagination.count(rows.filter(**wanted), COUNTED)
    return f"{title} ({number(COUNTED)}+)" if found > COUNTED else f"{title} ({number(found)})"


class ColumnFilter(admin.SimpleListFilter):
    """The distinct values of an indexed column."""

    column: ClassVar[str]
    nothing: ClassVar[Any] = _("(none)")

    def rows(self) -> QuerySet[Any]:
        """Return the rows that have the column."""
        return states.rows()

    def lookups(
        self, request: HttpRequest, model_admin: admin.ModelAdmin[Any]
    ) -> list[tuple[str, str]]:
        found = pagination.distinct(self.rows(), self.column)
        chosen = self.value()
        if chosen is not None and chosen not in found:
            found.append(chosen)
        return [(value, line(value, 80) or self.nothing) for value in found]

    def queryset(
        self, request: HttpRequest, queryset: QuerySet[ArchivedEvent]
    ) -> QuerySet[ArchivedEvent]:
        chosen = self.value()
        if chosen is None:
            return queryset
        if "\0" in chosen:  # PostgreSQL refuses it
            return queryset.none()
        return queryset.filter(**{self.column: chosen})


class EventFilter(ColumnFilter):
    title = _("event")
    parameter_name = "event"
    column = "name"


class HandlerFilter(ColumnFilter):
    title = _("handler")
    parameter_name = "handler"
    column = "handler"
    nothing = _("(no handler)")


class ReasonFilter(ColumnFilter):
    title = _("reason")
    parameter_name = "reason"
    column = "reason"


class ExceptionFilter(ColumnFilter):
    title = _("exception")
    parameter_name = "exception"
    column = "exception"


class GroupFilter(admin.SimpleListFilter):
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
        pk = uuid_of(chosen)
        return failure_groups.groups().filter(pk=pk).first() if pk is not None else None

    def queryset(
        self, request: HttpRequest, queryset: QuerySet[ArchivedEvent]
    ) -> QuerySet[ArchivedEvent]:
        chosen = self.value()
        if chosen is None:
            return queryset
        pk = uuid_of(chosen)
        return queryset.filter(group=pk) if pk is not None else queryset.none()


class TimeFilter(admin.SimpleListFilter):
    """Filter by the time of the last failure."""

    title = _("last failure")
    parameter_name = "failed"
    NEWER: ClassVar = {
        "hour": (_("in the last hour"), timedelta(hours=1)),
        "day": (_("in the last 24 hours"), timedelta(days=1)),
        "week": (_("in the last 7 days"), timedelta(days=7)),
    }
    OLDER: ClassVar = {
        "older-day": (_("more than 24 hours ago"), timedelta(days=1)),
        "older-week": (_("more than 7 days ago"), timedelta(days=7)),
        "older-month": (_("more than 30 days ago"), timedelta(days=30)),
    }
    TITLES: ClassVar = {key: title for key, (title, _age) in {**NEWER, **OLDER}.items()}

    def lookups(
        self, request: HttpRequest, model_admin: admin.ModelAdmin[Any]
    ) -> list[tuple[str, Any]]:
        return list(self.TITLES.items())

    def queryset(
        self, request: HttpRequest, queryset: QuerySet[ArchivedEvent]
    ) -> QuerySet[ArchivedEvent]:
        chosen = self.value()
        now = datetime.now(UTC)
        if chosen is None:
            return queryset
        if chosen in self.NEWER:
            return queryset.filter(last_failed_at__gte=now - self.NEWER[chosen][1])
        if chosen in self.OLDER:
            return queryset.filter(last_failed_at__lt=now - self.OLDER[chosen][1])
        return queryset.none()


def settings_and_registry() -> tuple[Settings, Registry] | None:
    """Return this service's settings and handlers, ``None`` where they are wrong."""
    try:
        return get_settings(), get_registry()
    except AmqpEventsError:
        return None


def handler_of(event: ArchivedEvent, found: tuple[Settings, Registry] | None) -> Handler | None:
    """Return the current handler of an event, ``None`` if it is unknown."""
    if found is None:
        return None
    settings, registry = found
    name = settings.renamed_handlers.get(event.handler, event.handler)
    return registry.handlers.get(name) if name else registry.find(event.queue, event.name)


def overdue(now: datetime | None = None) -> Q:
    """Express :func:`django_amqp_events.archive.eligibility.is_overdue` in SQL."""
    now = now or datetime.now(UTC)
    wanted = Q(state=State.REPLAYING, state_since__lte=now - timedelta(seconds=eligibility.OVERDUE))
    if (found := settings_and_registry()) is not None:
        settings, registry = found
        for handler in registry.handlers.values():
            delays = handler.policy.total()
            names = [old for old, name in settings.renamed_handlers.items() if name == handler.name]
            wanted &= ~Q(
                handler__in=[handler.name, *names],
                state_since__gt=now - timedelta(seconds=eligibility.OVERDUE + delays),
            )
    return wanted
