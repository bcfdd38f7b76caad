"""Move the messages of a queue without a consumer, such as the abyss, into the archive.

No body is decoded, and nothing is written to the database: it may be down, and only the mirror
knows which row a message belongs to. Each message gets an archive message as a worker would build
it; RabbitMQ confirms it, then the original is acked. If the process dies between the two, the next
run publishes the same archive message, which the mirror stores once. A message without an id gets
one for its copy, since another message may equal it byte for byte; the copy of such a process and
that of the next run become two events.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final
from uuid import uuid4

from amqp import exceptions as amqp_errors
from celery import Celery

from ..broker import connection as connection_module
from ..broker.batch_reader import Batch, BatchReader
from ..broker.before_death import before_death
from ..broker.provisioning.amqp_api import Amqp
from ..broker.publisher_pool import PublisherPool
from ..broker.queue_depth import Depth
from ..broker.topology import Names
from ..callables import nothing
from ..conf import MAX_NAME, Settings
from ..context import ReceivedEvent
from ..declare.registry import Registry
from ..exceptions import (
    BrokerUnavailableError,
    Malformed,
    PublishError,
    TopologyError,
)
from ..logs import get_logger, message_fields
from ..message import archive_message, decoding
from ..message.text import counted, parse_moment
from ..message.types import Message, Progress, Received
from ..reasons import Reason

logger = get_logger(__name__)

#: Most messages that are published, confirmed and acked together.
BATCH: Final = 100
#: Seconds without a message after which the queue counts as empty, once as many messages have come
#: as were in it at the start.
LULL: Final = 0.5
#: The worker's name in these archive messages.
WORKER: Final = "events_recover"


@dataclass(slots=True, kw_only=True)
class Recovered:
    """The result of recovering a queue.

    Attributes:
        reasons: archived messages by reason.
        refused: the error of each message that stays in its queue.
        stopped: why the rest was not attempted, ``None`` if all was.
    """

    reasons: Counter[str] = field(default_factory=Counter)
    refused: list[PublishError] = field(default_factory=list)
    stopped: Reason | None = None

    @property
    def total(self) -> int:
        return self.reasons.total()

    @property
    def seen(self) -> int:
        return self.total + len(self.refused)


def inspect_queue(app: Celery, settings: Settings, queue: str) -> Depth:
    """Inspect a queue; refuse one that must not be emptied.

    Raises:
        BrokerUnavailableError: no connection.
        TopologyError: it is the archive or a stream, does not exist, cannot be inspected, or has
            consumers.
    """
    names = Names.of(settings)
    if len(queue.encode()) > MAX_NAME:
        raise TopologyError(
            f"the queue's name is longer than AMQP's {MAX_NAME} bytes: {queue!r:.80}"
        )
    if queue == names.archive:
        raise TopologyError(
            f"{queue!r} is the archive queue; run `manage.py events_mirror` to empty it"
        )
    if names.is_window(queue):
        raise TopologyError(
            f"{queue!r} holds copies of events that the handler's queue received; run `manage.py "
            f"events_declare --delete-stale` to delete it"
        )
    if queue in (names.history, names.bindings):
        raise TopologyError(
            f"{queue!r} is a stream, which keeps its messages; `manage.py events_backfill` gives "
            f"past events to a handler"
        )
    with connection_module.connection(app, timeout=settings.confirm_timeout) as connection:
        try:
            depth = Amqp(connection).depth(queue)
        except amqp_errors.ChannelError as exc:
            raise TopologyError(
                f"queue {queue!r} cannot be inspected: {exc.reply_code} {exc.reply_text}; check "
                f"the user's permissions, and whether the queue is exclusive to another connection"
            ) from exc
    if depth is None:
        remedy = (
            "run `manage.py events_declare`"
            if queue == names.abyss
            else "`manage.py events_status` lists the queues of this service"
        )
        raise TopologyError(f"there is no queue {queue!r}; {remedy}")
    if depth.consumers:
        raise TopologyError(
            f"queue {queue!r} has {counted(depth.consumers, 'consumer')}, which would get some of "
            f"its messages; stop the workers that consume it, then run this command again"
        )
    return depth


def recover(
    app: Celery,
    settings: Settings,
    registry: Registry,
    queue: str,
    *,
    limit: int | None = None,
    progress: Callable[[Recovered], object] = nothing,
    stop: Callable[[], bool] = nothing,
) -> Recovered:
    """Move the messages of a queue into the archive until it is empty.

    Raises:
        BrokerUnavailableError: no connection.
        TopologyError: as for :func:`inspect_queue`, or the queue was deleted.
    """
    ready = inspect_queue(app, settings, queue).ready
    done = Recovered()
    copies = RecoveredCopies(settings, registry, queue)
    most = sys.maxsize if limit is None else limit
    reader = BatchReader(app, queue, settings, size=min(BATCH, most))
    pool = PublisherPool(app, timeout=settings.confirm_timeout)
    try:
        while done.seen < most:
            if stop():
                done.stopped = Reason("interrupted")
                break
            # A large body may take longer than LULL.
            expected = done.seen < ready
            batch = reader.batch(wait=settings.confirm_timeout if expected else LULL, stop=stop)
            if batch is None and not stop():
                if expected:
                    done.stopped = Reason("queue-silent", queue=repr(reader.queue))
                break
            if batch is not None:
                messages = batch.messages[: most - done.seen]
                done.stopped = _archive(batch, messages, copies, reader, pool, done)
                progress(done)
            if done.stopped:
                break
    except BrokerUnavailableError as exc:
        done.stopped = exc.reason
    finally:
        pool.close()
        reader.close()
    return done


def _archive(
    batch: Batch,
    received: Sequence[Received],
    copies: RecoveredCopies,
    reader: BatchReader,
    pool: PublisherPool,
    done: Recovered,
) -> Reason | None:
    """Publish copies of the first messages of a batch, ack the confirmed; return why to stop."""
    built = [copies.build(message) for message in received]
    messages = [message for _, message in built]
    errors = pool.publish(messages, mandatory=True)
    for place, error in enumerate(errors):
        # A refused message closes the connection, and the confirms of its neighbours are lost. Of a
        # copy that is published again, the mirror stores one.
        if error is not None and error.scope == "broker":
            [again] = pool.publish([messages[place]], mandatory=True)
            errors[place] = again
            if again is not None and again.scope == "broker":
                break  # each further message would wait for the whole time, too
    reader.ack(batch, [place for place, error in enumerate(errors) if error is None])
    general: PublishError | None = None
    for error, (reason, message) in zip(errors, built, strict=True):
        if error is None:
            done.reasons[reason] += 1
            continue
        if error.scope != "message":
            general = general or error
        done.refused.append(error)
        about = message_fields(message)
        logger.error("a message stays in %r: %s", copies.queue, error, extra=about)
    return None if general is None else general.reason


@dataclass(frozen=True, slots=True)
class RecoveredCopies:
    """Builds the archive messages of the messages in a queue.

    Every run builds the same archive message of a message that has an id.
    """

    settings: Settings
    registry: Registry
    queue: str

    def build(self, received: Received) -> tuple[str, Message]:
        """Return the archive reason and the archive message."""
        names = Names.of(self.settings)
        if received.unreadable:
            detail = f"it was found in {self.queue!r}; {received.unreadable}"
            return "malformed", self._copy(received, "malformed", detail, None)
        deaths = _own_deaths(received, names)
        at = max((at for death in deaths if (at := parse_moment(death["at"]))), default=None)
        came = before_death(received, deaths, names, self.registry)
        if deaths:
            reason = "poison"
            detail = (
                f"it was found in {self.queue!r}: no consumer acknowledged it before it "
                f"reached the delivery limit"
            )
        else:
            reason = "recovered"
            detail = f"it was found in {self.queue!r} and moved into the archive by a person"
        identity: dict[str, Any] = {}
        try:
            event, progress, handler = self._identify(came, names)
            identity = {"event": event, "progress": progress, "handler": handler}
        except Malformed as exc:
            detail = f"{detail}; {exc}"
        return reason, self._copy(came, reason, detail, at, **identity)

    def _identify(self, came: Received, names: Names) -> tuple[ReceivedEvent, Progress, str | None]:
        """Read event, progress and handler as the handler's worker would.

        Raises:
            Malformed: it has no readable identity.
        """
        trusted = came.exchange in (names.return_, names.replay) or names.is_delay(came.exchange)
        if came.routing_key == came.queue:
            came = replace(came, exchange="")  # the key is the queue's, not the event's name
        only = "" if came.exchange else self.registry.only_event(came.queue)
        event, progress = decoding.identify(came, trusted=trusted, only_event=only)
        handlers = self.registry.handlers
        if trusted:
            if progress.handler:
                return event, progress, progress.handler
            by_key = {handler.key: handler.name for handler in handlers.values()}
            return event, progress, by_key.get(came.event_key)
        handler = self.registry.find(came.queue, event.name)
        if handler is not None:
            return event, progress, handler.name
        # The queue may belong to a renamed handler, or the task to one that took its place.
        for old in (came.queue.removeprefix(names.handlers), came.headers.get("task")):
            if isinstance(old, str) and old in self.settings.renamed_handlers:
                return event, progress, old
        return event, progress, None

    def _copy(
        self, received: Received, reason: str, detail: str, at: datetime | None, **identity: Any
    ) -> Message:
        nameless = decoding.is_nameless(identity.get("event"))
        return archive_message.build(
            received,
            exchange=Names.of(self.settings).archive,
            reason=reason,
            detail=detail,
            at=at,
            worker=WORKER,
            service=self.settings.service,
            copy=uuid4().hex if nameless else "",
            **identity,
        )


def _own_deaths(received: Received, names: Names) -> list[dict[str, Any]]:
    """Return the deaths of a message in our dead-letter chain.

    The end of a delay does not count, nor does an ``x-death`` that a publisher wrote: its message
    has the exchange to which it was published.
    """
    if received.exchange not in (names.graveyard, names.dead, names.abyss):
        return []
    return [death for death in received.deaths if death["reason"] in ("delivery_limit", "rejected")]
