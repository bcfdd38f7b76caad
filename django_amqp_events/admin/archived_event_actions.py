"""The actions on archived events: replay, force, resolve, discard, restore."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
from ..exceptions import AmqpEventsError
from ..models import Replay, Revision, State, visible
from ..reasons import Reason
from ..templatetags.amqp_events import line
from .action_pages import DISCARD, DISCARDED, RESTORE, Action, Preview, Rows, by_reason, log
from .filters import handler_of, settings_and_registry


def _preview_change(action: Action, seen: Seen, rows: Rows) -> Preview:
    found = settings_and_registry()
    last = eligibility.last_actions(
        [pk for pk in seen if pk in rows and rows[pk].version != seen[pk]]
    )
    eligible, skipped = [], []
    for pk, version in seen.items():
        event = rows.get(pk)
        if event is None:
            skipped.append(_deleted(pk))
            continue
        if event.state not in action.states or event.version != version:
            why = eligibility.why_changed(event, version, last.get(pk))
        elif action.overdue and not eligibility.is_overdue(event, handler_of(event, found)):
            why = eligibility.NOT_OVERDUE
        else:
            eligible.append(pk)
            continue
        skipped.append(Skipped(id=pk, title=str(event), why=why))
    return Preview(eligible=eligible, skipped=by_reason(skipped))


def _preview_replay(action: Action, seen: Seen, rows: Rows) -> Preview:
    found, skipped = eligibility.examine(_present(seen, rows), force=action.force)
    by_target: dict[tuple[str, str, str, str], list[UUID]] = {}
    for pk, target in found:
        key = (target.handler.name, target.queue, target.exchange, target.routing_key)
        by_target.setdefault(key, []).append(pk)
    eligible = [pk for pk, _target in found]
    confirmed = [pk for pk in eligible if not rows[pk].unconfirmed]
    succeeded = {"event__in": eligible, "outcome": Replay.Outcome.SUCCEEDED}
    return Preview(
        eligible=eligible,
        skipped=by_reason(skipped + _missing(seen, rows)),
        destinations=[
            {
                "handler": handler,
                "archived_as": sorted({line(rows[pk].handler) for pk in ids} - {handler, ""}),
                "queue": queue,
                "exchange": exchange,
                "routing_key": routing_key,
                "count": len(ids),
            }
            for (handler, queue, exchange, routing_key), ids in sorted(by_target.items())
        ],
        details={
            "unconfirmed": len(eligible) - len(confirmed),
            "poison": sum(rows[pk].reason == "poison" for pk in eligible),
            "succeeded": _events(Replay, **succeeded) if eligible else 0,
            # A replay that is not confirmed is published again as it was.
            "edited": 0 if action.force else _events(Revision, event__in=confirmed),
        },
    )


def _events(model: type[Replay | Revision], **wanted: Any) -> int:
    manager: Any = model._default_manager  # noqa: SLF001 - Django's public name
    found = manager.using(states.database()).filter(**wanted)
    return int(found.values("event").distinct().count())


def _replay(action: Action, seen: Seen, rows: Rows, user: Any, reason: str) -> Report:
    report = Report()

    def progress(now: Report) -> None:
        nonlocal report
        report = now

    try:
        report = replay.replay(
            _present(seen, rows),
            by=user.get_username(),
            reason=reason,
            force=action.force,
            progress=progress,
        )
    except AmqpEventsError as exc:
        report.stopped = Reason.of(exc)
    return _noted(action, seen, rows, user, reason, report)


def _resolve(action: Action, seen: Seen, rows: Rows, user: Any, reason: str) -> Report:
    try:
        done, left = replay.resolve(_present(seen, rows), by=user.get_username(), reason=reason)
        report = Report(published=done, skipped=left)
    except AmqpEventsError as exc:
        report = Report(stopped=Reason.of(exc))
    return _noted(action, seen, rows, user, reason, report)


def _change(
    change: Callable[..., list[UUID]],
    action: Action,
    seen: Seen,
    rows: Rows,
    user: Any,
    reason: str,
) -> Report:
    wanted = _present(seen, rows)
    done = change(wanted, by=user.get_username(), reason=reason, now=datetime.now(UTC))
    # Nothing is published; these are the events that changed.
    report = Report(published=done, skipped=_missed(wanted, done))
    return _noted(action, seen, rows, user, reason, report)


def _noted(
    action: Action, seen: Seen, rows: Rows, user: Any, reason: str, report: Report
) -> Report:
    action.log_rows(user, [rows[pk] for pk in report.published], reason)
    for why in {each.why for each in report.returned}:
        events = [rows[each.id] for each in report.returned if each.why == why]
        log(user, events, f"Replay was not published: {visible(str(why), 500)}")
    report.skipped += _missing(seen, rows)
    return report


def _present(seen: Seen, rows: Rows) -> dict[UUID, int]:
    return {pk: version for pk, version in seen.items() if pk in rows}


def _missing(seen: Seen, rows: Rows) -> list[Skipped]:
    return [_deleted(pk) for pk in seen if pk not in rows]


def _deleted(pk: UUID) -> Skipped:
    return Skipped(id=pk, title="", why=eligibility.DELETED)


def _missed(wanted: Seen, done: Iterable[UUID]) -> list[Skipped]:
    """Return why events were not changed: another user or tab changed them first."""
    missed = set(wanted).difference(done)
    if not missed:
        return []
    found = states.rows().filter(pk__in=missed).defer("body", "headers_raw", "detail")
    now = {row.pk: row for row in found}
    last = eligibility.last_actions(list(now))
    return [
        Skipped(id=pk, title=str(row), why=eligibility.why_changed(row, wanted[pk], last.get(pk)))
        for pk, row in now.items()
    ] + [_deleted(pk) for pk in wanted if pk in missed and pk not in now]


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
            log="Replayed",
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
            log="Replayed by force",
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
            log="Marked as resolved",
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
            log="Discarded",
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
            log="Restored",
            effect=_("The discarded events return to the archive. Nothing is published."),
            preview=_preview_change,
            run=partial(_change, states.restore),
        ),
    )
}
