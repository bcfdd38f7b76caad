"""The outbox's pages: events that are not published yet; discard, restore."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import Any, ClassVar, Final, cast
from uuid import UUID

from django.contrib import admin
from django.db import Error, router, transaction
from django.db.models import Q, QuerySet
from django.db.models.functions import Coalesce
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy, pgettext, pgettext_lazy

from .. import conf
from ..archive.eligibility import Skipped
from ..archive.selection import parse_uuid
from ..archive.states import Seen
from ..databases import Now, may_have_table
from ..message import decoding
from ..message.headers import EVENT_CAUSATION_ID, EVENT_CORRELATION_ID
from ..message.types import Received
from ..models import ArchivedEvent, OutboxEvent
from ..monitor.state_texts import ROW_STATES
from ..publish import outbox, outbox_rows
from ..reasons import Reason
from ..templatetags.amqp_events import age, ago, breakable, line
from . import formatting
from .action_pages import (
    DISCARD,
    DISCARDED,
    RESTORE,
    Action,
    Decision,
    Preview,
    Result,
    Rows,
    in_list,
)
from .base import alias_of, head_of, problem
from .filters import settings_and_registry
from .lists import CAP, VALUES, AlwaysChosenFilter, StateFilter, ValueFilter, distinct
from .payload_pages import PayloadPages

# -- the actions -----------------------------------------------------------------------------


def _preview(action: Action, seen: Seen, rows: Rows) -> Preview:
    eligible, skipped = [], []
    for pk, version in seen.items():
        row = rows[pk]
        state = outbox.row_state(row, _now(row))
        if state not in action.states:
            skipped.append(Skipped.of(row, Reason(f"outbox-{state}")))
        elif version_of(row) != version:
            skipped.append(Skipped.of(row, Reason("outbox-changed")))
        else:
            eligible.append(row)
    counts = Counter((row.name, row.exchange, row.service) for row in eligible)
    details = {"destinations": [(count, *route) for route, count in sorted(counts.items())]}
    return [row.pk for row in eligible], skipped, details


def version_of(row: OutboxEvent) -> int:
    """Return what tells one discard of a row from another; 0 for a row that is not discarded."""
    at = row.discarded_at
    return 0 if at is None else int(at.timestamp() * 1000) % 2**31


def _run(decision: Decision) -> Result:
    """Change each row by one conditional UPDATE, which a relay's claim excludes."""
    action = decision.action
    acts: Mapping[str, Callable[..., int]] = {
        "restore": outbox.restore,
        "discard": partial(outbox.discard, by=decision.by, reason=decision.reason),
    }
    eligible, skipped, _details = _preview(action, decision.seen, decision.rows)
    result = Result(skipped=skipped)
    for alias in sorted({alias_of(decision.rows[pk]) for pk in eligible}):
        # In the order of the ids, so that two actions on the same rows do not wait for each other.
        ids = sorted(pk for pk in eligible if alias_of(decision.rows[pk]) == alias)
        try:
            with transaction.atomic(using=alias):
                done = [pk for pk in ids if acts[action.name]([pk], alias=alias)]
            result.done += done
            decision.log(done)
        except Error as exc:
            result.stopped = problem(exc, partly=bool(result.done))
            return result
    # A relay has claimed or published the others, or another user has changed them.
    changed = set(result.done)
    missed = [decision.rows[pk] for pk in eligible if pk not in changed]
    result.skipped += [Skipped.of(row, Reason("outbox-changed")) for row in missed]
    return result


def _now(row: OutboxEvent) -> datetime:
    """The database's clock when the row was read."""
    return cast("Any", row).at  # type: ignore[no-any-return]


ACTIONS: Final[Mapping[str, Action]] = {
    action.name: action
    for action in (
        Action(
            name="discard",
            button=pgettext_lazy("button", "Discard"),
            menu=gettext_lazy("Discard selected events"),
            question=DISCARD,
            done=DISCARDED,
            states=("failed", "due", "overdue"),
            log="Discarded",
            effect=gettext_lazy(
                "Discarded events are not published. You can restore them until events_prune "
                "deletes them."
            ),
            reason_required=True,
        ),
        Action(
            name="restore",
            button=pgettext_lazy("button", "Restore"),
            menu=gettext_lazy("Restore selected events"),
            question=RESTORE,
            done=ngettext_lazy(
                "%(count)s event restored. A relay publishes it.",
                "%(count)s events restored. A relay publishes them.",
                "count",
            ),
            states=("discarded",),
            log="Restored",
            effect=gettext_lazy(
                "The discarded events are due again. A relay publishes each to every bound queue."
            ),
            publishes=True,
        ),
    )
}


