"""The inbox's page: the events that ``once`` handlers have handled."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import unquote
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponseRedirect
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _

from ..models import InboxEntry
from ..templatetags.amqp_events import ago, breakable
from ..worker import inbox
from . import databases
from .base import Pages
from .databases import DatabaseFilter
from .filters import settings_and_registry
from .formatting import labelled
from .lists import AlwaysChosenFilter, ServiceFilter


class OwnFilter(AlwaysChosenFilter, ServiceFilter):
    """Filter by service: this service by default, in the order of its index."""

    def values(self, rows: QuerySet[Any]) -> list[str]:
        return sorted({*super().values(rows), *_own()})

    @property
    def chosen(self) -> str:
        return self.value() or "".join(_own())


def _own() -> list[str]:
    configured = settings_and_registry()
    return [configured[0].service] if configured is not None else []


class InboxEntryAdmin(Pages):
    """Shows the inbox; nothing can be changed here.

    Deleting a row would let its event run again; ``events_prune`` deletes what is old.
    """

    index_order = ("-handled_at", "-pk")
    list_display = ("what", "handler_name", "event", "source_name", "age")
    list_display_links = None
    list_filter = (OwnFilter, DatabaseFilter)
    sortable_by = ("age",)
    search_fields = ("event_id",)
    search_help_text = _("Start of an event id, or the id of a row.")

    def get_queryset(self, request: HttpRequest) -> QuerySet[InboxEntry]:
        configured = settings_and_registry()
        own = inbox.aliases(*configured) if configured is not None else []
        return super().get_queryset(request).using(databases.chosen(request, InboxEntry, *own))

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search the events of all services; without a search, list those of this service."""
        searched = search_term.strip() or OwnFilter.parameter_name in request.GET
        if not searched and (own := _own()):
            queryset = queryset.filter(service__in=own)
        return super().get_search_results(request, queryset, search_term)

    def change_view(self, request: HttpRequest, object_id: str, *args: Any, **kwargs: Any) -> Any:
        """Redirect to the list: a row has no more to show."""
        return HttpResponseRedirect(self._url("changelist", q=unquote(object_id)))

    @admin.display(description=_("event"))
    def what(self, entry: InboxEntry) -> str:
        return format_html('<span class="ae-what">{}</span>', breakable(entry.name))

    @admin.display(description=_("handler"))
    def handler_name(self, entry: InboxEntry) -> str:
        return breakable(entry.handler)

    @admin.display(description=_("event id"))
    def event(self, entry: InboxEntry) -> str:
        return format_html("<code>{}</code>", breakable(entry.event_id))

    @admin.display(description=_("published by"))
    def source_name(self, entry: InboxEntry) -> str:
        return labelled(_("published by"), breakable(entry.source))

    @admin.display(description=_("handled"), ordering="handled_at")
    def age(self, entry: InboxEntry) -> str:
        return ago(entry.handled_at, datetime.now(UTC))
