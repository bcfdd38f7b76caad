"""Read a delivery: its event, its handler, and whether it is due.

The worker and the in-memory broker share this module, which does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

from celery.utils.saferepr import saferepr

from ..broker.before_death import before_death
from ..broker.topology import Names
from ..conf import Settings
from ..context import ReceivedEvent
from ..declare.registry import Handler, Registry
from ..exceptions import Malformed
from ..logs import event_fields, get_logger
from ..message import decoding, formats
from ..message.headers import EVENT_HANDLER
from ..message.text import printable
from ..message.types import Payload, Progress, Received, task_id
from .verdict import Verdict

logger = get_logger(__name__)

#: A retry that is due within this many seconds is held in the worker instead of being published
#: to a delay queue again, whose shortest delay is a second.
HOLD_SECONDS: Final = 0.1
#: Headers with a trace's context (W3C, Zipkin's B3) whose names have no hyphen.
TRACE_HEADERS: Final = frozenset({"traceparent", "tracestate", "baggage", "b3"})
#: Longest representation of arguments in characters, for Celery's logs and task events.
MAX_REPR: Final = 1024


@dataclass(slots=True, kw_only=True, eq=False)
class Reading:
    """What was read of a delivery.

    Attributes:
        event, handler: ``None`` if they could not be read.
        home: the queue to which retries return, ``""`` for the queue of their handler.
    """

    received: Received
    event: ReceivedEvent | None = None
    progress: Progress = field(default_factory=Progress)
    handler: Handler | None = None
    home: str = ""

    @property
    def known(self) -> tuple[ReceivedEvent, Handler]:
        """Event and handler of a delivery that has a handler.

        Raises:
            LookupError: it has none; only its raw bytes can be archived.
        """
        if self.event is None or self.handler is None:
            raise LookupError(f"the delivery from {self.received.queue!r} has no handler")
        return self.event, self.handler

    @property
    def title(self) -> str:
        """The event and its handler, for logs."""
        if self.event is None:
            return f"a message from {self.received.queue!r}"
        handler = self.handler.name if self.handler else "no handler"
        return f"event {self.event.name!r} ({printable(self.event.id)}) for {handler}"

    @property
    def log_fields(self) -> dict[str, Any]:
        """The fields of its log records."""
        return event_fields(self.event, self.handler.name if self.handler else None)

    def remaining(self, now: datetime) -> float:
        """Return the seconds until it is due, 0 or less if it is."""
        due_at = self.progress.due_at
        return 0.0 if due_at is None else (due_at - now).total_seconds()


class Dispatcher:
    """Reads the deliveries of a service."""

    def __init__(self, settings: Settings, registry: Registry, names: Names) -> None:
        self.settings = settings
        self.registry = registry
        self.names = names
        self._by_key = {handler.key: handler for handler in registry.handlers.values()}
        self.find = lru_cache(maxsize=10_000)(registry.find)
        # Handlers of events that came without an id.
        self._without_id: set[str] = set()

    def open(self, received: Received) -> Reading:
        """Return a delivery to be read; a dead letter as it was in its handler's queue."""
        if received.queue not in (self.names.graveyard, self.names.dead):
            return Reading(received=received)
        # A retry of an event that runs alone returns to the graveyard.
        home = self.names.graveyard
        received = before_death(received, received.deaths, self.names, self.registry)
        if received.exchange == self.names.return_:
            name = received.headers.get(EVENT_HANDLER)
            handler = self.registry.handlers.get(name) if isinstance(name, str) else None
            if handler is not None:
                received = replace(received, queue=handler.queue)
        return Reading(received=received, home=home)

    def read(self, reading: Reading) -> Payload | Verdict:
        """Fill in event, progress and handler of a delivery.

        Returns:
            the payload, or a verdict if the delivery cannot be handled.
        """
        try:
            event = self.identify(reading)
            payload = decoding.decode(reading.received, self.settings.max_body)
        except Malformed as exc:
            return Verdict(kind="archive", reason="malformed", detail=str(exc))
        if reading.handler is None:
            wanted = reading.progress.handler or f"event {event.name!r}"
            detail = f"no handler for {wanted} on the queue {reading.received.queue!r}"
            return Verdict(kind="archive", reason="unknown", detail=detail)
        return payload

    def identify(self, reading: Reading) -> ReceivedEvent:
        """Fill in event, progress and handler from the headers, and return the event.

        Raises:
            Malformed: they are invalid.
        """
        received = reading.received
        if received.unreadable:
            raise Malformed(received.unreadable)
        if formats.wire_format(received) == "cloudevents":
            # Its identity is in the body.
            decoding.check_size(received, self.settings.max_body)
        # Only this service publishes to these, so our own headers are valid.
        trusted = received.exchange in (self.names.return_, self.names.replay)
        only = "" if received.exchange else self.registry.only_event(received.queue)
        event, progress = decoding.identify(received, trusted=trusted, only_event=only)
        reading.event, reading.progress = event, progress
        if not trusted:
            handler = reading.handler = self.find(received.queue, event.name)
            if handler is not None and decoding.is_nameless(event):
                self._check_content_id(reading, handler)
            return event
        if progress.handler is not None:
            handler = self.registry.handlers.get(progress.handler)
        else:
            handler = self._by_key.get(received.event_key)
        # If a handler moved to another queue (QUEUE), its old one stays bound to the return
        # exchange until an operator unbinds it. Both queues receive the retry, and running it
        # from both would double it each time.
        if handler is not None and handler.queue == received.queue:
            reading.handler = handler
        return event

    def _check_content_id(self, reading: Reading, handler: Handler) -> None:
        """Warn of an event whose publisher gave it no id, once per handler.

        Raises:
            Malformed: the handler has ``once``, and would skip a second event of that content.
        """
        if handler.once:
            reading.event = None
            raise Malformed(
                f"the event has no id, and {handler.name} handles each id once; publish it with a "
                f"message_id"
            )
        if handler.name not in self._without_id:
            self._without_id.add(handler.name)
            logger.warning(
                "event %r is published without an id; its handlers get one derived from its "
                "content. Publish it with a message_id",
                reading.received.event_key,
                extra=reading.log_fields,
            )