# -- filters ---------------------------------------------------------------------------------


class RowStateFilter(StateFilter):
    titles: ClassVar = {
        "waiting": gettext_lazy("pending"),
        "failed": gettext_lazy("failed: will be retried"),
        "overdue": gettext_lazy("overdue: no relay"),
        "discarded": gettext_lazy("discarded"),
        "all": gettext_lazy("all"),
    }

    def matching(self, rows: QuerySet[OutboxEvent], state: str) -> QuerySet[OutboxEvent]:
        if state in ("waiting", "failed"):
            rows = rows.filter(discarded_at__isnull=True)
            return rows.filter(attempts__gt=0) if state == "failed" else rows
        if state in ("overdue", "discarded"):
            # With the services their index is one of them.
            rows = rows.filter(service__in=distinct(rows, "service"))
            discarded = Q(discarded_at__isnull=False)
            return rows.filter(outbox.overdue() if state == "overdue" else discarded)
        return rows.none()


class NameFilter(ValueFilter):
    """Of the events that the list counts at most: an index would cost each publish."""

    title = gettext_lazy("event")
    parameter_name = "name"

    def values(self, rows: QuerySet[Any]) -> list[str]:
        first = rows.order_by("pk").values_list("name", flat=True)[:CAP]
        return sorted(set(first))[:VALUES]


class DatabaseFilter(AlwaysChosenFilter):
    """Offered if several databases have an outbox; the list is of the selected one."""

    title = gettext_lazy("database")
    parameter_name = "database"

    def lookups(
        self, request: HttpRequest, model_admin: admin.ModelAdmin[Any]
    ) -> list[tuple[str, str]]:
        self.chosen = model_admin.get_queryset(request).db
        possible = aliases()
        return [(alias, alias) for alias in possible] if len(possible) > 1 else []

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset


def aliases() -> list[str]:
    """Return the databases that have an outbox, first that of the settings."""
    first, *others = outbox_rows.aliases(conf.load()[0]) or [router.db_for_write(OutboxEvent)]
    return [first, *(alias for alias in others if may_have_table(alias, OutboxEvent))]


# -- the pages -------------------------------------------------------------------------------


