"""Edit and replay: an editor, a page that shows what would change, and doing it."""

from __future__ import annotations

from typing import Any, Final

from django import forms
from django.contrib import messages
from django.db import Error
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy

from .. import conf
from ..archive import editing, eligibility, redaction, replay
from ..archive.editing import Draft
from ..archive.risks import is_superseded
from ..declare.registry import Handler
from ..exceptions import AmqpEventsError, InvalidEditError
from ..models import ArchivedEvent, Replay, Revision, visible
from ..reasons import Reason
from ..templatetags.amqp_events import TEXT, code, line, text
from . import formatting
from .action_pages import ReasonForm, tell
from .archived_event_actions import of_report
from .base import alias_of, head_of, problem
from .payload_pages import PayloadPages

#: Revisions of one event that its page shows, the newest.
REVISIONS = 10
_PUBLISHED: Final = ngettext_lazy(
    "%(count)s event published with the edited payload.",
    "%(count)s events published with the edited payload.",
    "count",
)


class EditForm(ReasonForm):
    """The payload, and the reason of the edit."""

    # "Continue editing" needs no reason.
    use_required_attribute = False
    payload = forms.CharField(
        label=gettext_lazy("Payload"),
        strip=False,
        widget=forms.Textarea(
            attrs={"rows": 24, "cols": 80, "spellcheck": "false", "class": "ae-editor"}
        ),
    )


