"""Actions on archived events: their preview and their execution.

The events and their versions are frozen when somebody begins: whatever changes until he confirms
is left alone, and he is told.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Protocol
from uuid import UUID

from django import forms
from django.contrib.admin.models import CHANGE, LogEntry
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext, pgettext_lazy

from ..archive import eligibility, replay, states
from ..archive.eligibility import Skipped
from ..archive.replay import Report
from ..archive.states import Seen
from ..exceptions import AmqpEventsError
from ..models import (
    ArchivedEvent,
    Replay,
    Revision,
    State,
    visible,
)
from ..reasons import Reason
from .filters import handler_of, settings_and_registry
from .formatting import line, number, text

#: Events that one decision in the admin is about at most.
LIMIT: Final = 2_000
#: Events that a confirmation page names; the rest it counts.
NAMED: Final = 50

_PAIR: Final = re.compile(r"([0-9a-f]{32}):([0-9]{1,10})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """An action on archived events.

    Attributes:
        name: in addresses.
        right: its permission is ``<right>_archivedevent``.
        button: on the page of one event.
        asks: on the button that does it, for a number of events.
        before: the state that an event must be in.
        past: for the history: ``Discarded``.
        effect: one sentence of what it does.
        reason_required: nobody may do it without saying why.
        publishes: whether a message goes to the broker.
        overdue: only for events whose replay never reported back.
    """

    name: str
    right: str
    button: Any
    asks: Callable[[int], str]
    before: State
    past: str
    effect: Any
    reason_required: bool = False
    publishes: bool = False
    overdue: bool = False

    @property
    def force(self) -> bool:
        return self.name == "force"

    @property
    def permission(self) -> str:
        return f"{self.right}_archivedevent"


def _replays(count: int) -> str:
    found = ngettext("Replay %(count)s event", "Replay %(count)s events", count)
    return found % {"count": number(count)}


def _forces(count: int) -> str:
    found = ngettext(
        "Force a replay of %(count)s event", "Force a replay of %(count)s events", count
    )
    return found % {"count": number(count)}


def _resolves(count: int) -> str:
    found = ngettext("Mark %(count)s event as resolved", "Mark %(count)s events as resolved", count)
    return found % {"count": number(count)}


def discards(count: int) -> str:
    """``Discard 3 events``."""
    found = ngettext("Discard %(count)s event", "Discard %(count)s events", count)
    return found % {"count": number(count)}


def restores(count: int) -> str:
    """``Restore 3 events``."""
    found = ngettext("Restore %(count)s event", "Restore %(count)s events", count)
    return found % {"count": number(count)}


DECISIONS: Final[Mapping[str, Decision]] = {
    each.name: each
    for each in (
        Decision(
            name="replay",
            right="replay",
            button=pgettext_lazy("button", "Replay"),
            asks=_replays,
            before=State.ARCHIVED,
            past="Replayed",
            effect=_("Each event is published again, unchanged, to the handler that failed."),
            publishes=True,
        ),
        Decision(
            name="force",
            right="force",
            button=_("Force replay"),
            asks=_forces,
            before=State.REPLAYING,
            past="Replayed by force",
            effect=_(
                "Each overdue event is published again to its handler, under a new replay id."
            ),
            publishes=True,
            overdue=True,
        ),
        Decision(
            name="resolve",
            right="discard",
            button=_("Mark as resolved"),
            asks=_resolves,
            before=State.REPLAYING,
            past="Marked as resolved",
            effect=_(
                "The overdue events are discarded as settled. Nothing is published. A copy "
                "that is still queued will run, and a late outcome is only recorded in the "
                "history."
            ),
            reason_required=True,
            overdue=True,
        ),
        Decision(
            name="discard",
            right="discard",
            button=pgettext_lazy("button", "Discard"),
            asks=discards,
            before=State.ARCHIVED,
            past="Discarded",
            effect=_("The events are settled without being handled. You can restore them."),
            reason_required=True,
        ),
        Decision(
            name="restore",
            right="restore",
            button=pgettext_lazy("button", "Restore"),
            asks=restores,
            before=State.DISCARDED,
            past="Restored",
            effect=_("The discarded events return to the archive. Nothing is published."),
        ),
    )
}


class Asks(Protocol):
    """The part of an action that its form needs."""

    @property
    def reason_required(self) -> bool: ...


class ReasonForm(forms.Form):
    """The reason of an action."""

    reason = forms.CharField(
        max_length=1_000, strip=True, widget=forms.Textarea(attrs={"rows": 2, "cols": 60})
    )

    def __init__(self, decision: Asks, data: Any = None) -> None:
        super().__init__(data)
        self.fields["reason"].required = decision.reason_required
        self.fields["reason"].label = (
            _("Reason") if decision.reason_required else _("Reason (optional)")
        )


def encode_selection(seen: Seen) -> str:
    """Write ids and versions into one field."""
    return ",".join(f"{pk.hex}:{version}" for pk, version in seen.items())


def decode_selection(text: str) -> dict[UUID, int] | None:
    """Read what :func:`freeze` wrote; ``None`` for anything else, and for too many."""
    if len(text) > LIMIT * 44:
        return None
    seen = {}
    for pair in text.split(","):
        found = _PAIR.fullmatch(pair)
        if found is None or int(found[2]) >= 2**31:
            return None
        seen[UUID(found[1])] = int(found[2])
    return seen if len(seen) <= LIMIT else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The destination of events."""

    handler: str
    before: tuple[str, ...]
    queue: str
    exchange: str
    routing_key: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedGroup:
    """Events that are left out for one reason."""

    why: str
    count: int
    titles: tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class Plan:
    """The preview of an action.

    Attributes:
        eligible: ids it would take.
        routes: where they would go.
        skipped: the others, by reason.
        unconfirmed, succeeded, poison: how many of *eligible* may be on their way already, have
            had a replay that succeeded, and have ended the process that ran them.
        edited: how many have been edited before, and would go out as they were published.
    """

    eligible: list[UUID] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)
    skipped: list[SkippedGroup] = field(default_factory=list)
    unconfirmed: int = 0
    succeeded: int = 0
    poison: int = 0
    edited: int = 0


