"""The actions on archived events: replay, force, resolve, discard, restore."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final
from uuid import UUID

from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy, pgettext_lazy

from ..archive import eligibility, replay, states
from ..archive.eligibility import Skipped
from ..archive.replay import Report
from ..archive.states import Seen
from ..broker.topology import Names
from ..conf import get_settings
from ..exceptions import AmqpEventsError
from ..models import Replay, Revision, State
from ..reasons import Reason
from ..templatetags.amqp_events import line
from .action_pages import DISCARD, DISCARDED, RESTORE, Action, Decision, Preview, Rows
from .filters import handler_of, settings_and_registry


def _preview_change(action: Action, seen: Seen, rows: Rows) -> Preview:
    found = settings_and_registry()
    last = eligibility.last_actions([pk for pk in seen if rows[pk].version != seen[pk]])
    eligible, skipped = [], []
    for pk, version in seen.items():
        event = rows[pk]
        if event.state not in action.states or event.version != version:
            why = eligibility.why_changed(event, version, last.get(pk))
        elif action.overdue and not eligibility.is_overdue(event, handler_of(event, found)):
            why = eligibility.NOT_OVERDUE
        else:
            eligible.append(pk)
            continue
        skipped.append(Skipped.of(event, why))
    return eligible, skipped, {}


def _preview_replay(action: Action, seen: Seen, rows: Rows) -> Preview:
    force = action.name == "force"
    found, skipped = eligibility.examine(seen, force=force)
    by_handler: dict[tuple[str, str, str], list[UUID]] = {}
    for pk, handler in found.items():
        by_handler.setdefault((handler.name, handler.queue, handler.key), []).append(pk)
    eligible = list(found)
    confirmed = [pk for pk in eligible if not rows[pk].unconfirmed]
    succeeded = {"event__in": eligible, "outcome": Replay.Outcome.SUCCEEDED}
    exchange = Names.of(get_settings()).replay
    details = {
        "destinations": [
            # How many, where they go, and other names under which they are archived.
            (
                len(ids),
                name,
                queue,
                exchange,
                key,
                sorted({line(rows[pk].handler) for pk in ids} - {name, ""}),
            )
            for (name, queue, key), ids in sorted(by_handler.items())
        ],
        "unconfirmed": len(eligible) - len(confirmed),
        "poison": sum(rows[pk].reason == "poison" for pk in eligible),
        "succeeded": _events(Replay, **succeeded) if eligible else 0,
        # A replay that is not confirmed is published again as it was.
        "edited": 0 if force else _events(Revision, event__in=confirmed),
    }
    return eligible, skipped, details


def _events(model: type[Replay | Revision], **wanted: Any) -> int:
    manager: Any = model._default_manager  # noqa: SLF001 - Django's public name
    found = manager.using(states.database()).filter(**wanted)
    return int(found.values("event").distinct().count())


def _replay(decision: Decision) -> Report:
    reports = [Report()]
    try:
        report = replay.replay(
            decision.seen,
            by=decision.by,
            reason=decision.reason,
            force=decision.action.name == "force",
            progress=reports.append,
        )
    except AmqpEventsError as exc:
        report = reports[-1]
        report.stopped = Reason.of(exc)
    return report


def _resolve(decision: Decision) -> Report:
    try:
        done, left = replay.resolve(decision.seen, by=decision.by, reason=decision.reason)
    except AmqpEventsError as exc:
        return Report(stopped=Reason.of(exc))
    return Report(published=done, skipped=left)


def _change(change: Callable[..., list[UUID]], decision: Decision) -> Report:
    seen = decision.seen
    done = change(seen, by=decision.by, reason=decision.reason, now=datetime.now(UTC))
    # Nothing is published; these are the events that changed.
    return Report(published=done, skipped=eligibility.skipped_since(seen, done))


_PUBLISHED: Final = ngettext_lazy(
    "%(count)s event published to its handler.",
    "%(count)s events published to their handlers.",
    "count",
)

ACTIONS: Final[Mapping[str, Action]] = {
    each.name: each
    for each in (
        Action(
            name="replay",
            button=pgettext_lazy("button", "Replay"),
            menu=_("Replay selected events"),
            question=ngettext_lazy("Replay %(count)s event", "Replay %(count)s events", "count"),
            done=_PUBLISHED,
            states=(State.ARCHIVED,),
            effect=_("Each event is published again, unchanged, to the handler that failed."),
            publishes=True,
            preview=_preview_replay,
            run=_replay,
        ),
        Action(
            name="force",
            button=_("Force replay"),
            menu=_("Force replay of selected overdue events"),
            question=ngettext_lazy(
                "Force a replay of %(count)s event", "Force a replay of %(count)s events", "count"
            ),
            done=_PUBLISHED,
            states=(State.REPLAYING,),
            effect=_(
                "Each overdue event is published again to its handler, under a new replay id."
            ),
            publishes=True,
            overdue=True,
            preview=_preview_replay,
            run=_replay,
        ),
        Action(
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
            states=(State.REPLAYING,),
            effect=_(
                "The overdue events become discarded; nothing is published. A copy that is "
                "still queued will run, and a late outcome is only recorded in the history."
            ),
            reason_required=True,
            overdue=True,
            preview=_preview_change,
            run=_resolve,
        ),
        Action(
            name="discard",
            button=pgettext_lazy("button", "Discard"),
            menu=_("Discard selected events"),
            question=DISCARD,
            done=DISCARDED,
            states=(State.ARCHIVED,),
            effect=_("The events are settled without being handled. You can restore them."),
            reason_required=True,
            preview=_preview_change,
            run=partial(_change, states.discard),
        ),
        Action(
            name="restore",
            button=pgettext_lazy("button", "Restore"),
            menu=_("Restore selected events"),
            question=RESTORE,
            done=ngettext_lazy(
                "%(count)s event restored into the archive.",
                "%(count)s events restored into the archive.",
                "count",
            ),
            states=(State.DISCARDED,),
            effect=_("The discarded events return to the archive. Nothing is published."),
            preview=_preview_change,
            run=partial(_change, states.restore),
        ),
    )
}
