"""Replay: archived events go to the handler that failed, and nowhere else.

Claim in the database, commit, publish through ``svc:replay``, note the confirm. Whatever dies
between two of these steps leaves the row *queued*, and :func:`resume` (called by the mirror)
publishes it again under the same replay id. How it ended comes back through the archive queue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from django.db import InterfaceError, OperationalError, connections
from django.db.models import OuterRef, Q, QuerySet, Subquery
from django.db.models.functions import Length
from django.utils.timezone import localtime
from django.utils.translation import pgettext_lazy

from ..broker.connection import describe_message
from ..broker.topology import Names
from ..conf import Settings, get_settings
from ..declare.registry import Handler, Registry, get_registry
from ..exceptions import (
    AmqpEventsError,
    BrokerUnavailableError,
    ConfigurationError,
    ExchangeMissingError,
    MessageTooLargeError,
    PublishError,
    PublishInterruptedError,
    PublishRefusedError,
    PublishTimeoutError,
)
from ..message import copies, headers
from ..message.types import Message
from ..models import (
    ArchiveAction,
    ArchivedEvent,
    State,
    visible,
)
from ..publish import publisher
from ..reasons import Reason
from . import editing, states
from .states import (
    ClaimedReplay,
    Edit,
    Seen,
    UnpublishedReplay,
)

logger = logging.getLogger(__name__)

#: Events that are claimed, published in one window of confirms, and noted together: at most so
#: many, and bodies of so many bytes together (or one that is larger).
CHUNK: Final = 200
CHUNK_BYTES: Final = 16 * 1024 * 1024
#: Seconds, beyond all delays of the handler's retries, after which a replay that has not reported
#: back is called overdue.
OVERDUE: Final = 15 * 60.0
#: Seconds that an event may stay *queued*, beyond three confirm time-outs, before the process that
#: claimed it is taken for dead.
LEASE: Final = 30.0
#: Reasons after which the body may be unreadable still.
UNREAD: Final = frozenset({"malformed", "unreadable"})
#: Seconds between tries to note what became of a publish, while the database is away. What is not
#: noted runs twice, which is worse than a page that takes long.
_NOTE_AGAIN: Final = (0.2, 1.0, 3.0)
#: Errors that say nothing about the one event: the next one would fail like it.
_GENERAL: Final = (
    BrokerUnavailableError,
    ExchangeMissingError,
    PublishInterruptedError,
    PublishTimeoutError,
)
_DATABASE_AWAY: Final = (InterfaceError, OperationalError)
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
#: Why events are archived; docs/archive.md tells what each means.
REASONS: Final = frozenset(
    {
        "arguments",
        "exhausted",
        "failed",
        "malformed",
        "poison",
        "recovered",
        "revoked",
        "unknown",
        "unreadable",
        "unsupported",
    }
)
#: How the reason of a discard begins that was a mark as resolved.
RESOLVED: Final = "marked as resolved"
#: Characters of an id that may stand for the whole of it.
SHORT: Final = 8


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


@dataclass(slots=True, kw_only=True)
class Report:
    """The result of a replay.

    Attributes:
        published: confirmed by the broker, on their way to their handlers.
        returned: back in the archive, because they were not published (or that is not known).
        skipped: not touched.
        stopped: why the rest was not tried, ``None`` where all were.
    """

    published: list[UUID] = field(default_factory=list)
    returned: list[Skipped] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    stopped: Reason | None = None

    @property
    def done(self) -> int:
        """Return the number of events with a result."""
        return len(self.published) + len(self.returned) + len(self.skipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The destination of a replay."""

    handler: Handler
    exchange: str
    queue: str
    routing_key: str


