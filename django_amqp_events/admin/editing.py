"""Edit and replay: an editor, a page that shows what would change, and doing it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import UUID

from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError
from django.db.models import BinaryField, F, Func, Value
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.timezone import localtime
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from .. import conf
from ..archive import editing, eligibility, redaction, replay
from ..archive.editing import Draft
from ..archive.eligibility import Target
from ..conf import get_settings
from ..declare.registry import get_registry
from ..exceptions import AmqpEventsError, InvalidEditError
from ..models import (
    ArchivedEvent,
    Replay,
    Revision,
    visible,
)
from ..reasons import Reason
from . import archived_event_actions as decisions
from . import formatting
from .base import Pages, as_file, non_atomic
from .formatting import line

#: Revisions of one event that its page shows, the newest, and of how many what they change.
REVISIONS = 20
DIFFS = 5
_TEMPLATES = "admin/django_amqp_events/archivedevent"


class EditForm(forms.Form):
    """The payload, and why."""

    payload = forms.CharField(
        label=gettext_lazy("Payload"),
        strip=False,
        widget=forms.Textarea(
            attrs={"rows": 24, "cols": 80, "spellcheck": "false", "class": "ae-editor"}
        ),
    )
    reason = forms.CharField(
        label=gettext_lazy("Reason"),
        max_length=1_000,
        strip=True,
        widget=forms.Textarea(attrs={"rows": 2, "cols": 60}),
    )

    def __init__(self, data: Any = None, *, publishes: bool = False, **more: Any) -> None:
        super().__init__(data, **more)
        self.fields["reason"].required = publishes


class EditingPages(Pages[ArchivedEvent]):
    """Editing for the pages of the archive; see :class:`.archived_events.ArchivedEventAdmin`."""

    def has_payload_permission(self, request: HttpRequest) -> bool:
        """Return True if this user may see payloads and headers."""
        return self._granted(request, "view_payload_archivedevent")

    def has_raw_permission(self, request: HttpRequest) -> bool:
        """Return True if this user may see unredacted bodies."""
        if not self.has_payload_permission(request):
            return False
        return not redaction.has_hook() or self._granted(request, "view_raw_archivedevent")

    def has_edit_permission(self, request: HttpRequest) -> bool:
        """Return True if this user may edit, which needs the permission to see payloads."""
        return self._granted(request, "edit_archivedevent") and self.has_raw_permission(request)

    def _editing_urls(self) -> list[URLPattern]:
        name = f"{self.opts.app_label}_{self.opts.model_name}"

        def at(route: str, view: Callable[..., HttpResponse], name_: str) -> URLPattern:
            return path(route, self.admin_site.admin_view(view), name=f"{name}_{name_}")

        return [
            at("<uuid:pk>/edit/", non_atomic(partial(self.edit_view)), "edit"),
            at("<uuid:pk>/revision/<int:number>/", self.revision_view, "revision"),
        ]

    # -- on the event's page

    def _edit_button(
        self, request: HttpRequest, event: ArchivedEvent, filters: str
    ) -> tuple[dict[str, str] | None, str]:
        """Return the link to the editor, or what keeps this user from it, where editing is on."""
        label = _("Edit and replay")
        if not conf.load()[0].editing:
            return None, ""
        if not self.has_edit_permission(request):
            needed = ["edit_archivedevent", "view_payload_archivedevent"]
            if redaction.has_hook():
                needed.append("view_raw_archivedevent")
            missing = ", ".join(f"“{each}”" for each in needed if not self._granted(request, each))
            return None, _("You have no permission for “%(label)s” (%(missing)s).") % {
                "label": label,
                "missing": missing,
            }
        try:
            where = self._editable(event, event.version)
        except AmqpEventsError as exc:
            where = Reason.of(exc)
        if isinstance(where, Reason):
            return None, _("It cannot be edited: %(why)s") % {
                "why": formatting.text(where, formatting.TEXT)
            }
        url = self._url("edit", event.pk, filters=filters, version=str(event.version))
        return {"label": label, "name": "edit", "url": url}, ""

    def _editable(self, event: ArchivedEvent, version: int) -> Target | Reason:
        if event.body_size > formatting.SHOWN:
            return Reason("body-too-large-for-page", size=event.body_size, pk=event.pk)
        return eligibility.editable(event, version)

    def _revisions(self, request: HttpRequest, event: ArchivedEvent) -> list[dict[str, Any]]:
        """Return the newest revisions, newest first, with what they change, in one query."""
        head = Func(
            F("body"), Value(1), Value(formatting.SHOWN + 1), function="SUBSTR",
            output_field=BinaryField(),
        )  # fmt: skip
        using = event._state.db  # noqa: SLF001 - Django's own way to say where a row is from
        found = event.revision_set.using(using).defer("body").annotate(head=head)
        revisions = list(found.order_by("-number")[:REVISIONS])
        readable, raw = self.has_payload_permission(request), self.has_raw_permission(request)
        for each in revisions:
            # SQLite's SUBSTR makes NULL of an empty body.
            each.body = bytes(getattr(each, "head", None) or b"")
        by_number = {each.number: each for each in revisions}
        return [
            {
                "number": each.number,
                "base": each.base,
                "at": each.at,
                "by": line(each.by),
                "reason": visible(each.reason, formatting.TEXT),
                "url": self._url("revision", event.pk, each.number) if raw else "",
                "diff": self._changes(event, each, by_number.get(each.base))
                if readable and number < DIFFS
                else None,
            }
            for number, each in enumerate(revisions)
        ]

    def _changes(
        self, event: ArchivedEvent, revision: Revision, base: Revision | None
    ) -> dict[str, Any]:
        """Return what a revision changes, redacted, or why it is not shown."""
        sides = []
        for each in (base or event, revision):
            if max(event.body_size, len(each.body)) > formatting.SHOWN:
                return {"lines": [], "problem": _("The payload is too long to show here.")}
            found = redaction.redact(event.name, each.payload or {})
            if found.payload is None:
                return {"lines": [], "problem": formatting.text(found.problem)}
            sides.append(_written(found.payload))
        lines = editing.diff(*sides)
        problem = "" if lines else _("Only redacted values or number formats differ.")
        return {"lines": _lines(lines), "problem": problem}

    def revision_view(self, request: HttpRequest, pk: UUID, number: int) -> HttpResponse:
        """The body of a revision, as a file."""
        if not self.has_view_permission(request) or not self.has_raw_permission(request):
            raise PermissionDenied
        # Of an event that this user may see.
        event = self.get_queryset(request).only("pk").filter(pk=pk).first()
        found = event and event.revision_set.using(event._state.db).filter(number=number).first()  # noqa: SLF001
        if not found:
            messages.warning(request, _("There is no such revision."))
            return HttpResponseRedirect(self._url("changelist"))
        return as_file(pk, bytes(found.body))

    # -- the editor

    def edit_view(self, request: HttpRequest, pk: UUID) -> HttpResponse:
        """Edit (GET), show what it would change, and publish it (POST)."""
        if not self.has_view_permission(request) or not self.has_edit_permission(request):
            raise PermissionDenied
        filters = self._filters(request)
        event = self.get_queryset(request).defer(None).filter(pk=pk).first()
        if event is None:
            messages.warning(request, _("There is no archived event %(pk)s.") % {"pk": pk})
            return HttpResponseRedirect(self._url("changelist", filters=filters))
        data = request.POST if request.method == "POST" else request.GET
        version = _number(data.get("version", str(event.version)))
        try:
            if not get_settings().editing:
                raise PermissionDenied
            where = self._editable(event, -1 if version is None else version)
        except AmqpEventsError as exc:
            where = Reason.of(exc)
        if isinstance(where, Reason) or version is None:
            messages.error(
                request, _("Nothing was published: %(why)s") % {"why": formatting.text(where)}
            )
            return HttpResponseRedirect(self._url("change", pk, filters=filters))
        using = event._state.db  # noqa: SLF001
        revisions = list(event.revision_set.using(using).order_by("-number")[:REVISIONS])
        context = self._context(request, event, where, revisions, data.get("base"), filters)
        step = data.get("step") if request.method == "POST" else ""
        if step not in ("review", "publish"):
            return self._editor(request, context, _start(context["start"], event, data))
        form = EditForm(request.POST, publishes=step == "publish")
        try:
            payload = editing.parse(request.POST.get("payload", ""))
            draft = editing.draft(event, where.handler, payload, get_settings(), get_registry())
        except InvalidEditError as exc:
            for problem in exc.problems:
                form.add_error("payload", formatting.text(problem, formatting.TEXT))
            return self._editor(request, context, form)
        if step == "review":
            form = EditForm(initial={"payload": request.POST["payload"]})
        elif form.is_valid():
            reason = form.cleaned_data["reason"]
            report = decisions.edit(
                event, version, payload, user=request.user, reason=reason, base=context["base"]
            )
            _tell(request, report)
            return HttpResponseRedirect(self._url("change", pk, filters=filters))
        return self._review(request, context, form, payload, draft)

    def _context(
        self,
        request: HttpRequest,
        event: ArchivedEvent,
        where: Target,
        revisions: list[Revision],
        wanted: str | None,
        filters: str,
    ) -> dict[str, Any]:
        """Return what editor and review have in common."""
        by_number = {each.number: each for each in revisions}
        base = _number(wanted) if wanted is not None else max(by_number, default=0)
        if base not in by_number:
            base = 0

        def start(number: int) -> str:
            return self._url(
                "edit", event.pk, filters=filters, version=str(event.version), base=str(number)
            )

        own = {"label": _("the original payload"), "number": 0}
        starts = [own] + [
            {
                "number": each.number,
                "label": _("revision %(number)s by %(by)s, %(at)s")
                % {
                    "number": each.number,
                    "by": line(each.by) or "?",
                    "at": f"{localtime(each.at):%Y-%m-%d %H:%M}",
                },
            }
            for each in revisions
        ]
        return {
            **self.admin_site.each_context(request),
            "subtitle": None,
            "opts": self.opts,
            "media": self.media,
            "event": event,
            "where": where,
            "base": base,
            "start": by_number.get(base),
            "starts": [{**each, "url": start(int(str(each["number"])))} for each in starts],
            "locked": _locked(event, where),
            "warnings": _warnings(event, where),
            "action_url": self._url("edit", event.pk, filters=filters),
            "cancel_url": self._url("change", event.pk, filters=filters),
            "list_url": self._url("changelist", filters=filters),
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
            "title": title,
            "unreadable": decoded is None and context["start"] is None,
            "args": formatting.pretty(list(decoded.args))[0] if decoded and decoded.args else "",
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, f"{_TEMPLATES}/edit.html", context)

    def _review(
        self,
        request: HttpRequest,
        context: dict[str, Any],
        form: EditForm,
        payload: dict[str, Any],
        draft: Draft,
    ) -> HttpResponse:
        event: ArchivedEvent = context["event"]
        start: Revision | None = context["start"]
        after = _written(payload)
        own = _lines(editing.diff(_written(event.payload or {}), after))
        title = _("Replay %(event)s with this payload?") % {"event": line(event.name)}
        context = {
            **context,
            "form": form,
            "title": title,
            "notes": [formatting.text(each, formatting.TEXT) for each in draft.notes],
            "own": own,
            "since": None
            if start is None
            else _lines(editing.diff(_written(start.payload), after)),
            "number": start.number if start is not None else 0,
            "payload": request.POST.get("payload", ""),
            "bytes": len(draft.body),
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, f"{_TEMPLATES}/review.html", context)


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


def _locked(event: ArchivedEvent, where: Target) -> list[tuple[str, str]]:
    """Return what an edit does not change."""
    try:
        headers = ", ".join(sorted(map(str, event.headers)))
    except Exception:  # noqa: BLE001 - bytes that anything may have written
        headers = ""
    published = event.published_at.isoformat() if event.published_at else ""
    facts = [
        (_("Event"), event.name),
        (_("Event id"), event.event_id),
        (_("Published by"), event.source),
        (_("Published"), published),
        (_("Correlation id"), event.correlation_id),
        (_("Causation id"), event.causation_id),
        (_("Headers"), headers),
        (_("Goes to"), f"{where.handler.name} ({where.queue})"),
    ]
    return [(name, line(text, formatting.TEXT)) for name, text in facts if text]


def _warnings(event: ArchivedEvent, where: Target) -> list[str]:
    """Return the warnings to read before an edited replay."""
    told = []
    using = event._state.db  # noqa: SLF001
    succeeded = event.replay_set.using(using).filter(outcome=Replay.Outcome.SUCCEEDED).exists()
    if succeeded:
        told.append(_("A replay has already succeeded: the handler has run for this event once."))
    if event.reason == "poison":
        told.append(_("This event is poison: it killed its worker process and may do so again."))
    if where.handler.once:
        told.append(_once(event, where))
    return told


def _once(event: ArchivedEvent, where: Target) -> str:
    try:
        handled = editing.handled(event, where.handler, get_settings())
    except DatabaseError as exc:
        return _(
            "The handler uses once, and its inbox could not be read (%(error)s). If it "
            "has handled this event, the replay does nothing and counts as succeeded."
        ) % {"error": type(exc).__name__}
    if handled is not None:
        return _(
            "The handler uses once and handled this event id on %(at)s. An edited replay "
            "has the same id, so it would do nothing and count as succeeded. Publish a "
            "new event instead."
        ) % {"at": f"{localtime(handled.handled_at):%Y-%m-%d %H:%M:%S %Z}"}
    return _(
        "The handler uses once. An edited replay has the same event id, so only one "
        "of this and any other copy takes effect."
    )


def _written(payload: Any) -> str:
    return formatting.pretty(dict(payload))[0]


def _lines(lines: list[editing.Line]) -> list[dict[str, str]]:
    """Return a diff's lines with the class that marks each."""
    classes = {"+": "ae-added", "-": "ae-removed", "…": "ae-quiet"}
    return [
        {
            "kind": each.kind,
            "text": visible(each.text, formatting.TEXT),
            "css": classes.get(each.kind, ""),
        }
        for each in lines
    ]


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else None


def _tell(request: HttpRequest, report: replay.Report) -> None:
    if report.published:
        messages.success(
            request,
            _("1 event published with the edited payload."),
        )
    for each in report.returned:
        told = _("Not published; the edit is kept: %(why)s")
        messages.error(request, told % {"why": formatting.text(each.why, 500)})
    for each in report.skipped:
        told = _("Nothing was published: %(why)s")
        messages.warning(request, told % {"why": formatting.text(each.why, 500)})
    if report.stopped and not report.returned:
        told = _("Publishing stopped: %(why)s")
        messages.error(request, told % {"why": formatting.text(report.stopped, 500)})
