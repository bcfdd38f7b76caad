"""What a pool process does with the deliveries of a job: validate, run, decide, publish.

The worker's main process learns from the outcomes what to ack. It decodes and publishes nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final, Literal, NamedTuple

from billiard.exceptions import TimeLimitExceeded
from django.db import close_old_connections

from ..broker.confirms import accepts_publishes
from ..broker.connection import celery_app, handler_app
from ..broker.delivery_reader import decode
from ..broker.isolation import publish_each
from ..broker.publisher_pool import publisher_pool
from ..broker.topology import Names, build
from ..callables import nothing
from ..conf import Settings, get_settings
from ..declare.registry import Registry, get_registry
from ..exceptions import Malformed, PublishError, PublishTimeoutError
from ..logs import get_logger
from ..message.text import printable
from ..message.types import Message
from .celery_internals import terminated_by_signal
from .delivery import Item
from .outgoing import ANNOUNCED, OutgoingMessages, announce, needs_message
from .reading import HOLD_SECONDS, Dispatcher, Reading, celery_headers, delivery_info
from .task import HandlerTask, register, utc_now
from .tracing import trace
from .verdict import POSTPONE, Verdict

logger = get_logger(__name__)

#: Seconds after which a job begins no further event: those behind it go to another process.
JOB_SECONDS: Final = 0.05
#: Reasons of events that are archived without a run.
NOT_RUN: Final = frozenset({"malformed", "unknown"})


class Outcome(NamedTuple):
    """What the main process does with a delivery.

    Attributes:
        kind: ``ack``; ``published``: ack, since the message of the verdict is published;
            ``requeue``; ``publish``: the message of *verdict* is not published yet.
        seconds: duration of the run; ``None`` if the handler did not run.
        error: why the message was not published; ``""`` if that was not tried.
        verdict: also of what is settled, while Celery's task events are sent.
        unconfirmed: it may have been published.
    """

    kind: Literal["ack", "published", "requeue", "publish"]
    seconds: float | None = None
    verdict: Verdict | None = None
    error: str = ""
    unconfirmed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """What is the same for all deliveries of a job.

    Attributes:
        worker: name of the worker.
        observed: whether Celery's task events are sent.
        limited: a time limit may end a run, so the message of its verdict is left to another job.
    """

    worker: str
    observed: bool = False
    limited: bool = False


class Engine:
    """Decides what becomes of a delivery; the in-memory broker uses it too.

    Args:
        worker: name of the worker.
    """

    def __init__(self, settings: Settings, registry: Registry, worker: str) -> None:
        self.settings, self.registry, self.worker = settings, registry, worker
        self.names = Names.of(settings)
        self.topology = build(settings, registry)
        self.dispatcher = Dispatcher(settings, registry, self.names)
        self._outgoing = OutgoingMessages(
            settings=settings, names=self.names, delays=self.topology.delays, worker=worker
        )

    def decide(
        self,
        reading: Reading,
        *,
        now: Callable[[], datetime] = utc_now,
        wait: Callable[[float], object] = time.sleep,
        exceeded: float | None = None,
        observed: bool = False,
        eager: bool = False,
    ) -> Verdict:
        """Validate a delivery, run its handler, and return the verdict.

        Args:
            wait: waits for some seconds until an event is due.
            exceeded: the hard time limit in seconds that ended the run; it is not run again.
            eager: not in a worker.
        """
        payload = self.dispatcher.read(reading)
        if isinstance(payload, Verdict):
            return payload
        remaining = reading.remaining(now())
        if remaining > HOLD_SECONDS:
            return POSTPONE
        if remaining > 0:
            wait(remaining)
        task = self._task(reading)
        request = {
            **celery_headers(self.settings.service, reading, payload),
            "delivery_info": delivery_info(reading.received),
            "hostname": self.worker,
        }
        if exceeded is None and logger.isEnabledFor(logging.INFO):
            _log_received(reading, request["id"])
        error = None if exceeded is None else TimeLimitExceeded(exceeded)
        return trace(task, request, now=now, error=error, observed=observed, eager=eager)

    def _task(self, reading: Reading) -> HandlerTask:
        _, handler = reading.known
        # Without RabbitMQ, Celery's default app is sufficient.
        app = handler_app(self.settings)
        # Each time: another thread may be registering it, and Celery binds it afterwards.
        register(app, {handler.name: handler})
        task: HandlerTask = app.tasks[handler.name]
        return task

    def message(self, reading: Reading, verdict: Verdict, now: datetime) -> Message:
        """Return the message that a verdict publishes before the ack (:func:`needs_message`)."""
        return self._outgoing.build(reading, verdict, now)


def _log_received(reading: Reading, task_id: str) -> None:
    event, handler = reading.known
    logger.info(
        "Event %s (%s) for %s[%s] received, attempt %d%s",
        printable(event.name),
        printable(event.id),
        handler.name,
        task_id,
        event.attempt,
        ", replayed" if event.replay_id else "",
        extra=reading.log_fields,
    )


_engine: list[Engine] = []


def engine(worker: str) -> Engine:
    """Return the engine of this process, made again after a change of settings or handlers."""
    settings, registry = get_settings(), get_registry()
    for made in _engine:
        if made.settings is settings and made.registry is registry and made.worker == worker:
            return made
    _engine[:] = [made := Engine(settings, registry, worker)]
    return made


@dataclass(slots=True)
class Decided:
    """A delivery of a job, with its verdict."""

    reading: Reading
    verdict: Verdict
    outcome: Outcome


def run_job(
    options: JobOptions, items: Sequence[Item], lost: Callable[[], object] = nothing
) -> list[Outcome] | str:
    """Carry out a job, and return the outcomes of those deliveries that were begun.

    The messages of all verdicts are published after the last run. If they were published before
    it, and its handler ended the process, RabbitMQ would deliver the originals again beside them.
    That of an archived event behind others is left to a job of its own, since log handlers and
    receivers run after it: they must not delay the acks of the others.

    Args:
        lost: returns true if the connection of the deliveries is lost. RabbitMQ delivers them
            again, so a message that is published for one would double it.

    Returns:
        their outcomes, or the error if a bug of ours failed the first: a thread pool would drop an
        exception, and the deliveries would never be settled.
    """
    decided: list[Decided] = []
    try:
        _run(engine(options.worker), options, items, decided)
    except Exception as exc:
        logger.exception("event %d of %d in a job failed", len(decided) + 1, len(items))
        if not decided:
            return f"{type(exc).__name__}: {exc}"
    unpublished = [
        one
        for one in decided
        if one.outcome.kind == "publish" and (len(decided) == 1 or one.verdict.kind != "archive")
    ]
    if unpublished and not (lost() or (items[0].runs and options.limited)):
        _publish(engine(options.worker), options, unpublished)
    return [one.outcome for one in decided]


def _run(
    engine: Engine, options: JobOptions, items: Sequence[Item], decided: list[Decided]
) -> None:
    """Decide on deliveries, until one is archived or the time of a job is over."""
    began = time.perf_counter()
    for index, item in enumerate(items):
        since = time.perf_counter()
        if index and since - began > JOB_SECONDS:
            return
        reading = engine.dispatcher.open(decode(item.delivered))
        if item.verdict is None:
            verdict = engine.decide(reading, exceeded=item.exceeded, observed=options.observed)
        else:
            verdict = item.verdict
            with suppress(Malformed):  # then its raw bytes are archived
                engine.dispatcher.identify(reading)
        ran = item.runs and verdict.kind != "postpone" and verdict.reason not in NOT_RUN
        seconds = time.perf_counter() - since if ran else None
        if needs_message(reading, verdict):
            outcome = Outcome("publish", seconds, verdict, unconfirmed=item.unconfirmed)
        else:
            kind: Literal["ack", "requeue"] = "requeue" if verdict.kind == "requeue" else "ack"
            outcome = Outcome(kind, seconds, verdict if options.observed else None)
        decided.append(Decided(reading, verdict, outcome))
        if verdict.kind == "archive":
            return  # the next job publishes its message


def _publish(engine: Engine, options: JobOptions, decided: Sequence[Decided]) -> None:
    """Publish messages of verdicts; set the outcome ``published`` of those that are confirmed."""

    def record(index: int, error: PublishError | None) -> None:
        one = decided[index]
        if error is None:
            told = one.verdict if options.observed else None
            one.outcome = one.outcome._replace(kind="published", verdict=told)
        else:
            late = one.outcome.unconfirmed or isinstance(error, PublishTimeoutError)
            one.outcome = one.outcome._replace(error=str(error), unconfirmed=late)

    try:
        _publish_windows(engine, decided, record)
    except Exception as exc:
        logger.exception("the messages of a job could not be published")
        for one in decided:
            if one.outcome.kind == "publish":
                one.outcome = one.outcome._replace(error=f"{type(exc).__name__}: {exc}")
    for one in decided:
        if one.outcome.kind == "published" and one.verdict.kind in ANNOUNCED:
            _announce(engine.settings, one.reading, one.verdict)


def _publish_windows(
    engine: Engine,
    decided: Sequence[Decided],
    record: Callable[[int, PublishError | None], object],
) -> None:
    """Publish the messages of verdicts in a window for each exchange, and record the answers."""
    settings = engine.settings
    if any(one.outcome.unconfirmed for one in decided) and not accepts_publishes(
        celery_app(settings), settings.confirm_timeout
    ):
        # RabbitMQ stores what it has read during an alarm when that ends; a repeat would double it.
        for one in decided:
            one.outcome = one.outcome._replace(error="RabbitMQ accepts no messages")
        return
    messages = [engine.message(one.reading, one.verdict, utc_now()) for one in decided]
    # If an exchange is missing, RabbitMQ closes the channel and no message of the window is
    # confirmed.
    windows: dict[str, list[int]] = {}
    for index, message in enumerate(messages):
        windows.setdefault(message.exchange, []).append(index)
    publish = partial(publisher_pool(settings).publish, mandatory=True)
    publish_each(publish, messages, record, windows=list(windows.values()))


def _announce(settings: Settings, reading: Reading, verdict: Verdict) -> None:
    """Log an archived event and send its signal; an error must not settle it again."""
    try:
        close_old_connections()
        announce(settings.service, reading, verdict)
        close_old_connections()
    except BaseException as exc:
        if terminated_by_signal(exc):
            raise
        logger.exception(
            "%s is settled, but was not announced", reading.title, extra=reading.log_fields
        )
