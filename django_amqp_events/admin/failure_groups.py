"""The pages of failure groups: what fails alike, how often, who looks after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, Protocol
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.utils import unquote
from django.contrib.admin.views.main import SEARCH_VAR, ChangeList
from django.core.exceptions import PermissionDenied
from django.core.validators import URLValidator
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, pgettext, pgettext_lazy

from ..archive import states
from ..archive.groups import failure_groups, group_counts
from ..models import (
    LENGTH,
    ArchivedEvent,
    FailureGroup,
    visible,
)
from . import formatting
from .archived_event_actions import DECISIONS, Decision
from .archived_events import ArchivedEventAdmin
from .base import (
    List,
    Pages,
    ago,
    non_atomic,
    uuid_of,
)
from .charts import sparkline
from .filters import ColumnFilter
from .formatting import line
from .pagination import CAP

#: Hours that the picture of a group shows.
HOURS: Final = 24
#: What people wrote and decided that a page shows, the newest.
ACTIONS: Final = 100
#: What can be decided about all open events of a group.
ALL: Final = ("replay", "discard")
_TEMPLATES: Final = "admin/django_amqp_events/failuregroup"
_WORDS: Final = {
    "note": gettext_lazy("note"),
    "assignee": gettext_lazy("assignee"),
    "ticket": gettext_lazy("ticket"),
}


class _Counted(Protocol):
    """A group as the pages have it, with its exact numbers."""

    open_now: int
    again_now: int
    going_now: int
    hours: dict[datetime, dict[str, int]]


class GroupList(List):
    """Has the numbers of the groups on the page, in two statements for all of them."""

    def get_results(self, request: HttpRequest) -> None:
        """Read the page."""
        super().get_results(request)
        found: list[Any] = list(self.result_list)
        _count(found, datetime.now(UTC))
        self.result_list = found

    @property
    def nothing_open(self) -> bool:
        """Return True if the list is empty only because it shows groups with open events."""
        chosen = [each.chosen for each in self.filter_specs if isinstance(each, StandingFilter)]
        return not self.result_count and chosen == [StandingFilter.OPEN]

    @property
    def all_url(self) -> str:
        """The same list with groups of every kind."""
        return self.get_query_string({StandingFilter.parameter_name: "all"}, ["p"])


class StandingFilter(admin.SimpleListFilter):
    """Filter by state: groups with open events by default, all groups in a search."""

    title = gettext_lazy("state")
    parameter_name = "state"
    OPEN = "open"

    def __init__(self, request: HttpRequest, *args: Any) -> None:
        self._default = "all" if request.GET.get(SEARCH_VAR, "").strip() else self.OPEN
        super().__init__(request, *args)

    def lookups(
        self, request: HttpRequest, model_admin: admin.ModelAdmin[Any]
    ) -> list[tuple[str, Any]]:
        return [
            (self.OPEN, gettext_lazy("with open events")),
            ("back", gettext_lazy("reopened")),
            ("right", gettext_lazy("no open events")),
            ("all", gettext_lazy("all")),
        ]

    @property
    def chosen(self) -> str:
        """Return the selected filter."""
        return self.value() or self._default

    def queryset(
        self, request: HttpRequest, queryset: QuerySet[FailureGroup]
    ) -> QuerySet[FailureGroup]:
        wanted = {
            self.OPEN: Q(open_now__gt=0),
            "back": Q(reopened_at__isnull=False),
            "right": Q(open_now=0),
            "all": Q(),
        }
        chosen = wanted.get(self.chosen)
        return queryset.none() if chosen is None else queryset.filter(chosen)

    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        chosen = self.chosen
        for value, title in self.lookup_choices:
            yield {
                "selected": chosen == value,
                "query_string": changelist.get_query_string({self.parameter_name: str(value)}),
                "display": title,
            }


class GroupColumnFilter(ColumnFilter):
    """The distinct values of an indexed column of the groups."""

    nothing = gettext_lazy("(none)")

    def rows(self) -> QuerySet[Any]:
        return failure_groups.groups()


class HandlerFilter(GroupColumnFilter):
    title = gettext_lazy("handler")
    parameter_name = "handler"
    column = "handler"
    nothing = gettext_lazy("(no handler)")


class ExceptionFilter(GroupColumnFilter):
    title = gettext_lazy("exception")
    parameter_name = "exception"
    column = "exception"


class AssigneeFilter(GroupColumnFilter):
    title = gettext_lazy("assignee")
    parameter_name = "assignee"
    column = "assignee"
    nothing = gettext_lazy("(unassigned)")


class GroupForm(forms.Form):
    """The note, assignee and ticket of a group."""

    note = forms.CharField(
        label=gettext_lazy("Note"),
        required=False,
        max_length=5_000,
        widget=forms.Textarea(attrs={"rows": 3, "cols": 60}),
    )
    assignee = forms.CharField(
        label=gettext_lazy("Assignee"), required=False, max_length=LENGTH, strip=True
    )
    ticket = forms.CharField(
        label=gettext_lazy("Ticket URL"),
        required=False,
        max_length=LENGTH,
        validators=[URLValidator(schemes=["http", "https"])],
    )
    edits = forms.IntegerField(widget=forms.HiddenInput, min_value=0, max_value=2**31 - 2)


class FailureGroupAdmin(Pages[FailureGroup]):
    """Shows groups of failures; what can be decided is decided about their events.

    For an admin site of your own, register :class:`django_amqp_events.models.FailureGroup` with
    this class, and :class:`django_amqp_events.models.ArchivedEvent` with
    :class:`django_amqp_events.admin.ArchivedEventAdmin`: it has the events, and the permissions to
    decide about them.
    """

    list_display = ("what", "opened", "share", "picture", "seen", "people")
    list_display_links = ("what",)
    list_filter = (StandingFilter, HandlerFilter, ExceptionFilter, AssigneeFilter)
    sortable_by = ("opened", "seen")
    ordering = ("-last_seen", "-pk")
    search_fields = ("exception", "handler")
    search_help_text = gettext_lazy(
        "Start of an exception or handler: its dotted name, or the last part."
    )
    actions = ()

    # -- who may do what

    def has_assign_permission(self, request: HttpRequest) -> bool:
        """Return True if this user may write note, assignee and ticket."""
        return self._granted(request, "assign_failuregroup")

    def _events(self, request: HttpRequest) -> ArchivedEventAdmin | None:
        """Return the pages of events of this site, where this user may see them."""
        if not self.admin_site.is_registered(ArchivedEvent):
            return None
        found = self.admin_site.get_model_admin(ArchivedEvent)
        if not isinstance(found, ArchivedEventAdmin) or not found.has_view_permission(request):
            return None
        return found

    # -- the list

    def get_queryset(self, request: HttpRequest) -> QuerySet[FailureGroup]:
        """Return the groups with what is open of them, read where they are written."""
        found = super().get_queryset(request).using(states.database())
        return group_counts.with_exact_counts(found, names=("open",))

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return GroupList

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search by how exception or handler begin; a group's id finds it."""
        term = search_term.strip()
        if not term:
            return queryset, False
        wanted = Q()
        for column in self.search_fields:
            wanted |= Q(**{f"{column}__istartswith": term})
            wanted |= Q(**{f"{column}__icontains": f".{term}"})
        if (pk := uuid_of(term)) is not None:
            wanted |= Q(pk=pk)
        return queryset.filter(wanted), False

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        context = {
            "title": _("Failure groups"),
            "cap": CAP,
            "loose": states.rows().filter(group__isnull=True).exists(),
            **(extra_context or {}),
        }
        return super().changelist_view(request, context)

    @admin.display(description=gettext_lazy("failure, handler"))
    def what(self, group: FailureGroup) -> str:
        back = group.reopened_at
        return format_html(
            '<span class="ae-what ae-exception" title="{}">{}</span> '
            '<span class="ae-quiet">{}</span> <code class="ae-quiet">{}</code>{}',
            line(group.exception, 300),
            line(group.exception.rpartition(".")[2] or group.reason),
            line(group.handler) or _("no handler"),
            line(group.frame),
            format_html(
                ' <span class="ae-warning">{}</span>',
                format_html(_("reopened {time} ago"), time=ago(back, datetime.now(UTC))),
            )
            if back is not None
            else "",
        )

    @admin.display(description=pgettext_lazy("number of events", "open"), ordering="open_now")
    def opened(self, group: _Counted) -> int:
        return group.open_now

    @admin.display(description=gettext_lazy("replayed"))
    def share(self, group: _Counted) -> str:
        return _share(group)

    @admin.display(description=gettext_lazy("24 hours"))
    def picture(self, group: _Counted) -> str:
        return _picture(group, datetime.now(UTC))

    @admin.display(description=gettext_lazy("last seen"), ordering="last_seen")
    def seen(self, group: FailureGroup) -> str:
        now = datetime.now(UTC)
        return format_html(
            '{} <span class="ae-quiet">{}</span>',
            ago(group.last_seen, now),
            format_html(_("first {time}"), time=ago(group.first_seen, now)),
        )

    @admin.display(description=gettext_lazy("assignee"))
    def people(self, group: FailureGroup) -> str:
        return format_html(
            '<span>{}</span> {} <span class="ae-quiet">{}</span>',
            line(group.assignee, 40),
            _ticket(group),
            line(group.note, 80),
        )

    # -- addresses

    def get_urls(self) -> list[URLPattern]:
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        ours = [
            path(
                f"<uuid:pk>/{each}/",
                self.admin_site.admin_view(
                    non_atomic(partial(self.decide_view, decision=DECISIONS[each]))
                ),
                name=f"{name}_{each}",
            )
            for each in ALL
        ]
        ours += [
            path(f"<uuid:pk>/{each}/", self.admin_site.admin_view(view), name=f"{name}_{each}")
            for each, view in (("write", self.write_view), ("batch", self.batch_view))
        ]
        return [*ours, *super().get_urls()]

    # -- one group

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show a group."""
        if request.method not in ("GET", "HEAD"):
            raise PermissionDenied
        group = self._found(request, uuid_of(unquote(object_id)))
        if group is None:
            return self._gone(request, unquote(object_id))
        return self._page(request, group, extra_context=extra_context)

    def write_view(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """Write note, assignee and ticket."""
        if request.method != "POST" or not self.has_assign_permission(request):
            raise PermissionDenied
        group = self._found(request, pk)
        if group is None:
            return self._gone(request, str(pk))
        data = request.POST.copy()
        if "mine" in data:
            data["assignee"] = request.user.get_username()
        form = GroupForm(data)
        if not form.is_valid():
            return self._page(request, group, form=form)
        given = form.cleaned_data
        changed = failure_groups.write(
            pk,
            seen=given["edits"],
            by=request.user.get_username(),
            now=datetime.now(UTC),
            note=given["note"],
            assignee=given["assignee"],
            ticket=given["ticket"],
        )
        if changed is None:
            # As it is now: the row that was read may be older than the other's.
            group = self._found(request, pk) or group
            messages.error(request, self._who_was_faster(group))
            data["edits"] = str(group.edits)
            return self._page(request, group, form=GroupForm(data))
        if changed:
            words = ", ".join(str(_WORDS[name]) for name in changed)
            # The history is read by people with other languages.
            self.log_change(request, group, f"Changed: {', '.join(changed)}")
            messages.success(request, _("Saved: %(what)s.") % {"what": words})
        return HttpResponseRedirect(self._url("change", pk, filters=self._filters(request)))

    def decide_view(self, request: HttpRequest, pk: UUID, *, decision: Decision) -> HttpResponse:
        """Freeze what is open of a group now, and ask whether it is to be done."""
        if request.method != "POST":
            raise PermissionDenied
        events = self._events(request)
        group = self._found(request, pk)
        if group is None:
            return self._gone(request, str(pk))
        if events is None:
            raise PermissionDenied
        asked = events.decide_group(request, decision, group)
        return asked or HttpResponseRedirect(
            self._url("change", pk, filters=self._filters(request))
        )

    def batch_view(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """Freeze what is open of a group now, to be replayed in the background."""
        if request.method != "POST":
            raise PermissionDenied
        events = self._events(request)
        group = self._found(request, pk)
        if group is None:
            return self._gone(request, str(pk))
        if events is None:
            raise PermissionDenied
        made = events.batch_group(request, group)
        return made or HttpResponseRedirect(self._url("change", pk, filters=self._filters(request)))

    def _found(self, request: HttpRequest, pk: UUID | None) -> FailureGroup | None:
        if not self.has_view_permission(request):
            raise PermissionDenied
        return self.get_queryset(request).filter(pk=pk).first() if pk is not None else None

    def _gone(self, request: HttpRequest, pk: str) -> HttpResponse:
        messages.warning(
            request, _("There is no failure group %(group)s.") % {"group": line(pk, 60)}
        )
        return HttpResponseRedirect(self._url("changelist", filters=self._filters(request)))

    def _who_was_faster(self, group: FailureGroup) -> str:
        written = group.action_set.using(group._state.db).filter(events=None)  # noqa: SLF001
        last = written.order_by("-at", "-pk").first()
        return _(
            "Nothing was saved: %(who)s changed this group since you opened it. It now "
            "says: %(note)s; assignee %(assignee)s; ticket %(ticket)s. Save again to "
            "replace that with yours."
        ) % {
            "who": line(last.by) if last is not None else pgettext("who", "another user"),
            "note": line(group.note, 200) or "-",
            "assignee": line(group.assignee) or "-",
            "ticket": line(group.ticket) or "-",
        }

    def _page(
        self,
        request: HttpRequest,
        group: FailureGroup,
        *,
        form: GroupForm | None = None,
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        now = datetime.now(UTC)
        _count([group], now)
        counted: Any = group
        filters = self._filters(request)
        written = {"note": group.note, "assignee": group.assignee, "ticket": group.ticket}
        actions = group.action_set.using(group._state.db).order_by("-at", "-pk")  # noqa: SLF001
        context = {
            **self.admin_site.each_context(request),
            **self._sample(request, group),
            "title": formatting.text(group),
            "subtitle": None,
            "opts": self.opts,
            "media": self.media,
            "group": group,
            "open": counted.open_now,
            "going": counted.going_now,
            "share": _share(counted),
            "picture": _picture(counted, now),
            "totals": _totals(counted),
            "first": ago(group.first_seen, now),
            "last": ago(group.last_seen, now),
            "facts": [
                (name, visible(text, formatting.TEXT))
                for name, text in (
                    (_("Handler"), group.handler or _("none")),
                    (_("Exception"), group.exception),
                    (_("Reason"), group.reason),
                    (_("Failing function"), group.frame),
                    (_("Service"), group.service),
                    (_("Group id"), str(group.pk)),
                )
                if text
            ],
            "ticket": _ticket(group),
            "note": visible(group.note),
            "assignee": line(group.assignee),
            "actions": [
                (
                    each.at,
                    each.get_action_display(),
                    line(each.by),
                    visible(each.text, formatting.TEXT),
                    each.events,
                )
                for each in actions[:ACTIONS]
            ],
            "may_write": self.has_assign_permission(request),
            "form": form or GroupForm(initial={**written, "edits": group.edits}),
            "write_url": self._url("write", group.pk, filters=filters),
            "list_url": self._url("changelist", filters=filters),
            "buttons": self._buttons(request, group, counted.open_now),
            **(extra_context or {}),
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, f"{_TEMPLATES}/detail.html", context)

    def _buttons(self, request: HttpRequest, group: FailureGroup, count: int) -> list[Any]:
        """Return what this user can decide about the open events."""
        events = self._events(request)
        if events is None or not count:
            return []
        found = [name for name in ALL if events.may(request, DECISIONS[name])]
        if events.may_replay_in_background(request):
            found.append("batch")
        return [{"name": name, "url": self._url(name, group.pk)} for name in found]

    def _sample(self, request: HttpRequest, group: FailureGroup) -> dict[str, Any]:
        """Show the newest failure, and where the others are; for those who may see events."""
        events = self._events(request)
        if events is None:
            return {"sample": None, "events_url": "", "all_url": ""}
        address = partial(reverse, current_app=self.admin_site.name)
        name = f"admin:{self.opts.app_label}_{ArchivedEvent._meta.model_name}"  # noqa: SLF001
        listed = f"{address(f'{name}_changelist')}?group={group.pk}"
        found: dict[str, Any] = {
            "sample": None,
            "events_url": listed,
            "all_url": f"{listed}&state=all",
        }
        rows = events.get_queryset(request).filter(group=group.pk)
        event = rows.order_by("-last_failed_at", "-pk").first()
        if event is None:
            return found
        failures = event.failure_set.using(event._state.db).filter(late=False)  # noqa: SLF001
        failure = failures.order_by("-failed_at", "-pk").first()
        document = failure.about if failure is not None else {}
        kind, message = formatting.exception(document)
        return {
            **found,
            "sample": event,
            "sample_url": address(f"{name}_change", args=[event.pk]),
            "sample_title": line(event),
            "exception": kind or line(event.exception, formatting.TEXT),
            "message": message or visible(event.message, formatting.TEXT),
            "detail": visible(event.detail, formatting.TEXT),
            "traceback": formatting.fold_traceback(document.get("traceback")),
        }


def _count(found: list[Any], now: datetime) -> None:
    """Give groups their exact numbers and hours; two statements for all of them."""
    ids = [group.pk for group in found]
    numbers = group_counts.with_exact_counts(failure_groups.groups().filter(pk__in=ids))
    exact = {
        pk: values
        for pk, *values in numbers.values_list("pk", "open_now", "again_now", "going_now")
    }
    since = now - timedelta(hours=HOURS - 1)
    hours = group_counts.hourly_counts(ids, since=since, using=states.database()) if ids else {}
    for group in found:
        group.open_now, group.again_now, group.going_now = exact.get(group.pk, (0, 0, 0))
        group.hours = hours.get(group.pk, {})


def _totals(group: _Counted) -> dict[str, int]:
    totals = Counter[str]()
    for values in group.hours.values():
        totals.update(values)
    return {name: totals[name] for name in ("archived", "succeeded", "discarded")}


def _picture(group: _Counted, now: datetime) -> str:
    first = group_counts.hour_of(now) - timedelta(hours=HOURS - 1)
    values = [
        group.hours.get(first + timedelta(hours=number), {}).get("archived", 0)
        for number in range(HOURS)
    ]
    totals = _totals(group)
    label = _(
        "Last 24 hours: %(archived)s failed (at most %(most)s in an hour), "
        "%(succeeded)s succeeded, %(discarded)s discarded"
    ) % {**totals, "most": max(values)}
    return sparkline(values, label)


def _share(group: _Counted) -> str:
    if not group.open_now:
        return "-"
    # Never 0 % where there are some, nor all of them where one is missing.
    percent = 100 * group.again_now // group.open_now
    return f"{percent or bool(group.again_now):d} %"


def _ticket(group: FailureGroup) -> str:
    # The form takes no other address; a row that was written by hand might have one.
    if not group.ticket.startswith(("https://", "http://")):
        return line(group.ticket, 40)
    return format_html(
        '<a href="{}" rel="noopener noreferrer">{}</a>',
        group.ticket,
        line(group.ticket.partition("//")[2], 40),
    )


__all__ = ["FailureGroupAdmin", "GroupList"]
