"""The base of all our admin pages; forms do not add, change or delete rows."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial, partialmethod, wraps
from typing import Any, ClassVar, Final
from urllib.parse import urlencode
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME, ActionForm
from django.contrib.admin.templatetags.admin_urls import add_preserved_filters
from django.contrib.admin.utils import unquote
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import BadRequest, PermissionDenied
from django.db import Error
from django.db.models import BinaryField, Func, Model, Q, QuerySet, Value
from django.db.models.functions import Coalesce, Substr
from django.http import (
    HttpRequest,
    HttpResponse,
    HttpResponseRedirect,
)
from django.template.response import TemplateResponse
from django.urls import URLPattern, URLResolver, path, reverse
from django.utils.text import capfirst
from django.utils.translation import gettext as _

from ..archive.selection import parse_uuid, starts_with
from ..databases import clock, error_line, is_passing, non_atomic, reason_of
from ..exceptions import AmqpEventsError
from ..models import LENGTH, clean
from ..reasons import Reason
from ..templatetags.amqp_events import code, line, text
from .formatting import SHOWN
from .lists import CAP, CappedPaginator, IndexedList

#: Seconds after which a page is fetched again: of one that shows the present state, and of one on
#: which a person waits for an outcome.
WATCHED_SECONDS: Final = 10
WAITING_SECONDS: Final = 5


class ListActionForm(ActionForm):
    """The choice of an action, when the list was made, and how many rows it counted."""

    listed_at = forms.CharField(label="", required=False, widget=forms.HiddenInput)
    listed = forms.CharField(label="", required=False, widget=forms.HiddenInput)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # django-unfold shows its button only with this attribute.
        self.fields["action"].widget.attrs["x-model"] = "action"


class Pages(admin.ModelAdmin):  # type: ignore[type-arg]
    """Lists that count to a cap, pages without a form, URLs that keep the filters.

    Attributes:
        index_order: the order of the list and, reversed, the only other one: an index has both.
        missing: the message about an id that no row has.
    """

    index_order: ClassVar[tuple[str, ...]] = ()
    missing: ClassVar[Any]
    list_per_page = 50
    list_max_show_all = 0
    paginator = CappedPaginator
    action_form = ListActionForm
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER

    class Media:
        css: ClassVar = {"all": ["django_amqp_events/admin.css"]}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    # -- who may do what

    def __init_subclass__(cls, **options: Any) -> None:
        """Add ``has_<name>_permission`` for each of the model's ``Meta.permissions``."""
        super().__init_subclass__(**options)
        meta: Any = getattr(vars(cls).get("model"), "_meta", None)
        for codename, _label in meta.permissions if meta else ():
            name = f"has_{codename.removesuffix(f'_{meta.model_name}')}_permission"
            if not hasattr(cls, name):
                setattr(cls, name, partialmethod(Pages._has, codename))

    def _has(self, codename: str, request: HttpRequest, obj: Any = None) -> bool:
        return self.granted(request, codename)

    def granted(self, request: HttpRequest, codename: str) -> bool:
        """Return True if this user has a permission."""
        return request.user.has_perm(f"{self.opts.app_label}.{codename}")

    def allows(self, request: HttpRequest, row: Any, *permissions: str) -> bool:
        """Return True if this user may see rows, or this row, and has all these permissions."""
        try:
            self.require(request, row, *permissions)
        except PermissionDenied:
            return False
        return True

    def require(self, request: HttpRequest, row: Any, *permissions: str) -> None:
        """Refuse a user who may not see rows, or this row, or lacks one of these permissions."""
        for permission in ("view", *permissions):
            if not getattr(self, f"has_{permission}_permission")(request, row):
                raise PermissionDenied(self._codename(permission))

    def _codename(self, permission: str) -> str:
        """Return the full name of a permission, which is the archive's if the model has none."""
        own = f"{permission}_{self.opts.model_name}"
        if permission == "view" or own in dict(self.opts.permissions):
            return own
        return f"{permission}_archivedevent"

    # -- what a browser sends

    @property
    def urls(self) -> list[URLPattern]:
        """Return the URLs of these pages; their views get text that every database can compare."""
        return [self._guarded(pattern) for pattern in self.get_urls()]

    def _guarded(self, pattern: Any) -> Any:
        """Wrap the view of a pattern: clean its query, and tell why it is refused or fails.

        PostgreSQL refuses NUL, and other charsets than UTF-8 can yield lone surrogates. Django
        refuses both in forms only.
        """
        if isinstance(pattern, URLResolver):  # an include() of a subclass
            return pattern
        view = pattern.callback

        @wraps(view)
        def run(request: Any, *args: Any, **kwargs: Any) -> Any:
            if codecs.lookup(request.encoding or "utf-8").name != "utf-8":
                raise BadRequest("The charset of a request must be UTF-8.")
            query = request.GET.copy()
            for name, values in request.GET.lists():
                query.setlist(name, [*map(clean, values)])
            request.GET = query
            try:
                return view(request, *args, **kwargs)
            except PermissionDenied as exc:
                context = {"permission": " ".join(map(str, exc.args))}
                return self._render(request, "refused", _("No permission"), context, status=403)
            except (AmqpEventsError, Error) as exc:
                if request.method != "POST":
                    raise
                messages.error(request, code(text(problem(exc), 1_000)))
                page = ("change", kwargs["pk"]) if "pk" in kwargs else ("changelist",)
                return self._redirect(request, *page)

        return URLPattern(pattern.pattern, run, pattern.default_args, pattern.name)

    # -- the list

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        """Allow the filters of the list; ``?body__contains=`` would tell payloads apart."""
        ours = {
            getattr(listed, "parameter_name", listed) for listed in self.get_list_filter(request)
        }
        return lookup in ours

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return IndexedList

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        term = search_term.strip()
        return (queryset.filter(self.matches(term, queryset.db)) if term else queryset), False

    def matches(self, term: str, alias: str) -> Q:
        """Match the id of a row, or a search field."""
        pk = parse_uuid(term)
        condition = Q(pk__in=() if pk is None else (pk,))
        # No field is longer, and SQLite refuses a LIKE of 50,000 bytes. PostgreSQL refuses NUL,
        # which Django's autocomplete passes on.
        findable = len(term) <= LENGTH and "\0" not in term
        for column in self.search_fields if findable else ():
            condition |= self.column_matches(str(column), term, alias)
        return condition

    def column_matches(self, column: str, term: str, alias: str) -> Q:
        """Match the start of a search field, by its index."""
        return starts_with(column, term, alias)

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        self.require(request, None)
        context = {
            "title": capfirst(self.opts.verbose_name_plural),
            "cap": CAP,
            "live": WATCHED_SECONDS,
            "now": datetime.now(UTC),
            **_without_messages(request),
        }
        response = super().changelist_view(request, {**context, **(extra_context or {})})
        shown = getattr(response, "context_data", None) or {}
        if (form := shown.get("action_form")) is not None:
            listed = shown["cl"]
            # Of the clock that writes these rows.
            form.initial["listed_at"] = clock(listed.queryset.db).isoformat()
            form.initial["listed"] = listed.result_count
        return response

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
        response = self.row_view(self.detail_view)(request, unquote(object_id))
        if isinstance(response, TemplateResponse) and response.context_data is not None:
            response.context_data.update(extra_context or {})
        return response

    def rows(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the rows with what their pages show."""
        return self.get_queryset(request)

    def find(self, request: HttpRequest, object_id: str) -> Any:
        """Return a row with what its page shows, ``None`` if there is none."""
        pk = parse_uuid(object_id)
        return None if pk is None else self.rows(request).filter(pk=pk).first()

    def detail_view(self, request: HttpRequest, row: Any) -> TemplateResponse:
        """Show a row that the user may see."""
        raise NotImplementedError

    def row_view(
        self, view: Callable[..., HttpResponse], *permissions: str, posted: bool = False
    ) -> Callable[..., HttpResponse]:
        """Return a view of a row for users with all these permissions, who may see the row.

        Args:
            posted: of a form; after a login, a browser asks for its URL, and gets the row's page.
        """

        def run(request: HttpRequest, pk: UUID | str, **kwargs: Any) -> HttpResponse:
            # First: an answer must not tell whether there is a row.
            self.require(request, None, *permissions)
            row = self.find(request, str(pk))
            if row is None:
                return self._missing(request, pk)
            self.require(request, row, *permissions)
            if posted and request.method != "POST":
                return self._redirect(request, "change", pk)
            return view(request, row, **kwargs)

        return run

    # -- for the pages

    def _path(self, route: str, view: Callable[..., Any], name: str) -> URLPattern:
        label = f"{self.opts.app_label}_{self.opts.model_name}_{name}"
        return path(route, self.admin_site.admin_view(non_atomic(partial(view))), name=label)

    def _url(self, name: str, /, *args: Any, **query: str) -> str:
        return self.url_of(self.model, name, *args, **query)

    def _filtered_url(self, request: HttpRequest, name: str, /, *args: Any, **query: str) -> str:
        """Return the URL of a page of this model that keeps the filters of the list."""
        preserved = self.get_preserved_filters(request)
        url = self._url(name, *args, **query)
        return add_preserved_filters({"preserved_filters": preserved, "opts": self.opts}, url)

    def pages_of(self, request: HttpRequest, model: type[Model]) -> Any:
        """Return this site's pages of a model, ``None`` if it has none that this user may view."""
        if not self.admin_site.is_registered(model):
            return None
        pages = self.admin_site.get_model_admin(model)
        return pages if pages.has_view_permission(request) else None

    def list_url(self, request: HttpRequest, model: type[Model], **query: str) -> str:
        """Return the URL of a list, ``""`` for users who may not see it."""
        return self.url_of(model, "changelist", **query) if self.pages_of(request, model) else ""

    def url_of(self, model: type[Model], name: str, /, *args: Any, **query: str) -> str:
        """Return the URL of a page of any of our models, ``""`` if this site has none."""
        if not self.admin_site.is_registered(model):
            return ""
        name = f"admin:{self.opts.app_label}_{model._meta.model_name}_{name}"  # noqa: SLF001
        url = reverse(name, args=args, current_app=self.admin_site.name)
        return f"{url}?{urlencode(query)}" if query else url

    def _redirect(self, request: HttpRequest, name: str, /, *args: Any) -> HttpResponse:
        return HttpResponseRedirect(self._filtered_url(request, name, *args))

    def _missing(self, request: HttpRequest, pk: object) -> HttpResponse:
        messages.warning(request, str(self.missing) % {"pk": line(pk, 60)})
        return self._redirect(request, "changelist")

    def _render(
        self,
        request: HttpRequest,
        template: str,
        title: str,
        context: Mapping[str, Any],
        status: int = 200,
    ) -> TemplateResponse:
        request.current_app = self.admin_site.name
        folder = "admin/django_amqp_events/"
        return TemplateResponse(
            request,
            [f"{folder}{self.opts.model_name}/{template}.html", f"{folder}{template}.html"],
            {
                **self.admin_site.each_context(request),
                "title": title,
                "subtitle": None,
                "opts": self.opts,
                "media": self.media,
                "preserved_filters": self.get_preserved_filters(request),
                "list_url": self._filtered_url(request, "changelist"),
                **_without_messages(request),
                **context,
            },
            status=status,
        )


def problem(error: AmqpEventsError | Error, *, partly: bool = False) -> Reason:
    """Return what a user is told of an error.

    Args:
        partly: something was done before it.

    Raises:
        Error: it is a mistake of a program, and nothing was done.
    """
    if isinstance(error, AmqpEventsError):
        return Reason.of(error)
    if not is_passing(error):
        if partly:
            return Reason.of(error_line(error))
        raise error
    return reason_of(error)


def fetched(request: HttpRequest) -> bool:
    """Return True if live.js fetches a page, of which it shows no messages."""
    return "X-Live" in request.headers


def _without_messages(request: HttpRequest) -> dict[str, Any]:
    """Leave the messages to another page if this one does not show them."""
    return {"messages": ()} if fetched(request) else {}


def head_of(column: str, size: int = SHOWN) -> Func:
    """Return the first bytes of a column, so that a page never reads more than it shows."""
    head = Substr(column, 1, size, output_field=BinaryField())
    # SQLite's SUBSTR makes NULL of an empty body.
    return Coalesce(head, Value(b""), output_field=BinaryField())


def alias_of(row: Model) -> str:
    """Return the database that a row was read from."""
    return str(row._state.db)  # noqa: SLF001 - Django has no other way


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
