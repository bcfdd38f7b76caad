"""Decide which archived events can be replayed, where each goes, and why the others cannot.

Nothing here changes or publishes anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from django.db.models import OuterRef, QuerySet, Subquery
from django.utils.timezone import localtime
from django.utils.translation import pgettext_lazy

from ..broker.topology import Names
from ..conf import Settings, get_settings
from ..declare.registry import Handler, Registry, get_registry
from ..models import ArchiveAction, ArchivedEvent, State, visible
from ..reasons import Reason
from . import states
from .states import Seen

#: Most events that are claimed, published and recorded together, and most bytes of their bodies.
#: A larger body is a chunk of its own.
CHUNK: Final = 200
CHUNK_BYTES: Final = 16 * 1024 * 1024
#: Seconds after the last retry of its handler is due from which a replay without an outcome is
#: overdue.
OVERDUE: Final = 15 * 60.0
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
class Target:
    """The destination of a replay."""

    handler: Handler
    exchange: str
    queue: str
    routing_key: str


def target(
    event: ArchivedEvent, settings: Settings | None = None, registry: Registry | None = None
) -> Target | Reason:
    """Return where a replay of an event would go, or why it cannot be replayed."""
    settings = settings or get_settings()
    found = _target(event, settings, registry or get_registry())
    if isinstance(found, Reason):
        return found
    if event.body_size > settings.max_body:
        return Reason("body-too-large", size=event.body_size, most=settings.max_body)
    if event.reason in UNREAD and event.payload is None:
        return Reason("body-unreadable")
    return found


def edit_target(
    event: ArchivedEvent,
    version: int,
    settings: Settings | None = None,
    registry: Registry | None = None,
) -> Target | Reason:
    """Return where an edited replay of an event would go, or why it cannot be edited.

    The body may be unreadable or too large, since an edit replaces it.
    """
    if event.state != State.ARCHIVED or event.version != version:
        return why_changed(event, version, last_actions([event.pk]).get(event.pk))
    if event.unconfirmed:
        return Reason("unconfirmed")
    return _target(event, settings or get_settings(), registry or get_registry())


def _target(event: ArchivedEvent, settings: Settings, registry: Registry) -> Target | Reason:
    if event.service != settings.service:
        return other_service(event)
    handler = handler_for(event, settings, registry)
    if isinstance(handler, Reason):
        return handler
    return Target(
        handler=handler,
        exchange=Names.of(settings).replay,
        queue=handler.queue,
        routing_key=handler.key,
    )


def handler_for(event: ArchivedEvent, settings: Settings, registry: Registry) -> Handler | Reason:
    """Return the handler that gets replays of an event, or why there is none."""
    name = settings.renamed_handlers.get(event.handler, event.handler)
    if name:
        return registry.handlers.get(name) or Reason(
            "unknown-handler", name=repr(name), old=event.handler
        )
    # No handler matched when the event was delivered; one may match now.
    return registry.find(event.queue, event.name) or Reason(
        "unknown-event", name=repr(event.name), queue=repr(event.queue)
    )


def is_overdue(event: ArchivedEvent, handler: Handler | None, now: datetime | None = None) -> bool:
    """Return True if a replay has no outcome although its last retry is long due.

    Args:
        handler: ``None`` if it no longer exists.
    """
    patience = OVERDUE + (handler.policy.total() if handler else 0.0)
    return event.state == State.REPLAYING and event.state_since + timedelta(seconds=patience) <= (
        now or datetime.now(UTC)
    )


def examine(seen: Seen, *, force: bool = False) -> tuple[list[tuple[UUID, Target]], list[Skipped]]:
    """Return what a replay would publish, and what it would skip; changes nothing."""
    eligible: list[tuple[UUID, Target]] = []
    skipped: list[Skipped] = []
    settings, registry = get_settings(), get_registry()
    for chunk in chunks(seen, CHUNK):
        targets, left = examine_chunk(chunk, settings, registry, force=force)
        eligible += targets.items()
        skipped += left
    return eligible, skipped


def examine_chunk(
    chunk: Seen, settings: Settings, registry: Registry, *, force: bool
) -> tuple[dict[UUID, Target], list[Skipped]]:
    """Return the targets of a chunk's eligible events, and the others."""
    targets: dict[UUID, Target] = {}
    skipped: list[Skipped] = []
    for event in unchanged(chunk, State.REPLAYING if force else State.ARCHIVED, skipped):
        where = target(event, settings, registry)
        if isinstance(where, Reason):
            skipped.append(Skipped.of(event, where))
        elif force and not is_overdue(event, where.handler):
            skipped.append(Skipped.of(event, NOT_OVERDUE))
        else:
            targets[event.pk] = where
    return targets, skipped


