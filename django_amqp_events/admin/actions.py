"""Pages whose rows change only by actions with a confirmation page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol
from uuid import UUID

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.translation import gettext as _

from ..archive.states import Seen
from . import archived_event_actions as decisions
from .archived_event_actions import NAMED, ReasonForm
from .base import M, Pages, non_atomic


class Decides(Protocol):
    """The interface of an action."""

    @property
    def name(self) -> str:
        """In addresses."""

    @property
    def right(self) -> str:
        """``has_<right>_permission`` says who may."""

    @property
    def permission(self) -> str:
        """Codename of that permission."""

    @property
    def button(self) -> Any:
        """On the page of one event."""

    @property
    def asks(self) -> Callable[[int], str]:
        """On the button that does it, for a number of events."""

    @property
    def reason_required(self) -> bool:
        """Return True if the action needs a reason."""


class DecidingPages(Pages[M]):
    """Ask for confirmation of an action and run it.

    Attributes:
        choices: what can be decided, by name.
        templates: where the template ``confirm.html`` is.
    """

    choices: ClassVar[Mapping[str, Any]]
    templates: ClassVar[str]

    def may(self, request: HttpRequest, decision: Decides) -> bool:
        """Return True if this user may run the action."""
        check: Callable[[HttpRequest], bool] = getattr(self, f"has_{decision.right}_permission")
        return check(request)

    def decide_view(self, request: HttpRequest, *, decision: Any) -> HttpResponse:
        """Ask (GET), and do it (POST)."""
        raise NotImplementedError

    def _decide_urls(self) -> list[URLPattern]:
        name = f"{self.opts.app_label}_{self.opts.model_name}"
        return [
            path(
                f"decide/{each.name}/",
                self.admin_site.admin_view(non_atomic(partial(self.decide_view, decision=each))),
                name=f"{name}_{each.name}",
            )
            for each in self.choices.values()
        ]

    def _button(self, decision: Decides, pk: UUID, version: int, filters: str) -> dict[str, Any]:
        """Return the button of a decision about one event."""
        seen = decisions.encode_selection({pk: version})
        return {
            "label": decision.button,
            "name": decision.name,
            "url": self._url(decision.name, filters=filters, seen=seen, back="event"),
        }

    def _forbidden(self, decision: Decides) -> str:
        """Name the permission that the user lacks for an action."""
        return _("You have no permission for “%(label)s” (%(missing)s).") % {
            "label": decision.button,
            "missing": f"“{decision.permission}”",
        }

    def _unknown(self, request: HttpRequest, filters: str) -> HttpResponse:
        """Lead back to the list from an address that names no events."""
        messages.error(
            request,
            _("The URL or form names no events. Select the events again."),
        )
        return HttpResponseRedirect(self._url("changelist", filters=filters))

    def _confirm(
        self,
        request: HttpRequest,
        decision: Decides,
        *,
        plan: Any,
        eligible: Seen,
        total: int,
        events: Sequence[tuple[object, ...]],
        back: str,
        cancel_url: str,
        filters: str,
        form: ReasonForm | None,
    ) -> HttpResponse:
        """Show what a decision would do, and ask.

        Args:
            plan: for the template.
            eligible: the events that it would take.
            total: events that it was asked for.
            events: cells about the first :data:`~.archived_event_actions.NAMED` of them.
            back: where it leads back to.
        """
        count = len(eligible)
        context = {
            **self.admin_site.each_context(request),
            "title": _("%(question)s?") % {"question": decision.asks(count)}
            if count
            else _("Nothing can be done"),
            "subtitle": None,
            "opts": self.opts,
            "media": self.media,
            "decision": decision,
            "plan": plan,
            "count": count,
            "total": total,
            "events": events,
            "unnamed": max(0, count - NAMED),
            "form": form or ReasonForm(decision),
            "button": decision.asks(count),
            "seen": decisions.encode_selection(eligible),
            "back": back,
            "action_url": self._url(decision.name, filters=filters),
            "cancel_url": cancel_url or self._url("changelist", filters=filters),
            "list_url": self._url("changelist", filters=filters),
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, f"{self.templates}/confirm.html", context)
