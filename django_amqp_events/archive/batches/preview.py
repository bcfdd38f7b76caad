"""Preview a batch; nothing is changed or published.

The first pending events are examined, as they are before they are published.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from ...models import ReplayBatch, clean
from ...reasons import Reason
from .. import eligibility, tables
from ..risks import count_risks
from . import backfill, batch_states

#: Most events that are examined; further ones are undecided.
EXAMINED: Final = 5_000


def preview_batch(batch: ReplayBatch) -> dict[str, Any]:
    """Preview a batch, and store the preview as its ``plan``.

    Returns:
        ``at`` (ISO 8601), ``eligible``, how many of these need a warning (:func:`count_risks`;
        of a backfill only ``superseded``), ``undecided`` (decided when they are published),
        ``skipped`` (a list of ``why`` as JSON, ``count``, ``title``) and ``handlers`` (a list of
        ``handler``, ``exchange``, ``queue``, ``routing_key``, ``events``).

    Raises:
        ConfigurationError: AMQP_EVENTS is wrong.
        AmqpEventsError: as :func:`.backfill.read_chunk`.
    """
    if batch.backfill is not None:
        return _store(batch, _preview_backfill(batch))
    examined = eligibility.examine(batch_states.next_events(batch.pk, EXAMINED), eligibility.REPLAY)
    targets = Counter(examined.handlers.values())
    skipped = Counter(event.why for event in examined.skipped)
    titles = {event.why: event.title for event in examined.skipped}
    plan = {
        "eligible": targets.total(),
        **count_risks(examined),
        "undecided": max(0, batch.pending - EXAMINED),
        "skipped": [
            {"why": why.as_json(), "count": count, "title": clean(titles[why], 300)}
            for why, count in skipped.most_common(batch_states.REASONS)
        ],
        "handlers": [
            {**eligibility.destination(handler), "events": count}
            for handler, count in targets.most_common()
        ],
    }
    return _store(batch, plan)


def _preview_backfill(batch: ReplayBatch) -> dict[str, Any]:
    """Preview the first events of the range; later ones are undecided."""
    plan, chunk = backfill.Backfill.of(batch), backfill.preview_chunk(batch, EXAMINED)
    handler = plan.receiver
    left = Counter({**chunk.left, "expired": chunk.expired})
    return {
        "eligible": len(chunk.records),
        "superseded": None if handler.newest and not plan.again else 0,
        "undecided": plan.end + 1 - chunk.next,
        "skipped": [
            {"why": Reason(f"left-{why}").as_json(), "count": count, "title": ""}
            for why, count in (+left).most_common()
        ],
        "handlers": [{**eligibility.destination(handler), "events": len(chunk.records)}],
    }


def _store(batch: ReplayBatch, plan: dict[str, Any]) -> dict[str, Any]:
    plan["at"] = tables.clock().isoformat()
    batch_states.rows().filter(pk=batch.pk).update(plan=plan)
    batch.plan = plan
    return plan
