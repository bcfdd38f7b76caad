"""The outbox's pages: what waits and why; publish now, discard, restore."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, cast
from uuid import UUID

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.utils import unquote
from django.contrib.admin.views.main import SEARCH_VAR, ChangeList
from django.core.exceptions import PermissionDenied
from django.db import connections, transaction
from django.db.models import BinaryField, F, Func, Q, QuerySet, Value
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext, pgettext, pgettext_lazy

from ..archive.eligibility import Skipped
from ..message import decoding
from ..message.headers import EVENT_CAUSATION_ID, EVENT_CORRELATION_ID
from ..message.types import Received
from ..models import Moment, OutboxEvent, visible
from ..publish import outbox
from ..publish.outbox import RowState
from ..reasons import Reason
from . import (
    archived_event_actions as decisions,
)
from . import (
    databases,
    formatting,
    pagination,
)
from .actions import DecidingPages
from .archived_event_actions import (
    LIMIT,
    NAMED,
    ReasonForm,
    SkippedGroup,
    by_reason,
)
from .base import (
    List,
    ago,
    as_file,
    uuid_of,
)
from .databases import DatabaseFilter
from .filters import COUNTED, settings_and_registry
from .formatting import Step, line, number
from .pagination import CAP

#: Rows in one transaction at most, of those that somebody decides about.
_BATCH: Final = 500
_TEMPLATES: Final = "admin/django_amqp_events/outboxevent"

#: How a row stands: on the list, what it means, and what can be done.
STANDINGS: Final[Mapping[RowState, tuple[Any, Any, Any]]] = {
    "held": (
        gettext_lazy("publishing"),
        gettext_lazy("Waiting for RabbitMQ to confirm."),
        gettext_lazy("If its publisher has died, a relay takes over within 60 s."),
    ),
    "failed": (
        gettext_lazy("failed"),
        gettext_lazy("Publishing failed. A relay tries again."),
        gettext_lazy("Fix the cause, then wait or publish it now; or discard it."),
    ),
    "due": (
        gettext_lazy("due"),
        gettext_lazy("Due: the next relay publishes it."),
        gettext_lazy("Wait a moment."),
    ),
    "overdue": (
        gettext_lazy("overdue"),
        gettext_lazy("Due for more than a minute, and no relay has published it."),
        gettext_lazy("Run events_relay or events_worker."),
    ),
    "discarded": (
        gettext_lazy("discarded"),
        gettext_lazy("Discarded: it is not published."),
        gettext_lazy("Restore it to publish it. events_prune deletes it when it is old."),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """An action on events of the outbox.

    Attributes:
        name: in addresses; with ``_outboxevent`` its permission.
        button: on the page of one event.
        asks: on the button that does it, for a number of events.
        before: how a row must stand.
        past: for the history.
        effect: what it does.
        done: what was done, for a number of events.
        publishes: whether a relay publishes the event then.
    """

    name: str
    button: Any
    asks: Callable[[int], str]
    before: tuple[RowState, ...]
    past: str
    effect: Any
    done: Callable[[int], str]
    reason_required: bool = False
    publishes: bool = True

    @property
    def right(self) -> str:
        return self.name

    @property
    def permission(self) -> str:
        return f"{self.right}_outboxevent"


def _publishes(count: int) -> str:
    found = ngettext("Publish %(count)s event now", "Publish %(count)s events now", count)
    return found % {"count": number(count)}


def _published(count: int) -> str:
    found = ngettext(
        "%(count)s event is due now. A relay publishes it.",
        "%(count)s events are due now. A relay publishes them.",
        count,
    )
    return found % {"count": number(count)}


def _discarded(count: int) -> str:
    found = ngettext("%(count)s event discarded.", "%(count)s events discarded.", count)
    return found % {"count": number(count)}


def _restored(count: int) -> str:
    found = ngettext(
        "%(count)s event restored. A relay publishes it.",
        "%(count)s events restored. A relay publishes them.",
        count,
    )
    return found % {"count": number(count)}


DECISIONS: Final[Mapping[str, Decision]] = {
    each.name: each
    for each in (
        Decision(
            name="publish",
            button=gettext_lazy("Publish now"),
            asks=_publishes,
            before=("failed",),
            past="Publish now",
            effect=gettext_lazy(
                "The events are due now instead of at their next try. A relay publishes each "
                "to every bound queue."
            ),
            done=_published,
        ),
        Decision(
            name="discard",
            button=pgettext_lazy("button", "Discard"),
            asks=decisions.discards,
            before=("failed", "due", "overdue"),
            past="Discarded",
            effect=gettext_lazy(
                "Discarded events are not published. You can restore them until events_prune "
                "deletes them."
            ),
            done=_discarded,
            reason_required=True,
            publishes=False,
        ),
        Decision(
            name="restore",
            button=pgettext_lazy("button", "Restore"),
            asks=decisions.restores,
            before=("discarded",),
            past="Restored",
            effect=gettext_lazy(
                "The discarded events are due again. A relay publishes each to every bound queue."
            ),
            done=_restored,
        ),
    )
}
_GONE: Final = Reason("outbox-published")


# -- filters ---------------------------------------------------------------------------------


class StandingFilter(admin.SimpleListFilter):
    """Filter by state: pending events by default, all events in a search."""

    title = gettext_lazy("state")
    parameter_name = "state"

    def __init__(
        self,
        request: HttpRequest,
        params: dict[str, Any],
        model: type[OutboxEvent],
        model_admin: admin.ModelAdmin[OutboxEvent],
    ) -> None:
        self._default = "all" if request.GET.get(SEARCH_VAR, "").strip() else "waiting"
        super().__init__(request, params, model, model_admin)

    def lookups(
        self, request: HttpRequest, model_admin: admin.ModelAdmin[Any]
    ) -> list[tuple[str, str]]:
        rows = model_admin.get_queryset(request)
        self._services = pagination.distinct(rows, "service")
        return [
            (value, _counted(title, self._of(rows, value)))
            for value, title in (
                ("waiting", _("pending")),
                ("failed", _("failed: will be retried")),
                ("overdue", _("overdue: no relay")),
                ("discarded", _("discarded")),
            )
        ] + [("all", _("all"))]

    def _of(self, rows: QuerySet[OutboxEvent], value: str) -> QuerySet[OutboxEvent]:
        if value == "waiting":
            return rows.filter(discarded_at__isnull=True)
        if value == "failed":
            return rows.filter(discarded_at__isnull=True, attempts__gt=0)
        if value in ("overdue", "discarded"):
            # With the services their index is one of them.
            found = rows.filter(service__in=self._services)
            return outbox.in_state(found, cast("RowState", value))
        return rows if value == "all" else rows.none()

    @property
    def chosen(self) -> str:
        """Return the selected filter."""
        return self.value() or self._default

    def queryset(
        self, request: HttpRequest, queryset: QuerySet[OutboxEvent]
    ) -> QuerySet[OutboxEvent]:
        return self._of(queryset, self.chosen)

    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        chosen = self.chosen
        for value, title in self.lookup_choices:
            yield {
                "selected": chosen == value,
                "query_string": changelist.get_query_string({"state": str(value)}),
                "display": title,
            }


def _counted(title: str, rows: QuerySet[Any]) -> str:
    found = pagination.count(rows, COUNTED)
    return f"{title} ({number(COUNTED)}+)" if found > COUNTED else f"{title} ({number(found)})"


class ValueFilter(admin.SimpleListFilter):
    """Filter by a value of a column."""

    least = 1

    def lookups(
        self, request: HttpRequest, model_admin: admin.ModelAdmin[Any]
    ) -> list[tuple[str, str]]:
        found = self.values(model_admin.get_queryset(request))
        chosen = self.value()
        if chosen is not None and chosen not in found:
            found.append(chosen)
        return [(value, line(value, 80)) for value in found] if len(found) >= self.least else []

    def values(self, rows: QuerySet[Any]) -> list[str]:
        raise NotImplementedError

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = self.value()
        if chosen is None:
            return queryset
        if "\0" in chosen:  # PostgreSQL refuses it
            return queryset.none()
        return queryset.filter(**{str(self.parameter_name): chosen})


class NameFilter(ValueFilter):
    """Of the events that the list counts at most: an index would cost each publish."""

    title = gettext_lazy("event")
    parameter_name = "name"

    def values(self, rows: QuerySet[Any]) -> list[str]:
        first = rows.order_by("pk").values_list("name", flat=True)[:CAP]
        return sorted(set(first))[: pagination.VALUES]


class ServiceFilter(ValueFilter):
    """Offered where services share the table, or this one had another name."""

    title = gettext_lazy("service")
    parameter_name = "service"
    least = 2

    def values(self, rows: QuerySet[Any]) -> list[str]:
        return pagination.distinct(rows, "service")


class OutboxList(List):
    """Ordered by when they were published and nothing else: the ids begin with it."""

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[Any]:
        """Return one of the two orders."""
        return ["-pk"] if super().get_ordering(request, queryset)[0] == "-pk" else ["pk"]


# -- what a decision would do ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The destination of events, and the service whose relay publishes them."""

    name: str
    exchange: str
    service: str
    count: int