def plan(decision: Decision, seen: Seen, rows: Mapping[UUID, ArchivedEvent]) -> Plan:
    """Return the preview of an action; changes nothing.

    Args:
        rows: the events that this user may see.

    Raises:
        ConfigurationError: AMQP_EVENTS is wrong.
    """
    missing = [_gone(pk) for pk in seen if pk not in rows]
    there = {pk: version for pk, version in seen.items() if pk in rows}
    if not decision.publishes:
        found_here = settings_and_registry()
        skipped = []
        last = eligibility.last_actions([pk for pk in there if rows[pk].version != there[pk]])
        for pk, version in there.items():
            event = rows[pk]
            if event.state != decision.before or event.version != version:
                why = eligibility.why_changed(event, version, last.get(pk))
            elif decision.overdue and not eligibility.is_overdue(
                event, handler_of(event, found_here)
            ):
                why = eligibility.NOT_OVERDUE
            else:
                continue
            skipped.append(Skipped(id=pk, title=str(event), why=why))
        out = {each.id for each in skipped}
        return Plan(
            eligible=[pk for pk in there if pk not in out],
            skipped=by_reason(skipped + missing),
        )
    found, skipped = eligibility.examine(there, force=decision.force)
    routes: dict[tuple[str, str, str, str], list[UUID]] = {}
    for pk, target in found:
        key = (target.handler.name, target.queue, target.exchange, target.routing_key)
        routes.setdefault(key, []).append(pk)
    eligible = [pk for pk, _ in found]
    succeeded = Replay.objects.using(states.database()).filter(
        event__in=eligible, outcome=Replay.Outcome.SUCCEEDED
    )
    return Plan(
        eligible=eligible,
        routes=[
            Route(
                handler=handler,
                before=tuple(sorted({line(rows[pk].handler) for pk in ids} - {handler, ""})),
                queue=queue,
                exchange=exchange,
                routing_key=routing_key,
                count=len(ids),
            )
            for (handler, queue, exchange, routing_key), ids in sorted(routes.items())
        ],
        skipped=by_reason(skipped + missing),
        unconfirmed=sum(rows[pk].unconfirmed for pk in eligible),
        poison=sum(rows[pk].reason == "poison" for pk in eligible),
        succeeded=succeeded.values("event").distinct().count() if eligible else 0,
        edited=0 if decision.force else _edited(pk for pk in eligible if not rows[pk].unconfirmed),
    )


