"""The base of all our admin pages; forms do not add, change or delete rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from urllib.parse import urlencode
from uuid import UUID

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME, ActionForm
from django.contrib.admin.templatetags.admin_urls import add_preserved_filters
from django.contrib.admin.utils import unquote
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.db import connections, transaction
from django.db.models import BinaryField, F, Func, Model, Q, QuerySet, Value
from django.forms import Media
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.text import capfirst
from django.utils.timezone import localtime
from django.utils.translation import gettext as _

from ..archive.selection import parse_uuid, starts_with
from ..templatetags.amqp_events import age, line
from .formatting import SHOWN
from .lists import CAP, CappedPaginator, IndexedList

M = TypeVar("M", bound=Model)

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin
else:

    class _ModelAdmin(admin.ModelAdmin):
        def __class_getitem__(cls, _item: object) -> type:
            return cls


class ListActionForm(ActionForm):
    """The choice of an action; django-unfold shows its button only with this attribute."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["action"].widget.attrs["x-model"] = "action"


class Pages(_ModelAdmin[M]):
    """Lists that count to a cap, pages without a form, URLs that keep the filters.

    Attributes:
        folder: the folder of the templates.
        index_order: the order of the list and, reversed, the only other one: an index has both.
        missing: the message about an id that no row has.
    """

    folder: ClassVar[str]
    index_order: ClassVar[tuple[str, ...]] = ()
    missing: ClassVar[Any]
    list_per_page = 50
    list_max_show_all = 0
    paginator = CappedPaginator
    action_form = ListActionForm
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER

    @property
    def media(self) -> Media:
        return super().media + Media(css={"all": ["django_amqp_events/admin.css"]})

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: M | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: M | None = None) -> bool:
        return False

    def _granted(self, request: HttpRequest, codename: str) -> bool:
        return request.user.has_perm(f"{self.opts.app_label}.{codename}")

    # -- the list

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        """Allow the filters of the list; ``?body__contains=`` would tell payloads apart."""
        ours = {getattr(each, "parameter_name", each) for each in self.get_list_filter(request)}
        return lookup in ours

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return IndexedList

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        term = search_term.strip()
        return (queryset.filter(self.matches(term, queryset.db)) if term else queryset), False

    def matches(self, term: str, alias: str) -> Q:
        """Match the id of a row, or the start of a search field, each by an index."""
        found = Q()
        for column in self.search_fields:
            found |= starts_with(str(column), term, alias)
        pk = parse_uuid(term)
        return found if pk is None else found | Q(pk=pk)

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        title = capfirst(self.opts.verbose_name_plural)
        return super().changelist_view(
            request, {"title": title, "cap": CAP, **(extra_context or {})}
        )

    def response_action(
        self, request: HttpRequest, queryset: QuerySet[Any], *args: Any, **kwargs: Any
    ) -> HttpResponse | None:
        """Refuse a form with invalid ids, over which Django would fail."""
        if all(map(parse_uuid, request.POST.getlist(ACTION_CHECKBOX_NAME))):
            return super().response_action(request, queryset, *args, **kwargs)
        messages.error(request, _("Some event ids are invalid. Select the events again."))
        return self._redirect(request, "changelist")

    # -- one row

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show one row; nothing can be changed here."""
        if request.method not in ("GET", "HEAD"):
            raise PermissionDenied
        row = self.find(request, unquote(object_id))
        if row is None:
            return self._missing(request, unquote(object_id))
        if not self.has_view_permission(request, row):
            raise PermissionDenied
        return self.detail_view(request, row, extra_context or {})

    def find(self, request: HttpRequest, object_id: str) -> M | None:
        """Return a row with what its page shows."""
        return self.get_object(request, object_id)

    def detail_view(
        self, request: HttpRequest, row: M, extra_context: Mapping[str, Any]
    ) -> HttpResponse:
        """Show a row that the user may see."""
        raise NotImplementedError

    # -- for the pages

    def _path(self, route: str, view: Callable[..., Any], name: str) -> URLPattern:
        label = f"{self.opts.app_label}_{self.opts.model_name}_{name}"
        return path(route, self.admin_site.admin_view(view), name=label)

    def _url(self, name: str, /, *args: Any, filters: str = "", **query: str) -> str:
        url = self._url_of(self.model, name, *args, **query)
        return add_preserved_filters({"preserved_filters": filters, "opts": self.opts}, url)

    def _url_of(self, model: type[Model], name: str, /, *args: Any, **query: str) -> str:
        """Return the URL of a page of any of our models, ``""`` if this site has none."""
        if not self.admin_site.is_registered(model):
            return ""
        name = f"admin:{self.opts.app_label}_{model._meta.model_name}_{name}"  # noqa: SLF001
        url = reverse(name, args=args, current_app=self.admin_site.name)
        return f"{url}?{urlencode(query)}" if query else url

    def _filters(self, request: HttpRequest) -> str:
        return self.get_preserved_filters(request)

    def _redirect(self, request: HttpRequest, name: str, /, *args: Any) -> HttpResponse:
        """Redirect to a page of this model, with the filters of the list."""
        return HttpResponseRedirect(self._url(name, *args, filters=self._filters(request)))

    def _missing(self, request: HttpRequest, pk: object) -> HttpResponse:
        messages.warning(request, str(self.missing) % {"pk": line(pk, 60)})
        return self._redirect(request, "changelist")

    def _render(
        self, request: HttpRequest, template: str, title: str, context: Mapping[str, Any]
    ) -> TemplateResponse:
        request.current_app = self.admin_site.name
        return TemplateResponse(
            request,
            f"admin/django_amqp_events/{self.folder}/{template}.html",
            {
                **self.admin_site.each_context(request),
                "title": title,
                "subtitle": None,
                "opts": self.opts,
                "media": self.media,
                "list_url": self._url("changelist", filters=self._filters(request)),
                **context,
            },
        )


def permission_check(codename: str) -> Callable[[Any, HttpRequest], bool]:
    """Return a ``has_…_permission`` method."""

    def check(pages: Pages[Any], request: HttpRequest) -> bool:
        return pages._granted(request, codename)  # noqa: SLF001 - a method of it

    return check


def head_of(column: str, size: int = SHOWN) -> Func:
    """Return the first bytes of a column, so that a page never reads more than it shows."""
    return Func(F(column), Value(1), Value(size), function="SUBSTR", output_field=BinaryField())


def alias_of(row: Model) -> str:
    """Return the database that a row was read from."""
    return str(row._state.db)  # noqa: SLF001 - Django has no other way


def ago(then: datetime, now: datetime) -> str:
    """Show how long ago that was, and when."""
    return format_html(
        '<time class="ae-age" datetime="{}" title="{}">{}</time>',
        then.isoformat(),
        date_format(localtime(then), "DATETIME_FORMAT"),
        age(then, now),
    )


def non_atomic(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Exempt a view from ATOMIC_REQUESTS: a claim is committed before it is published."""
    for alias in connections:
        view = transaction.non_atomic_requests(using=alias)(view)
    return view


def as_file(pk: UUID, body: bytes) -> HttpResponse:
    """Return a body byte for byte, as a file that no browser interprets."""
    return HttpResponse(
        body,
        content_type="application/octet-stream",
        headers={
            "Content-Disposition": f'attachment; filename="{pk}.bin"',
            "X-Content-Type-Options": "nosniff",
            "Content-Security-Policy": "default-src 'none'; sandbox",
        },
    )
