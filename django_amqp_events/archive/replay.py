"""Replay: archived events go to the handler that failed, and nowhere else.

Claim in the database, commit, publish through ``svc:replay``, note the confirm. Whatever dies
between two of these steps leaves the row *queued*, and :func:`resume` (called by the mirror)
publishes it again under the same replay id. How it ended comes back through the archive queue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from django.db import InterfaceError, OperationalError, connections

from ..broker.connection import describe_message
from ..broker.topology import Names
from ..conf import Settings, get_settings
from ..declare.registry import Registry, get_registry
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
from ..message import encoding, headers
from ..message.types import Message
from ..models import (
    State,
)
from ..publish import publisher
from ..reasons import Reason
from . import editing, states
from .eligibility import (
    CHUNK,
    CHUNK_BYTES,
    NOT_OVERDUE,
    Skipped,
    chunks,
    editable,
    examine_chunk,
    handler_for,
    is_overdue,
    other_service,
    skipped_since,
    unchanged,
)
from .states import (
    ClaimedReplay,
    Edit,
    Seen,
    UnpublishedReplay,
)

logger = logging.getLogger(__name__)

#: Seconds that an event may stay *queued*, beyond three confirm time-outs, before the process that
#: claimed it is taken for dead.
LEASE: Final = 30.0
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
        for chunk in chunks(seen, size):
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
            report.skipped.append(Skipped.deleted(pk))
        elif isinstance(where, Reason):
            report.skipped.append(Skipped.of(event, where))
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
            report.skipped += skipped_since({pk: version}, [each.event.pk for each in claimed])
            _publish(claimed, settings, registry, report)
    except _DATABASE_AWAY as exc:
        report.stopped = _database_unreachable(exc)
    return report


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
    for chunk in chunks(seen, CHUNK):
        wanted: dict[UUID, int] = {}
        for event in unchanged(chunk, State.REPLAYING, skipped):
            handler = handler_for(event, settings, registry)
            if event.service != settings.service:
                skipped.append(Skipped.of(event, other_service(event)))
            elif not is_overdue(event, None if isinstance(handler, Reason) else handler):
                skipped.append(Skipped.of(event, NOT_OVERDUE))
            else:
                wanted[event.pk] = chunk[event.pk]
        done = states.resolve(wanted, by=by, reason=reason, now=_now())
        skipped += skipped_since(wanted, done)
        resolved += done
    return resolved, skipped


# -- one chunk ----------------------------------------------------------------------------

#: Why nobody may edit.
EDITING_OFF: Final = Reason("editing-off")


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
    targets, skipped = examine_chunk(chunk, settings, registry, force=force)
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
    report.skipped += skipped_since(wanted, [each.event.pk for each in claimed])
    _publish(claimed, settings, registry, report)
    return len(claimed)


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
            message = encoding.replay_message(
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
            Skipped.of(
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


def _now() -> datetime:
    return datetime.now(UTC)
