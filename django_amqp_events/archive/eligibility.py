"""Decide which archived events can be replayed, by which handler, and why the others cannot.

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

from ..conf import get_settings
from ..databases import parts, pieces
from ..declare.registry import Handler, get_registry
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


def target(event: ArchivedEvent) -> Handler | Reason:
    """Return the handler that would get a replay of an event, or why it cannot be replayed."""
    found, most = _own_handler(event), get_settings().max_body
    if isinstance(found, Reason):
        return found
    if event.body_size > most:
        return Reason("body-too-large", size=event.body_size, most=most)
    if event.reason in UNREAD and event.payload is None:
        return Reason("body-unreadable")
    return found


def edit_target(event: ArchivedEvent, version: int) -> Handler | Reason:
    """Return the handler that would get an edited replay, or why the event cannot be edited.

    The body may be unreadable or too large, since an edit replaces it.
    """
    if event.state != State.ARCHIVED or event.version != version:
        return why_changed(event, version, last_actions([event.pk]).get(event.pk))
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


def is_overdue(event: ArchivedEvent, handler: Handler | None, now: datetime | None = None) -> bool:
    """Return True if a replay has no outcome although its last retry is long due.

    Args:
        handler: ``None`` if it no longer exists.
    """
    patience = OVERDUE + (handler.policy.total() if handler else 0.0)
    return event.state == State.REPLAYING and event.state_since + timedelta(seconds=patience) <= (
        now or datetime.now(UTC)
    )


def examine(seen: Seen, *, force: bool = False) -> tuple[dict[UUID, Handler], list[Skipped]]:
    """Return the handlers of the events that a replay would publish, and the skipped events."""
    targets: dict[UUID, Handler] = {}
    skipped: list[Skipped] = []
    for chunk in chunks(seen, CHUNK):
        targets |= examine_chunk(chunk, skipped, force=force)
    return targets, skipped


def examine_chunk(chunk: Seen, skipped: list[Skipped], *, force: bool) -> dict[UUID, Handler]:
    """Return the handlers of a chunk's eligible events; append the others to *skipped*."""
    targets: dict[UUID, Handler] = {}
    for event in unchanged(chunk, State.REPLAYING if force else State.ARCHIVED, skipped):
        handler = target(event)
        if isinstance(handler, Reason):
            skipped.append(Skipped.of(event, handler))
        elif force and not is_overdue(event, handler):
            skipped.append(Skipped.of(event, NOT_OVERDUE))
        else:
            targets[event.pk] = handler
    return targets


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
    return states.rows().filter(pk__in=list(ids)).defer(*ArchivedEvent.LARGE)


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
    for part in parts(list(seen), 1000):
        found = states.rows().filter(pk__in=part).order_by()
        sizes = dict(found.values_list("pk", "body_size"))
        sized = ((pk, sizes.get(pk, 0)) for pk in part)
        for piece in pieces(sized, count=size, size=CHUNK_BYTES):
            yield {pk: seen[pk] for pk in piece}
