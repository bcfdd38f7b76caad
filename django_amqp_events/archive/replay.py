"""Replay: publish archived events again, each to the handler that failed and no other.

Claim in the database, commit, publish through ``svc:replay``, record the confirm. A process that
dies between two of these steps leaves the row *queued*, and :func:`resume` (called by the mirror)
publishes it again under the same replay id. The outcome comes back through the archive queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, Final
from uuid import UUID

from django.db import Error

from .. import signals
from ..broker.isolation import publish_each
from ..broker.topology import Names
from ..callables import nothing
from ..conf import get_settings
from ..databases import error_line, is_passing, parts, pieces, reason_of, reconnect
from ..declare.registry import Handler, get_registry
from ..exceptions import (
    AmqpEventsError,
    ConfigurationError,
    PublishError,
    PublishTimeoutError,
)
from ..logs import event_fields, get_logger
from ..message import encoding
from ..message.types import Message
from ..models import Replay, Revision
from ..publish import publisher
from ..reasons import Reason
from . import editing, states, tables
from .eligibility import (
    CHUNK,
    DISCARD,
    FORCE,
    REPLAY,
    REPLAY_IN_BATCH,
    RESOLVE,
    RESTORE,
    Rule,
    Skipped,
    edit_target,
    examine,
    skipped_since,
)
from .states import Seen, UnpublishedReplay

logger = get_logger(__name__)

#: Most bytes of the bodies that are read and published together; a larger body is alone.
CHUNK_BYTES: Final = 16 * 1024 * 1024
#: Seconds, plus three confirm timeouts, that an event may stay *queued* before the process that
#: claimed it is taken for dead.
LEASE: Final = 30.0
#: Seconds between attempts to record a publish while the database is unreachable or locked. A
#: publish that is not recorded is repeated, which is worse than a slow page.
_RECORD_AGAIN: Final = (0.2, 1.0, 3.0)
#: Errors that do not concern one event: the next event would fail in the same way.
_GENERAL: Final = ("exchange", "broker")
_DECISIONS: Final = {DISCARD: states.discard, RESOLVE: states.resolve, RESTORE: states.restore}
#: The reason for refusing edits.
EDITING_OFF: Final = Reason("editing-off")


@dataclass(slots=True, kw_only=True)
class Report:
    """The result of a replay.

    Attributes:
        published: confirmed by the broker.
        returned: back in the archive, because they were not published or not confirmed.
        unconfirmed: how many of the returned may have been published.
        stopped: why the rest was not attempted; ``None`` if all events were.
    """

    published: list[UUID] = field(default_factory=list)
    returned: list[Skipped] = field(default_factory=list)
    unconfirmed: int = 0
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
    progress: Callable[[Report], object] = nothing,
    stop: Callable[[], bool] = nothing,
    batch: UUID | None = None,
) -> Report:
    """Replay archived events, each once however many callers ask for it at a time.

    An unreachable broker, a queue that confirms nothing, or an unreachable or locked database ends
    it: :attr:`Report.stopped`.

    Args:
        force: replay events whose replay is overdue instead; their handlers may run twice.
        progress: called after each chunk; an exception from it ends the replay.

    Raises:
        ConfigurationError: AMQP_EVENTS is wrong, or a transaction is open.
    """
    _require_broker()
    report = Report()
    rule = FORCE if force else REPLAY
    chunks = _chunks(seen, rule if batch is None else REPLAY_IN_BATCH, report)
    try:
        for chunk, handlers in chunks:
            if stop():
                report.stopped = Reason("interrupted")
                break
            claimed = _claim(
                chunk, handlers, report, by=by, reason=reason, force=force, batch=batch
            )
            publish_claimed(claimed, report)
            progress(report)
            if report.stopped:
                break
    except Error as exc:
        if is_passing(exc):
            report.stopped = reason_of(exc)
        elif report.published:
            # The caller has to learn what was published before.
            report.stopped = Reason.of(error_line(exc))
        else:
            raise
    return report


def _chunks(
    seen: Seen, rule: Rule, report: Report
) -> Iterator[tuple[Seen, Mapping[UUID, Handler]]]:
    """Yield the events to replay together, with their handlers; report those that are skipped."""
    for part in parts(list(seen), CHUNK):
        examined = examine({pk: seen[pk] for pk in part}, rule)
        report.skipped += examined.skipped
        sized = ((pk, event.body_size) for pk, event in examined.events.items())
        for piece in list(pieces(sized, count=CHUNK, size=CHUNK_BYTES)) or [[]]:
            yield {pk: seen[pk] for pk in piece}, examined.handlers


def edit(pk: UUID, version: int, payload: Mapping[str, object], *, by: str, reason: str) -> Report:
    """Replay one archived event with another payload, under its own event id.

    The event keeps its body; what is published is a revision of it. The claim and the revision
    are one transaction, so that of an edit and another replay at the same time one wins.

    Args:
        reason: required.

    Raises:
        ConfigurationError: editing is off, AMQP_EVENTS is wrong, or a transaction is open.
        InvalidEditError: the payload cannot be published.
        ValueError: the reason is empty.
    """
    _require_broker()
    if not get_settings().editing:
        raise ConfigurationError(EDITING_OFF)
    if not reason.strip():
        raise ValueError("an edit needs a reason; nothing was published")
    report = Report()
    try:
        event = tables.rows().filter(pk=pk).first()
        if event is None:
            report.skipped.append(Skipped.deleted(pk))
            return report
        handler = edit_target(event, version)
        if isinstance(handler, Reason):
            report.skipped.append(Skipped.of(event, handler))
            return report
        draft = editing.draft(event, handler, payload)
        revision = Revision(body=draft.body)
        claimed = _claim({pk: version}, {pk: handler}, report, by=by, reason=reason, edit=revision)
        publish_claimed(claimed, report)
    except Error as exc:
        if not is_passing(exc):
            raise
        report.stopped = reason_of(exc)
    return report


def _claim(
    seen: Seen, targets: Mapping[UUID, Handler], report: Report, **options: Any
) -> list[Replay]:
    """Claim events, and report those that changed meanwhile."""
    handlers = {pk: targets[pk].name for pk in seen}
    claimed = states.claim(seen, handlers=handlers, now=tables.clock(), **options)
    report.skipped += skipped_since(seen, [replay.event_id for replay in claimed])
    return claimed


def _require_broker() -> None:
    """Raise ConfigurationError if no replay can be published in this process or transaction."""
    backend = get_settings().backend
    if backend != "amqp" and not publisher.diverted():
        raise ConfigurationError(Reason("backend", backend=repr(backend)))
    tables.check_no_transaction()


def resume(*, lease: float | None = None) -> int:
    """Publish again what dead processes have left *queued*; return how many were published.

    Args:
        lease: seconds that a row may be queued before its process is taken for dead.
    """
    settings = get_settings()
    get_registry()  # Its errors come before a claim.
    lease = LEASE + 3 * settings.confirm_timeout if lease is None else lease
    report = Report()
    since_before = tables.clock() - timedelta(seconds=lease)
    while not report.stopped:
        claimed = states.reclaim(
            service=settings.service,
            handlers=settings.renamed_handlers,
            since_before=since_before,
            limit=CHUNK,
            size=CHUNK_BYTES,
            now=tables.clock(),
        )
        if not claimed:
            break
        logger.warning("publishing %d replays again, which a dead process left", len(claimed))
        publish_claimed(claimed, report)
    return len(report.published)


def decide(seen: Seen, rule: Rule, *, by: str, reason: str) -> Report:
    """Discard, resolve or restore events; nothing is published.

    The events that changed are *published* in the report. A later outcome of a resolved event is
    history only; a copy in the handler's queue is not withdrawn.

    Args:
        rule: ``DISCARD``, ``RESOLVE`` or ``RESTORE``.
    """
    examined = examine(seen, rule)
    allowed = {pk: seen[pk] for pk in examined.events}
    done = _DECISIONS[rule](allowed, by=by, reason=reason, now=tables.clock())
    return Report(published=done, skipped=examined.skipped + skipped_since(allowed, done))


# -- publishing ---------------------------------------------------------------------------


def publish_claimed(claimed: list[Replay], report: Report) -> None:
    """Publish claimed replays and record the result of each."""
    sent: list[tuple[Replay, Message]] = []
    confirmed: list[Replay] = []
    back: list[UnpublishedReplay] = []

    def give_back(
        replay: Replay, error: Reason, *, known: bool = True, general: bool = False
    ) -> None:
        # An earlier publish of the same replay may have arrived although this one did not.
        unconfirmed = not known or replay.publishes > 1
        back.append(
            UnpublishedReplay(replay=replay, error=error, unconfirmed=unconfirmed, general=general)
        )
        report.returned.append(Skipped.of(replay.event, error))
        if unconfirmed:
            report.unconfirmed += 1

    for taken in claimed:
        message = _message(taken)
        if isinstance(message, Reason):
            give_back(taken, message)
        else:
            sent.append((taken, message))
    try:
        answers = _confirmed([message for _, message in sent]) if sent else []
    except AmqpEventsError as exc:
        # The Celery app or the broker's URL is wrong; nothing was published.
        for taken, _ in sent:
            give_back(taken, Reason.of(exc), general=True)
        _record(lambda: states.returned(back, now=tables.clock()))
        raise
    for (taken, _), error in zip(sent, answers, strict=True):
        if error is None:
            confirmed.append(taken)
            continue
        known, general = error.published is False, error.scope in _GENERAL
        give_back(taken, error.reason, known=known, general=general)
    if confirmed:
        report.published += [replay.event_id for replay in confirmed]
        _record(lambda: states.published(confirmed, now=tables.clock()))
    if back:
        _record(lambda: states.returned(back, now=tables.clock()))
    # Receivers may take longer than the lease of what is still queued.
    for replay in confirmed:
        signals.event_replayed.send_robust(
            get_settings().service, handler=replay.handler, event=replay.event.event
        )
    if sent and all(error is not None and error.scope in _GENERAL for error in answers):
        report.stopped = report.returned[-len(sent)].why
    # A queue may confirm nothing, as without a leader; each further chunk would wait for it.
    late = [error for error in answers if isinstance(error, PublishTimeoutError)]
    if late:
        report.stopped = late[0].reason


def _message(replay: Replay) -> Message | Reason:
    """Build the message of a replay, or return why that is impossible."""
    handler, event = get_registry().handlers.get(replay.handler), replay.event
    if handler is None:
        # Another version of the project has claimed it.
        return Reason("handler-missing", name=repr(replay.handler))
    try:
        return encoding.retry_message(
            replay.received,
            replace(event.event, replay_forced=replay.forced),
            exchange=Names.of(get_settings()).replay,
            routing_key=handler.key,
            service=event.service,
            handler=handler.name,
            replay_id=str(replay.pk),
        )
    except Exception as exc:
        # A row that was changed by hand must not block the others.
        logger.exception(
            "cannot build the message of %s",
            event,
            extra=event_fields(event.event, handler.name),
        )
        return Reason("message-unbuildable", error=f"{type(exc).__name__}: {exc}")


def _confirmed(messages: list[Message]) -> list[PublishError | None]:
    """Publish messages; one that may have arrived is not published again without a decision."""
    publish = partial(publisher.backend(get_settings()).publish, mandatory=True)
    answers: dict[int, PublishError | None] = {}
    publish_each(publish, messages, answers.__setitem__, last=_GENERAL)
    return [answers[index] for index in range(len(messages))]


def _record(write: Callable[[], None]) -> None:
    """Record the result of a publish; retry while the database is unreachable.

    What cannot be written stays *queued* and is published again, so it would run twice.
    """
    for wait in _RECORD_AGAIN:
        try:
            write()
        except Error as exc:
            if not is_passing(exc):
                raise
            logger.warning("the result of a replay is not recorded yet: %s", exc)
            time.sleep(wait)
            # Django does not reconnect outside of a request.
            reconnect(tables.database())
        else:
            return
    write()
