"""The archive's pages: list, detail, payload, export."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from django.apps import apps
from django.contrib import admin, messages
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.db.models import F, Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.urls import URLPattern
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy, pgettext

from ..archive import eligibility, export, redaction, selection, states
from ..archive.groups import failure_groups
from ..archive.replay import Report
from ..archive.selection import parse_uuid
from ..archive.states import Seen
from ..exceptions import AmqpEventsError
from ..models import ArchivedEvent, FailureGroup, GroupAction, Replay, ReplayBatch, State, visible
from ..reasons import Reason
from ..templatetags.amqp_events import TEXT, line, text
from . import formatting
from .action_pages import Action, in_list
from .archived_event_actions import ACTIONS
from .base import ago, alias_of, as_file, head_of, permission_check
from .editing import EditingPages
from .filters import (
    EventFilter,
    EventStateFilter,
    GroupFilter,
    ReasonFilter,
    TimeFilter,
    handler_of,
    settings_and_registry,
)
from .formatting import counted, number
from .lists import ExceptionFilter, HandlerFilter, IndexedList
from .replay_batches import begin, freeze

logger = logging.getLogger(__name__)

#: Failures, replays and decisions of one event that its page shows, the newest.
FAILURES = 20
REPLAYS = 100
#: Related events of each kind, the newest.
RELATED = 20
_UNLISTED = ngettext_lazy(
    "%(count)s of the %(total)s selected events changed and left this list.",
    "%(count)s of the %(total)s selected events changed and left this list.",
    "count",
)


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
        ids = self.result_list.values("pk")
        found = self.model_admin.get_queryset(request).filter(pk__in=ids)
        if not found.query.select_related:
            found = self.apply_select_related(found)
        self.result_list = found.order_by(*self.result_list.query.order_by)


class ArchivedEventAdmin(EditingPages):
    """Shows the archive; only actions change the state of events.

    For an admin site of your own, register :class:`django_amqp_events.models.ArchivedEvent` with
    this class or a subclass. Rows that :meth:`get_queryset` leaves out cannot be changed.
    """

    folder = "archivedevent"
    index_order = ("-last_failed_at", "-pk")
    missing = gettext_lazy("There is no archived event %(pk)s.")
    row_actions = ACTIONS
    version = F("version")
    too_many = gettext_lazy(
        "More than %(limit)s events are selected. Filter the list, or replay them with the action "
        "“Replay selected events in the background” or `manage.py events_replay --background`."
    )
    list_display = ("what", "status", "failure", "tries", "replayed", "age")
    list_display_links = ("what",)
    list_filter = (
        EventStateFilter,
        GroupFilter,
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
        "background_selected",
        *(in_list(ACTIONS[name]) for name in ("discard", "restore", "force", "resolve")),
    )

    has_replay_permission = permission_check("replay_archivedevent")
    has_force_permission = permission_check("force_archivedevent")
    has_discard_permission = permission_check("discard_archivedevent")
    has_restore_permission = permission_check("restore_archivedevent")
    has_bulk_replay_permission = permission_check("bulk_replay_archivedevent")

    def has_export_permission(self, request: HttpRequest) -> bool:
        """Return True if this user may export payloads."""
        granted = self._granted(request, "export_archivedevent")
        return granted and self.has_payload_permission(request)

    # -- the list

    def get_queryset(self, request: HttpRequest) -> QuerySet[ArchivedEvent]:
        """Return the rows of the database that is written, without what is large."""
        found = super().get_queryset(request).using(states.database())
        return found.defer("body", "headers_raw", "detail")

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return ArchiveList

    def matches(self, term: str, alias: str) -> Q:
        """Match ids of events, correlations, rows and replays."""
        found = super().matches(term, alias)
        if (pk := parse_uuid(term)) is not None:
            of_replay = Replay.objects.using(alias).filter(pk=pk)
            found |= Q(pk__in=list(of_replay.values_list("event_id", flat=True)))
        return found

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        context = extra_context or {}
        if self.has_export_permission(request):
            query = request.GET.urlencode()
            context = {
                "export_url": self._url("export") + (f"?{query}" if query else ""),
                **context,
            }
        return super().changelist_view(request, context)

    def export_view(self, request: HttpRequest) -> HttpResponseBase:
        """Return the events of the filtered list, one JSON document per line."""
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
    def status(self, event: ArchivedEvent) -> str:
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

    # -- actions

    @admin.action(
        description=gettext_lazy("Replay selected events in the background"),
        permissions=["bulk_replay"],
    )
    def background_selected(
        self, request: HttpRequest, queryset: QuerySet[Any]
    ) -> HttpResponse | None:
        """Freeze any number of events in a batch, and show what its replay would do."""
        return begin(self, request, queryset)

    def get_actions(self, request: HttpRequest, action_location: Any = None) -> dict[str, Any]:
        """Leave out what this site has no page for."""
        # Only Django 6.1 and later say on which page the actions are offered.
        place = {} if action_location is None else {"action_location": action_location}
        found = super().get_actions(request, **place)
        if not self.admin_site.is_registered(ReplayBatch):
            found.pop("background_selected", None)
        return found

    def add_unlisted(self, request: HttpRequest, seen: dict[UUID, int], ids: set[UUID]) -> None:
        # Their versions when the list was shown are not known.
        if ids:
            total = len(ids) + len(seen)
            messages.warning(request, counted(_UNLISTED, len(ids), total=total))

    def cells(self, row: ArchivedEvent) -> tuple[object, ...]:
        return (
            line(row.name),
            line(row.event_id),
            line(row.handler) or _("none"),
            formatting.exception_line(row.exception, row.message) or line(row.reason),
            row.replays,
        )

    def after(
        self,
        request: HttpRequest,
        action: Action,
        rows: Mapping[UUID, ArchivedEvent],
        report: Report,
        *,
        reason: str,
        back: str,
    ) -> None:
        """Record in a group what was done from its page."""
        group = _group_of(back)
        if group is not None and action.name in GroupAction.Action.values:
            failure_groups.record_decision(
                group,
                action=action.name,
                # The form comes from a browser: events of other groups do not count.
                events=sum(rows[pk].group_id == group for pk in report.published),
                by=request.user.get_username(),
                reason=reason,
                now=datetime.now(UTC),
            )

    def origin(self, request: HttpRequest, seen: Seen, back: str) -> str:
        return self._group_url(_group_of(back)) or super().origin(request, seen, back)

    def ask_group(
        self, request: HttpRequest, action: Action, group: FailureGroup
    ) -> HttpResponse | None:
        """Freeze the open events of a group, and ask; ``None`` where a message says why not."""
        if not self.has_view_permission(request) or not self.may(request, action):
            raise PermissionDenied
        rows = self.get_queryset(request).filter(group=group.pk, state__in=action.states)
        seen = self.freeze(rows.order_by("last_failed_at", "pk"))
        if not seen:
            messages.warning(request, _("This group has no open events."))
            return None
        if len(seen) > self.limit and action.publishes:
            messages.error(
                request,
                _(
                    "More than %(limit)s events are open. Replay them in the background, here or "
                    "with `manage.py events_replay --background --group %(group)s`."
                )
                % {"limit": number(self.limit), "group": group.pk},
            )
            return None
        if len(seen) > self.limit:
            messages.warning(
                request,
                _(
                    "More than %(limit)s events are open. These are the %(limit)s that failed "
                    "first; repeat the action for the rest."
                )
                % {"limit": number(self.limit)},
            )
        return self.ask(
            request, action, dict(list(seen.items())[: self.limit]), back=f"group:{group.pk.hex}"
        )

    def may_replay_in_background(self, request: HttpRequest) -> bool:
        """Return True if this user may create batches on this site."""
        return self.has_bulk_replay_permission(request) and self.admin_site.is_registered(
            ReplayBatch
        )

    def batch_group(self, request: HttpRequest, group: FailureGroup) -> HttpResponse | None:
        """Make a batch of the open events of a group; ``None`` where a message says why not."""
        if not self.has_view_permission(request) or not self.may_replay_in_background(request):
            raise PermissionDenied
        rows = self.get_queryset(request).filter(group=group.pk, state=State.ARCHIVED)
        if not rows.exists():
            messages.warning(request, _("This group has no open events."))
            return None
        criteria = selection.Selection(groups=[group.pk])
        return freeze(self, request, rows, title=str(group), criteria=criteria)

    # -- one event

    def get_urls(self) -> list[URLPattern]:
        return [
            *self._action_urls(),
            self._path("export/", self.export_view, "export"),
            self._path("<uuid:pk>/payload/", self.payload_view, "payload"),
            *self._editing_urls(),
            *super().get_urls(),
        ]

    def find(self, request: HttpRequest, object_id: str) -> ArchivedEvent | None:
        pk = parse_uuid(object_id)
        rows = self.get_queryset(request).defer(None).defer("body")
        readable = self.has_payload_permission(request)
        if readable:
            rows = rows.annotate(head=head_of("body"))
        event = rows.filter(pk=pk).first() if pk is not None else None
        if event is not None and readable and event.body_size <= formatting.SHOWN:
            event.body = _head(event)
        return event

    def detail_view(
        self, request: HttpRequest, row: ArchivedEvent, extra_context: Mapping[str, Any]
    ) -> HttpResponse:
        filters = self._filters(request)
        context = {
            **self._about(request, row),
            **self._content(request, row, readable=self.has_payload_permission(request)),
            "revisions": self._revisions(request, row),
            "related": self._related(request, row, filters),
            "event": row,
            "history_url": self._url("history", row.pk, filters=filters),
            "buttons": self._event_buttons(request, row),
            **extra_context,
        }
        title = _("%(name)s for %(handler)s (%(id)s)") % {
            "name": line(row.name),
            "handler": line(row.handler) or pgettext("for", "no handler"),
            "id": line(row.event_id, 9),
        }
        return self._render(request, "detail", title, context)

    def _about(self, request: HttpRequest, event: ArchivedEvent) -> dict[str, Any]:
        """Return everything but payload and headers."""
        using = alias_of(event)
        failures = list(event.failure_set.using(using).order_by("-failed_at", "-pk")[:FAILURES])
        made = event.replay_set.using(using).select_related("revision").defer("revision__body")
        replays = list(made.order_by("-number")[:REPLAYS])
        actions = list(event.action_set.using(using).order_by("-at", "-pk")[:REPLAYS])
        # The row describes the last failure that took effect.
        last = next((each for each in failures if not each.late), None)
        if last is None:
            effective = event.failure_set.using(using).filter(late=False)
            last = effective.order_by("-failed_at", "-pk").first()
        document = last.about if last is not None else {}
        kind, message = formatting.exception(document)
        by_id = {each.pk: each for each in replays}
        tasks = self._tasks(request, [event.task_id, *(each.task_id for each in replays)])
        meaning, remedy = formatting.STATES.get(event.state, ("", ""))
        if event.state == State.DISCARDED and actions and formatting.resolved(actions[0]):
            meaning, remedy = formatting.RESOLVED
        return {
            "meaning": meaning,
            "remedy": remedy,
            "note": self._note(event),
            "overdue": self._overdue(event),
            "now": datetime.now(UTC),
            "failed": by_id.get(last.replay_id) if last and last.replay_id else None,
            "exception": kind or line(event.exception, TEXT),
            "message": message or visible(event.message, TEXT),
            "traceback": formatting.fold_traceback(document.get("traceback")),
            "frames": formatting.frames(document),
            "deaths": formatting.deaths(document),
            "cut": _texts(document.get("cut")),
            "facts": self._facts(request, event),
            "attempts": [
                (attempt, by_id.get(each.replay_id) if each.replay_id else None)
                for each in reversed(failures)
                for attempt in formatting.attempts(each)
            ],
            "steps": formatting.timeline(event, failures[::-1], replays[::-1], actions[::-1]),
            "more_failures": len(failures) == FAILURES,
            "audit": [
                (each, by_id.get(each.replay_id) if each.replay_id else None) for each in actions
            ],
            "more_audit": len(actions) == REPLAYS,
            "replays": [(each, tasks.get(each.task_id)) for each in replays],
            "task": tasks.get(event.task_id),
        }

    def _facts(self, request: HttpRequest, event: ArchivedEvent) -> list[tuple[str, str, str]]:
        """Return the event's identifiers: label, value, and the URL of events that share it."""

        def same(value: str) -> str:
            return self._url("changelist", q=value) if value else ""

        return formatting.facts(
            (_("Event"), event.name, self._url("changelist", state="all", event=event.name)),
            (
                _("Handler"),
                event.handler or _("none"),
                self._url("changelist", state="all", handler=event.handler),
            ),
            (_("Queue"), event.queue),
            (_("Published by"), event.source),
            (_("Event id"), event.event_id, same(event.event_id)),
            (_("Correlation id"), event.correlation_id, same(event.correlation_id)),
            (_("Causation id"), event.causation_id, same(event.causation_id)),
            (_("Row id"), event.pk),
            *self._group(request, event),
        )

    def _group(self, request: HttpRequest, event: ArchivedEvent) -> list[tuple[str, str, str]]:
        """Return the failure group, for users who may see it."""
        url = self._group_url(event.group_id)
        if not url or event.group is None:
            return []
        pages = self.admin_site.get_model_admin(FailureGroup)
        if not pages.has_view_permission(request, event.group):
            return []
        return [(_("Failures like it"), text(event.group), url)]

    def _group_url(self, pk: UUID | None) -> str:
        return self._url_of(FailureGroup, "change", pk) if pk is not None else ""

    def _related(
        self, request: HttpRequest, event: ArchivedEvent, filters: str
    ) -> list[dict[str, Any]]:
        """Return the same event at other handlers, and events of the same cause."""
        now = datetime.now(UTC)
        rows = self.get_queryset(request).exclude(pk=event.pk).order_by("-last_failed_at", "-pk")
        of_event = rows.filter(event_id=event.event_id)
        of_cause = rows.filter(correlation_id=event.correlation_id)
        of_cause = of_cause.exclude(event_id=event.event_id)
        groups = []
        for title, value, found in (
            (_("The same event id"), event.event_id, of_event),
            (_("The same correlation id"), event.correlation_id, of_cause),
        ):
            events = [
                (
                    each,
                    self._url("change", each.pk, filters=filters),
                    ago(each.last_failed_at, now),
                    formatting.exception_line(each.exception, each.message) or line(each.reason),
                )
                for each in (found[:RELATED] if value else ())
            ]
            if events:
                url = self._url("changelist", q=value)
                groups.append({"title": title, "url": url, "events": events})
        return groups

    def _content(
        self, request: HttpRequest, event: ArchivedEvent, *, readable: bool
    ) -> dict[str, Any]:
        """Return payload and headers for users who may see them; redacted if there is a hook."""
        if not readable:
            return {"readable": False}
        raw = self.has_raw_permission(request)
        payload, cut, problem = "", False, ""
        if event.body_size > formatting.SHOWN:
            problem = _("The payload is too long to decode here.")
            if raw:
                problem = _(
                    "The payload is too long to decode here. This is the start of the raw body."
                )
        else:
            try:
                found = event.payload
            except Exception:  # noqa: BLE001 - invalid headers
                found = None
            if found is not None:
                safe = redaction.redact(event.name, found)
                problem = text(safe.problem, TEXT)
                if safe.payload is not None:
                    payload, cut = formatting.pretty(dict(safe.payload))
            elif raw:
                problem = _("The payload cannot be decoded. This is the raw body.")
            else:
                problem = _("The payload cannot be decoded, so it cannot be redacted.")
        headers, headers_note = formatting.headers(event)
        return {
            "readable": True,
            "payload": payload,
            "payload_cut": cut,
            "problem": problem,
            "redacted": redaction.has_hook(),
            "raw": raw,
            "body": formatting.body(_head(event), event.body_size) if raw else None,
            "headers": headers,
            "headers_note": headers_note,
            "types": [line(t) for t in (event.content_type, event.content_encoding) if t],
            "payload_url": self._url("payload", event.pk),
        }

    def _event_buttons(self, request: HttpRequest, event: ArchivedEvent) -> dict[str, Any]:
        """Return the buttons of an event, and why others are missing."""
        offered = [
            each
            for each in ACTIONS.values()
            if event.state in each.states and (self._overdue(event) or not each.overdue)
        ]
        found = self._buttons(request, event, event.version, offered)
        if event.state == State.ARCHIVED:
            edit = self._edit_button(request, event)
            kind = "obstacles" if isinstance(edit, str) else "links"
            if edit and edit not in found[kind]:
                found[kind].append(edit)
        return found

    def _obstacle(self, request: HttpRequest, row: ArchivedEvent, action: Action) -> str:
        obstacle = super()._obstacle(request, row, action)
        if obstacle or not action.publishes:
            return obstacle
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
        if not self.admin_site.is_registered(model):
            return {}
        if not self.admin_site.get_model_admin(model).has_view_or_change_permission(request):
            return {}
        found = model.objects.filter(task_id__in=ids).only("pk", "task_id", "status")
        return {each.task_id: each for each in found}

    def payload_view(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """The body as it was published, as a file."""
        if not self.has_view_permission(request) or not self.has_raw_permission(request):
            raise PermissionDenied
        event = self.get_queryset(request).defer(None).only("body").filter(pk=pk).first()
        return self._missing(request, pk) if event is None else as_file(pk, bytes(event.body))


def _group_of(back: str) -> UUID | None:
    """Return the group from whose page a user came."""
    kind, _colon, number = back.partition(":")
    return parse_uuid(number) if kind == "group" else None


def _head(event: ArchivedEvent) -> bytes:
    # SQLite's SUBSTR makes NULL of an empty body.
    return bytes(getattr(event, "head", None) or b"")


def _texts(value: object) -> Sequence[object]:
    return value[:20] if isinstance(value, list) else ()


__all__ = ["ArchivedEventAdmin"]
