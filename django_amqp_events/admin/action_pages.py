"""Actions: what users can do with rows, each after a page that previews and confirms it.

Ids and versions are frozen when a user selects: an event that changes before the confirmation is
skipped, and the user is told.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar, Final
from uuid import UUID

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, LogEntry
from django.db import Error
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern
from django.utils.translation import gettext as _
from django.utils.translation import ngettext_lazy

from ..archive.eligibility import Skipped
from ..archive.states import REASON_CHARACTERS, Seen
from ..databases import clock, parts
from ..exceptions import AmqpEventsError
from ..reasons import Reason
from ..templatetags.amqp_events import code, line, text
from .base import Pages, problem
from .formatting import MORE, counted, number
from .lists import CAP

#: Events that one action can take.
LIMIT: Final = 2_000
#: Events that a confirmation page names; the rest it counts.
NAMED: Final = 50
#: Reasons that one answer names; the rest it counts.
REASONS: Final = 5

_PAIR: Final = re.compile(r"([0-9a-f]{32}):([0-9]{1,10})")


Rows = Mapping[UUID, Any]
#: The rows that an action would change, those that it would skip, and what else its page shows.
Preview = tuple[list[UUID], list[Skipped], dict[str, Any]]


@dataclass(slots=True, kw_only=True)
class Result:
    """The result of an action.

    Attributes:
        done, returned: what it changed or published, and what it could not publish.
        stopped: why it ended early.
    """

    done: list[UUID] = field(default_factory=list)
    returned: list[Skipped] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    stopped: Reason | None = None

    def add(self, other: Result) -> None:
        """Add the result of another part of the rows."""
        self.done += other.done
        self.returned += other.returned
        self.skipped += other.skipped
        self.stopped = self.stopped or other.stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A confirmed action."""

    action: Action
    seen: Seen
    rows: Rows
    user: Any
    reason: str

    @property
    def by(self) -> str:
        """The name of the user."""
        return str(self.user.get_username())

    def log(self, done: Iterable[UUID]) -> None:
        """Write the action into Django's log, which people with other languages read."""
        if rows := [self.rows[pk] for pk in done]:
            message = ": ".join(filter(None, (self.action.log, self.reason)))
            LogEntry.objects.log_actions(self.user.pk, rows, CHANGE, message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """An action on the rows of a list.

    Attributes:
        button: its label on the page of one event.
        menu: its label in the list; ``""`` for an action that the list does not have.
        question, done: title of the confirmation page and message after it, for ``count`` events.
        states: the states that an event may be in.
        log: its name in Django's log, which stays English; for rows without an audit of their own.
        permission_of: the action whose permission it needs, if not its own.
    """

    name: str
    button: Any
    question: Any
    done: Any
    states: tuple[str, ...]
    effect: Any
    menu: Any = ""
    log: str = ""
    reason_required: bool = False
    publishes: bool = False
    permission_of: str = ""

    @property
    def permission(self) -> str:
        """The permission that ``has_<permission>_permission`` checks, as for Django's actions."""
        return self.permission_of or self.name


class ReasonForm(forms.Form):
    """The reason of an action."""

    reason = forms.CharField(
        max_length=REASON_CHARACTERS,
        strip=True,
        widget=forms.Textarea(attrs={"rows": 2, "cols": 60}),
    )

    def __init__(self, data: Any = None, *, required: bool = False, **more: Any) -> None:
        super().__init__(data, **more)
        self.fields["reason"].required = required
        self.fields["reason"].label = _("Reason") if required else _("Reason (optional)")


def encode_selection(seen: Seen) -> str:
    """Write ids and versions into one field."""
    return ",".join(f"{pk.hex}:{version}" for pk, version in seen.items())


def decode_selection(text: str) -> dict[UUID, int] | None:
    """Read what :func:`encode_selection` wrote; ``None`` for anything else, and for too many."""
    if len(text) > LIMIT * 44:
        return None
    seen = {}
    for pair in text.split(","):
        match = _PAIR.fullmatch(pair)
        if match is None or int(match[2]) >= 2**31:
            return None
        seen[UUID(match[1])] = int(match[2])
    return seen if len(seen) <= LIMIT else None


def by_reason(skipped: Iterable[Skipped]) -> list[tuple[str, list[str]]]:
    """Return each reason with the titles of its events, the most frequent first."""
    groups: dict[str, list[str]] = {}
    for skip in skipped:
        groups.setdefault(text(skip.why, 500), []).append(line(skip.title or skip.id))
    return sorted(groups.items(), key=lambda item: -len(item[1]))


def in_list(action: Action) -> Callable[..., HttpResponse | None]:
    """Return an action as an entry of ``ModelAdmin.actions``."""

    @admin.action(description=action.menu, permissions=[action.permission])
    def selected(
        pages: ActionPages, request: HttpRequest, queryset: QuerySet[Any]
    ) -> HttpResponse | None:
        return pages.ask_selected(request, queryset, action)

    selected.__name__ = f"{action.name}_selected"
    return selected


def across(request: HttpRequest) -> bool:
    """Return True if the form selects all rows of the list, as Django's form reads it."""
    return request.POST.get("select_across", "").lower() not in ("", "0", "false")


def as_listed(request: HttpRequest, rows: QuerySet[Any], changed: Any) -> QuerySet[Any]:
    """Return those of the selected rows that the list had when it was shown.

    Raises:
        AmqpEventsError: other rows match the filters by now, such as events that are overdue since.
    """
    try:
        listed = datetime.fromisoformat(request.POST.get("listed_at", "")).astimezone(UTC)
    except (ValueError, OverflowError):
        listed = clock(rows.db)
    since: QuerySet[Any] = rows.alias(came=changed).filter(came__lte=listed)
    shown = request.POST.get("listed", "")
    count = int(shown) if re.fullmatch("[0-9]{1,9}", shown) else CAP
    # A list that is full ends at its cap.
    if count < CAP and len(since.values_list("pk")[: count + 1]) > count:
        raise AmqpEventsError(Reason("list-changed"))
    return since


class ActionPages(Pages):
    """Pages whose rows change by actions alone.

    Attributes:
        version: the expression that changes when an event does.
        limit, too_many: events that one action can change, and the message about more.
        gone: why an action skips a row that is deleted.
        changed: the time at which a row came into the list, an expression.
        preview: returns what an action would do to rows that exist; changes nothing.
        run: runs an action and records it, for a part of the rows at a time.
    """

    preview: ClassVar[staticmethod[[Action, Seen, Rows], Preview]]
    run: ClassVar[staticmethod[[Decision], Result]]
    row_actions: ClassVar[Mapping[str, Action]]
    version: ClassVar[Any]
    limit: ClassVar[int] = LIMIT
    too_many: ClassVar[Any]
    gone: ClassVar[Reason]
    changed: ClassVar[Any]

    def rows_of(self, request: HttpRequest, ids: Iterable[UUID]) -> dict[UUID, Any]:
        """Return rows by their ids; :meth:`_existing` asks which of them this user may see."""
        return {row.pk: row for row in self.get_queryset(request).filter(pk__in=list(ids))}

    def freeze(self, queryset: QuerySet[Any]) -> dict[UUID, int]:
        """Return the versions of the rows by id, one more than the limit at most."""
        versions: Any = queryset.annotate(frozen=self.version).values_list("pk", "frozen")
        return dict(versions[: self.limit + 1])

    def may(self, request: HttpRequest, action: Action, row: Any = None) -> bool:
        """Return True if this user may see a row and run the action on it, or on some row."""
        return self.allows(request, row, action.permission)

    def get_urls(self) -> list[URLPattern]:
        decide = [
            self._path(f"decide/{name}/", partial(self.action_view, action=action), name)
            for name, action in self.row_actions.items()
        ]
        return [*decide, *super().get_urls()]

    def _buttons(
        self, request: HttpRequest, row: Any, version: int, offered: Iterable[Action]
    ) -> dict[str, list[Any]]:
        """Return the buttons of one event that this user may use, and why others are missing."""
        buttons: dict[str, list[Any]] = {"links": [], "obstacles": []}
        seen = encode_selection({row.pk: version})
        for action in offered:
            if not self.may(request, action, row):
                continue
            if obstacle := self._obstacle(row, action):
                buttons["obstacles"].append(obstacle)
            else:
                url = self._filtered_url(request, action.name, seen=seen, back="event")
                buttons["links"].append({"label": action.button, "name": action.name, "url": url})
        return buttons

    def _obstacle(self, row: Any, action: Action) -> str:
        """Return why an action cannot run now, ``""`` if it can."""
        return ""

    def ask_selected(
        self, request: HttpRequest, queryset: QuerySet[Any], action: Action
    ) -> HttpResponse | None:
        """Freeze the rows that are selected in the list, and ask for confirmation."""
        whole = across(request)
        seen = self.freeze(as_listed(request, queryset, self.changed) if whole else queryset)
        if len(seen) > self.limit:
            messages.error(request, code(str(self.too_many) % {"limit": number(self.limit)}))
            return None
        if not whole:
            # The confirmation page says why events that have left the list are skipped.
            ids = {UUID(pk) for pk in request.POST.getlist(ACTION_CHECKBOX_NAME)}
            seen.update(dict.fromkeys(ids - set(seen), 0))
        if not seen:
            messages.warning(request, _("No selected event is left in the list."))
            return None
        return self.ask(request, action, dict(list(seen.items())[: self.limit]))

    def action_view(self, request: HttpRequest, *, action: Action) -> HttpResponse:
        """Ask for confirmation (GET), and run the action (POST)."""
        self.require(request, None, action.permission)
        data = request.POST if request.method == "POST" else request.GET
        back = data.get("back", "")
        seen = decode_selection(data.get("seen", ""))
        if seen is None:
            messages.error(request, _("The URL or form names no events. Select the events again."))
            return self._redirect(request, "changelist")
        if request.method != "POST":
            return self.ask(request, action, seen, back=back)
        form = ReasonForm(request.POST, required=action.reason_required)
        if not form.is_valid():
            return self.ask(request, action, seen, back=back, form=form)
        there, rows, gone = self._existing(request, action, seen)
        decision = Decision(
            action=action,
            seen=there,
            rows=rows,
            user=request.user,
            reason=form.cleaned_data["reason"],
        )
        result = self._run(decision)
        result.skipped += gone
        tell(request, action.done, result, len(seen))
        return HttpResponseRedirect(self._origin(request, seen, back))

    def _run(self, decision: Decision) -> Result:
        """Run an action part by part, each with commits of its own, until an error ends it."""
        result = Result()
        for part in parts(list(decision.seen)):
            rows = replace(decision, seen={pk: decision.seen[pk] for pk in part})
            try:
                result.add(self.run(rows))
            except (AmqpEventsError, Error) as exc:
                result.stopped = problem(exc, partly=bool(result.done))
            if result.stopped:
                break
        return result

    def _existing(
        self, request: HttpRequest, action: Action, seen: Seen
    ) -> tuple[Seen, Rows, list[Skipped]]:
        """Return versions and rows that this user may change, and the others as skipped."""
        existing = self.rows_of(request, seen)
        visible = {pk: row for pk, row in existing.items() if self.allows(request, row)}
        rows = {pk: row for pk, row in visible.items() if self.may(request, action, row)}
        there = {pk: version for pk, version in seen.items() if pk in rows}
        skipped = [Skipped(id=pk, title="", why=self.gone) for pk in seen if pk not in visible]
        skipped += [
            Skipped.of(row, Reason("forbidden")) for pk, row in visible.items() if pk not in rows
        ]
        return there, rows, skipped

    def _origin(self, request: HttpRequest, seen: Seen, back: str) -> str:
        """Return the URL of the page that a user came from."""
        if back != "event" or len(seen) != 1:
            return self._filtered_url(request, "changelist")
        return self._filtered_url(request, "change", next(iter(seen)))

    def ask(
        self,
        request: HttpRequest,
        action: Action,
        seen: Seen,
        *,
        back: str = "",
        form: ReasonForm | None = None,
    ) -> HttpResponse:
        """Show what an action would do, and ask for confirmation."""
        there, rows, gone = self._existing(request, action, seen)
        try:
            eligible, skipped, details = self.preview(action, there, rows)
        except AmqpEventsError as exc:
            messages.error(
                request, code(_("Nothing can be published: %(why)s") % {"why": text(exc, 1_000)})
            )
            return self._redirect(request, "changelist")
        count = len(eligible)
        question = counted(action.question, count)
        context = {
            **details,
            "action": action,
            "skipped": by_reason(skipped + gone),
            "count": count,
            "total": len(seen),
            "seen": encode_selection({pk: seen[pk] for pk in eligible}),
            "events": [rows[pk] for pk in eligible[:NAMED]],
            "unnamed": max(0, count - NAMED),
            "back": back,
            "form": form or ReasonForm(required=action.reason_required),
            "button": question,
            "action_url": self._filtered_url(request, action.name),
            "cancel_url": self._origin(request, seen, back),
        }
        title = _("%(question)s?") % {"question": question} if count else _("Nothing can be done")
        return self._render(request, "confirm", title, context)


#: Texts that archived events and the outbox share.
DISCARD: Final = ngettext_lazy("Discard %(count)s event", "Discard %(count)s events", "count")
RESTORE: Final = ngettext_lazy("Restore %(count)s event", "Restore %(count)s events", "count")
DISCARDED: Final = ngettext_lazy(
    "%(count)s event discarded.", "%(count)s events discarded.", "count"
)

_RETURNED: Final = ngettext_lazy(
    "%(count)s event not published: %(why)s", "%(count)s events not published: %(why)s", "count"
)
_SKIPPED: Final = ngettext_lazy(
    "%(count)s event skipped: %(why)s", "%(count)s events skipped: %(why)s", "count"
)
_STOPPED: Final = ngettext_lazy(
    "%(count)s event not processed. Stopped: %(why)s",
    "%(count)s events not processed. Stopped: %(why)s",
    "count",
)


def tell(request: HttpRequest, done: Any, result: Result, total: int) -> None:
    """Show the result of an action as messages."""
    if result.done:
        messages.success(request, counted(done, len(result.done)))
    returned = by_reason(result.returned)
    for say, groups, told in (
        (messages.error, returned, _RETURNED),
        (messages.warning, by_reason(result.skipped), _SKIPPED),
    ):
        for why, titles in groups[:REASONS]:
            say(request, code(counted(told, len(titles), why=why)))
        if others := sum(len(titles) for _why, titles in groups[REASONS:]):
            say(request, counted(MORE, others))
    if result.stopped:
        tried = len(result.done) + len(result.returned) + len(result.skipped)
        left, why = total - tried, text(result.stopped, 500)
        if left or why not in dict(returned):
            messages.error(request, code(counted(_STOPPED, left, why=why)))