class EditingPages(PayloadPages):
    """Editing, for :class:`.archived_event_pages.ArchivedEventAdmin`."""

    def get_urls(self) -> list[URLPattern]:
        edit = self.row_view(self.edit_view, "view_payload", "view_raw", "edit")
        return [
            self._path("<uuid:pk>/edit/", edit, "edit"),
            *super().get_urls(),
        ]

    def has_edit_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return True if this user may edit payloads, which shows them."""
        allowed = self.granted(request, "edit_archivedevent")
        return allowed and self.has_view_raw_permission(request, obj)

    # -- on the event's page

    def _edit_button(self, request: HttpRequest, event: ArchivedEvent) -> dict[str, str] | str:
        """Return the link to the editor or why it is missing, ``""`` if the user may not edit."""
        if not conf.load()[0].editing or not self.allows(request, event, "edit"):
            return ""
        where = self._editable(event, event.version)
        if isinstance(where, Reason):
            return _("It cannot be edited: %(why)s") % {"why": text(where, TEXT)}
        url = self._filtered_url(request, "edit", event.pk, version=str(event.version))
        return {"label": _("Edit and replay"), "name": "edit", "url": url}

    def _editable(self, event: ArchivedEvent, version: int) -> Handler | Reason:
        if event.body_size > formatting.SHOWN:
            return Reason("body-too-large-for-page", size=event.body_size)
        try:
            return eligibility.edit_target(event, version)
        except AmqpEventsError as exc:
            return Reason.of(exc)

    def _revisions(self, request: HttpRequest, event: ArchivedEvent) -> list[tuple[Any, ...]]:
        """Return the newest revisions and how they differ from the original, in one query."""
        head = head_of("body", formatting.SHOWN + 1)
        edits = event.revision_set.using(alias_of(event)).defer("body").annotate(head=head)
        revisions = list(edits.order_by("-number")[:REVISIONS])
        readable = self.sight(request, event) != "none"
        for revision in revisions:
            revision.body = bytes(revision.head)
        return [
            (revision, self._changes(event, revision) if readable else None)
            for revision in revisions
        ]

    def _changes(self, event: ArchivedEvent, revision: Revision) -> dict[str, Any]:
        """Return what a revision changes, redacted, or why it is not shown."""
        sides = []
        for side in (event, revision):
            if max(event.body_size, len(side.body)) > formatting.SHOWN:
                return {"lines": [], "problem": _("The payload is too long to show here.")}
            redacted = redaction.redact(event.name, side.payload or {})
            if isinstance(redacted, Reason):
                return {"lines": [], "problem": text(redacted)}
            sides.append(_written(redacted))
        lines = editing.diff(*sides)
        problem = "" if lines else _("No visible difference.")
        return {"lines": lines, "problem": problem}

    # -- the editor

    def edit_view(self, request: HttpRequest, event: ArchivedEvent) -> HttpResponse:
        """Edit (GET), show what it would change, and publish it (POST)."""
        data = request.POST if request.method == "POST" else request.GET
        version = _number(data.get("version", str(event.version)))
        where = self._editable(event, -1 if version is None else version)
        if not conf.load()[0].editing:
            where = replay.EDITING_OFF
        if isinstance(where, Reason) or version is None:
            messages.error(
                request, code(_("Nothing was published: %(why)s") % {"why": text(where)})
            )
            return self._redirect(request, "change", event.pk)
        context = self._context(request, event, where)
        step = data.get("step") if request.method == "POST" else ""
        if step not in ("review", "publish"):
            return self._editor(request, context, _start(context["start"], event, data))
        form = EditForm(request.POST, required=step == "publish")
        try:
            payload = editing.parse(request.POST.get("payload", ""))
            if step == "publish" and form.is_valid():
                result = of_report(
                    replay.edit(
                        event.pk,
                        version,
                        payload,
                        by=request.user.get_username(),
                        reason=form.cleaned_data["reason"],
                    )
                )
                tell(request, _PUBLISHED, result, 1)
                if result.returned:
                    messages.info(request, _("The edit is kept as a revision."))
                return self._redirect(request, "change", event.pk)
            draft = editing.draft(event, where, payload)
        except (AmqpEventsError, Error) as exc:
            # The page keeps what the user has written.
            problems = exc.problems if isinstance(exc, InvalidEditError) else (problem(exc),)
            for why in problems:
                form.add_error("payload", text(why, TEXT))
            return self._editor(request, context, form)
        if step == "review":
            form = EditForm(required=True, initial={"payload": request.POST["payload"]})
        return self._review(request, context, form, payload, draft)

    def _context(
        self, request: HttpRequest, event: ArchivedEvent, handler: Handler
    ) -> dict[str, Any]:
        """Return the context of editor and review; an edit starts from the newest revision."""
        start = event.revision_set.using(alias_of(event)).order_by("-number").first()
        return {
            "event": event,
            "start": start,
            "handler": handler,
            "warnings": _warnings(event, handler),
            "action_url": self._filtered_url(request, "edit", event.pk),
            "cancel_url": self._filtered_url(request, "change", event.pk),
        }

    def _editor(
        self, request: HttpRequest, context: dict[str, Any], form: EditForm
    ) -> HttpResponse:
        event: ArchivedEvent = context["event"]
        decoded = event.decoded
        title = _("Edit and replay %(event)s") % {"event": line(event.name)}
        context = {
            **context,
            "form": form,
            "unreadable": decoded is None and context["start"] is None,
            "args": formatting.pretty(list(decoded.args))[0] if decoded and decoded.args else "",
        }
        return self._render(request, "edit", title, context)

    def _review(
        self,
        request: HttpRequest,
        context: dict[str, Any],
        form: EditForm,
        payload: dict[str, Any],
        draft: Draft,
    ) -> HttpResponse:
        event: ArchivedEvent = context["event"]
        own = editing.diff(_written(event.payload or {}), _written(payload))
        title = _("Replay %(event)s with this payload?") % {"event": line(event.name)}
        context = {
            **context,
            "form": form,
            "notes": [text(note, TEXT) for note in draft.notes],
            "own": own,
            "payload": request.POST.get("payload", ""),
            "superseded": is_superseded(event.name, payload, context["handler"]) and 1,
            "count": 1,
        }
        return self._render(request, "review", title, context)


def _start(start: Revision | None, event: ArchivedEvent, data: Any) -> EditForm:
    """Return the editor with what was written, or with what is edited."""
    if data.get("payload") is not None:
        return EditForm(initial={"payload": data["payload"]})
    payload = start.payload if start is not None else event.payload
    if payload is not None:
        return EditForm(initial={"payload": editing.written(payload)})
    # A comma may be all that is wrong with it.
    text = bytes(event.body).decode("utf-8", "replace")
    return EditForm(initial={"payload": text if visible(text) == text else "{}"})


def _warnings(event: ArchivedEvent, handler: Handler) -> list[str]:
    """Return the warnings to read before an edited replay."""
    told = []
    replays = event.replay_set.using(alias_of(event))
    if replays.filter(state=Replay.State.SUCCEEDED).exists():
        told.append(_("A replay has already succeeded: the handler has run for this event once."))
    if event.reason == "poison":
        told.append(_("This event is poison: it killed its worker process and may do so again."))
    if handler.once:
        told.append(
            _(
                "The handler has once=True. If it has handled this event id, an edited replay does "
                "nothing and counts as succeeded: publish a new event instead."
            )
        )
    return told


def _written(payload: Any) -> str:
    return formatting.pretty(dict(payload))[0]


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else None
