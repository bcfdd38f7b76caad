"""Preview a batch; nothing is changed or published.

The database groups the events by everything that decides about them, and one event of each group is
examined: a hundred thousand events are one query and not a hundred thousand rows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from django.db.models import Case, CharField, Count, F, IntegerField, Min, Q, QuerySet, Value, When

from ...broker import connection
from ...broker.provisioning.amqp_api import session
from ...broker.queue_depth import Depth
from ...conf import Settings, get_settings
from ...declare.registry import Handler
from ...exceptions import AmqpEventsError
from ...models import ArchivedEvent, Replay, ReplayBatch, State, clean
from ...reasons import Reason
from .. import eligibility, tables
from . import batch_states

#: Most groups that are examined; events in further ones are undecided.
GROUPS: Final = 500
#: Most events whose bodies are read one by one.
BODIES: Final = 1_000
#: Most reasons in a preview.
REASONS: Final = 50


def preview_batch(batch: ReplayBatch) -> dict[str, Any]:
    """Preview a batch, and store the preview as its ``plan``.

    Returns:
        ``at`` (ISO 8601), ``eligible``, ``undecided`` (decided when they are published),
        ``skipped`` (a list of ``why``, ``count``, ``title``), ``handlers`` (a list of ``handler``,
        ``exchange``, ``queue``, ``routing_key``, ``events``, ``ready``, ``consumers``) and
        ``broker``: why ``ready`` and ``consumers`` are ``None``, if they are.
        Reasons are as JSON.

    Raises:
        ConfigurationError: AMQP_EVENTS is wrong.
    """
    settings = get_settings()
    decisions = _decide(batch, settings)
    depths, problem = _depths(settings, {handler.queue for handler in decisions.targets})
    plan = {
        "at": tables.clock().isoformat(),
        "eligible": decisions.targets.total(),
        "undecided": max(0, decisions.undecided),
        "skipped": [
            {"why": why.as_json(), "count": count, "title": clean(decisions.titles[why], 300)}
            for why, count in decisions.skipped.most_common(REASONS)
        ],
        "skipped_total": decisions.skipped.total(),
        "handlers": [
            {
                **eligibility.destination(handler),
                "events": count,
                "ready": depth and depth.ready,
                "consumers": depth and depth.consumers,
            }
            for handler, count in decisions.targets.most_common()
            for depth in [depths.get(handler.queue)]
        ],
        "broker": problem and problem.as_json(),
    }
    batch_states.rows().filter(pk=batch.pk).update(plan=plan)
    batch.plan = plan
    return plan


@dataclass(slots=True)
class _Decisions:
    """Numbers of events by handler, and by reason with the title of one; and of undecided ones."""

    targets: Counter[Handler] = field(default_factory=Counter)
    skipped: Counter[Reason] = field(default_factory=Counter)
    titles: dict[Reason, str] = field(default_factory=dict)
    undecided: int = 0

    def skip(self, reason: Reason, title: str, count: int = 1) -> None:
        self.skipped[reason] += count
        self.titles.setdefault(reason, title)


def _decide(batch: ReplayBatch, settings: Settings) -> _Decisions:
    """Decide about the pending events of a batch, by group, and one by one if their bodies do."""
    decisions = _Decisions()
    groups = list(_groups(batch, settings)[: GROUPS + 1])
    examples = _examples(batch, groups)
    for group in groups[:GROUPS]:
        count, event = group["count"], examples.get(group["first"])
        if event is None:  # deleted, or no longer pending, since the first query
            decisions.skip(eligibility.DELETED, "", count)
        elif group["standing"] == "changed":
            decisions.skip(eligibility.why_changed(event, event.version + 1), str(event), count)
        elif group["standing"] == "other":
            decisions.skip(eligibility.why_changed(event, event.version), str(event), count)
        elif group["unread"] == "unread":
            decisions.undecided += count
        elif isinstance(handler := eligibility.target(event), Reason):
            decisions.skip(handler, str(event), count)
        else:
            decisions.targets[handler] += count
    if len(groups) > GROUPS:
        others = _pending(batch).count() - sum(group["count"] for group in groups[:GROUPS])
        decisions.undecided += max(0, others)
    if 0 < decisions.undecided <= BODIES:
        examined = eligibility.examine(_unread(batch), eligibility.REPLAY)
        decisions.targets.update(examined.handlers.values())
        for skipped in examined.skipped:
            decisions.skip(skipped.why, skipped.title)
        decisions.undecided -= len(examined.events) + len(examined.skipped)
    return decisions


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


def _groups(batch: ReplayBatch, settings: Settings) -> QuerySet[Replay, Any]:
    """Group the pending events of a batch by everything that decides about them."""
    text = CharField()
    standing = Case(
        When(~Q(event__version=F("version")), then=Value("changed")),
        When(~Q(event__state=State.ARCHIVED), then=Value("other")),
        default=Value("archived"),
        output_field=text,
    )
    # Without a handler's name, queue and event determine the handler.
    place = {
        f"at_{name}": Case(
            When(event__handler="", then=F(f"event__{name}")), default=Value(""), output_field=text
        )
        for name in ("queue", "name")
    }
    large = Case(
        When(event__body_size__gt=settings.max_body, then=F("event__body_size")),
        default=Value(0),
        output_field=IntegerField(),
    )
    unread = Case(
        When(event__reason__in=sorted(eligibility.UNREAD), then=Value("unread")),
        default=Value(""),
        output_field=text,
    )
    return (
        _pending(batch)
        .order_by()
        .values("event__service", "event__handler", "event__state")
        .annotate(standing=standing, large=large, unread=unread, **place)
        .annotate(count=Count("pk"), first=Min("position"))
        .order_by("-count", "first")
    )


def _pending(batch: ReplayBatch) -> QuerySet[Replay]:
    return batch_states.events(batch.pk).filter(state=Replay.State.PENDING)


def _examples(batch: ReplayBatch, groups: list[dict[str, Any]]) -> dict[int | None, ArchivedEvent]:
    """Return one event of each group by the group's first position."""
    firsts = dict(
        _pending(batch)
        .filter(position__in=[group["first"] for group in groups])
        .values_list("position", "event_id")
    )
    by_id = {
        event.pk: event
        for event in tables.rows().filter(pk__in=set(firsts.values())).defer(*ArchivedEvent.LARGE)
    }
    return {first: by_id[pk] for first, pk in firsts.items() if pk in by_id}


def _unread(batch: ReplayBatch) -> dict[UUID, int]:
    """Return events whose body may be unreadable."""
    wanted = _pending(batch).filter(
        event__reason__in=sorted(eligibility.UNREAD),
        event__state=State.ARCHIVED,
        event__version=F("version"),
    )
    return dict(wanted.values_list("event_id", "version")[:BODIES])