def replay(
    seen: Seen,
    *,
    by: str,
    reason: str = "",
    force: bool = False,
    rate: float | None = None,
    progress: Callable[[Report], object] | None = None,
    batch: UUID | None = None,
) -> Report:
    """Replay archived events, each at most once however many people ask for it at a time.

    A broker or database that goes away ends it early, with the rest untouched: see
    :attr:`Report.stopped`.

    Args:
        seen: the version of each event by its id, as it was when somebody decided.
        by: who asks: a user's name, a command's.
        reason: why.
        force: events whose replay is overdue instead (:func:`overdue`); they may be handled twice.
        rate: events per second at most.
        progress: called after each chunk; what it raises ends the replay there.
        batch: the one that they are replayed for
        (:mod:`django_amqp_events.archive.batches.runner`).

    Raises:
        ConfigurationError: AMQP_EVENTS is wrong, or there is a transaction around it.
        ValueError: the rate is none.
    """
    settings, registry = _require_broker()
    if rate is not None and not rate > 0:
        raise ValueError(f"the rate is {rate!r}; it is a number of events per second, above 0")
    report = Report()
    size = CHUNK if rate is None else max(1, int(min(CHUNK, rate)))
    began, sent = time.monotonic(), 0
    try:
        for chunk in _chunks(seen, size):
            if rate is not None:
                time.sleep(max(0.0, began + sent / rate - time.monotonic()))
            sent += _replay(
                chunk, settings, registry, report, by=by, reason=reason, force=force, batch=batch
            )
            if progress is not None:
                progress(report)
            if report.stopped:
                break
    except _DATABASE_AWAY as exc:
        report.stopped = _database_unreachable(exc)
    return report


def edit(
    pk: UUID, version: int, payload: Mapping[str, Any], *, by: str, reason: str, base: int = 0
) -> Report:
    """Replay one archived event with another payload, under its own event id.

    The event keeps its body; what is published is a revision of it. The claim and the revision
    are one transaction, so that of an edit and another replay at the same time one wins.

    Args:
        version: of the event, as it was when somebody decided.
        by: who asks: a user's name, a command's.
        reason: why; there is one.
        base: the revision that the edit began with, 0 for the event's own body.

    Raises:
        ConfigurationError: editing is off, AMQP_EVENTS is wrong, or there is a transaction around
            it.
        InvalidEditError: the payload cannot be published.
        ValueError: there is no reason.
    """
    settings, registry = _require_broker()
    if not settings.editing:
        raise ConfigurationError(EDITING_OFF)
    if not reason.strip():
        raise ValueError("an edit needs a reason; nothing was published")
    report = Report()
    try:
        event = states.rows().filter(pk=pk).first()
        where = None if event is None else editable(event, version, settings, registry)
        if event is None:
            report.skipped.append(_deleted(pk))
        elif isinstance(where, Reason):
            report.skipped.append(_skipped(event, where))
        elif where is not None:
            draft = editing.draft(event, where.handler, payload, settings, registry)
            claimed = states.claim(
                {pk: version},
                handlers={pk: where.handler.name},
                by=by,
                reason=reason,
                now=states.clock(),
                edit=Edit(body=draft.body, base=base),
            )
            report.skipped += _skipped_since({pk: version}, [each.event.pk for each in claimed])
            _publish(claimed, settings, registry, report)
    except _DATABASE_AWAY as exc:
        report.stopped = _database_unreachable(exc)
    return report


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


def _require_broker() -> tuple[Settings, Registry]:
    """Return settings and handlers, where a replay can be published.

    Raises:
        ConfigurationError: it cannot.
    """
    settings, registry = get_settings(), get_registry()
    if settings.backend != "amqp":
        raise ConfigurationError(Reason("backend", backend=repr(settings.backend)))
    states.check_no_transaction()
    return settings, registry


def _database_unreachable(exc: Exception) -> Reason:
    text = str(exc).strip().partition("\n")[0]
    return Reason("database-unreachable", error=f"{type(exc).__name__}: {text}")


def resume(*, lease: float | None = None) -> int:
    """Publish again what processes that died have left *queued*, under the same replay ids.

    Args:
        lease: seconds that a row may be queued before that is assumed.

    Returns:
        how many were published.
    """
    settings, registry = get_settings(), get_registry()
    lease = LEASE + 3 * settings.confirm_timeout if lease is None else lease
    report = Report()
    since_before = states.clock() - timedelta(seconds=lease)
    while not report.stopped:
        claimed = states.reclaim(
            service=settings.service,
            handlers=settings.renamed_handlers,
            since_before=since_before,
            limit=CHUNK,
            size=CHUNK_BYTES,
            now=states.clock(),
        )
        if not claimed:
            break
        logger.warning(
            "%d replays were left queued by a process that ended; they are published again",
            len(claimed),
        )
        _publish(claimed, settings, registry, report)
    return len(report.published)


