"""Replay batches: preview, progress, results; start, pause, resume and cancel."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.db.models import F, QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..archive import states, tables
from ..archive.batches import batch_states, preview
from ..archive.groups import failure_groups
from ..conf import get_settings
from ..models import (
    ArchivedEvent,
    FailureGroup,
    Replay,
    ReplayBatch,
    ReplayBatchAction,
)
from ..reasons import Reason
from ..templatetags.amqp_events import ago, line
from . import backfill_pages
from .action_pages import as_listed
from .base import WAITING_SECONDS, Pages
from .formatting import number
from .lists import CAP

#: Entries of the history that a page shows, the newest.
STEPS: Final = 100
#: Skipped events among which a page counts the reasons.
LEFT: Final = 5_000
#: The permission for every button here.
BULK_REPLAY: Final = "bulk_replay_archivedevent"

_State = ReplayBatch.State
_Replay = Replay.State

_CANCEL: Final = ("cancel", gettext_lazy("Cancel batch"), "ae-danger")
#: The buttons of a batch that has begun, by its state: action, label, CSS class.
_BUTTONS: Final[Mapping[str, tuple[tuple[str, Any, str], ...]]] = {
    _State.RUNNING: (("pause", gettext_lazy("Pause"), "default"), _CANCEL),
    _State.PAUSED: (("resume", gettext_lazy("Resume"), "default"), _CANCEL),
}
#: The message after an action.
_DONE: Final = {
    "start": gettext_lazy("Started"),
    "pause": gettext_lazy("Paused"),
    "resume": gettext_lazy("Resumed"),
    "cancel": gettext_lazy("Cancelled"),
}


class StartForm(forms.Form):
    """Options of a batch."""

    reason = forms.CharField(
        label=gettext_lazy("Reason"),
        max_length=states.REASON_CHARACTERS,
        widget=forms.Textarea(attrs={"rows": 2}),
        help_text=gettext_lazy("Recorded with your name in the history of each event."),
    )
    rate = forms.FloatField(
        label=gettext_lazy("Rate limit (events per second)"),
        required=False,
        min_value=batch_states.RATES[0],
        max_value=batch_states.RATES[1],
        help_text=gettext_lazy("Empty: no limit."),
    )
    canary = forms.IntegerField(
        label=gettext_lazy("Canary size"),
        required=False,
        min_value=1,
        max_value=1_000_000,
        help_text=gettext_lazy(
            "Events to replay first. The rest starts after these have succeeded; if one fails "
            "again, the batch pauses. Empty: no canary."
        ),
    )
    threshold = forms.IntegerField(
        label=gettext_lazy("Failure threshold (percent)"),
        required=False,
        min_value=1,
        max_value=100,
        initial=batch_states.THRESHOLD,
        help_text=gettext_lazy(
            "The batch pauses when this share of the last 50 outcomes has failed. Empty: never."
        ),
    )


class ReplayBatchAdmin(Pages):
    """Shows batches; only the buttons of their pages change them.

    :func:`background_selected` creates them.
    """

    index_order = ("-created_at", "-pk")
    missing = gettext_lazy("There is no replay batch %(pk)s.")
    list_display = ("what", "status", "progress", "asked", "age")
    list_display_links = ("what",)
    sortable_by = ()
    actions = None

    # -- who may do what

    def has_view_permission(self, request: HttpRequest, obj: ReplayBatch | None = None) -> bool:
        """Return True if this user may view batches, which name archived events."""
        if not request.user.has_perm(f"{self.opts.app_label}.view_archivedevent"):
            return False
        return super().has_view_permission(request, obj) or self.has_bulk_replay_permission(
            request, obj
        )

    def has_bulk_replay_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return True if this user may start, pause, resume and cancel batches."""
        return self.granted(request, BULK_REPLAY)

    # -- the list

    def get_queryset(self, request: HttpRequest) -> QuerySet[ReplayBatch]:
        """Return the batches without what is large, read where they are written."""
        return super().get_queryset(request).using(tables.database()).defer(*ReplayBatch.LARGE)

    @admin.display(description=gettext_lazy("events"))
    def what(self, batch: ReplayBatch) -> str:
        return format_html(
            '<span class="ae-what">{}</span> <span class="ae-quiet">{}</span>',
            line(batch.name),
            line(batch.reason, 120),
        )

    @admin.display(description=gettext_lazy("state"))
    def status(self, batch: ReplayBatch) -> str:
        return format_html(
            '<span class="ae-state ae-batch-{}">{}</span> <span class="ae-quiet">{}</span>',
            batch.state,
            batch.get_state_display(),
            line(batch.note, 160),
        )

    @admin.display(description=gettext_lazy("progress"))
    def progress(self, batch: ReplayBatch) -> str:
        url = self._events_url(batch, _Replay.FAILED)
        if not batch.failed or not url:
            return bar(batch)
        failed = _("%(number)s failed again") % {"number": number(batch.failed)}
        return format_html('{} <a href="{}">{}</a>', bar(batch), url, failed)

    @admin.display(description=gettext_lazy("created by"))
    def asked(self, batch: ReplayBatch) -> str:
        return line(batch.created_by)

    @admin.display(description=gettext_lazy("created"))
    def age(self, batch: ReplayBatch) -> str:
        return ago(batch.created_at, datetime.now(UTC))

    # -- one batch

    def get_urls(self) -> list[URLPattern]:
        return [
            *(
                self._path(
                    f"<uuid:pk>/{act}/",
                    self.row_view(partial(self.act_view, act=act), "bulk_replay", posted=True),
                    act,
                )
                for act in ("start", "look", "pause", "resume", "cancel")
            ),
            self._path("backfill/", self.backfill_view, "backfill"),
            *super().get_urls(),
        ]

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        may = self.has_bulk_replay_permission(request)
        form = backfill_pages.empty_form(self, request) if may else None
        return super().changelist_view(request, {"backfill_form": form, **(extra_context or {})})

    def backfill_view(self, request: HttpRequest) -> HttpResponse:
        """Freeze a range of past events."""
        self.require(request, None, "bulk_replay")
        if request.method != "POST":
            return self._redirect(request, "changelist")
        return backfill_pages.backfill_view(self, request)

    def rows(self, request: HttpRequest) -> QuerySet[Any]:
        return self.get_queryset(request).defer(None)

    def detail_view(
        self, request: HttpRequest, batch: ReplayBatch, form: StartForm | None = None
    ) -> TemplateResponse:
        """Show the dry run of a draft, else the progress."""
        now = tables.clock()
        draft = batch.state == _State.DRAFT
        group = self._group(request, batch)
        history = ReplayBatchAction.objects.using(tables.database()).filter(batch=batch)
        context = {
            "batch": batch,
            "draft": draft,
            "may": self.allows(request, batch, "bulk_replay"),
            "form": form or StartForm(initial={"reason": group.ticket if group else ""}),
            "group": group,
            "plan": batch.plan,
            "bar": bar(batch),
            "now": now,
            "counts": [
                (state, count, self._events_url(batch, state.value))
                for state in _Replay
                if (count := getattr(batch, state.value))
            ],
            "buttons": _BUTTONS.get(batch.state, ()),
            "events_url": self._events_url(batch),
            "idle": batch.state == _State.RUNNING
            and (batch.leased_until is None or batch.leased_until < now),
            "left": []
            if draft
            else [
                (skip, _Replay(skip.state).label)
                for skip in batch_states.skipped_by_reason(batch.pk, LEFT)
            ],
            "deleted": batch.deleted,
            "left_of": LEFT if batch.skipped + batch.returned + batch.unconfirmed > LEFT else 0,
            "history": history.order_by("-at", "-pk")[:STEPS],
            "live": WAITING_SECONDS,
        }
        return self._render(request, "detail", line(batch.name), context)

    def _group(self, request: HttpRequest, batch: ReplayBatch) -> FailureGroup | None:
        """Return the failure group that a batch replays, for users who may see it."""
        if batch.group is None or not self.pages_of(request, FailureGroup):
            return None
        return failure_groups.groups().filter(pk=batch.group).first()

    def _events_url(self, batch: ReplayBatch, state: str = "") -> str:
        """Return the URL of the list of a batch's events, all or those in one state."""
        value = ".".join(filter(None, (str(batch.pk), state)))
        return self.url_of(ArchivedEvent, "changelist", state="all", batch=value)

    # -- the buttons

    def act_view(self, request: HttpRequest, batch: ReplayBatch, *, act: str) -> HttpResponse:
        """Run the action of a button."""
        form = StartForm(request.POST) if act == "start" else None
        if form is not None and not form.is_valid():
            return self.detail_view(request, batch, form)
        if act != "look":
            return self._act(request, batch, act, form.cleaned_data if form is not None else {})
        # Handlers of another service are not known here.
        if batch.state == _State.DRAFT and batch.service == get_settings().service:
            preview.preview_batch(batch)
        return self._redirect(request, "change", batch.pk)

    def _act(
        self, request: HttpRequest, batch: ReplayBatch, act: str, options: Mapping[str, Any]
    ) -> HttpResponse:
        """Change the state that the page showed, and tell the user."""
        shown = request.POST.get("version", "")
        seen = int(shown) if re.fullmatch("[0-9]{1,9}", shown) else -1
        by = request.user.get_username()
        done = getattr(batch_states, act)(batch.pk, by=by, seen=seen, **options)
        # refresh_from_db() would ask a router, which may name a replica.
        now = self.find(request, str(batch.pk))
        if done and now is None:
            messages.success(request, _("Draft deleted."))
        elif done:
            reason = f": {options['reason']}" if options else ""
            messages.success(request, f"{_DONE[act]}{reason}")
        else:
            state = (now or batch).get_state_display()
            told = _("Nothing was done: the batch has changed. It is {state} now.")
            messages.warning(request, told.format(state=state))
        if now is None:
            return self._redirect(request, "changelist")
        return self._redirect(request, "change", now.pk)


