"""The forms that give past events to a handler; the page of the draft confirms it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import Error
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext_lazy

from ..archive.batches import backfill, preview
from ..archive.history import PastSelection
from ..declare.registry import get_registry
from ..exceptions import AmqpEventsError
from ..message.text import valid_moment
from ..models import LENGTH, ArchivedEvent, ReplayBatch
from ..templatetags.amqp_events import code, text
from .base import Pages, problem
from .filters import settings_and_registry

#: Time before a row of an event in which the event may have been published.
BEFORE: Final = timedelta(days=1)


def _check_year(at: datetime) -> None:
    if valid_moment(at) is None:
        raise ValidationError(forms.DateTimeField.default_error_messages["invalid"])


class BackfillForm(forms.Form):
    """A range of past events, or one event."""

    handler = forms.ChoiceField(label=gettext_lazy("Handler"))
    event = forms.CharField(
        label=gettext_lazy("Event"),
        max_length=LENGTH,
        required=False,
        help_text=gettext_lazy("Name or pattern, such as shop.order.*. Empty: all of the handler."),
    )
    match = forms.CharField(
        label=gettext_lazy("Value in the payload"),
        max_length=LENGTH,
        required=False,
        help_text=gettext_lazy("Such as order_id=17, or name=Ann* for its start. Empty: any."),
    )
    since = forms.DateTimeField(
        label=gettext_lazy("Published since"),
        required=False,
        validators=[_check_year],
        help_text=gettext_lazy("Such as 2026-11-20 13:30. Empty: since the history begins."),
    )
    until = forms.DateTimeField(
        label=gettext_lazy("Published before"),
        required=False,
        validators=[_check_year],
        help_text=gettext_lazy("Empty: now."),
    )
    again = forms.BooleanField(
        label=gettext_lazy("Run again"),
        required=False,
        help_text=gettext_lazy("Include the events that the handler has received."),
    )
    id = forms.CharField(max_length=LENGTH, required=False, widget=forms.HiddenInput)

    def __init__(self, data: Any = None, *, searches: bool) -> None:
        """Create a form; only users who may view payloads may search them."""
        super().__init__(data)
        if not searches:
            del self.fields["match"]
        names = sorted(get_registry().handlers)
        handler: Any = self.fields["handler"]
        handler.choices = [(name, name) for name in names]

    @property
    def selection(self) -> PastSelection:
        """Return the filter of a valid form.

        Raises:
            ValueError: *Value in the payload* is not ``path=value``.
        """
        given = self.cleaned_data
        return PastSelection(
            events=tuple(filter(None, [given["event"]])),
            ids=tuple(filter(None, [given["id"]])),
            search=tuple(filter(None, [given.get("match")])),
            since=given["since"] and _aware(given["since"]),
            until=given["until"] and _aware(given["until"]),
        )


def _aware(at: datetime) -> datetime:
    # With USE_TZ = False, Django's forms return local times.
    return at.astimezone(UTC)


def empty_form(pages: Pages, request: HttpRequest) -> BackfillForm | None:
    """Return the form for a range, ``None`` without a history."""
    configured = settings_and_registry()
    if not (configured and configured[0].history):
        return None
    return BackfillForm(searches=_may_search(pages, request))


def _may_search(pages: Pages, request: HttpRequest) -> bool:
    archive = pages.pages_of(request, ArchivedEvent)
    return archive is not None and archive.allows(request, None, "view_payload")


def backfill_view(pages: Pages, request: HttpRequest) -> HttpResponse:
    """Freeze a range and show its preview."""
    searches = _may_search(pages, request)
    if request.POST.get("match") and not searches:
        raise PermissionDenied("view_payload_archivedevent")
    form = BackfillForm(request.POST, searches=searches)
    list_url = pages.url_of(ReplayBatch, "changelist")
    if not form.is_valid():
        for name, errors in form.errors.items():
            label = form.fields[name].label if name in form.fields else ""
            messages.error(request, f"{label}: {' '.join(map(str, errors))}")
        return HttpResponseRedirect(list_url)
    handler, by = form.cleaned_data["handler"], request.user.get_username()
    try:
        batch = backfill.freeze(handler, form.selection, by=by, again=form.cleaned_data["again"])
    except ValueError as exc:
        messages.error(request, code(text(exc, 1_000)))
        return HttpResponseRedirect(list_url)
    return show_draft(pages, request, batch)


def show_draft(pages: Pages, request: HttpRequest, batch: ReplayBatch) -> HttpResponse:
    """Preview a draft, and redirect to its page."""
    try:
        preview.preview_batch(batch)
    except (AmqpEventsError, Error) as exc:
        # The page of the batch has a button for it.
        messages.error(request, code(text(problem(exc, partly=True), 1_000)))
    return HttpResponseRedirect(pages.url_of(ReplayBatch, "change", batch.pk))