def resolve(seen: Seen, *, by: str, reason: str) -> tuple[list[UUID], list[Skipped]]:
    """Discard events whose replay is overdue; an outcome that comes after all is history.

    It is kept as a discard whose reason begins with :data:`RESOLVED`. A copy that still waits in
    the handler's queue is not taken back.

    Returns:
        those that were, and why the others were not.
    """
    settings, registry = get_settings(), get_registry()
    skipped: list[Skipped] = []
    resolved: list[UUID] = []
    reason = f"{RESOLVED}: {reason}" if reason else RESOLVED
    for chunk in _chunks(seen, CHUNK):
        wanted: dict[UUID, int] = {}
        for event in _matching(chunk, State.REPLAYING, skipped):
            handler = _handler(event, settings, registry)
            if event.service != settings.service:
                skipped.append(_skipped(event, other_service(event)))
            elif not is_overdue(event, None if isinstance(handler, Reason) else handler):
                skipped.append(_skipped(event, NOT_OVERDUE))
            else:
                wanted[event.pk] = chunk[event.pk]
        done = states.resolve(wanted, by=by, reason=reason, now=_now())
        skipped += _skipped_since(wanted, done)
        resolved += done
    return resolved, skipped


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
    handler = _handler(event, settings, registry)
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
    for chunk in _chunks(seen, CHUNK):
        targets, left = _examine(chunk, settings, registry, force=force)
        eligible += targets.items()
        skipped += left
    return eligible, skipped


def select(
    *,
    ids: Iterable[str] = (),
    handlers: Iterable[str] = (),
    events: Iterable[str] = (),
    exceptions: Iterable[str] = (),
    reasons: Iterable[str] = (),
    groups: Iterable[UUID] = (),
    since: datetime | None = None,
    until: datetime | None = None,
    state: State | None = State.ARCHIVED,
) -> QuerySet[ArchivedEvent]:
    """Return the events that match all of these filters; an empty filter matches all.

    Args:
        ids: of rows or of events.
        exceptions: dotted names, or their last words.
        groups: ids of failure groups.
        since, until: of the last failure; *until* is left out.
        state: ``None`` for any.
    """
    found = states.rows() if state is None else states.rows().filter(state=state)
    if ids := list(ids):
        found = found.filter(Q(pk__in=filter(None, map(_uuid, ids))) | Q(event_id__in=ids))
    if handlers := list(handlers):
        found = found.filter(handler__in=handlers)
    if events := list(events):
        found = found.filter(name__in=events)
    if exceptions := list(exceptions):
        wanted = Q()
        for name in exceptions:
            wanted |= exception_matches(name)
        found = found.filter(wanted)
    if reasons := list(reasons):
        found = found.filter(reason__in=reasons)
    if groups := list(groups):
        found = found.filter(group__in=groups)
    if since is not None:
        found = found.filter(last_failed_at__gte=since)
    if until is not None:
        found = found.filter(last_failed_at__lt=until)
    return found


def exception_matches(name: str) -> Q:
    """Match an exception: by its dotted name, or the last word of it."""
    return Q(exception=name) | Q(exception__endswith=f".{name}")


def starts_with(column: str, text: str) -> Q:
    """Match how a text column begins, in the way that this database has an index for."""
    if connections[states.database()].vendor == "postgresql":
        return Q(**{f"{column}__startswith": text})
    # SQLite's LIKE ignores case, so it ignores the index too.
    return Q(**{f"{column}__gte": text, f"{column}__lt": text + "\U0010ffff"})


def expand_id(text: str, limit: int = 3) -> list[str]:
    """Return the ids, of events or of rows, that begin with *text*, no more than *limit* of each.

    Only UUIDs are looked for. An id of a publisher's own making may well be how another one of
    his begins: it stands for itself alone.
    """
    digits = text.replace("-", "").lower()
    if not SHORT <= len(digits) < 32 or set(digits) - set("0123456789abcdef"):
        return []
    if states.rows().filter(event_id=text).exists():
        return [text]
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    dashed = "-".join(filter(None, parts))
    events = states.rows().filter(starts_with("event_id", dashed) | starts_with("event_id", text))
    events = events.annotate(length=Length("event_id")).filter(length=36).order_by()
    found = list(events.values_list("event_id", flat=True).distinct()[:limit])
    first, last = (UUID(digits.ljust(32, end)) for end in "0f")
    rows = states.rows().filter(pk__range=(first, last)).exclude(event_id__in=found)
    return found + [str(pk) for pk in rows.order_by().values_list("pk", flat=True)[:limit]]