def unchanged(chunk: Seen, state: State, skipped: list[Skipped]) -> Iterator[ArchivedEvent]:
    """Yield the events that are in *state* with the version seen; append the others to *skipped*.

    A body is read only where :func:`target` looks at it.
    """
    light = {event.pk: event for event in _light(chunk)}
    found = []
    changed = []
    for pk, version in chunk.items():
        event = light.get(pk)
        if event is None:
            skipped.append(Skipped.deleted(pk))
        elif event.state != state or event.version != version:
            changed.append(event)
        else:
            found.append(event)
    skipped += _changed(changed, chunk)
    unread = [event.pk for event in found if event.reason in UNREAD]
    full = states.rows().in_bulk(unread) if unread else {}
    for event in found:
        yield full.get(event.pk, event)


def skipped_since(wanted: Seen, done: Iterable[UUID]) -> list[Skipped]:
    """Return the events that changed between the examination and the UPDATE."""
    missed = set(wanted).difference(done)
    if not missed:
        return []
    found = {event.pk: event for event in _light(missed)}
    gone = [Skipped.deleted(pk) for pk in missed if pk not in found]
    return _changed(list(found.values()), wanted) + gone


def _light(ids: Iterable[UUID]) -> QuerySet[ArchivedEvent]:
    return states.rows().filter(pk__in=list(ids)).defer("body", "headers_raw", "detail")


def _changed(events: list[ArchivedEvent], seen: Seen) -> list[Skipped]:
    last = last_actions([event.pk for event in events])
    return [
        Skipped.of(event, why_changed(event, seen[event.pk], last.get(event.pk)))
        for event in events
    ]


def other_service(event: ArchivedEvent) -> Reason:
    """Return the reason for skipping an event of another service."""
    return Reason("other-service", service=repr(event.service))


def why_changed(event: ArchivedEvent, version: int, last: ArchiveAction | None = None) -> Reason:
    """Return the reason for skipping an event that changed.

    Args:
        last: its last action (:func:`last_actions`).
    """
    if event.version == version:
        return Reason("state", state=_label(State, event.state))
    changed = Reason("changed", state=_label(State, event.state))
    if last is None:
        return changed
    return Reason(
        "changed-by",
        changed=changed,
        what=_label(ArchiveAction.Action, last.action),
        who=visible(last.by, 80) or pgettext_lazy("by", "unknown"),
        at=f"{localtime(last.at):%Y-%m-%d %H:%M:%S %Z}",
    )


def _label(choices: Any, value: str) -> Any:
    """Return the lazy label of a value, or the value if a newer version wrote it."""
    return choices(value).label if value in choices.values else value


def last_actions(ids: Collection[UUID]) -> dict[UUID, ArchiveAction]:
    """Return the last action on each of these events, in two statements."""
    if not ids:
        return {}
    actions = ArchiveAction.objects.using(states.database())
    newest = actions.filter(event=OuterRef("pk")).order_by("-at", "-pk").values("pk")[:1]
    wanted = states.rows().filter(pk__in=ids).order_by().annotate(last=Subquery(newest))
    found = list(wanted.exclude(last=None).values_list("last", flat=True))
    return {each.event_id: each for each in actions.filter(pk__in=found)}


def chunks(seen: Seen, size: int) -> Iterator[Seen]:
    """Cut *seen* into chunks of at most *size* events and :data:`CHUNK_BYTES`, in its order."""
    ids = list(seen)
    for start in range(0, len(ids), 1000):
        part = ids[start : start + 1000]
        found = states.rows().filter(pk__in=part).order_by()
        sizes = dict(found.values_list("pk", "body_size"))
        sized = ((pk, sizes.get(pk, 0)) for pk in part)
        for piece in states.pieces(sized, count=size, size=CHUNK_BYTES):
            yield {pk: seen[pk] for pk in piece}