class OutboxEventAdmin(PayloadPages):
    """Shows the events that are not published yet, and why; only actions change rows.

    Rows that :meth:`get_queryset` leaves out are on no page, and no action takes them.
    """

    model = OutboxEvent
    index_order = ("pk",)
    missing = gettext_lazy(
        "The outbox has no event %(pk)s. An event is deleted once RabbitMQ has confirmed it."
    )
    row_actions = ACTIONS
    preview = staticmethod(_preview)
    run = staticmethod(_run)
    gone = Reason("outbox-published")
    changed = Coalesce("discarded_at", "created_at")
    too_many = gettext_lazy("More than %(limit)s events are selected. Filter the list first.")
    list_display = ("what", "status", "failure", "tries", "age")
    list_display_links = ("what",)
    list_filter = (RowStateFilter, NameFilter, DatabaseFilter)
    sortable_by = ("age",)
    search_fields = ("event_id",)
    search_help_text = gettext_lazy("Start of an event id, or the id of a row.")
    actions = tuple(map(in_list, ACTIONS.values()))

    # -- rows

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the rows of the selected database, without what is large."""
        possible = aliases()
        chosen = request.GET.get(DatabaseFilter.parameter_name)
        rows = super().get_queryset(request).using(chosen if chosen in possible else possible[0])
        waiting: QuerySet[Any] = rows.annotate(at=Now())
        return waiting.defer(*OutboxEvent.LARGE)

    def rows_of(self, request: HttpRequest, ids: Iterable[UUID]) -> dict[UUID, OutboxEvent]:
        """Return rows by their ids, whichever database they are in."""
        by_id: dict[UUID, OutboxEvent] = {}
        rows = self.get_queryset(request)
        for alias in aliases():
            if left := [pk for pk in ids if pk not in by_id]:
                by_id |= {row.pk: row for row in rows.using(alias).filter(pk__in=left)}
        return by_id

    def freeze(self, queryset: QuerySet[Any]) -> dict[UUID, int]:
        return {row.pk: version_of(row) for row in queryset[: self.limit + 1]}

    def find(self, request: HttpRequest, object_id: str) -> OutboxEvent | None:
        pk = parse_uuid(object_id)
        return self.rows_of(request, [pk]).get(pk) if pk is not None else None

    # -- the list

    @admin.display(description=gettext_lazy("event"))
    def what(self, event: OutboxEvent) -> str:
        return format_html(
            '<span class="ae-what">{}</span> <span class="ae-quiet">{}</span>',
            breakable(event.name),
            _("of %(service)s") % {"service": line(event.service)},
        )

    @admin.display(description=gettext_lazy("state"))
    def status(self, event: OutboxEvent) -> str:
        state = outbox.row_state(event, _now(event))
        badge = format_html('<span class="ae-state ae-{}">{}</span>', state, ROW_STATES[state][0])
        if state != "failed":
            return badge
        return format_html(
            '{} <time class="ae-age ae-quiet" datetime="{}">{}</time>',
            badge,
            event.due_at.isoformat(),
            _("next try in %(time)s") % {"time": _ahead(event)},
        )

    @admin.display(description=gettext_lazy("error"))
    def failure(self, event: OutboxEvent) -> str:
        state = outbox.row_state(event, _now(event))
        if state == "discarded":
            return line(_discarded_by(event))
        return line(event.error) or ROW_STATES[state][1]

    @admin.display(description=gettext_lazy("attempts"))
    def tries(self, event: OutboxEvent) -> str:
        return formatting.labelled(_("attempts"), event.attempts)

    @admin.display(description=gettext_lazy("published"), ordering="pk")
    def age(self, event: OutboxEvent) -> str:
        return ago(event.created_at, _now(event))

    # -- one event

    def detail_view(self, request: HttpRequest, row: OutboxEvent) -> TemplateResponse:
        state = outbox.row_state(row, _now(row))
        label, meaning, remedy = ROW_STATES[state]
        configured = settings_and_registry()
        foreign = configured is not None and row.service != configured[0].service
        offered = [action for action in ACTIONS.values() if state in action.states]
        context = {
            **self._content(request, row),
            "event": row,
            "row_state": state,
            "state": label,
            "meaning": meaning,
            "remedy": remedy,
            "database": alias_of(row),
            "foreign": line(row.service) if foreign else "",
            "again": _ahead(row) if state == "failed" else "",
            "archived_url": self.list_url(request, ArchivedEvent, q=row.event_id),
            "buttons": self._buttons(request, row, version_of(row), offered),
        }
        title = _("%(name)s of %(service)s (%(id)s)") % {
            "name": line(row.name),
            "service": line(row.service),
            "id": line(row.event_id, 9),
        }
        return self._render(request, "detail", title, context)

    def _content(self, request: HttpRequest, event: OutboxEvent) -> dict[str, Any]:
        """Return ids; payload and headers only for users who may see them."""
        # An event that is published meanwhile is shown as empty.
        body, written = (
            outbox.rows(alias_of(event))
            .filter(pk=event.pk)
            .annotate(head=head_of("body"))
            .values_list("head", "envelope")
            .first()
        ) or (b"", "{}")
        envelope = json.loads(written)
        headers, properties = envelope.get("headers", {}), envelope.get("properties", {})
        head = bytes(body)
        shown = self.shown_payload(
            request,
            event,
            head=head,
            size=event.size,
            read=lambda: _payload(event, head, headers, properties),
        )
        if shown["readable"]:
            shown["headers"] = formatting.table(headers)
            shown["properties"] = formatting.table(properties)
        return {
            **shown,
            "correlation_id": headers.get(EVENT_CORRELATION_ID),
            "causation_id": headers.get(EVENT_CAUSATION_ID),
        }


def _discarded_by(event: OutboxEvent) -> str:
    """Return who discarded an event, and the reason."""
    who = line(event.discarded_by) or pgettext("by", "unknown")
    if not event.discard_reason:
        return _("discarded by %(who)s") % {"who": who}
    return _("discarded by %(who)s: %(why)s") % {"who": who, "why": event.discard_reason}


def _ahead(event: OutboxEvent) -> str:
    """Write in how much time it is due."""
    return age(_now(event), event.due_at)


def _payload(
    event: OutboxEvent, body: bytes, headers: Mapping[str, Any], properties: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the arguments by name."""
    received = Received(
        queue="",
        exchange=event.exchange,
        routing_key=event.name,
        body=body,
        headers=headers,
        properties=properties,
    )
    return dict(decoding.decode(received, event.size).kwargs)