@dataclass(slots=True, kw_only=True)
class Plan:
    """The preview of an action.

    Attributes:
        eligible: the rows it would take.
        routes: where they go.
        errors: what came of their last try.
        skipped: the others, by reason.
        foreign: services of theirs that are not this one.
        idle: services of theirs whose due rows no relay takes.
    """

    eligible: list[OutboxEvent] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)
    errors: list[SkippedGroup] = field(default_factory=list)
    skipped: list[SkippedGroup] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)


def plan(decision: Decision, ids: Sequence[UUID], rows: Mapping[UUID, OutboxEvent]) -> Plan:
    """Return the preview of an action; changes nothing."""
    eligible, skipped = [], []
    for pk in ids:
        row = rows.get(pk)
        if row is None:
            skipped.append(Skipped(id=pk, title="", why=_GONE))
        elif (stands := outbox.row_state(row, _now(row))) in decision.before:
            eligible.append(row)
        else:
            skipped.append(Skipped(id=pk, title=str(row), why=Reason(f"outbox-{stands}")))
    routes: dict[tuple[str, str, str], int] = {}
    for row in eligible:
        key = (row.name, row.exchange, row.service)
        routes[key] = routes.get(key, 0) + 1
    services = {row.service for row in eligible}
    idle: set[str] = set()
    if decision.publishes:
        for alias in {_alias_of(row) for row in eligible}:
            of_theirs = outbox.rows(alias).filter(service__in=services).order_by()
            late = outbox.in_state(of_theirs, "overdue")
            idle |= set(late.values_list("service", flat=True).distinct())
    found = settings_and_registry()
    own = found[0].service if found is not None else None
    return Plan(
        eligible=eligible,
        routes=[
            Route(name=line(name), exchange=line(exchange), service=line(service), count=count)
            for (name, exchange, service), count in sorted(routes.items())
        ],
        errors=by_reason(
            Skipped(id=row.pk, title=str(row), why=Reason.of(_error(row)))
            for row in eligible
            if row.error
        ),
        skipped=by_reason(skipped),
        foreign=sorted(map(line, services - {own})) if own else [],
        idle=sorted(map(line, idle)),
    )


