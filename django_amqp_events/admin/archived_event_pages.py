"""The archive's pages: list, detail, payload."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID

from django.apps import apps
from django.contrib import admin, messages
from django.contrib.admin.views.main import ChangeList
from django.db.models import F, Q, QuerySet
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy, pgettext

from ..archive import eligibility, selection, tables
from ..archive.selection import SearchTerm, parse_uuid
from ..exceptions import AmqpEventsError
from ..models import (
    ArchivedEvent,
    ArchivedFailure,
    FailureGroup,
    Replay,
    ReplayBatch,
    SearchValue,
    State,
)
from ..monitor.state_texts import about_state
from ..reasons import Reason
from ..templatetags.amqp_events import TEXT, ago, breakable, line, text
from . import archived_event_actions, formatting
from .action_pages import Action, in_list
from .archived_event_actions import ACTIONS
from .base import WAITING_SECONDS, alias_of, fetched, head_of
from .editing_pages import EditingPages
from .filters import (
    BatchFilter,
    EventFilter,
    EventStateFilter,
    GroupFilter,
    ReasonFilter,
    TimeFilter,
)
from .formatting import counted, number
from .lists import ArchiveList, ExceptionFilter, HandlerFilter
from .replay_batch_pages import BULK_REPLAY, background_selected

#: Failures, replays and decisions of one event that its page shows, the newest.
FAILURES = 20
REPLAYS = 100
#: Search values of an event that the list shows.
VALUES = 4
#: The newest failure first: a replay is later than what it replays, whatever the clocks say.
_NEWEST = (F("replay__number").desc(nulls_last=True), "-failed_at", "-pk")
_ATTEMPTS = ngettext_lazy("%(count)s attempt", "%(count)s attempts", "count")
_REPLAYS = ngettext_lazy("%(count)s replay", "%(count)s replays", "count")
_TOO_MANY = gettext_lazy(
    "More than %(most)s values match. Only events of the first %(most)s are listed; refine the "
    "search."
)


class ArchivedEventAdmin(EditingPages):
    """Shows the archive; only actions change the state of events.

    Rows that :meth:`get_queryset` leaves out are on no page, and no action takes them.
    """

    model = ArchivedEvent
    index_order = ("-last_failed_at", "-pk")
    missing = gettext_lazy("There is no archived event %(pk)s.")
    row_actions = ACTIONS
    preview = staticmethod(archived_event_actions.preview)
    run = staticmethod(archived_event_actions.run)
    version = F("version")
    gone = eligibility.DELETED
    changed = F("state_since")
    too_many = gettext_lazy(
        "More than %(limit)s events are selected. Filter the list, or replay them with the action "
        "“Replay selected events in the background” or `manage.py events_replay --background`."
    )
    list_display = ("what", "age", "handled_by", "status", "failure")
    list_display_links = ("what",)
    list_filter = (
        EventStateFilter,
        GroupFilter,
        BatchFilter,
        HandlerFilter,
        EventFilter,
        ExceptionFilter,
        ReasonFilter,
        TimeFilter,
    )
    sortable_by = ("age",)
    search_fields = ("event_id", "correlation_id")
    search_help_text = gettext_lazy(
        "Start of an event id or correlation id, or the id of a row or replay."
    )
    actions = (
        in_list(ACTIONS["replay"]),
        background_selected,
        *(in_list(ACTIONS[name]) for name in ("discard", "restore", "resolve")),
    )

    def has_bulk_replay_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return True if this user may create batches on this site."""
        return self.granted(request, BULK_REPLAY) and self.admin_site.is_registered(ReplayBatch)

    # -- the list

    def get_queryset(self, request: HttpRequest) -> QuerySet[ArchivedEvent]:
        """Return the rows of the database that is written, without what is large."""
        events = super().get_queryset(request).using(tables.database())
        return events.defer(*ArchivedEvent.LARGE)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return ArchiveList

    def matches(self, term: str, alias: str) -> Q:
        """Match ids of events, correlations, rows and replays."""
        condition = super().matches(term, alias)
        if (pk := parse_uuid(term)) is not None:
            of_replay = Replay.objects.using(alias).filter(pk=pk)
            condition |= Q(pk__in=list(of_replay.values_list("event_id", flat=True)))
        return condition

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search by values, too, for users who may view payloads, of which these are a part."""
        events, duplicates = super().get_search_results(request, queryset, search_term)
        term = self._search_term(request, search_term)
        if term is None:
            return events, duplicates
        many = partial(self._warn, request, _TOO_MANY % {"most": number(selection.FEW_VALUES)})
        matching = selection.matching([term], queryset.db, too_many=many)
        if not (term.path or term.start):
            ids = self.matches(search_term.strip(), queryset.db)
            return queryset.filter(ids | matching), duplicates
        events = queryset.filter(matching)
        return events.order_by(*selection.sort_few(events.query.order_by)), duplicates

    def _search_term(self, request: HttpRequest, text: str) -> SearchTerm | None:
        if not text.strip() or not self.allows(request, None, "view_payload"):
            return None
        try:
            return SearchTerm.parse_any(text)
        except AmqpEventsError:
            # The settings are wrong, so no path is known.
            return None

    def _warn(self, request: HttpRequest, said: str) -> None:
        if not fetched(request):
            messages.warning(request, said)

    @admin.display(description=gettext_lazy("event"))
    def what(self, event: ArchivedEvent) -> str:
        searched: Sequence[SearchValue] = getattr(event, "searched", ())
        values = ((breakable(str(value), 60),) for value in searched[:VALUES])
        return format_html(
            '<span class="ae-what">{}</span> {}{}',
            breakable(event.name),
            format_html_join(" ", '<span class="ae-quiet">{}</span>', values),
            " …" if len(searched) > VALUES else "",
        )

    @admin.display(description=gettext_lazy("handler"))
    def handled_by(self, event: ArchivedEvent) -> str:
        return breakable(event.handler) or _("no handler")

    @admin.display(description=gettext_lazy("state"))
    def status(self, event: ArchivedEvent) -> str:
        return format_html(
            '<span class="ae-state ae-{}">{}</span>', event.state, event.get_state_display()
        )

    def _note(self, event: Any) -> str:
        if event.unconfirmed:
            return _("last replay not confirmed")
        if event.error:
            return _("last replay not published")
        return _("overdue") if event.overdue else ""

    @admin.display(description=gettext_lazy("failure"))
    def failure(self, event: ArchivedEvent) -> str:
        note = self._note(event)
        tries = [counted(_ATTEMPTS, event.attempts)]
        if event.replays:
            tries.append(counted(_REPLAYS, event.replays))
        return format_html(
            '<span class="ae-exception" title="{}">{}</span> <span>{}</span> '
            '<code class="ae-quiet">{}</code> <span class="ae-tries ae-quiet">{}</span>{}',
            line(event.exception, 300),
            breakable(event.exception.rpartition(".")[2] or event.reason),
            line(event.message),
            breakable(event.location),
            ", ".join(tries),
            format_html(' <span class="ae-warning">{}</span>', note) if note else "",
        )

    @admin.display(description=gettext_lazy("When"), ordering="last_failed_at")
    def age(self, event: ArchivedEvent) -> str:
        return ago(event.last_failed_at, datetime.now(UTC))

    # -- one event

    def rows(self, request: HttpRequest) -> QuerySet[Any]:
        events = self.get_queryset(request).select_related("group").defer(None).defer("body")
        readable = self.allows(request, None, "view_payload")
        return events.annotate(head=head_of("body")) if readable else events

    def find(self, request: HttpRequest, object_id: str) -> Any:
        event = super().find(request, object_id)
        if hasattr(event, "head") and event.body_size <= formatting.SHOWN:
            event.body = bytes(event.head)
        return event

    def detail_view(self, request: HttpRequest, row: Any) -> TemplateResponse:
        row.overdue = eligibility.is_overdue(row)
        context = {
            **self._about(request, row),
            **self._content(request, row),
            "revisions": self._revisions(request, row),
            "event": row,
            "buttons": self._event_buttons(request, row),
        }
        title = _("%(name)s for %(handler)s (%(id)s)") % {
            "name": line(row.name),
            "handler": line(row.handler) or pgettext("for", "no handler"),
            "id": line(row.event_id, 9),
        }
        return self._render(request, "detail", title, context)

    def _about(self, request: HttpRequest, event: Any) -> dict[str, Any]:
        """Return everything but payload and headers."""
        using = alias_of(event)
        failures = list(event.failure_set.using(using).order_by(*_NEWEST)[:FAILURES])
        made = event.replay_set.using(using).select_related("revision")
        made = made.filter(Q(number__isnull=False) | Q(state=Replay.State.RETURNED))
        replays: list[Any] = list(
            made.defer("revision__body").order_by("-requested_at", "-pk")[:REPLAYS]
        )
        actions = list(event.action_set.using(using).order_by("-pk")[:REPLAYS])
        # The row describes the last failure that took effect.
        last = next((failed for failed in failures if not failed.late), None) or last_failure(event)
        document = last.about if last is not None else {}
        by_id: dict[UUID | None, Replay] = {replayed.pk: replayed for replayed in replays}
        tasks = self._tasks(request, [event.task_id, *(replayed.task_id for replayed in replays)])
        for replayed in replays:
            replayed.result = tasks.get(replayed.task_id)
        meaning, remedy = about_state(event)
        return {
            "meaning": meaning,
            "remedy": remedy,
            "note": self._note(event),
            "overdue": event.overdue,
            "in_progress": event.state in (State.QUEUED, State.REPLAYING),
            "live": WAITING_SECONDS,
            "now": datetime.now(UTC),
            "failed": by_id.get(last.replay_id) if last else None,
            **formatting.failure(event, document),
            "deaths": formatting.mappings(document.get("deaths")),
            "group_url": self.url_of(FailureGroup, "change", event.group_id)
            if event.group_id and self.pages_of(request, FailureGroup)
            else "",
            "steps": formatting.timeline(event, failures[::-1], replays[::-1], actions[::-1]),
            "more_failures": len(failures) == FAILURES,
            "more_audit": len(actions) == REPLAYS,
            "task": tasks.get(event.task_id),
        }

    def _content(self, request: HttpRequest, event: Any) -> dict[str, Any]:
        """Return payload and headers for users who may see them."""
        shown = self.shown_payload(
            request,
            event,
            head=bytes(getattr(event, "head", b"")),
            size=event.body_size,
            read=lambda: event.payload,
        )
        if not shown["readable"]:
            return shown
        headers, headers_note = formatting.headers(event)
        return {
            **shown,
            "headers": headers,
            "headers_note": headers_note,
            "types": [line(t) for t in (event.content_type, event.content_encoding) if t],
        }

    def _event_buttons(self, request: HttpRequest, event: Any) -> dict[str, Any]:
        """Return the buttons of an event, and why others are missing."""
        offered = [
            action
            for action in ACTIONS.values()
            if event.state == action.rule.state and (not action.rule.overdue or event.overdue)
        ]
        buttons = self._buttons(request, event, event.version, offered)
        if event.state == State.ARCHIVED:
            edit = self._edit_button(request, event)
            kind = "obstacles" if isinstance(edit, str) else "links"
            if edit and edit not in buttons[kind]:
                buttons[kind].append(edit)
        return buttons

    def _obstacle(self, row: ArchivedEvent, action: Action) -> str:
        if not action.publishes:
            return ""
        try:
            where = eligibility.target(row)
        except AmqpEventsError as exc:
            where = Reason.of(exc)
        if not isinstance(where, Reason):
            return ""
        return _("It cannot be replayed: %(why)s") % {"why": text(where, TEXT)}

    def _tasks(self, request: HttpRequest, ids: list[str]) -> dict[str, Any]:
        """Return the results that django-celery-results has, for users who may see them."""
        if not apps.is_installed("django_celery_results"):
            return {}
        model: Any = apps.get_model("django_celery_results", "TaskResult")
        if self.pages_of(request, model) is None:
            return {}
        results = model.objects.filter(task_id__in=ids).only("pk", "task_id", "status")
        return {result.task_id: result for result in results}


def last_failure(event: ArchivedEvent) -> ArchivedFailure | None:
    """Return the last failure of an event that took effect."""
    effective = event.failure_set.using(alias_of(event)).filter(late=False)
    return effective.order_by(*_NEWEST).first()
