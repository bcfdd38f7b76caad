"""The base of all our admin pages; rows are not added, changed or deleted in forms."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlencode
from uuid import UUID

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME, ActionForm
from django.contrib.admin.templatetags.admin_urls import add_preserved_filters
from django.contrib.admin.views.main import ChangeList
from django.db import connections, transaction
from django.db.models import Model, QuerySet
from django.forms import Media
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.timezone import localtime
from django.utils.translation import gettext as _

from .formatting import age
from .pagination import CappedPaginator

M = TypeVar("M", bound=Model)

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin
else:

    class _ModelAdmin(admin.ModelAdmin):
        def __class_getitem__(cls, _item: object) -> type:
            return cls


class List(ChangeList):
    """A list whose search promises nothing."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        # Of a list of one page Django asks for all rows, and PostgreSQL, which takes values that
        # exclude each other for independent, may read the whole table and sort it.
        if not self.multi_page:
            self.result_list = self.result_list[: self.list_per_page]
        # Else Django shows "Show all" beside the search, which leads to what is open.
        self.full_result_count = self.result_count


class Actions(ActionForm):
    """The choice of an action; django-unfold shows its button only where it hears of one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["action"].widget.attrs["x-model"] = "action"


class Pages(_ModelAdmin[M]):
    """Lists that count to a cap, pages without a form, addresses that keep the filters."""

    list_per_page = 50
    list_max_show_all = 0
    paginator = CappedPaginator
    action_form = Actions
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

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        """Allow the filters of the list; ``?body__contains=`` would tell payloads apart."""
        ours = {getattr(each, "parameter_name", each) for each in self.get_list_filter(request)}
        return lookup in ours

    def response_action(
        self, request: HttpRequest, queryset: QuerySet[Any], *args: Any, **kwargs: Any
    ) -> HttpResponse | None:
        """Refuse a form with ids that are none, which Django would fail over."""
        if all(map(uuid_of, request.POST.getlist(ACTION_CHECKBOX_NAME))):
            return super().response_action(request, queryset, *args, **kwargs)
        messages.error(
            request,
            _("Some event ids are invalid. Select the events again."),
        )
        return HttpResponseRedirect(self._url("changelist", filters=self._filters(request)))

    def _url(self, name: str, /, *args: Any, filters: str = "", **query: str) -> str:
        url = reverse(
            f"admin:{self.opts.app_label}_{self.opts.model_name}_{name}",
            args=args,
            current_app=self.admin_site.name,
        )
        if query:
            url += f"?{urlencode(query)}"
        return add_preserved_filters({"preserved_filters": filters, "opts": self.opts}, url)

    def _filters(self, request: HttpRequest) -> str:
        return self.get_preserved_filters(request)


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


def uuid_of(text: str) -> UUID | None:
    """Read an id; ``None`` where it is none."""
    try:
        return UUID(text)
    except ValueError:
        return None


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
