"""Decide which archived events can be replayed, by which handler, and why the others cannot.

Nothing here changes or publishes anything. What a user may do: ``admin/action_pages.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from django.db.models import Q, QuerySet

from ..broker.topology import Names
from ..conf import get_settings
from ..databases import parts
from ..declare.registry import Handler, get_registry
from ..exceptions import AmqpEventsError
from ..models import ArchivedEvent, State
from ..reasons import Reason
from . import tables
from .states import Seen

#: Most events that are examined, claimed, published and recorded together.
CHUNK: Final = 200
#: Seconds after the last retry of its handler is due from which a replay without an outcome is
#: overdue.
OVERDUE_SECONDS: Final = 15 * 60.0
#: The archive reason of a past event that was given to a handler, and has not failed since.
BACKFILL: Final = "backfill"
#: Archive reasons after which the body may be unreadable.
UNREAD: Final = frozenset({"malformed", "unreadable"})
NOT_OVERDUE: Final = Reason("not-overdue")
DELETED: Final = Reason("deleted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """An event that was not replayed, and why.

    Attributes:
        title: the event for people; ``""`` if the row is gone.
        why: without the event, so that events skipped for one reason share it.
    """

    id: UUID
    title: str
    why: Reason

    @classmethod
    def of(cls, event: ArchivedEvent, why: Reason) -> Skipped:
        return cls(id=event.pk, title=str(event), why=why)

    @classmethod
    def deleted(cls, pk: UUID) -> Skipped:
        return cls(id=pk, title="", why=DELETED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What an event must be for a decision.

    Attributes:
        state: the state before it.
        also: another one.
        publishes: its handler must exist, and its body must be readable.
        overdue: its replay must be overdue.
    """

    state: State
    also: State | None = None
    publishes: bool = False
    overdue: bool = False


REPLAY: Final = Rule(state=State.ARCHIVED, publishes=True)
#: In a batch: a backfill may run again what has succeeded.
REPLAY_IN_BATCH: Final = replace(REPLAY, also=State.SUCCEEDED)
FORCE: Final = Rule(state=State.REPLAYING, publishes=True, overdue=True)
RESOLVE: Final = Rule(state=State.REPLAYING, overdue=True)
DISCARD: Final = Rule(state=State.ARCHIVED)
RESTORE: Final = Rule(state=State.DISCARDED)


@dataclass(slots=True, kw_only=True)
class Examined:
    """The events that a decision would change, and those that it would skip.

    Attributes:
        events: without their large columns.
        handlers: of *events*, where the decision publishes.
    """

    events: dict[UUID, ArchivedEvent] = field(default_factory=dict)
    handlers: dict[UUID, Handler] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)


# -- handlers -----------------------------------------------------------------------------


def target(event: ArchivedEvent) -> Handler | Reason:
    """Return the handler that would get a replay of an event, or why it cannot be replayed."""
    handler, settings = _own_handler(event), get_settings()
    if isinstance(handler, Reason):
        return handler
    if event.body_size > settings.max_body:
        return Reason("body-too-large", size=event.body_size, most=settings.max_body)
    if event.reason in UNREAD and event.payload is None:
        return Reason("body-unreadable-editable" if settings.editing else "body-unreadable")
    return handler


def edit_target(event: ArchivedEvent, version: int) -> Handler | Reason:
    """Return the handler that would get an edited replay, or why the event cannot be edited.

    The body may be unreadable or too large, since an edit replaces it.
    """
    if event.state != State.ARCHIVED or event.version != version:
        return why_changed(event, version)
    if event.unconfirmed:
        return Reason("unconfirmed")
    return _own_handler(event)


def _own_handler(event: ArchivedEvent) -> Handler | Reason:
    if event.service != get_settings().service:
        return other_service(event)
    return handler_for(event)


def handler_for(event: ArchivedEvent) -> Handler | Reason:
    """Return the handler that gets replays of an event, or why there is none."""
    registry = get_registry()
    name = get_settings().renamed_handlers.get(event.handler, event.handler)
    if name:
        return registry.handlers.get(name) or Reason(
            "unknown-handler", name=repr(name), old=event.handler
        )
    # No handler matched when the event was delivered; one may match now.
    return registry.find(event.queue, event.name) or Reason(
        "unknown-event", name=repr(event.name), queue=repr(event.queue)
    )


def destination(handler: Handler) -> dict[str, str]:
    """Return where replays go: ``handler``, ``exchange``, ``queue`` and ``routing_key``."""
    return {
        "handler": handler.name,
        "exchange": Names.of(get_settings()).replay,
        "queue": handler.queue,
        "routing_key": handler.key,
    }


