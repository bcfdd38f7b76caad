"""The pages of failure groups: counts and owners of failures that are alike, and their replay."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, ClassVar, Final

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.core.validators import RegexValidator, URLValidator
from django.db.models import Q, QuerySet
from django.db.models.functions import Lower
from django.db.models.lookups import Contains
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, pgettext, pgettext_lazy

from ..archive import tables
from ..archive.groups import failure_groups, group_counts
from ..archive.selection import Selection
from ..models import LENGTH, ArchivedEvent, FailureGroup, State
from ..templatetags.amqp_events import ago, breakable, line, text
from . import formatting
from .archived_event_pages import ArchivedEventAdmin, last_failure
from .base import Pages
from .lists import ExceptionFilter, HandlerFilter, IndexedList, StateFilter, ValueFilter
from .replay_batch_pages import freeze

#: Entries of the history that a page shows, the newest.
HISTORY: Final = 100
_WORDS: Final = {
    "note": gettext_lazy("note"),
    "assignee": gettext_lazy("assignee"),
    "ticket": gettext_lazy("ticket"),
}


class GroupStateFilter(StateFilter):
    titles: ClassVar = {
        "open": gettext_lazy("with open events"),
        "back": gettext_lazy("reopened"),
        "right": gettext_lazy("no open events"),
        "all": gettext_lazy("all"),
    }
    _CONDITIONS: ClassVar = {
        "open": group_counts.has_open(),
        "back": Q(reopened_at__isnull=False),
        "right": ~group_counts.has_open(),
    }

    def matching(self, rows: QuerySet[FailureGroup], state: str) -> QuerySet[FailureGroup]:
        condition = self._CONDITIONS.get(state)
        return rows.none() if condition is None else rows.filter(condition)


class AssigneeFilter(ValueFilter):
    title = gettext_lazy("assignee")
    parameter_name = "assignee"


class GroupList(IndexedList):
    """A list whose first order is that of an annotation, which ``ordering`` may not name."""

    def get_ordering_field_columns(self) -> dict[int, Any]:
        return super().get_ordering_field_columns() or {self.list_display.index("seen"): "desc"}


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
        # A host of an intranet may have no dot.
        validators=[RegexValidator(r"\A(?i:https?)://[^\s/?#]\S*\Z", URLValidator.message)],
    )
    edits = forms.IntegerField(widget=forms.HiddenInput, min_value=0, max_value=2**31 - 2)


class FailureGroupAdmin(Pages):
    """Shows groups of failures, and replays their events."""

    model = FailureGroup
    missing = gettext_lazy("There is no failure group %(pk)s.")

    list_display = ("what", "opened", "seen", "people")
    list_display_links = ("what",)
    list_filter = (GroupStateFilter, HandlerFilter, ExceptionFilter, AssigneeFilter)
    sortable_by = ("opened", "seen")
    search_fields = ("exception", "handler")
    search_help_text = gettext_lazy("Part of an exception or handler, or the id of a group.")
    actions = ()

    def _events(self, request: HttpRequest) -> ArchivedEventAdmin | None:
        """Return the pages of events of this site, where this user may see them."""
        pages = self.pages_of(request, ArchivedEvent)
        return pages if isinstance(pages, ArchivedEventAdmin) else None

    # -- the list

    def get_queryset(self, request: HttpRequest) -> QuerySet[FailureGroup]:
        """Return the groups with their counts, the last failure first."""
        groups = group_counts.with_counts(failure_groups.groups())
        return groups.order_by("-last_seen", "-pk")

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return GroupList

    def column_matches(self, column: str, term: str, alias: str) -> Q:
        # Groups are few: no index is needed. MySQL and MariaDB compare our tables case by case.
        return Q(Contains(Lower(column), term.lower()))

    @admin.display(description=gettext_lazy("failure, handler"))
    def what(self, group: Any) -> str:
        back = group.reopened_at
        return format_html(
            '<span class="ae-what ae-exception" title="{}">{}</span> '
            '<span class="ae-quiet">{}</span> <code class="ae-quiet">{}</code>{}',
            line(group.exception, 300),
            breakable(group.exception.rpartition(".")[2] or group.reason),
            breakable(group.handler) or _("no handler"),
            breakable(group.frame),
            format_html(
                ' <span class="ae-warning">{}</span>',
                format_html(_("reopened {time}"), time=ago(back, datetime.now(UTC))),
            )
            if back is not None
            else "",
        )

    @admin.display(description=pgettext_lazy("number of events", "open"), ordering="open")
    def opened(self, group: Any) -> str:
        label = pgettext("number of events", "open")
        return formatting.labelled(label, group.open)

    @admin.display(description=gettext_lazy("last seen"), ordering="last_seen")
    def seen(self, group: Any) -> str:
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

    # -- one group

    def get_urls(self) -> list[URLPattern]:
        batch = self.row_view(self.batch_view, posted=True)
        write = self.row_view(self.write_view, "assign", posted=True)
        return [
            self._path("<uuid:pk>/batch/", batch, "batch"),
            self._path("<uuid:pk>/write/", write, "write"),
            *super().get_urls(),
        ]

    def write_view(self, request: HttpRequest, group: FailureGroup) -> HttpResponse:
        """Write note, assignee and ticket."""
        form = GroupForm(request.POST)
        if not form.is_valid():
            return self.detail_view(request, group, form)
        given = form.cleaned_data
        changed = failure_groups.write(
            group.pk,
            seen=given.pop("edits"),
            by=request.user.get_username(),
            now=tables.clock(),
            **given,
        )
        if changed is None:
            told = _("Nothing was saved: another user has changed this group. Open it again.")
            messages.error(request, told)
            return self.detail_view(request, group, form)
        if changed:
            words = ", ".join(str(_WORDS[name]) for name in changed)
            messages.success(request, _("Saved: %(what)s.") % {"what": words})
        return self._redirect(request, "change", group.pk)

    def batch_view(self, request: HttpRequest, group: FailureGroup) -> HttpResponse:
        """Freeze the open events of a group in a batch."""
        events = self._events(request)
        if events is None:
            raise PermissionDenied("view_archivedevent")
        events.require(request, None, "bulk_replay")
        rows = events.get_queryset(request).filter(group=group.pk, state=State.ARCHIVED)
        title = Selection(groups=[group.pk]).title()
        response = freeze(events, request, rows, title, group.pk)
        return response or self._redirect(request, "change", group.pk)

    def detail_view(
        self, request: HttpRequest, group: Any, form: GroupForm | None = None
    ) -> TemplateResponse:
        now = datetime.now(UTC)
        written = {name: getattr(group, name) for name in GroupForm.base_fields}
        context = {
            **self._sample(request, group),
            "handled_url": self.list_url(request, ArchivedEvent, handler=group.handler),
            "group": group,
            "now": now,
            "ticket": _ticket(group),
            "steps": failure_groups.history(group, HISTORY),
            "may_write": self.allows(request, None, "assign"),
            "form": form or GroupForm(initial=written),
            "may_replay": bool(group.open) and self._may_replay(request),
        }
        return self._render(request, "detail", text(group), context)

    def _may_replay(self, request: HttpRequest) -> bool:
        events = self._events(request)
        return events is not None and events.allows(request, None, "bulk_replay")

    def _sample(self, request: HttpRequest, group: FailureGroup) -> dict[str, Any]:
        """Return the newest failure, for users who may see events."""
        events = self._events(request)
        if events is None:
            return {"linked": False}
        rows = events.get_queryset(request).filter(group=group.pk)
        rows = rows.defer(None).defer("body", "headers_raw")
        event = rows.order_by("-last_failed_at", "-pk").first()
        if event is None or not events.allows(request, event):
            return {"linked": True}
        last = last_failure(event)
        document = last.about if last is not None else {}
        return {"linked": True, "sample": event, **formatting.failure(event, document)}


def _ticket(group: FailureGroup) -> str:
    # The form takes no other address; a row that was written by hand might have one.
    if not group.ticket.lower().startswith(("https://", "http://")):
        return breakable(group.ticket, 40)
    return format_html(
        '<a href="{}" rel="noopener noreferrer">{}</a>',
        group.ticket,
        breakable(group.ticket.partition("//")[2], 40),
    )
