"""What the states of rows mean, and what can be done, for pages and commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from django.utils.translation import gettext_lazy

from ..archive.eligibility import BACKFILL
from ..models import ArchivedEvent, State
from ..publish.outbox import RowState
from ..worker.prefetch import Why

_NOT_PUBLISHED: Final = (
    gettext_lazy("A backfill has not published this event."),
    gettext_lazy("Replay the event, or discard it."),
)
#: Of an archived event: its meaning, and the next step.
STATES: Final[Mapping[str, tuple[Any, Any]]] = {
    State.ARCHIVED: (
        gettext_lazy("The handler failed."),
        gettext_lazy("Fix the cause and replay the event, or discard it."),
    ),
    State.QUEUED: (
        gettext_lazy("A replay was requested and is being published."),
        gettext_lazy("Wait. If its process has died, the mirror publishes it."),
    ),
    State.REPLAYING: (
        gettext_lazy("Published to its handler, which has not reported an outcome yet."),
        gettext_lazy("Wait for its outcome, which the mirror records."),
    ),
    State.SUCCEEDED: (gettext_lazy("A replay succeeded."), gettext_lazy("Nothing is left to do.")),
    State.DISCARDED: (
        gettext_lazy("Discarded without being handled."),
        gettext_lazy("Restore it to return it to the archive."),
    ),
}


def about_state(row: ArchivedEvent) -> tuple[Any, Any]:
    """Return what the state of an archived event means, and the next step."""
    if row.state == State.ARCHIVED and row.reason == BACKFILL:
        return _NOT_PUBLISHED
    return STATES.get(row.state, ("", ""))


#: What a prefetch count follows from.
PREFETCH_REASONS: Final[Mapping[Why, Any]] = {
    "default": gettext_lazy("default"),
    "configured": gettext_lazy("configured"),
    "measured": gettext_lazy("measured"),
    "slow": gettext_lazy("long runs"),
    "rate": gettext_lazy("rate limit"),
}
#: Of a row of the outbox: its label, its meaning, and the next step.
ROW_STATES: Final[Mapping[RowState, tuple[Any, Any, Any]]] = {
    "held": (
        gettext_lazy("publishing"),
        gettext_lazy("Waiting for RabbitMQ to confirm."),
        gettext_lazy("Wait. If its publisher has died, a relay takes over within 60 s."),
    ),
    "failed": (
        gettext_lazy("failed"),
        gettext_lazy("Publishing failed. A relay tries again."),
        gettext_lazy(
            "Fix the cause, then wait, or run events_relay --now to retry all failed events; or "
            "discard it."
        ),
    ),
    "due": (
        gettext_lazy("due"),
        gettext_lazy("Due: the next relay publishes it."),
        gettext_lazy("Wait a moment."),
    ),
    "overdue": (
        gettext_lazy("overdue"),
        gettext_lazy("Due for more than a minute, and no relay has published it."),
        gettext_lazy("Run events_relay or events_worker."),
    ),
    "discarded": (
        gettext_lazy("discarded"),
        gettext_lazy("Discarded: it is not published."),
        gettext_lazy("Restore it to publish it. events_prune deletes it when it is old."),
    ),
}
