"""Count what a user should know before a replay: poison, possible duplicates, superseded events."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from ..databases import parts
from ..models import Replay, Revision
from . import tables
from .eligibility import CHUNK, Examined
from .superseded import count_superseded


def count_risks(examined: Examined, *, forced: bool = False) -> dict[str, int | None]:
    """Count, among the events that would be replayed, those that need a warning.

    Args:
        forced: a forced replay publishes again what the one before it did, and is not skipped.

    Returns:
        ``poison``, ``unconfirmed`` (may already be published), ``succeeded`` (have a successful
        replay), ``edited`` (have a revision, which is not published) and ``superseded`` (would be
        skipped; ``None`` if that cannot be read).
    """
    events = examined.events.values()
    confirmed = [event.pk for event in events if not event.unconfirmed]
    return {
        "poison": sum(event.reason == "poison" for event in events),
        "unconfirmed": len(events) - len(confirmed),
        "succeeded": _count(Replay, examined.events, state=Replay.State.SUCCEEDED),
        # A replay that is not confirmed is published again as it was.
        "edited": 0 if forced else _count(Revision, confirmed),
        "superseded": 0 if forced else count_superseded(examined.handlers),
    }


def _count(model: type[Replay | Revision], events: Iterable[UUID], **wanted: object) -> int:
    """Count the events that have such a row."""
    rows = model._default_manager.using(tables.database()).filter(**wanted)  # noqa: SLF001 - Django's public name
    return sum(
        rows.filter(event__in=part).values("event").distinct().count()
        for part in parts(list(events), CHUNK)
    )