def delivery_info(received: Received) -> dict[str, Any]:
    """Return the delivery info of the message that Celery receives."""
    return {
        "exchange": received.exchange,
        "routing_key": received.routing_key,
        "redelivered": received.redelivered,
    }


def celery_headers(service: str, reading: Reading, payload: Payload) -> dict[str, Any]:
    """Return the headers of the message that Celery receives.

    They are the fields of the task's request as well. The publisher's headers are one of them,
    ``headers``, and :func:`_trace_context` chooses those that are fields of their own.
    """
    event, handler = reading.known
    args, kwargs = list(payload.args), dict(payload.kwargs)
    size = len(reading.received.body)
    return {
        **_trace_context(event.headers),
        "lang": "py",
        "task": handler.name,
        "id": task_id(service, handler.name, event, event.replay_id),
        "root_id": event.correlation_id,
        "parent_id": event.causation_id,
        "retries": reading.progress.attempt - 1,
        "args": args,
        "kwargs": kwargs,
        "argsrepr": _representation(tuple(args), size),
        "kwargsrepr": _representation(kwargs, size),
        "is_eager": False,
        "origin": event.service,
        "ignore_result": handler.ignore_result,
        "amqp_event": event,
        # A copy, since Sentry's integration removes one.
        "headers": dict(event.headers),
    }


def _trace_context(headers: Mapping[str, Any]) -> dict[str, str]:
    """Return the publisher's headers that are fields of the task's request, as of Celery's tasks.

    OpenTelemetry's Celery integration reads the trace there, by the names of its propagators.
    Celery and result backends read other fields (``timelimit``, ``meta``,
    ``periodic_task_name``), whose names have no hyphen.
    """
    return {
        key: value
        for key, value in headers.items()
        if ("-" in key or key in TRACE_HEADERS) and isinstance(value, str)
    }


def _representation(value: tuple[Any, ...] | dict[str, Any], size: int) -> str:
    """Return plain data as text of at most :data:`MAX_REPR` characters.

    Args:
        size: bytes of the body that the payload was decoded from.
    """
    if size <= MAX_REPR:
        # saferepr takes longer than the rest of the dispatch.
        text = repr(value)
        if len(text) <= MAX_REPR:
            return text
    return str(saferepr(value, MAX_REPR))
