"""The inbox's page: which handler has handled which event, once."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import unquote
from django.contrib.admin.views.main import ChangeList
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.html import format_html
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..models import InboxEntry
from ..worker import once
from . import databases
from .base import List, Pages, ago
from .databases import DatabaseFilter
from .filters import settings_and_registry
from .formatting import line
from .outbox import ServiceFilter, with_id
from .pagination import CAP


class InboxList(List):
    """The newest first, which an index has for each service."""

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        """Return one of the two orders."""
        oldest_first = super().get_ordering(request, queryset)[0] == "handled_at"
        return ["handled_at", "pk"] if oldest_first else ["-handled_at", "-pk"]


class OwnFilter(ServiceFilter):
    """Filter by service: this service by default, in the order of its index."""

    def values(self, rows: QuerySet[Any]) -> list[str]:
        return sorted({*super().values(rows), *_own()})

    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        chosen = self.value() or "".join(_own())
        for value, title in self.lookup_choices:
            yield {
                "selected": chosen == value,
                "query_string": changelist.get_query_string({"service": str(value)}),
                "display": title,
            }


def _own() -> list[str]:
    found = settings_and_registry()
    return [found[0].service] if found is not None else []


class InboxEntryAdmin(Pages[InboxEntry]):
    """Shows the inbox; nothing can be changed here.

    A row that goes lets its event run again, so there is nothing to decide: ``events_prune``
    deletes what is old.
    """

    list_display = ("what", "handler_name", "event", "source_name", "age")
    list_display_links = None
    list_filter = (OwnFilter, DatabaseFilter)
    sortable_by = ("age",)
    search_fields = ("event_id",)
    search_help_text = _("Start of an event id, or the id of a row.")

    def get_queryset(self, request: HttpRequest) -> QuerySet[InboxEntry]:
        found = settings_and_registry()
        own = once.aliases(*found) if found is not None else []
        return super().get_queryset(request).using(databases.chosen(request, InboxEntry, *own))

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return InboxList

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search by ids, always by an index."""
        if term := search_term.strip():
            return queryset.filter(with_id(term, queryset.db)), False
        if OwnFilter.parameter_name not in request.GET and (own := _own()):
            queryset = queryset.filter(service__in=own)
        return queryset, False

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Lead to the list: a row has no more to show."""
        return HttpResponseRedirect(self._url("changelist", q=unquote(object_id)))

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        title = gettext("Inbox")
        return super().changelist_view(
            request, {"title": title, "cap": CAP, **(extra_context or {})}
        )

    @admin.display(description=_("event"))
    def what(self, entry: InboxEntry) -> str:
        return format_html('<span class="ae-what">{}</span>', line(entry.name))

    @admin.display(description=_("handler"))
    def handler_name(self, entry: InboxEntry) -> str:
        return line(entry.handler)

    @admin.display(description=_("event id"))
    def event(self, entry: InboxEntry) -> str:
        return format_html("<code>{}</code>", line(entry.event_id))

    @admin.display(description=_("published by"))
    def source_name(self, entry: InboxEntry) -> str:
        return line(entry.source)

    @admin.display(description=_("handled"), ordering="handled_at")
    def age(self, entry: InboxEntry) -> str:
        return ago(entry.handled_at, datetime.now(UTC))


__all__ = ["InboxEntryAdmin"]
