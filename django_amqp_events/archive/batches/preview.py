"""Preview a batch; nothing is changed or published.

The first pending events are examined, as they are before they are published.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from ...models import ReplayBatch, clean
from .. import eligibility, tables
from ..superseded import count_superseded
from . import batch_states

#: Most events that are examined; further ones are undecided.
EXAMINED: Final = 5_000
#: Most reasons in a preview.
REASONS: Final = 50


def preview_batch(batch: ReplayBatch) -> dict[str, Any]:
    """Preview a batch, and store the preview as its ``plan``.

    Returns:
        ``at`` (ISO 8601), ``eligible``, ``superseded`` (how many of these would be skipped;
        ``None`` if that cannot be read), ``undecided`` (decided when they are published),
        ``skipped`` (a list of ``why`` as JSON, ``count``, ``title``) and ``handlers`` (a list of
        ``handler``, ``exchange``, ``queue``, ``routing_key``, ``events``).

    Raises:
        ConfigurationError: AMQP_EVENTS is wrong.
    """
    examined = eligibility.examine(batch_states.next_events(batch.pk, EXAMINED), eligibility.REPLAY)
    targets = Counter(examined.handlers.values())
    skipped = Counter(event.why for event in examined.skipped)
    titles = {event.why: event.title for event in examined.skipped}
    plan = {
        "at": tables.clock().isoformat(),
        "eligible": targets.total(),
        "superseded": count_superseded(examined.handlers),
        "undecided": max(0, batch.pending - EXAMINED),
        "skipped": [
            {"why": why.as_json(), "count": count, "title": clean(titles[why], 300)}
            for why, count in skipped.most_common(REASONS)
        ],
        "handlers": [
            {**eligibility.destination(handler), "events": count}
            for handler, count in targets.most_common()
        ],
    }
    batch_states.rows().filter(pk=batch.pk).update(plan=plan)
    batch.plan = plan
    return plan