def carry_out(
    decision: Decision,
    ids: Sequence[UUID],
    rows: Mapping[UUID, OutboxEvent],
    *,
    user: Any,
    reason: str,
) -> tuple[list[OutboxEvent], list[UUID]]:
    """Do it, each row by one conditional UPDATE; returns those that were, and the others' ids."""
    acts: Mapping[str, Callable[..., int]] = {
        "publish": outbox.publish_now,
        "restore": outbox.restore,
        "discard": partial(outbox.discard, by=user.get_username(), reason=reason),
    }
    act = acts[decision.name]
    # In one order, so that two who decide about the same rows do not wait for each other.
    there = sorted((rows[pk] for pk in ids if pk in rows), key=lambda row: (_alias_of(row), row.pk))
    done: list[OutboxEvent] = []
    for alias in dict.fromkeys(map(_alias_of, there)):
        own = [
            row
            for row in there
            if _alias_of(row) == alias and outbox.row_state(row, _now(row)) in decision.before
        ]
        for start in range(0, len(own), _BATCH):
            with transaction.atomic(using=alias):
                part = [row for row in own[start : start + _BATCH] if act([row.pk], alias=alias)]
            done += part
            _log(user, part, f"{decision.past}: {reason}" if reason else decision.past)
    return done, [pk for pk in ids if pk not in {row.pk for row in done}]