def _edited(ids: Iterable[UUID]) -> int:
    found = Revision.objects.using(states.database()).filter(event__in=list(ids))
    return found.values("event").distinct().count()


def _gone(pk: UUID) -> Skipped:
    return Skipped(id=pk, title="", why=eligibility.DELETED)


def by_reason(skipped: Iterable[Skipped], titles: int = 5) -> list[SkippedGroup]:
    """Put those with one reason together, the most frequent first."""
    groups: dict[str, list[Skipped]] = {}
    for each in skipped:
        groups.setdefault(text(each.why, 500), []).append(each)
    return [
        SkippedGroup(
            why=why,
            count=len(found),
            titles=tuple(line(each.title or each.id) for each in found[:titles]),
        )
        for why, found in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]


def carry_out(
    decision: Decision,
    seen: Seen,
    rows: Mapping[UUID, ArchivedEvent],
    *,
    user: Any,
    reason: str,
) -> Report:
    """Do it, and write it into the objects' history; returns what came of each event."""
    there = {pk: version for pk, version in seen.items() if pk in rows}
    by = user.get_username()
    if decision.publishes:
        report = Report()

        def so_far(now: Report) -> None:
            nonlocal report
            report = now

        try:
            report = replay.replay(
                there, by=by, reason=reason, force=decision.force, progress=so_far
            )
        except AmqpEventsError as exc:
            report.stopped = Reason.of(exc)
    elif decision.overdue:
        try:
            done, left = replay.resolve(there, by=by, reason=reason)
            report = Report(published=done, skipped=left)
        except AmqpEventsError as exc:
            report = Report(stopped=Reason.of(exc))
    else:
        act = states.discard if decision.name == "discard" else states.restore
        # Nothing is published; these are what was done.
        report = Report(published=act(there, by=by, reason=reason, now=datetime.now(UTC)))
        report.skipped = _missed(there, report.published)
    because = f": {reason}" if reason else ""
    _log(user, [rows[pk] for pk in report.published], f"{decision.past}{because}")
    for why in {each.why for each in report.returned}:
        ids = [each.id for each in report.returned if each.why == why]
        _log(user, [rows[pk] for pk in ids], f"Replay was not published: {visible(str(why), 500)}")
    report.skipped += [_gone(pk) for pk in seen if pk not in rows]
    return report


def edit(
    event: ArchivedEvent,
    version: int,
    payload: Mapping[str, Any],
    *,
    user: Any,
    reason: str,
    base: int,
) -> Report:
    """Replay one event with another payload, and write it into its history."""
    try:
        report = replay.edit(
            event.pk, version, payload, by=user.get_username(), reason=reason, base=base
        )
    except AmqpEventsError as exc:
        report = Report(stopped=Reason.of(exc))
    if report.published:
        _log(user, [event], f"Edited and replayed: {reason}")
    for each in report.returned:
        _log(user, [event], f"Edited, but not published: {visible(str(each.why), 500)}")
    return report


def _missed(wanted: Seen, done: Iterable[UUID]) -> list[Skipped]:
    missed = set(wanted).difference(done)
    if not missed:
        return []
    found = states.rows().filter(pk__in=missed).defer("body", "headers_raw", "detail")
    now = {row.pk: row for row in found}
    last = eligibility.last_actions(list(now))
    return [
        Skipped(
            id=pk,
            title=str(now[pk]),
            why=eligibility.why_changed(now[pk], wanted[pk], last.get(pk)),
        )
        if pk in now
        else _gone(pk)
        for pk in missed
    ]


def _log(user: Any, rows: list[ArchivedEvent], message: str) -> None:
    if rows:
        LogEntry.objects.log_actions(user.pk, rows, CHANGE, message)