def is_overdue(event: ArchivedEvent, handler: Handler | None, now: datetime | None = None) -> bool:
    """Return True if a replay has no outcome although its last retry is long due.

    Args:
        handler: ``None`` where nobody is known by that name any more.
    """
    patience = OVERDUE + (handler.policy.total() if handler else 0.0)
    return event.state == State.REPLAYING and event.state_since + timedelta(seconds=patience) <= (
        now or _now()
    )


# -- one chunk ----------------------------------------------------------------------------

#: Why nobody may edit.
EDITING_OFF: Final = Reason("editing-off")
_MAY_RUN: Final = Reason("unconfirmed")
#: Why an event is left alone whose replay may report back still.
NOT_OVERDUE: Final = Reason("not-overdue")
#: Why nothing is done about an event that was deleted.
DELETED: Final = Reason("deleted")


def _replay(
    chunk: Seen,
    settings: Settings,
    registry: Registry,
    report: Report,
    *,
    by: str,
    reason: str,
    force: bool,
    batch: UUID | None,
) -> int:
    """Replay a chunk; returns how many events were claimed."""
    targets, skipped = _examine(chunk, settings, registry, force=force)
    report.skipped += skipped
    wanted = {pk: chunk[pk] for pk in targets}
    claimed = states.claim(
        wanted,
        handlers={pk: found.handler.name for pk, found in targets.items()},
        by=by,
        reason=reason,
        now=states.clock(),
        force=force,
        batch=batch,
    )
    report.skipped += _skipped_since(wanted, [each.event.pk for each in claimed])
    _publish(claimed, settings, registry, report)
    return len(claimed)


def _examine(
    chunk: Seen, settings: Settings, registry: Registry, *, force: bool
) -> tuple[dict[UUID, Target], list[Skipped]]:
    targets: dict[UUID, Target] = {}
    skipped: list[Skipped] = []
    for event in _matching(chunk, State.REPLAYING if force else State.ARCHIVED, skipped):
        where = target(event, settings, registry)
        if isinstance(where, Reason):
            skipped.append(_skipped(event, where))
        elif force and not is_overdue(event, where.handler):
            skipped.append(_skipped(event, NOT_OVERDUE))
        else:
            targets[event.pk] = where
    return targets, skipped


def _matching(chunk: Seen, state: State, skipped: list[Skipped]) -> Iterator[ArchivedEvent]:
    """Yield the events that are in *state* as they were seen, and note why not the others."""
    light = {event.pk: event for event in _without_bodies(chunk)}
    found, left = [], []
    for pk, version in chunk.items():
        event = light.get(pk)
        if event is None:
            skipped.append(_deleted(pk))
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


def _skipped_since(wanted: Seen, done: Iterable[UUID]) -> list[Skipped]:
    """Return why events changed between the check and the update."""
    missed = set(wanted).difference(done)
    if not missed:
        return []
    found = {event.pk: event for event in _without_bodies(missed)}
    gone = [_deleted(pk) for pk in missed if pk not in found]
    return _changed(list(found.values()), wanted) + gone


def _changed(events: list[ArchivedEvent], seen: Seen) -> list[Skipped]:
    last = last_actions([event.pk for event in events])
    return [
        _skipped(event, why_changed(event, seen[event.pk], last.get(event.pk))) for event in events
    ]


def _skipped(event: ArchivedEvent, why: Reason) -> Skipped:
    return Skipped(id=event.pk, title=str(event), why=why)


def _deleted(pk: UUID) -> Skipped:
    return Skipped(id=pk, title="", why=DELETED)


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