# -- overdue replays ----------------------------------------------------------------------


def patience(*handlers: Handler) -> timedelta:
    """Return how long a replay to one of these handlers may have no outcome."""
    totals = (handler.policy.total() for handler in handlers)
    return timedelta(seconds=OVERDUE_SECONDS + max(totals, default=0.0))


def is_overdue(event: ArchivedEvent) -> bool:
    """Return True if a replay has no outcome although its last retry is long due."""
    return event.state == State.REPLAYING and tables.rows().filter(overdue(), pk=event.pk).exists()


def overdue(now: datetime | None = None) -> Q:
    """Match the events of :func:`is_overdue`.

    Only an event's own service knows its handlers' retries.
    """
    now = now or tables.clock()
    try:
        handlers, settings = get_registry().handlers, get_settings()
    except AmqpEventsError:
        return Q(pk__in=[])
    late = Q(service=settings.service, state=State.REPLAYING, state_since__lte=now - patience())
    for handler in handlers.values():
        names = [old for old, name in settings.renamed_handlers.items() if name == handler.name]
        own = Q(handler__in=[handler.name, *names]) | Q(handler="", queue=handler.queue)
        late &= ~(own & Q(state_since__gt=now - patience(handler)))
    return late


# -- examining ----------------------------------------------------------------------------


def examine(seen: Seen, rule: Rule) -> Examined:
    """Return the events that a decision would change now; read only the bodies that decide."""
    examined = Examined()
    for part in parts(list(seen), CHUNK):
        _examine({pk: seen[pk] for pk in part}, rule, examined)
    return examined


def _examine(chunk: Seen, rule: Rule, examined: Examined) -> None:
    rows = {event.pk: event for event in _light(chunk)}
    unchanged, changed = [], []
    for pk, version in chunk.items():
        event = rows.get(pk)
        if event is None:
            examined.skipped.append(Skipped.deleted(pk))
        elif event.state not in (rule.state, rule.also) or event.version != version:
            changed.append(event)
        else:
            unchanged.append(event)
    examined.skipped += _changed(changed, chunk)
    unread = [event.pk for event in unchanged if rule.publishes and event.reason in UNREAD]
    bodies = tables.rows().in_bulk(unread) if unread else {}
    overdue_ids: set[UUID] = set()
    if rule.overdue:
        late = tables.rows().filter(overdue(), pk__in=[event.pk for event in unchanged])
        overdue_ids.update(late.values_list("pk", flat=True))
    for event in unchanged:
        decision = _decide(bodies.get(event.pk, event), rule, is_late=event.pk in overdue_ids)
        if isinstance(decision, Reason):
            examined.skipped.append(Skipped.of(event, decision))
            continue
        examined.events[event.pk] = event
        if decision is not None:
            examined.handlers[event.pk] = decision


def _decide(event: ArchivedEvent, rule: Rule, *, is_late: bool) -> Handler | Reason | None:
    """Return the handler that the rule needs, or why it does not allow the event."""
    handler = target(event) if rule.publishes else None
    if isinstance(handler, Reason):
        return handler
    if rule.overdue and event.service != get_settings().service:
        return other_service(event)
    if rule.overdue and not is_late:
        return NOT_OVERDUE
    return handler


def skipped_since(seen: Seen, done: Iterable[UUID]) -> list[Skipped]:
    """Return the events that changed between the examination and the UPDATE."""
    missed = set(seen).difference(done)
    if not missed:
        return []
    existing = {event.pk: event for event in _light(missed)}
    gone = [Skipped.deleted(pk) for pk in missed if pk not in existing]
    return _changed(existing.values(), seen) + gone


def _light(ids: Iterable[UUID]) -> QuerySet[ArchivedEvent]:
    return tables.rows().filter(pk__in=list(ids)).defer(*ArchivedEvent.LARGE)


def _changed(events: Iterable[ArchivedEvent], seen: Seen) -> list[Skipped]:
    return [Skipped.of(event, why_changed(event, seen[event.pk])) for event in events]


def other_service(event: ArchivedEvent) -> Reason:
    """Return the reason for skipping an event of another service."""
    return Reason("other-service", service=repr(event.service))


def why_changed(event: ArchivedEvent, version: int) -> Reason:
    """Return the reason for skipping an event that is not as it was seen."""
    if event.version == version:
        return state_reason(event)
    return Reason("changed", state=Reason.named("state", event.state))


def state_reason(event: ArchivedEvent) -> Reason:
    """Return the reason for skipping an event in another state."""
    return Reason("state", state=Reason.named("state", event.state))
