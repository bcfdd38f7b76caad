"""Preview a batch; nothing is changed or published.

The first pending events are examined, as they are before they are published.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from ...broker import connection
from ...broker.provisioning.amqp_api import session
from ...broker.queue_depth import Depth
from ...conf import Settings, get_settings
from ...exceptions import AmqpEventsError
from ...models import ReplayBatch, clean
from ...reasons import Reason
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
        ``skipped`` (a list of ``why``, ``count``, ``title``), ``handlers`` (a list of ``handler``,
        ``exchange``, ``queue``, ``routing_key``, ``events``, ``ready``, ``consumers``) and
        ``broker``: why ``ready`` and ``consumers`` are ``None``, if they are.
        Reasons are as JSON.

    Raises:
        ConfigurationError: AMQP_EVENTS is wrong.
    """
    settings = get_settings()
    examined = eligibility.examine(batch_states.next_events(batch.pk, EXAMINED), eligibility.REPLAY)
    targets = Counter(examined.handlers.values())
    skipped = Counter(event.why for event in examined.skipped)
    titles = {event.why: event.title for event in examined.skipped}
    depths, problem = _depths(settings, {handler.queue for handler in targets})
    plan = {
        "at": tables.clock().isoformat(),
        "eligible": targets.total(),
        "superseded": count_superseded(examined.handlers),
        "undecided": max(0, batch.pending - EXAMINED),
        "skipped": [
            {"why": why.as_json(), "count": count, "title": clean(titles[why], 300)}
            for why, count in skipped.most_common(REASONS)
        ],
        "skipped_total": skipped.total(),
        "handlers": [
            {
                **eligibility.destination(handler),
                "events": count,
                "ready": depth and depth.ready,
                "consumers": depth and depth.consumers,
            }
            for handler, count in targets.most_common()
            for depth in [depths.get(handler.queue)]
        ],
        "broker": problem and problem.as_json(),
    }
    batch_states.rows().filter(pk=batch.pk).update(plan=plan)
    batch.plan = plan
    return plan


def _depths(settings: Settings, queues: set[str]) -> tuple[dict[str, Depth], Reason | None]:
    """Return ready messages and consumers of each queue, and why some are unknown."""
    depths: dict[str, Depth] = {}
    if not queues:
        return depths, None
    try:
        with session(connection.celery_app(settings), settings) as amqp:
            for queue in sorted(queues):
                if (seen := amqp.depth(queue)) is not None:
                    depths[queue] = seen
    except AmqpEventsError as exc:
        return depths, Reason.of(exc)
    if missing := sorted(queues - depths.keys()):
        return depths, Reason("queues-missing", queues=missing)
    return depths, None
