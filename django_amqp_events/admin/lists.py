"""Lists over many rows: counted to a cap, ordered by an index, filtered by indexed values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final

from django.apps import apps
from django.contrib import admin
from django.contrib.admin.views.main import SEARCH_VAR, ChangeList
from django.core.paginator import Paginator
from django.db import connections
from django.db.models import Prefetch, QuerySet
from django.http import HttpRequest
from django.utils.functional import cached_property
from django.utils.translation import gettext_lazy as _

from ..archive import eligibility
from ..databases import sliced
from ..models import SearchValue
from ..monitor.statistics import capped
from ..templatetags.amqp_events import breakable, line

#: Rows that a list counts and pages through at most.
CAP: Final = 5_000
#: Distinct values that a filter offers at most.
VALUES: Final = 100


class CappedPaginator(Paginator):  # type: ignore[type-arg]
    """A paginator that counts at most :data:`CAP` rows."""

    @cached_property
    def _found(self) -> int:
        rows: Any = self.object_list
        return capped(rows, CAP + 1)

    @property
    def capped(self) -> bool:
        """Return True if there are more rows than were counted."""
        return self._found > CAP

    @cached_property
    def count(self) -> int:
        return min(self._found, CAP)


class IndexedList(ChangeList):
    """A list in the order of an index, or the reverse of it."""

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        """Return one of the two orders of :attr:`.base.Pages.index_order`, if there is one."""
        pages: Any = self.model_admin
        order: tuple[str, ...] = pages.index_order
        ordering = super().get_ordering(request, queryset)
        if order and ordering[0] == _reversed(order[0]):
            return [*map(_reversed, order)]
        return list(order) or ordering

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        # Of a list of one page Django asks for all rows, and PostgreSQL, which takes values that
        # exclude each other for independent, may read the whole table and sort it.
        if not self.multi_page:
            self.result_list = self.result_list[: self.list_per_page]
        # Else Django shows "Show all" beside the search, which leads to what is open.
        self.full_result_count = self.result_count


def _reversed(order: str) -> str:
    return order[1:] if order.startswith("-") else f"-{order}"


class OptionalFilter(admin.SimpleListFilter):
    """A filter that shows all rows until a value is selected."""

    def matching(self, rows: QuerySet[Any], value: str) -> QuerySet[Any]:
        """Return the rows that a value selects; none for an unknown one."""
        raise NotImplementedError

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = self.value()
        return queryset if chosen is None else self.matching(queryset, chosen)


class AlwaysChosenFilter(admin.SimpleListFilter):
    """A filter with a default instead of "All"."""

    chosen: str

    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        for value, title in self.lookup_choices:
            yield {
                "selected": self.chosen == value,
                "query_string": changelist.get_query_string({str(self.parameter_name): str(value)}),
                "display": title,
            }


class StateFilter(AlwaysChosenFilter):
    """Filter by state: the first state by default, all rows in a search."""

    title = _("state")
    parameter_name = "state"
    titles: ClassVar[Mapping[str, Any]]

    def __init__(self, request: HttpRequest, *args: Any) -> None:
        searched = request.GET.get(SEARCH_VAR, "").strip()
        default = "all" if searched else next(iter(self.titles))
        self.chosen = request.GET.get(self.parameter_name) or default
        super().__init__(request, *args)

    def matching(self, rows: QuerySet[Any], state: str) -> QuerySet[Any]:
        """Return the rows in a state that is not ``all``; none for an unknown one."""
        raise NotImplementedError

    def lookups(
        self, request: HttpRequest, model_admin: admin.ModelAdmin[Any]
    ) -> list[tuple[str, Any]]:
        return list(self.titles.items())

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset if self.chosen == "all" else self.matching(queryset, self.chosen)


class ValueFilter(OptionalFilter):
    """Filter by a value of an indexed column.

    Attributes:
        column: unless the parameter has its name.
    """

    column: ClassVar[str] = ""

    def values(self, rows: QuerySet[Any]) -> list[str]:
        """Return the values that it offers, of the whole table."""
        return distinct(rows, self.column or str(self.parameter_name))

    def lookups(
        self, request: HttpRequest, model_admin: admin.ModelAdmin[Any]
    ) -> list[tuple[str, Any]]:
        values = self.values(model_admin.get_queryset(request))
        chosen = self.value()
        if chosen is not None and chosen not in values:
            values.append(chosen)
        # django-unfold has the titles in attributes, too, which have no elements.
        shown = line if apps.is_installed("unfold") else breakable
        return [(value, shown(value, 80) or _("(none)")) for value in values]

    def matching(self, rows: QuerySet[Any], value: str) -> QuerySet[Any]:
        return rows.filter(**{self.column or str(self.parameter_name): value})


class HandlerFilter(ValueFilter):
    title = _("handler")
    parameter_name = "handler"


class ExceptionFilter(ValueFilter):
    title = _("exception")
    parameter_name = "exception"


def distinct(rows: QuerySet[Any], column: str) -> list[str]:
    """Return the distinct values of an indexed column, the first :data:`VALUES` of them.

    One look into the index for each value ("loose index scan"), where SELECT DISTINCT would read
    every entry.
    """
    connection = connections[rows.db]
    quote = connection.ops.quote_name
    table = quote(rows.model._meta.db_table)  # noqa: SLF001 - Django's public _meta
    name = quote(rows.model._meta.get_field(column).column)  # noqa: SLF001
    sql = (
        f"WITH RECURSIVE found(value, number) AS ("  # noqa: S608 - names of our own columns
        f"SELECT MIN({name}), 1 FROM {table} UNION ALL "
        f"SELECT (SELECT MIN({name}) FROM {table} WHERE {name} > found.value), number + 1 "
        f"FROM found WHERE found.value IS NOT NULL AND number < %s"
        f") SELECT value FROM found WHERE value IS NOT NULL"
    )
    with connection.cursor() as cursor:
        cursor.execute(sql, [VALUES])
        return [value for (value,) in cursor.fetchall()]


class ArchiveList(IndexedList):
    """A list that reads the ids of the page from an index alone, and the rows by their ids.

    Of whole rows PostgreSQL may read the order from one index and filter them afterwards, which
    reads everything where it wrongly expects rows that match.
    """

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        if not self.result_count:
            # Where filters exclude each other, a second query costs as much as the count did.
            self.result_list = self.result_list.none()
            return
        ids = self.result_list.values_list("pk", flat=True)
        events = self.model_admin.get_queryset(request).filter(pk__in=sliced(ids))
        if not events.query.select_related:
            events = self.apply_select_related(events)
        # They are part of the payload.
        pages: Any = self.model_admin
        if pages.allows(request, None, "view_payload"):
            values = SearchValue.objects.using(events.db).order_by("path", "value")
            events = events.prefetch_related(Prefetch("search_values", values, "searched"))
        events = events.annotate(overdue=eligibility.overdue())
        self.result_list = list(events.order_by(*self.result_list.query.order_by))
