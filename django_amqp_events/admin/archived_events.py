"""The archive's pages: list, detail, payload, confirmation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from django.apps import apps
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.utils import unquote
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.db.models import BinaryField, F, Func, Q, QuerySet, Value
from django.http import (
    HttpRequest,
    HttpResponse,
    HttpResponseRedirect,
    StreamingHttpResponse,
)
from django.http.response import HttpResponseBase
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext, pgettext

from ..archive import (
    eligibility,
    export,
    redaction,
    selection,
    states,
)
from ..archive.groups import failure_groups
from ..archive.replay import Report
from ..archive.states import Seen
from ..exceptions import AmqpEventsError
from ..models import (
    ArchiveAction,
    ArchivedEvent,
    FailureGroup,
    GroupAction,
    Replay,
    ReplayBatch,
    State,
    visible,
)
from ..reasons import Reason, stored
from . import archived_event_actions as decisions
from . import formatting
from .actions import DecidingPages
from .archived_event_actions import (
    DECISIONS,
    LIMIT,
    NAMED,
    Decision,
    ReasonForm,
)
from .base import (
    List,
    ago,
    as_file,
    uuid_of,
)
from .editing import EditingPages
from .filters import (
    EventFilter,
    ExceptionFilter,
    GroupFilter,
    HandlerFilter,
    ReasonFilter,
    StateFilter,
    TimeFilter,
    handler_of,
    settings_and_registry,
)
from .formatting import line, number
from .pagination import CAP
from .replay_batches import begin, freeze

logger = logging.getLogger(__name__)

#: Failures, replays and decisions of one event that its page shows, the newest.
FAILURES = 20
REPLAYS = 100
#: Related events of each kind, the newest.
RELATED = 20
#: Reasons that one answer names; the rest it counts.
_GROUPS = 5
#: Where our templates are.
_TEMPLATES = "admin/django_amqp_events/archivedevent"


class ArchiveList(List):
    """Ordered by the last failure and nothing else, so that an index has the order."""

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        """Return one of the two orders."""
        oldest_first = super().get_ordering(request, queryset)[0] == "last_failed_at"
        return ["last_failed_at", "pk"] if oldest_first else ["-last_failed_at", "-pk"]

    def get_results(self, request: HttpRequest) -> None:
        """Read the ids of the page from an index alone, and the rows by their ids.

        Of whole rows PostgreSQL may read the order from one index and throw away what the filter
        leaves out, which is everything where it expects rows that there are none of.
        """
        super().get_results(request)
        if not self.result_count:
            # Where filters exclude each other, looking once more costs as much as counting did.
            self.result_list = self.result_list.none()
            return
        ids = self.result_list.values("pk")
        found = self.model_admin.get_queryset(request).filter(pk__in=ids)
        if not found.query.select_related:
            found = self.apply_select_related(found)
        self.result_list = found.order_by(*self.result_list.query.order_by)

    @property
    def nothing_open(self) -> bool:
        """Return True if the list is empty only because it shows open events."""
        chosen = [each.chosen for each in self.filter_specs if isinstance(each, StateFilter)]
        return not self.result_count and chosen == [StateFilter.OPEN]

    @property
    def all_url(self) -> str:
        """The same list with events of every state."""
        return self.get_query_string({"state": "all"}, ["p"])


class ArchivedEventAdmin(EditingPages, DecidingPages[ArchivedEvent]):
    """Shows the archive; events change state only by the decisions that a page confirms.

    For an admin site of your own, register :class:`django_amqp_events.models.ArchivedEvent` with
    this class or a subclass. Whatever :meth:`get_queryset` leaves out cannot be decided about.
    """

    choices = DECISIONS
    templates = _TEMPLATES
    list_display = ("what", "standing", "failure", "tries", "replayed", "age")
    list_display_links = ("what",)
    list_filter = (
        StateFilter,
        GroupFilter,
        HandlerFilter,
        EventFilter,
        ExceptionFilter,
        ReasonFilter,
        TimeFilter,
    )
    sortable_by = ("age",)
    search_fields = ("event_id",)
    search_help_text = gettext_lazy(
        "Start of an event id or correlation id, or the id of a row or replay."
    )
    actions = (
        "replay_selected",
        "background_selected",
        "discard_selected",
        "restore_selected",
        "force_selected",
        "resolve_selected",
    )

    # -- who may do what

    def has_replay_permission(self, request: HttpRequest) -> bool:
        """Return True if this user may replay."""
        return self._granted(request, DECISIONS["replay"].permission)

    def has_force_permission(self, request: HttpRequest) -> bool:
        """Return True if this user may force replays."""
        return self._granted(request, DECISIONS["force"].permission)

    def has_discard_permission(self, request: HttpRequest) -> bool:
        """Return True if this user may discard."""
        return self._granted(request, DECISIONS["discard"].permission)

    def has_export_permission(self, request: HttpRequest) -> bool:
        """Return True if this user may export payloads."""
        granted = self._granted(request, "export_archivedevent")
        return granted and self.has_payload_permission(request)

    def has_restore_permission(self, request: HttpRequest) -> bool:
        """Return True if this user may restore."""
        return self._granted(request, DECISIONS["restore"].permission)

    def has_bulk_replay_permission(self, request: HttpRequest) -> bool:
        """Return True if this user may replay events in a batch."""
        return self._granted(request, "bulk_replay_archivedevent")

    # -- the list

    def get_queryset(self, request: HttpRequest) -> QuerySet[ArchivedEvent]:
        """Return the rows without what is large, read where they are written."""
        found = super().get_queryset(request).using(states.database())
        return found.defer("body", "headers_raw", "detail")

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return ArchiveList

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search by ids: whole or by how they begin, always by an index."""
        term = search_term.strip()
        if not term:
            return queryset, False
        wanted = selection.starts_with("event_id", term) | selection.starts_with(
            "correlation_id", term
        )
        if (pk := uuid_of(term)) is not None:
            wanted |= Q(pk=pk)
            of_replay = Replay.objects.using(queryset.db).filter(pk=pk)
            wanted |= Q(pk__in=list(of_replay.values_list("event_id", flat=True)))
        return queryset.filter(wanted), False

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        context = {"title": _("Archived events"), "cap": CAP, **(extra_context or {})}
        if self.has_export_permission(request):
            query = request.GET.urlencode()
            context["export_url"] = self._url("export") + (f"?{query}" if query else "")
        return super().changelist_view(request, context)

    def export_view(self, request: HttpRequest) -> HttpResponseBase:
        """Return all that the list's filters find, a JSON document a line."""
        if not self.has_view_permission(request) or not self.has_export_permission(request):
            raise PermissionDenied
        try:
            found = self.get_changelist_instance(request).queryset
        except IncorrectLookupParameters:
            messages.error(request, _("The URL contains an unknown filter."))
            return HttpResponseRedirect(self._url("changelist"))
        raw = self.has_raw_permission(request)
        logger.info("%s exports archived events: %s", request.user, request.GET.urlencode())
        return StreamingHttpResponse(
            export.export(found, raw=raw),
            content_type="application/x-ndjson",
            headers={
                "Content-Disposition": 'attachment; filename="archived-events.jsonl"',
                "X-Content-Type-Options": "nosniff",
            },
        )

    @admin.display(description=gettext_lazy("event"))
    def what(self, event: ArchivedEvent) -> str:
        return format_html(
            '<span class="ae-what">{}</span> <span class="ae-quiet">{}</span>',
            line(event.name),
            line(event.handler) or _("no handler"),
        )

    @admin.display(description=gettext_lazy("state"))
    def standing(self, event: ArchivedEvent) -> str:
        note = self._note(event)
        return format_html(
            '<span class="ae-state ae-{}">{}</span>{}',
            event.state,
            event.get_state_display(),
            format_html(' <span class="ae-warning">{}</span>', note) if note else "",
        )

    def _note(self, event: ArchivedEvent) -> str:
        if event.unconfirmed:
            return _("last replay not confirmed")
        if event.error:
            return _("last replay not published")
        return _("overdue") if self._overdue(event) else ""

    def _overdue(self, event: ArchivedEvent) -> bool:
        if event.unconfirmed or event.error or event.state != State.REPLAYING:
            return False
        return eligibility.is_overdue(event, handler_of(event, settings_and_registry()))

    @admin.display(description=gettext_lazy("failure"))
    def failure(self, event: ArchivedEvent) -> str:
        return format_html(
            '<span class="ae-exception" title="{}">{}</span> <span>{}</span> '
            '<code class="ae-quiet">{}</code>',
            line(event.exception, 300),
            line(event.exception.rpartition(".")[2] or event.reason),
            line(event.message),
            line(event.location),
        )

    @admin.display(description=gettext_lazy("attempts"))
    def tries(self, event: ArchivedEvent) -> int:
        return event.attempts

    @admin.display(description=gettext_lazy("replays"))
    def replayed(self, event: ArchivedEvent) -> int:
        return event.replays

    @admin.display(description=gettext_lazy("failed"), ordering="last_failed_at")
    def age(self, event: ArchivedEvent) -> str:
        return ago(event.last_failed_at, datetime.now(UTC))

    # -- actions of the list: freeze what is selected, and ask

    @admin.action(description=gettext_lazy("Replay selected events"), permissions=["replay"])
    def replay_selected(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        return self._selected(request, queryset, DECISIONS["replay"])

    @admin.action(
        description=gettext_lazy("Replay selected events in the background"),
        permissions=["bulk_replay"],
    )
    def background_selected(
        self, request: HttpRequest, queryset: QuerySet[Any]
    ) -> HttpResponse | None:
        """Freeze any number of them in a batch, and show what its replay would do."""
        return begin(self, request, queryset)

    def get_actions(self, request: HttpRequest, action_location: Any = None) -> dict[str, Any]:
        """Leave out what this site has no page for."""
        # Django 6.1 says on which page the actions are offered; those before it do not.
        place = {} if action_location is None else {"action_location": action_location}
        found = super().get_actions(request, **place)
        if not self.admin_site.is_registered(ReplayBatch):
            found.pop("background_selected", None)
        return found

    @admin.action(
        description=gettext_lazy("Force replay of selected overdue events"), permissions=["force"]
    )
    def force_selected(self, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        return self._selected(request, queryset, DECISIONS["force"])

    @admin.action(
        description=gettext_lazy("Mark selected overdue events as resolved"),
        permissions=["discard"],
    )
    def resolve_selected(
        self, request: HttpRequest, queryset: QuerySet[Any]
    ) -> HttpResponse | None:
        return self._selected(request, queryset, DECISIONS["resolve"])

    @admin.action(description=gettext_lazy("Discard selected events"), permissions=["discard"])
    def discard_selected(
        self, request: HttpRequest, queryset: QuerySet[Any]
    ) -> HttpResponse | None:
        return self._selected(request, queryset, DECISIONS["discard"])

    @admin.action(description=gettext_lazy("Restore selected events"), permissions=["restore"])
    def restore_selected(
        self, request: HttpRequest, queryset: QuerySet[Any]
    ) -> HttpResponse | None:
        return self._selected(request, queryset, DECISIONS["restore"])

    def _selected(
        self, request: HttpRequest, queryset: QuerySet[Any], decision: Decision
    ) -> HttpResponse | None:
        # One more than may be, to know whether there are more.
        seen = dict(queryset.values_list("pk", "version")[: LIMIT + 1])
        if len(seen) > LIMIT:
            messages.error(
                request,
                _(
                    "More than %(limit)s events are selected. Filter the list, or replay them in "
                    "the background with the action of that name or `manage.py events_replay "
                    "--background`."
                )
                % {"limit": number(LIMIT)},
            )
            return None
        # As Django's form of the actions reads it.
        if request.POST.get("select_across", "").lower() in ("", "0", "false"):
            chosen = len(set(request.POST.getlist(ACTION_CHECKBOX_NAME)))
            if chosen > len(seen):
                messages.warning(
                    request,
                    ngettext(
                        "%(count)s of the %(total)s selected events changed and left this list.",
                        "%(count)s of the %(total)s selected events changed and left this list.",
                        chosen - len(seen),
                    )
                    % {"count": chosen - len(seen), "total": chosen},
                )
        if not seen:
            return None
        filters = self._filters(request)
        return self._ask(request, decision, seen, filters=filters, back="list")

    # -- addresses

    def get_urls(self) -> list[URLPattern]:
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        ours = self._decide_urls()
        ours.append(
            path("export/", self.admin_site.admin_view(self.export_view), name=f"{name}_export")
        )
        ours.append(
            path(
                "<uuid:pk>/payload/",
                self.admin_site.admin_view(self.payload_view),
                name=f"{name}_payload",
            )
        )
        return [*ours, *self._editing_urls(), *super().get_urls()]

    # -- detail

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show one event; nothing can be changed here."""
        if request.method not in ("GET", "HEAD"):
            raise PermissionDenied
        readable = self.has_payload_permission(request)
        pk = uuid_of(unquote(object_id))
        rows = self.get_queryset(request).defer(None).defer("body")
        if readable:
            # Never more of a body than the page shows.
            first = Func(
                F("body"),
                Value(1),
                Value(formatting.SHOWN),
                function="SUBSTR",
                output_field=BinaryField(),
            )
            rows = rows.annotate(head=first)
        event = rows.filter(pk=pk).first() if pk is not None else None
        filters = self._filters(request)
        if event is None:
            messages.warning(
                request,
                _("There is no archived event %(pk)s.") % {"pk": line(unquote(object_id), 60)},
            )
            return HttpResponseRedirect(self._url("changelist", filters=filters))
        if not self.has_view_permission(request, event):
            raise PermissionDenied
        if readable and event.body_size <= formatting.SHOWN:
            event.body = _head(event)
        context = {
            **self.admin_site.each_context(request),
            **self._about(request, event),
            **self._content(request, event, readable=readable),
            "revisions": self._revisions(request, event),
            "related": self._related(request, event, filters),
            "title": _("%(name)s for %(handler)s (%(id)s)")
            % {
                "name": line(event.name),
                "handler": line(event.handler) or pgettext("for", "no handler"),
                "id": line(event.event_id, 9),
            },
            "subtitle": None,
            "opts": self.opts,
            "media": self.media,
            "event": event,
            "list_url": self._url("changelist", filters=filters),
            "history_url": self._url("history", event.pk, filters=filters),
            "buttons": self._buttons(request, event, filters),
            **(extra_context or {}),
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, f"{_TEMPLATES}/detail.html", context)

    def _about(self, request: HttpRequest, event: ArchivedEvent) -> dict[str, Any]:
        """Everything but payload and headers."""
        using = event._state.db  # noqa: SLF001 - Django's own way to say where a row is from
        failures = list(event.failure_set.using(using).order_by("-failed_at", "-pk")[:FAILURES])
        made = event.replay_set.using(using).select_related("revision").defer("revision__body")
        replays = list(made.order_by("-number")[:REPLAYS])
        actions = list(event.action_set.using(using).order_by("-at", "-pk")[:REPLAYS])
        # The last failure that counted is the one that the row tells of.
        last = next((each for each in failures if not each.late), None)
        if last is None:
            counted = event.failure_set.using(using).filter(late=False)
            last = counted.order_by("-failed_at", "-pk").first()
        document = last.about if last is not None else {}
        kind, message = formatting.exception(document)
        numbers = {each.pk: each.number for each in replays}
        failed = next((each for each in replays if last and each.pk == last.replay_id), None)
        ids = {event.task_id: None, **{each.task_id: each for each in replays}}
        tasks = self._tasks(request, list(ids))
        now = datetime.now(UTC)
        meaning, remedy = formatting.STATES.get(event.state, ("", ""))
        if event.state == State.DISCARDED and actions and formatting.resolved(actions[0]):
            meaning, remedy = formatting.RESOLVED
        return {
            "meaning": meaning,
            "remedy": remedy,
            "note": self._note(event),
            "overdue": self._overdue(event),
            "since": formatting.age(event.state_since, now),
            "age": formatting.age(event.last_failed_at, now),
            "error": visible(stored(event.error), formatting.TEXT),
            "failure": last,
            "failed": formatting.replayed(failed) if failed is not None else None,
            "exception": kind or line(event.exception, formatting.TEXT),
            "message": message or visible(event.message, formatting.TEXT),
            "detail": visible(event.detail, formatting.TEXT),
            "traceback": formatting.fold_traceback(document.get("traceback")),
            "frames": formatting.frames(document),
            "deaths": formatting.deaths(document),
            "cut": [line(each) for each in _texts(document.get("cut"))],
            "facts": self._facts(request, event),
            "attempts": [
                (attempt, numbers.get(each.replay_id) if each.replay_id else None)
                for each in reversed(failures)
                for attempt in formatting.attempts(each)
            ],
            "steps": formatting.timeline(event, reversed(failures), replays[::-1],
            reversed(actions)),
            "more_failures": len(failures) == FAILURES,
            "audit": _audit(actions, replays),
            "more_audit": len(actions) == REPLAYS,
            "replays": [(formatting.replayed(each), tasks.get(each.task_id)) for each in replays],
            "location": line(event.location, formatting.TEXT),
            "reason": line(event.reason),
            "task": tasks.get(event.task_id),
            "task_id": event.task_id,
        }  # fmt: skip

    def _facts(self, request: HttpRequest, event: ArchivedEvent) -> list[tuple[str, str, str]]:
        """Return the event's identifiers: label, value, and the URL of events that share it."""

        def same(value: str) -> str:
            return self._url("changelist", q=value) if value else ""

        return [
            (name, visible(text, formatting.TEXT), url)
            for name, text, url in (
                (_("Event"), event.name, self._url("changelist", state="all", event=event.name)),
                (
                    _("Handler"),
                    event.handler or _("none"),
                    self._url("changelist", state="all", handler=event.handler),
                ),
                (_("Queue"), event.queue, ""),
                (_("Published by"), event.source, ""),
                (_("Event id"), event.event_id, same(event.event_id)),
                (_("Correlation id"), event.correlation_id, same(event.correlation_id)),
                (_("Causation id"), event.causation_id, same(event.causation_id)),
                (_("Row id"), str(event.pk), ""),
                *self._group(request, event),
            )
            if text
        ]

    def _group(self, request: HttpRequest, event: ArchivedEvent) -> list[tuple[str, str, str]]:
        """Name the group of failures that it belongs to, for who may see those."""
        url = self._group_url(event.group_id)
        if not url or event.group is None:
            return []
        pages = self.admin_site.get_model_admin(FailureGroup)
        if not pages.has_view_permission(request, event.group):
            return []
        return [(_("Failures like it"), formatting.text(event.group), url)]

    def _group_url(self, pk: UUID | None) -> str:
        """Return the address of a group; ``""`` where this site has none."""
        if pk is None or not self.admin_site.is_registered(FailureGroup):
            return ""
        name = f"admin:{self.opts.app_label}_{FailureGroup._meta.model_name}_change"  # noqa: SLF001
        return reverse(name, args=[pk], current_app=self.admin_site.name)

    def _related(
        self, request: HttpRequest, event: ArchivedEvent, filters: str
    ) -> list[dict[str, Any]]:
        """Return the same event at other handlers, and what came of the same cause."""
        now = datetime.now(UTC)
        groups = []
        rows = self.get_queryset(request).exclude(pk=event.pk).order_by("-last_failed_at", "-pk")
        for title, column in (
            (_("The same event id"), "event_id"),
            (_("The same correlation id"), "correlation_id"),
        ):
            value = getattr(event, column)
            found = rows.filter(**{column: value})
            if column == "correlation_id":
                found = found.exclude(event_id=event.event_id)
            events = list(found[:RELATED]) if value else []
            if events:
                groups.append(
                    {
                        "title": title,
                        "url": self._url("changelist", q=value),
                        "events": [
                            {
                                "name": line(each.name),
                                "handler": line(each.handler) or _("none"),
                                "state": each.state,
                                "words": line(each.get_state_display()),
                                "age": ago(each.last_failed_at, now),
                                "failure": formatting.exception_line(each.exception, each.message)
                                or line(each.reason),
                                "url": self._url("change", each.pk, filters=filters),
                            }
                            for each in events
                        ],
                    }
                )
        return groups

    def _content(
        self, request: HttpRequest, event: ArchivedEvent, *, readable: bool
    ) -> dict[str, Any]:
        """Payload and headers, for those who may see them; redacted where there is a hook."""
        if not readable:
            return {"readable": False}
        head = _head(event)
        whole = event.body_size <= formatting.SHOWN
        raw = self.has_raw_permission(request)
        payload, cut, problem = "", False, ""
        if whole:
            try:
                found = event.payload
            except Exception:  # noqa: BLE001 - headers that cannot be read
                found = None
            if found is not None:
                safe = redaction.redact(event.name, found)
                problem = formatting.text(safe.problem, formatting.TEXT)
                if safe.payload is not None:
                    payload, cut = formatting.pretty(dict(safe.payload))
            elif not raw:
                problem = _("The payload cannot be decoded, so it cannot be redacted.")
            else:
                problem = _("The payload cannot be decoded. This is the raw body.")
        elif raw:
            problem = _(
                "The payload is too long to decode here. This is the start of the raw body."
            )
        else:
            problem = _("The payload is too long to decode here.")
        headers, headers_note = formatting.headers(event)
        return {
            "readable": True,
            "payload": payload,
            "payload_cut": cut,
            "problem": problem,
            "redacted": redaction.has_hook(),
            "raw": raw,
            "body": formatting.body(head, event.body_size) if raw else None,
            "headers": headers,
            "headers_note": headers_note,
            "types": [line(t) for t in (event.content_type, event.content_encoding) if t],
            "payload_url": self._url("payload", event.pk),
        }

    def _buttons(self, request: HttpRequest, event: ArchivedEvent, filters: str) -> dict[str, Any]:
        """Return what this user can decide now, and what keeps him from the rest."""
        possible = [each for each in DECISIONS.values() if each.before == event.state]
        obstacles = []
        buttons = []
        for each in possible:
            if each.overdue and not self._overdue(event):
                continue
            if not self.may(request, each):
                obstacles.append(self._forbidden(each))
                continue
            if each.publishes:
                try:
                    where = eligibility.target(event)
                except AmqpEventsError as exc:
                    where = Reason.of(exc)
                if isinstance(where, Reason):
                    obstacles.append(
                        _("It cannot be replayed: %(why)s")
                        % {"why": formatting.text(where, formatting.TEXT)}
                    )
                    continue
            buttons.append(self._button(each, event.pk, event.version, filters))
        if event.state == State.ARCHIVED:
            edit, obstacle = self._edit_button(request, event, filters)
            buttons += [edit] if edit else []
            obstacles += [obstacle] if obstacle and obstacle not in obstacles else []
        return {"links": buttons, "obstacles": obstacles}

    def _tasks(self, request: HttpRequest, ids: list[str]) -> dict[str, dict[str, str]]:
        """Return the stored results of django-celery-results that there are, with their pages."""
        if not apps.is_installed("django_celery_results"):
            return {}
        model: Any = apps.get_model("django_celery_results", "TaskResult")
        if not self.admin_site.is_registered(model):
            return {}
        registered = self.admin_site.get_model_admin(model)
        if not registered.has_view_or_change_permission(request):
            return {}
        url = "admin:django_celery_results_taskresult_change"
        return {
            task_id: {
                "status": status,
                "url": reverse(url, args=[pk], current_app=self.admin_site.name),
            }
            for pk, task_id, status in model.objects.filter(task_id__in=ids).values_list(
                "pk", "task_id", "status"
            )
        }

    def payload_view(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """The body as it was published, as a file."""
        if not self.has_view_permission(request) or not self.has_raw_permission(request):
            raise PermissionDenied
        event = self.get_queryset(request).defer(None).only("body").filter(pk=pk).first()
        if event is None:
            messages.warning(request, _("There is no archived event %(pk)s.") % {"pk": pk})
            return HttpResponseRedirect(self._url("changelist"))
        return as_file(pk, bytes(event.body))

    # -- deciding

    def decide_view(self, request: HttpRequest, *, decision: Decision) -> HttpResponse:
        """Ask (GET), and do it (POST)."""
        if not self.has_view_permission(request) or not self.may(request, decision):
            raise PermissionDenied
        data = request.POST if request.method == "POST" else request.GET
        filters = self._filters(request)
        back, group = _back(data.get("back", ""))
        seen = decisions.decode_selection(data.get("seen", ""))
        if seen is None:
            return self._unknown(request, filters)
        if request.method != "POST":
            return self._ask(request, decision, seen, filters=filters, back=back)
        form = ReasonForm(decision, request.POST)
        if not form.is_valid():
            return self._ask(request, decision, seen, filters=filters, back=back, form=form)
        rows = self._rows(request, seen)
        reason = form.cleaned_data["reason"]
        report = decisions.carry_out(decision, seen, rows, user=request.user, reason=reason)
        _tell(request, decision, report, len(seen))
        if group is not None and decision.name in GroupAction.Action.values:
            failure_groups.record_decision(
                group,
                action=decision.name,
                # The form comes from a browser: what is of another group is not counted here.
                events=sum(rows[pk].group_id == group for pk in report.published),
                by=request.user.get_username(),
                reason=reason,
                now=datetime.now(UTC),
            )
        if url := self._group_url(group):
            return HttpResponseRedirect(url)
        if back == "event" and len(seen) == 1:
            return HttpResponseRedirect(self._url("change", next(iter(seen)), filters=filters))
        return HttpResponseRedirect(self._url("changelist", filters=filters))

    def decide_group(
        self, request: HttpRequest, decision: Decision, group: FailureGroup
    ) -> HttpResponse | None:
        """Freeze what is open of a group, and ask; ``None`` where there is nothing to ask about.

        What fails from here on is not taken.
        """
        if not self.has_view_permission(request) or not self.may(request, decision):
            raise PermissionDenied
        rows = self.get_queryset(request).filter(group=group.pk, state=decision.before)
        # One more than may be, to know whether there are more.
        oldest = rows.order_by("last_failed_at", "pk").values_list("pk", "version")
        seen = dict(oldest[: LIMIT + 1])
        if not seen:
            messages.warning(request, _("This group has no open events."))
            return None
        if len(seen) > LIMIT and decision.publishes:
            messages.error(
                request,
                _(
                    "More than %(limit)s events are open. Replay them in the background, here or "
                    "with `manage.py events_replay --background --group %(group)s`."
                )
                % {"limit": number(LIMIT), "group": group.pk},
            )
            return None
        if len(seen) > LIMIT:
            seen = dict(list(seen.items())[:LIMIT])
            messages.warning(
                request,
                _(
                    "More than %(limit)s events are open. These are the %(limit)s that failed "
                    "first; repeat the action for the rest."
                )
                % {"limit": number(LIMIT)},
            )
        return self._ask(request, decision, seen, filters="", back=f"group:{group.pk.hex}")

    def may_replay_in_background(self, request: HttpRequest) -> bool:
        """Return True if this user may create batches on this site."""
        return self.has_bulk_replay_permission(request) and self.admin_site.is_registered(
            ReplayBatch
        )

    def batch_group(self, request: HttpRequest, group: FailureGroup) -> HttpResponse | None:
        """Make a batch of what is open of a group; ``None`` where that is not possible."""
        if not self.has_view_permission(request) or not self.may_replay_in_background(request):
            raise PermissionDenied
        rows = self.get_queryset(request).filter(group=group.pk, state=State.ARCHIVED)
        if not rows.exists():
            messages.warning(request, _("This group has no open events."))
            return None
        criteria = selection.Selection(groups=[group.pk])
        return freeze(self, request, rows, title=str(group), criteria=criteria)

    def _rows(self, request: HttpRequest, seen: Seen) -> dict[UUID, ArchivedEvent]:
        return {row.pk: row for row in self.get_queryset(request).filter(pk__in=list(seen))}

    def _ask(
        self,
        request: HttpRequest,
        decision: Decision,
        seen: Seen,
        *,
        filters: str,
        back: str,
        form: ReasonForm | None = None,
    ) -> HttpResponse:
        rows = self._rows(request, seen)
        try:
            plan = decisions.plan(decision, seen, rows)
        except AmqpEventsError as exc:
            messages.error(
                request,
                _("Nothing can be published: %(why)s") % {"why": formatting.text(exc, 1_000)},
            )
            return HttpResponseRedirect(self._url("changelist", filters=filters))
        cancel = self._group_url(_back(back)[1])
        if not cancel and back == "event" and len(seen) == 1:
            cancel = self._url("change", next(iter(seen)), filters=filters)
        eligible = set(plan.eligible)
        return self._confirm(
            request,
            decision,
            plan=plan,
            eligible={pk: seen[pk] for pk in seen if pk in eligible},
            total=len(seen),
            events=[
                (
                    line(rows[pk].name),
                    line(rows[pk].event_id),
                    line(rows[pk].handler) or _("none"),
                    formatting.exception_line(rows[pk].exception, rows[pk].message)
                    or line(rows[pk].reason),
                    rows[pk].replays,
                )
                for pk in plan.eligible[:NAMED]
            ],
            back=back,
            cancel_url=cancel,
            filters=filters,
            form=form,
        )


def _back(text: str) -> tuple[str, UUID | None]:
    """Read where a decision leads back to: an event, a group, or else the list."""
    kind, _colon, number = text.partition(":")
    if kind == "group" and (group := uuid_of(number)) is not None:
        return f"group:{group.hex}", group
    return ("event" if text == "event" else "list"), None


def _tell(request: HttpRequest, decision: Decision, report: Report, total: int) -> None:
    """Show the result of an action as messages."""
    if count := len(report.published):
        messages.success(request, _said(decision.name, count) % {"count": number(count)})
    returned = decisions.by_reason(report.returned)
    for say, alike, one, more in (
        (messages.error, returned, _returned, _returned_more),
        (messages.warning, decisions.by_reason(report.skipped), _skipped, _skipped_more),
    ):
        for group in alike[:_GROUPS]:
            say(request, one(group.count) % {"count": number(group.count), "why": group.why})
        if others := sum(group.count for group in alike[_GROUPS:]):
            say(request, more(others) % {"count": number(others)})
    if report.stopped:
        left = total - report.done
        why = formatting.text(report.stopped, 500)
        if why not in {group.why for group in returned[:_GROUPS]}:
            told = _("Publishing stopped: %(why)s")
            if left > 0:
                told = ngettext(
                    "%(count)s event not published. Publishing stopped: %(why)s",
                    "%(count)s events not published. Publishing stopped: %(why)s",
                    left,
                )
            messages.error(request, told % {"count": number(left), "why": why})
        elif left > 0:
            told = ngettext(
                "%(count)s more event not tried, for the same reason.",
                "%(count)s more events not tried, for the same reason.",
                left,
            )
            messages.error(request, told % {"count": number(left)})


def _said(decision: str, count: int) -> str:
    if decision == "discard":
        return ngettext("%(count)s event discarded.", "%(count)s events discarded.", count)
    if decision == "resolve":
        return ngettext(
            "%(count)s event marked as resolved.", "%(count)s events marked as resolved.", count
        )
    if decision == "restore":
        return ngettext(
            "%(count)s event restored into the archive.",
            "%(count)s events restored into the archive.",
            count,
        )
    return ngettext(
        "%(count)s event published to its handler.",
        "%(count)s events published to their handlers.",
        count,
    )


def _returned(count: int) -> str:
    return ngettext(
        "%(count)s event not published: %(why)s",
        "%(count)s events not published: %(why)s",
        count,
    )


def _returned_more(count: int) -> str:
    return ngettext(
        "and %(count)s more event not published, for other reasons",
        "and %(count)s more events not published, for other reasons",
        count,
    )


def _skipped(count: int) -> str:
    return ngettext("%(count)s event skipped: %(why)s", "%(count)s events skipped: %(why)s", count)


def _skipped_more(count: int) -> str:
    return ngettext(
        "and %(count)s more event skipped, for other reasons",
        "and %(count)s more events skipped, for other reasons",
        count,
    )


def _head(event: ArchivedEvent) -> bytes:
    # SQLite's SUBSTR makes NULL of an empty body.
    return bytes(getattr(event, "head", None) or b"")


def _audit(actions: list[ArchiveAction], replays: list[Replay]) -> list[dict[str, Any]]:
    """Return what was decided, newest first."""
    by_id = {each.pk: each for each in replays}
    found = []
    for each in actions:
        made = by_id.get(each.replay_id) if each.replay_id is not None else None
        found.append(
            {
                "at": each.at,
                "by": line(each.by) or _("none"),
                "what": line(each.get_action_display()),
                "reason": visible(each.reason, formatting.TEXT),
                "replay": made.number if made else 0,
                "revision": made.revision.number if made and made.revision else 0,
            }
        )
    return found


def _texts(value: object) -> Sequence[object]:
    return value[:20] if isinstance(value, list) else ()


__all__ = ["ArchiveList", "ArchivedEventAdmin"]