def bar(batch: ReplayBatch) -> SafeString:
    """Show the progress of a batch."""
    told = _("%(through)s of %(total)s finished") % {
        "through": number(batch.through),
        "total": number(batch.total),
    }
    return format_html(
        '<progress max="{}" value="{}" aria-label="{}"></progress> '
        '<span class="ae-quiet">{}</span>',
        batch.total or 1,
        batch.through,
        told,
        told,
    )


# -- making one, in the list of archived events ---------------------------------------------


@admin.action(
    description=gettext_lazy("Replay selected events in the background"),
    permissions=["bulk_replay"],
)
def background_selected(
    pages: Pages, request: HttpRequest, queryset: QuerySet[ArchivedEvent]
) -> HttpResponse | None:
    """Freeze the selected events that the list had when it was shown in a batch, and preview it."""
    return freeze(pages, request, as_listed(request, queryset, F("state_since"))[:CAP])


def freeze(
    pages: Pages,
    request: HttpRequest,
    queryset: QuerySet[ArchivedEvent],
    title: Reason | None = None,
    group: UUID | None = None,
) -> HttpResponse | None:
    """Create a batch and redirect to its page; if none is created, say why, return ``None``."""
    by = request.user.get_username()
    batch = batch_states.freeze(queryset, by=by, title=title, group=group)
    if not batch.total:
        messages.warning(request, _("None of these events can be replayed now."))
        return None
    return backfill_pages.show_draft(pages, request, batch)
