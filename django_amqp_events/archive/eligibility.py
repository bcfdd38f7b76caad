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

#: Events that are claimed, published in one window of confirms, and noted together: at most so
#: many, and bodies of so many bytes together (or one that is larger).
CHUNK: Final = 200
CHUNK_BYTES: Final = 16 * 1024 * 1024
#: Seconds, beyond all delays of the handler's retries, after which a replay that has not reported
#: back is called overdue.
OVERDUE: Final = 15 * 60.0
#: Reasons after which the body may be unreadable still.
UNREAD: Final = frozenset({"malformed", "unreadable"})
#: What is looked at before an event is claimed; to read all of it takes several times as long.
_LOOKED_AT: Final = (
    "body_size",
    "event_id",
    "handler",
    "name",
    "queue",
    "reason",
    "service",
    "state",
    "state_since",
    "version",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """An event that was not replayed, and why; it stays as it was.

    Attributes:
        title: who it is, ``""`` where there is no such row.
        why: without who it is, so that many have the same.
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


def editable(
    event: ArchivedEvent,
    version: int,
    settings: Settings | None = None,
    registry: Registry | None = None,
) -> Target | Reason:
    """Return where an edited replay of *event* would go, or why there can be none.

    A body that cannot be read, or that is too large, can be mended.
    """
    settings, registry = settings or get_settings(), registry or get_registry()
    if event.state != State.ARCHIVED or event.version != version:
        return why_changed(event, version, last_actions([event.pk]).get(event.pk))
    if event.unconfirmed:
        return _MAY_RUN
    return _target(event, settings, registry)


def target(
    event: ArchivedEvent, settings: Settings | None = None, registry: Registry | None = None
) -> Target | Reason:
    """Return where a replay of *event* would go, or why it cannot be replayed."""
    settings, registry = settings or get_settings(), registry or get_registry()
    found = _target(event, settings, registry)
    if isinstance(found, Reason):
        return found
    if event.body_size > settings.max_body:
        return Reason("body-too-large", size=event.body_size, most=settings.max_body)
    if event.reason in UNREAD and event.payload is None:
        return Reason("body-unreadable")
    return found


def _target(event: ArchivedEvent, settings: Settings, registry: Registry) -> Target | Reason:
    """Return where a replay would go, whatever its body is."""
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


def examine(seen: Seen, *, force: bool = False) -> tuple[list[tuple[UUID, Target]], list[Skipped]]:
    """Return what a replay would publish, and why it would skip the rest; changes nothing."""
    eligible: list[tuple[UUID, Target]] = []
    skipped: list[Skipped] = []
    settings, registry = get_settings(), get_registry()
    for chunk in chunks(seen, CHUNK):
        targets, left = examine_chunk(chunk, settings, registry, force=force)
        eligible += targets.items()
        skipped += left
    return eligible, skipped


def is_overdue(event: ArchivedEvent, handler: Handler | None, now: datetime | None = None) -> bool:
    """Return True if a replay has no outcome although its last retry is long due.

    Args:
        handler: ``None`` where nobody is known by that name any more.
    """
    patience = OVERDUE + (handler.policy.total() if handler else 0.0)
    return event.state == State.REPLAYING and event.state_since + timedelta(seconds=patience) <= (
        now or _now()
    )


_MAY_RUN: Final = Reason("unconfirmed")
#: Why an event is left alone whose replay may report back still.
NOT_OVERDUE: Final = Reason("not-overdue")
#: Why nothing is done about an event that was deleted.
DELETED: Final = Reason("deleted")


def examine_chunk(
    chunk: Seen, settings: Settings, registry: Registry, *, force: bool
) -> tuple[dict[UUID, Target], list[Skipped]]:
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
    """Yield the events that are in *state* as they were seen, and note why not the others."""
    light = {event.pk: event for event in _without_bodies(chunk)}
    found, left = [], []
    for pk, version in chunk.items():
        event = light.get(pk)
        if event is None:
            skipped.append(Skipped.deleted(pk))
        elif event.state != state or event.version != version:
            left.append(event)
        else:
            found.append(event)
    skipped += _changed(left, chunk)
    # Of these alone the body is looked at, see target(); all of them in one query.
    unread = [event.pk for event in found if event.reason in UNREAD]
    full = states.rows().in_bulk(unread) if unread else {}
    for event in found:
        yield full.get(event.pk, event)


def skipped_since(wanted: Seen, done: Iterable[UUID]) -> list[Skipped]:
    """Return why events changed between the check and the update."""
    missed = set(wanted).difference(done)
    if not missed:
        return []
    found = {event.pk: event for event in _without_bodies(missed)}
    gone = [Skipped.deleted(pk) for pk in missed if pk not in found]
    return _changed(list(found.values()), wanted) + gone


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
        last: the last decision about it (:func:`last_actions`).
    """
    if event.version == version:
        return Reason("state", state=_label(State, event.state))
    text = Reason("changed", state=_label(State, event.state))
    if last is None:
        return text
    return Reason(
        "changed-by",
        changed=text,
        what=_label(ArchiveAction.Action, last.action),
        who=visible(last.by, 80) or pgettext_lazy("by", "unknown"),
        at=f"{localtime(last.at):%Y-%m-%d %H:%M:%S %Z}",
    )


def _label(choices: Any, value: str) -> Any:
    """Return the lazy label of a value, or the value if it has none."""
    return choices(value).label if value in choices.values else value


def last_actions(ids: Collection[UUID]) -> dict[UUID, ArchiveAction]:
    """Return the last decision about each of these events, in two statements."""
    if not ids:
        return {}
    actions = ArchiveAction.objects.using(states.database())
    newest = actions.filter(event=OuterRef("pk")).order_by("-at", "-pk").values("pk")[:1]
    wanted = states.rows().filter(pk__in=ids).order_by().annotate(last=Subquery(newest))
    found = list(wanted.exclude(last=None).values_list("last", flat=True))
    return {each.event_id: each for each in actions.filter(pk__in=found)}


def _without_bodies(ids: Iterable[UUID]) -> QuerySet[ArchivedEvent]:
    return states.rows().filter(pk__in=list(ids)).only(*_LOOKED_AT)


def handler_for(event: ArchivedEvent, settings: Settings, registry: Registry) -> Handler | Reason:
    name = settings.renamed_handlers.get(event.handler, event.handler)
    if name:
        handler = registry.handlers.get(name)
        if handler is None:
            return Reason("unknown-handler", name=repr(name), old=event.handler)
        return handler
    # Nobody was found when it was delivered; there may be somebody by now.
    handler = registry.find(event.queue, event.name)
    if handler is None:
        return Reason("unknown-event", name=repr(event.name), queue=repr(event.queue))
    return handler


def chunks(seen: Seen, size: int) -> Iterator[Seen]:
    """Cut *seen* into chunks of at most *size* events and :data:`CHUNK_BYTES`, in its order."""
    ids = list(seen)
    for start in range(0, len(ids), 1000):
        part = ids[start : start + 1000]
        found = states.rows().filter(pk__in=part).order_by()
        sizes = dict(found.values_list("pk", "body_size"))
        chunk: dict[UUID, int] = {}
        total = 0
        for pk in part:
            size_of = sizes.get(pk, 0)
            if chunk and (len(chunk) >= size or total + size_of > CHUNK_BYTES):
                yield chunk
                chunk, total = {}, 0
            chunk[pk] = seen[pk]
            total += size_of
        if chunk:
            yield chunk


def _now() -> datetime:
    return datetime.now(UTC)
