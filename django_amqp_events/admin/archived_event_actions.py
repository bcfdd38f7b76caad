"""The actions on archived events: replay, force, resolve, discard, restore."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy, pgettext_lazy

from ..archive import eligibility, replay
from ..archive.eligibility import Rule
from ..archive.replay import Report
from ..archive.risks import count_risks
from ..archive.states import Seen
from ..declare.registry import Handler
from ..templatetags.amqp_events import line
from .action_pages import DISCARD, DISCARDED, RESTORE, Action, Decision, Preview, Result, Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class EventAction(Action):
    """An action on archived events, with the rule that they must meet."""

    rule: Rule


def _action(rule: Rule, **options: Any) -> EventAction:
    return EventAction(rule=rule, states=(rule.state,), publishes=rule.publishes, **options)


def preview(action: Action, seen: Seen, rows: Rows) -> Preview:
    examined = eligibility.examine(seen, ACTIONS[action.name].rule)
    if not action.publishes:
        return list(examined.events), examined.skipped, {}
    by_handler: dict[Handler, list[UUID]] = {}
    for pk, handler in examined.handlers.items():
        by_handler.setdefault(handler, []).append(pk)
    details = {
        "destinations": [
            {
                **eligibility.destination(handler),
                "events": len(ids),
                # Other names under which they are archived.
                "names": sorted({line(rows[pk].handler) for pk in ids} - {handler.name, ""}),
            }
            for handler, ids in sorted(by_handler.items(), key=lambda item: item[0].name)
        ],
        **count_risks(examined, forced=action.name == "force"),
    }
    return list(examined.events), examined.skipped, details


def of_report(report: Report) -> Result:
    """Return the result of a replay or a decision."""
    return Result(
        done=report.published,
        returned=report.returned,
        skipped=report.skipped,
        stopped=report.stopped,
    )


def run(decision: Decision) -> Result:
    """Replay events, or decide about them."""
    action = ACTIONS[decision.action.name]
    if not action.publishes:
        decided = replay.decide(decision.seen, action.rule, by=decision.by, reason=decision.reason)
        return of_report(decided)
    replayed = replay.replay(
        decision.seen, by=decision.by, reason=decision.reason, force=action.name == "force"
    )
    return of_report(replayed)


_PUBLISHED: Final = ngettext_lazy(
    "%(count)s event published to its handler.",
    "%(count)s events published to their handlers.",
    "count",
)

ACTIONS: Final[Mapping[str, EventAction]] = {
    action.name: action
    for action in (
        _action(
            eligibility.REPLAY,
            name="replay",
            button=pgettext_lazy("button", "Replay"),
            menu=_("Replay selected events"),
            question=ngettext_lazy("Replay %(count)s event", "Replay %(count)s events", "count"),
            done=_PUBLISHED,
            effect=_("Each event is published again, unchanged, to the handler that failed."),
        ),
        _action(
            eligibility.FORCE,
            name="force",
            button=_("Force replay"),
            question=ngettext_lazy(
                "Force a replay of %(count)s event", "Force a replay of %(count)s events", "count"
            ),
            done=_PUBLISHED,
            effect=_(
                "Each overdue event is published again to its handler, under a new replay id."
            ),
        ),
        _action(
            eligibility.RESOLVE,
            name="resolve",
            permission_of="discard",
            button=_("Mark as resolved"),
            menu=_("Mark selected overdue events as resolved"),
            question=ngettext_lazy(
                "Mark %(count)s event as resolved", "Mark %(count)s events as resolved", "count"
            ),
            done=ngettext_lazy(
                "%(count)s event marked as resolved.",
                "%(count)s events marked as resolved.",
                "count",
            ),
            effect=_(
                "The overdue events become discarded; nothing is published. A copy that is "
                "still queued will run, and a late outcome is only recorded in the history."
            ),
            reason_required=True,
        ),
        _action(
            eligibility.DISCARD,
            name="discard",
            button=pgettext_lazy("button", "Discard"),
            menu=_("Discard selected events"),
            question=DISCARD,
            done=DISCARDED,
            effect=_("The events are settled without being handled. You can restore them."),
            reason_required=True,
        ),
        _action(
            eligibility.RESTORE,
            name="restore",
            button=pgettext_lazy("button", "Restore"),
            menu=_("Restore selected events"),
            question=RESTORE,
            done=ngettext_lazy(
                "%(count)s event restored.",
                "%(count)s events restored.",
                "count",
            ),
            effect=_("The events return to their state before the discard. Nothing is published."),
        ),
    )
}