def _error(row: OutboxEvent) -> str:
    """Its error without its own id, so that those of many events are alike."""
    return row.error.replace(f" ({row.event_id})", "")


def _log(user: Any, rows: list[OutboxEvent], message: str) -> None:
    if rows:
        LogEntry.objects.log_actions(user.pk, rows, CHANGE, message)


def _alias_of(row: OutboxEvent) -> str:
    return str(row._state.db)  # noqa: SLF001 - Django's own way to say where a row is from


def _now(row: OutboxEvent) -> datetime:
    """The database's clock when the row was read."""
    return cast("Any", row).at  # type: ignore[no-any-return]


# -- the pages -------------------------------------------------------------------------------


class OutboxEventAdmin(DecidingPages[OutboxEvent]):
    """Shows what waits in the outbox and why; rows change only by what a page confirms.

    For an admin site of your own, register :class:`django_amqp_events.models.OutboxEvent` with
    this class or a subclass. Whatever :meth:`get_queryset` leaves out cannot be decided about.
    """

    choices = DECISIONS
    templates = _TEMPLATES
    list_display = ("what", "standing", "failure", "tries", "age")
    list_display_links = ("what",)
    list_filter = (StandingFilter, NameFilter, ServiceFilter, DatabaseFilter)
    sortable_by = ("age",)
    search_fields = ("event_id",)
    search_help_text = gettext_lazy("Start of an event id, or the id of a row.")
    actions = ("publish_selected", "discard_selected", "restore_selected")

    # -- who may do what

    def has_payload_permission(self, request: HttpRequest) -> bool:
        """Return True if this user may see payloads and headers."""
        return self._granted(request, "view_payload_outboxevent")

    def has_publish_permission(self, request: HttpRequest) -> bool:
        """Return True if this user may publish events now."""
        return self._granted(request, DECISIONS["publish"].permission)

    def has_discard_permission(self, request: HttpRequest) -> bool:
        """Return True if this user may discard events."""
        return self._granted(request, DECISIONS["discard"].permission)

    def has_restore_permission(self, request: HttpRequest) -> bool:
        """Return True if this user may restore discarded events."""
        return self._granted(request, DECISIONS["restore"].permission)

    # -- the list

    def get_queryset(self, request: HttpRequest) -> QuerySet[OutboxEvent]:
        """Return the rows without what is large, of the database that is chosen."""
        found = super().get_queryset(request).using(databases.chosen(request, OutboxEvent))
        return found.defer("body", "envelope").annotate(at=Now(output_field=Moment()))

    def _found(self, request: HttpRequest, ids: Sequence[UUID]) -> dict[UUID, OutboxEvent]:
        """Return rows by their ids, whichever database they are in."""
        found: dict[UUID, OutboxEvent] = {}
        rows = self.get_queryset(request)
        for alias in dict.fromkeys([rows.db, *databases.aliases(OutboxEvent)]):
            if left := [pk for pk in ids if pk not in found]:
                found |= {row.pk: row for row in rows.using(alias).filter(pk__in=left)}
        return found

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> OutboxEvent | None:
        pk = uuid_of(object_id)
        return self._found(request, [pk]).get(pk) if pk is not None else None

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return OutboxList

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search by ids: that of a row, or of an event, whole or by how it begins."""
        term = search_term.strip()
        return queryset.filter(with_id(term, queryset.db)) if term else queryset, False

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        context = {"title": _("Outbox"), "cap": CAP, **(extra_context or {})}
        return super().changelist_view(request, context)

    @admin.display(description=gettext_lazy("event"))
    def what(self, event: OutboxEvent) -> str:
        return format_html(
            '<span class="ae-what">{}</span> <span class="ae-quiet">{}</span>',
            line(event.name),
            _("of %(service)s") % {"service": line(event.service)},
        )

    @admin.display(description=gettext_lazy("state"))
    def standing(self, event: OutboxEvent) -> str:
        stands = outbox.row_state(event, _now(event))
        note = _("next try in %(time)s") % {"time": _ahead(event)} if stands == "failed" else ""
        return format_html(
            '<span class="ae-state ae-{}">{}</span>{}',
            stands,
            STANDINGS[stands][0],
            format_html(' <span class="ae-quiet">{}</span>', note) if note else "",
        )

    @admin.display(description=gettext_lazy("error"))
    def failure(self, event: OutboxEvent) -> str:
        stands = outbox.row_state(event, _now(event))
        if stands == "discarded":
            return line(_given_up(event))
        return line(_error(event)) or STANDINGS[stands][1]

    @admin.display(description=gettext_lazy("attempts"))
    def tries(self, event: OutboxEvent) -> int:
        return event.attempts

    @admin.display(description=gettext_lazy("published"), ordering="pk")
    def age(self, event: OutboxEvent) -> str:
        return ago(event.created_at, _now(event))

    # -- actions of the list: freeze what is selected, and ask

    @admin.action(description=gettext_lazy("Publish selected events now"), permissions=["publish"])
    def publish_selected(
        self, request: HttpRequest, queryset: QuerySet[Any]
    ) -> HttpResponse | None:
        return self._selected(request, queryset, DECISIONS["publish"])

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
        ids = list(queryset.values_list("pk", flat=True)[: LIMIT + 1])
        if len(ids) > LIMIT:
            messages.error(
                request,
                _("More than %(limit)s events are selected. Filter the list first.")
                % {"limit": number(LIMIT)},
            )
            return None
        if request.POST.get("select_across", "").lower() in ("", "0", "false"):
            # Who is not there any more is told of on the page that asks.
            ids = [UUID(each) for each in dict.fromkeys(request.POST.getlist(ACTION_CHECKBOX_NAME))]
        if not ids:
            return None
        return self._ask(request, decision, ids[:LIMIT], filters=self._filters(request))

    # -- addresses

    def get_urls(self) -> list[URLPattern]:
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        ours = self._decide_urls()
        view = self.admin_site.admin_view(self.payload_view)
        ours.append(path("<uuid:pk>/payload/", view, name=f"{name}_payload"))
        return [*ours, *super().get_urls()]

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
        event = self.get_object(request, unquote(object_id))
        filters = self._filters(request)
        if event is None:
            messages.warning(
                request,
                _(
                    "The outbox has no event %(pk)s. An event is deleted once RabbitMQ has "
                    "confirmed it."
                )
                % {"pk": line(unquote(object_id), 60)},
            )
            return HttpResponseRedirect(self._url("changelist", filters=filters))
        if not self.has_view_permission(request, event):
            raise PermissionDenied
        stands = outbox.row_state(event, _now(event))
        state, meaning, remedy = STANDINGS[stands]
        found = settings_and_registry()
        foreign = found is not None and event.service != found[0].service
        context = {
            **self.admin_site.each_context(request),
            **self._content(event, readable=self.has_payload_permission(request)),
            "title": _("%(name)s of %(service)s (%(id)s)")
            % {
                "name": line(event.name),
                "service": line(event.service),
                "id": line(event.event_id, 9),
            },
            "subtitle": None,
            "opts": self.opts,
            "media": self.media,
            "event": event,
            "stands": stands,
            "state": state,
            "meaning": meaning,
            "remedy": remedy,
            "foreign": line(event.service) if foreign else "",
            "again": _ahead(event) if stands == "failed" else "",
            "age": formatting.age(event.created_at, _now(event)),
            "error": visible(event.error, formatting.TEXT),
            "reason": visible(event.discard_reason, formatting.TEXT),
            "by": line(event.discarded_by),
            "steps": _timeline(event, stands),
            "list_url": self._url("changelist", filters=filters),
            "history_url": self._url("history", event.pk, filters=filters),
            "buttons": self._buttons(request, event, stands, filters),
            **(extra_context or {}),
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, f"{_TEMPLATES}/detail.html", context)

    def _content(self, event: OutboxEvent, *, readable: bool) -> dict[str, Any]:
        """Facts; payload and headers for those who may see them."""
        first = Func(
            F("body"),
            Value(1),
            Value(formatting.SHOWN),
            function="SUBSTR",
            output_field=BinaryField(),
        )
        # Never more of a body than the page shows. What goes meanwhile is shown as empty.
        body, written = (
            outbox.rows(_alias_of(event))
            .filter(pk=event.pk)
            .annotate(head=first)
            .values_list("head", "envelope")
            .first()
        ) or (b"", "{}")
        headers, properties = _envelope(written)
        facts = [
            (name, visible(text, formatting.TEXT), url)
            for name, text, url in (
                (_("Event"), event.name, self._url("changelist", state="all", name=event.name)),
                (_("Published by"), event.service, ""),
                (_("Event id"), event.event_id, ""),
                (_("Correlation id"), headers.get(EVENT_CORRELATION_ID), ""),
                (_("Causation id"), headers.get(EVENT_CAUSATION_ID), ""),
                (_("Exchange"), event.exchange, ""),
                (_("Routing key"), event.name, ""),
                (_("Database"), _alias_of(event), ""),
                (_("Row id"), str(event.pk), ""),
            )
            if text
        ]
        if not readable:
            return {"facts": facts, "readable": False}
        # SQLite's SUBSTR makes NULL of an empty body.
        head = bytes(body or b"")
        payload, cut, problem = _payload(event, head, headers, properties)
        return {
            "facts": facts,
            "readable": True,
            "payload": payload,
            "payload_cut": cut,
            "problem": problem,
            "body": formatting.body(head, event.size),
            "headers": _table(headers),
            "properties": _table(properties),
            "payload_url": self._url("payload", event.pk),
        }

    def _buttons(
        self, request: HttpRequest, event: OutboxEvent, stands: RowState, filters: str
    ) -> dict[str, Any]:
        """Return what this user can decide now, and what keeps him from the rest."""
        obstacles, links = [], []
        for each in DECISIONS.values():
            if stands not in each.before:
                continue
            if not self.may(request, each):
                obstacles.append(self._forbidden(each))
                continue
            links.append(self._button(each, event.pk, 0, filters))
        return {"links": links, "obstacles": obstacles}

    def payload_view(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """Return the published body as a file."""
        if not self.has_view_permission(request) or not self.has_payload_permission(request):
            raise PermissionDenied
        event = self.get_object(request, str(pk))
        if event is None:
            messages.warning(request, _("The outbox has no event %(pk)s.") % {"pk": pk})
            return HttpResponseRedirect(self._url("changelist"))
        return as_file(pk, bytes(event.body))

    # -- deciding

    def decide_view(self, request: HttpRequest, *, decision: Decision) -> HttpResponse:
        """Ask (GET), and do it (POST)."""
        if not self.has_view_permission(request) or not self.may(request, decision):
            raise PermissionDenied
        data = request.POST if request.method == "POST" else request.GET
        filters = self._filters(request)
        one = data.get("back") == "event"
        seen = decisions.decode_selection(data.get("seen", ""))
        if seen is None:
            return self._unknown(request, filters)
        ids = list(seen)
        form = ReasonForm(decision, request.POST if request.method == "POST" else None)
        if request.method != "POST" or not form.is_valid():
            return self._ask(request, decision, ids, filters=filters, one=one, form=form)
        done, others = carry_out(
            decision,
            ids,
            self._found(request, ids),
            user=request.user,
            reason=form.cleaned_data["reason"],
        )
        self._tell(request, decision, done, others)
        if one and len(ids) == 1 and not decision.publishes:
            return HttpResponseRedirect(self._url("change", ids[0], filters=filters))
        return HttpResponseRedirect(self._url("changelist", filters=filters))

    def _tell(
        self,
        request: HttpRequest,
        decision: Decision,
        done: Sequence[OutboxEvent],
        others: Sequence[UUID],
    ) -> None:
        """Show the result of an action as messages."""
        if done:
            messages.success(request, decision.done(len(done)))
        if not others:
            return
        # Again, because somebody else has changed them since.
        now = plan(decision, others, self._found(request, others))
        for group in now.skipped:
            told = ngettext(
                "%(count)s event skipped: %(why)s",
                "%(count)s events skipped: %(why)s",
                group.count,
            )
            messages.warning(request, told % {"count": number(group.count), "why": group.why})
        if now.eligible:
            told = ngettext(
                "%(count)s event changed meanwhile. Check it again.",
                "%(count)s events changed meanwhile. Check them again.",
                len(now.eligible),
            )
            messages.warning(request, told % {"count": number(len(now.eligible))})

    def _ask(
        self,
        request: HttpRequest,
        decision: Decision,
        ids: Sequence[UUID],
        *,
        filters: str,
        one: bool = False,
        form: ReasonForm | None = None,
    ) -> HttpResponse:
        found = plan(decision, ids, self._found(request, ids))
        return self._confirm(
            request,
            decision,
            plan=found,
            eligible={row.pk: 0 for row in found.eligible},
            total=len(ids),
            events=[
                (
                    line(row.name),
                    line(row.event_id),
                    line(row.service),
                    row.attempts,
                    formatting.age(row.created_at, _now(row)),
                )
                for row in found.eligible[:NAMED]
            ],
            back="event" if one else "list",
            cancel_url=self._url("change", ids[0], filters=filters)
            if one and len(ids) == 1
            else "",
            filters=filters,
            form=form,
        )


def with_id(text: str, alias: str) -> Q:
    """Match the id of a row, or how an event id begins."""
    if connections[alias].vendor == "postgresql":
        wanted = Q(event_id__startswith=text)
    else:
        # SQLite's LIKE ignores case, so it ignores an index too.
        wanted = Q(event_id__gte=text, event_id__lt=text + "\U0010ffff")
    pk = uuid_of(text)
    return wanted if pk is None else wanted | Q(pk=pk)


def _given_up(event: OutboxEvent) -> str:
    """Return who discarded an event, and the reason."""
    who = line(event.discarded_by) or pgettext("by", "unknown")
    if not event.discard_reason:
        return _("discarded by %(who)s") % {"who": who}
    return _("discarded by %(who)s: %(why)s") % {"who": who, "why": event.discard_reason}


def _ahead(event: OutboxEvent) -> str:
    """Write in how much time it is due."""
    return formatting.age(_now(event), event.due_at)


def _envelope(written: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return headers and properties; empty if a row was changed by hand."""
    try:
        found = json.loads(written)
        return dict(found["headers"]), dict(found["properties"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}, {}


def _payload(
    event: OutboxEvent, head: bytes, headers: Mapping[str, Any], properties: Mapping[str, Any]
) -> tuple[str, bool, str]:
    """Show the arguments by name; says whether they were cut, and what is wrong with them."""
    if event.size > formatting.SHOWN:
        problem = _("The payload is too long to decode here. This is the start of the raw body.")
        return "", False, problem
    received = Received(
        queue="",
        exchange=event.exchange,
        routing_key=event.name,
        body=head,
        headers=headers,
        properties=properties,
    )
    try:
        return (*formatting.pretty(dict(decoding.decode(received, event.size).kwargs)), "")
    except Exception:  # noqa: BLE001 - Malformed, or a row that somebody has changed by hand
        problem = _("The payload cannot be decoded. This is the raw body.")
        return "", False, problem


def _table(found: Mapping[str, Any]) -> list[formatting.Header]:
    return [
        formatting.Header(
            name=line(name),
            value=formatting.header(found[name]),
            kind="" if isinstance(found[name], str) else type(found[name]).__name__,
        )
        for name in sorted(found)[: formatting.ROWS]
    ]


def _timeline(event: OutboxEvent, stands: RowState) -> list[Step]:
    """Put what a row knows into the order of time."""
    steps = [
        Step(
            at=event.created_at,
            what=_("published"),
            who=_("by %(service)s, in its outbox") % {"service": line(event.service)},
        )
    ]
    if event.discarded_at is not None:
        steps.append(
            Step(
                at=event.discarded_at,
                what=_("discarded"),
                who=formatting.who(event.discarded_by),
                note=visible(event.discard_reason, formatting.TEXT),
            )
        )
    elif stands == "held":
        what = _("lease ends: a relay takes over unless it is confirmed")
        steps.append(Step(at=event.due_at, what=what))
    elif stands == "failed":
        what = _("try %(number)s by a relay") % {"number": event.attempts + 1}
        steps.append(Step(at=event.due_at, what=what))
    else:
        late = event.due_at < _now(event) - timedelta(seconds=outbox.OVERDUE)
        steps.append(Step(at=event.due_at, what=_("due for a relay"), kind="bad" if late else ""))
    return steps


__all__ = ["DECISIONS", "OutboxEventAdmin", "OutboxList"]