def _publish(
    claimed: list[ClaimedReplay], settings: Settings, registry: Registry, report: Report
) -> None:
    """Publish what is claimed and note what became of each."""
    exchange = Names.of(settings).replay
    messages: list[Message] = []
    sent: list[ClaimedReplay] = []
    back: list[UnpublishedReplay] = []
    # What is wrong, without who it is about.
    whys: dict[UUID, Reason] = {}
    forced = states.forced(claimed)
    for each in claimed:
        handler = registry.handlers.get(each.replay.handler)
        if handler is None:
            # Queued by a version of the project that knew it.
            back.append(_unpublished(each, f"there is no handler {each.replay.handler!r}"))
            continue
        try:
            message = copies.replay_copy(
                each.replay.received,
                each.event.event,
                exchange=exchange,
                routing_key=handler.key,
                handler=handler.name,
                replay_id=str(each.replay.pk),
                forced=each.replay.pk in forced,
            )
        except Exception as exc:
            # A row that somebody has changed by hand must not keep the others from leaving.
            logger.exception("no message can be made of %s", each.event)
            why = f"no message can be made of it: {type(exc).__name__}: {exc}"
            back.append(_unpublished(each, why))
            continue
        sent.append(each)
        messages.append(message)
    try:
        answers = _confirmed(messages, settings) if messages else []
    except AmqpEventsError as exc:
        # The Celery app or the broker's URL; nothing was published.
        away = (_unpublished(each, str(exc), general=True) for each in sent)
        _return_to_archive([*back, *away], report)
        raise
    confirmed: list[ClaimedReplay] = []
    errors: list[PublishError] = []
    for each, message, error in zip(sent, messages, answers, strict=True):
        if error is None:
            confirmed.append(each)
        else:
            errors.append(error)
            whys[each.event.pk] = _publish_reason(error, message)
            back.append(
                _unpublished(
                    each,
                    str(error),
                    known=error.published is False,
                    general=isinstance(error, _GENERAL),
                )
            )
    if confirmed:
        report.published += [each.event.pk for each in confirmed]
        _record_outcome(lambda: states.published(confirmed, now=_now()))
    _return_to_archive(back, report, whys)
    if errors and not confirmed and all(isinstance(error, _GENERAL) for error in errors):
        report.stopped = whys[sent[0].event.pk]


def _publish_reason(error: PublishError, message: Message) -> Reason:
    """Write an error without the name and id of its event, which its neighbours do not share."""
    text = str(error).replace(describe_message(message), "it")
    return Reason.of(text.removeprefix("it was not published: ").removeprefix("it: "))


def _unpublished(
    each: ClaimedReplay, error: str, *, known: bool = True, general: bool = False
) -> UnpublishedReplay:
    # What is not known may be on its way: its next replay has the same id. That this try was in
    # vain says nothing about one before.
    unconfirmed = not known or each.replay.publishes > 1
    return UnpublishedReplay(claimed=each, error=error, unconfirmed=unconfirmed, general=general)


def _return_to_archive(
    back: list[UnpublishedReplay], report: Report, whys: Mapping[UUID, Reason] | None = None
) -> None:
    if back:
        whys = whys or {}
        report.returned += [
            _skipped(
                each.claimed.event,
                whys.get(each.claimed.event.pk) or Reason.of(each.error),
            )
            for each in back
        ]
        _record_outcome(lambda: states.returned(back, now=_now()))


def _confirmed(messages: list[Message], settings: Settings) -> list[PublishError | None]:
    backend = publisher.backend(settings)
    messages = list(messages)
    results: list[PublishError | None] = [None] * len(messages)
    wanted = list(range(len(messages)))
    bare: set[int] = set()
    while wanted:
        answers = backend.publish([messages[index] for index in wanted], mandatory=True)
        errors = dict(zip(wanted, answers, strict=True))
        results = [errors.get(index, result) for index, result in enumerate(results)]
        refused = [
            index
            for index, error in errors.items()
            if isinstance(error, PublishRefusedError) and index not in bare
        ]
        for index in refused:
            # A header that cannot be written, or that the broker refuses, is not the event.
            messages[index] = headers.without_publisher_headers(messages[index])
            bare.add(index)
        # The broker closes the connection over such a message, before it has read the next ones.
        culprits = (PublishRefusedError, MessageTooLargeError)
        behind = [
            index
            for index, error in errors.items()
            if isinstance(error, BrokerUnavailableError)
            and any(isinstance(other, culprits) for other in answers)
        ]
        wanted = behind + refused
    return results


def _record_outcome(note: Callable[[], None]) -> None:
    """Record the result of a publish; retry while the database is unreachable.

    What cannot be written stays *queued* and is published again, so it would run twice.
    """
    for wait in _NOTE_AGAIN:
        try:
            note()
        except _DATABASE_AWAY as exc:
            logger.warning("a replay is not noted yet: %s", exc)
            time.sleep(wait)
            # Otherwise a connection that is lost stays so.
            connections[states.database()].close_if_unusable_or_obsolete()
        else:
            return
    note()


def _handler(event: ArchivedEvent, settings: Settings, registry: Registry) -> Handler | Reason:
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


def _chunks(seen: Seen, size: int) -> Iterator[Seen]:
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


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _now() -> datetime:
    return datetime.now(UTC)
