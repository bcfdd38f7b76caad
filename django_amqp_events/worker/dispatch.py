"""Read a delivery: its event, its handler, and whether it is due. Without broker and worker.

The worker's consumer and the in-memory broker use the same code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from celery.utils.saferepr import saferepr

from ..broker.topology import Names
from ..conf import MAX_NAME, Settings
from ..context import ReceivedEvent
from ..declare.registry import Handler, Registry
from ..exceptions import Malformed
from ..message import decoding, headers
from ..message.text import printable
from ..message.types import Payload, Progress, Received, task_id
from .verdict import Verdict

#: A retry that is due within this many seconds is held in the worker instead of being published
#: to a delay queue again, whose shortest delay is a second.
HOLDABLE: Final = 0.1
#: Longest representation of arguments in characters, for Celery's logs and task events.
MAX_REPR: Final = 1024


@dataclass(slots=True, kw_only=True, eq=False)
class Reading:
    """What was read of a delivery.

    Attributes:
        event, handler: ``None`` if they could not be read.
    """

    received: Received
    event: ReceivedEvent | None = None
    progress: Progress = field(default_factory=Progress)
    handler: Handler | None = None

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

    def remaining(self, now: datetime) -> float:
        """Return the seconds until it is due, 0 or less if it is."""
        due_at = self.progress.due_at
        return 0.0 if due_at is None else (due_at - now).total_seconds()


class Dispatcher:
    """Reads deliveries. Pure; the time is an argument."""

    def __init__(self, settings: Settings, registry: Registry, names: Names) -> None:
        self.settings = settings
        self.registry = registry
        self.names = names
        self._by_key = {handler.key: handler for handler in registry.handlers.values()}
        self._found: dict[tuple[str, str], Handler | None] = {}

    def read(
        self, received: Received
    ) -> tuple[ReceivedEvent | None, Progress, Handler | None, Payload | Verdict]:
        """Read a delivery.

        Returns:
            event, progress, handler and payload, or a verdict instead of the payload if the
            delivery cannot be handled.
        """
        if received.unreadable:
            verdict = Verdict(kind="archive", reason="malformed", detail=received.unreadable)
            return None, Progress(), None, verdict
        trusted = self.is_trusted(received)
        event: ReceivedEvent | None = None
        progress, handler = Progress(), None
        try:
            event, progress = decoding.identify(received, trusted=trusted)
            handler = self.find_handler(received, event, progress)
            payload = decoding.decode(received, self.settings.max_body)
        except Malformed as exc:
            verdict = Verdict(kind="archive", reason="malformed", detail=exc.detail)
            return event, progress, handler, verdict
        if handler is None:
            wanted = progress.handler or f"event {event.name!r}"
            verdict = Verdict(
                kind="archive",
                reason="unknown",
                detail=f"no handler for {wanted} on the queue {received.queue!r}",
            )
            return event, progress, None, verdict
        return event, progress, handler, payload

    def is_trusted(self, received: Received) -> bool:
        """Return True if this service has published it, so that our own headers are valid."""
        return received.exchange in (self.names.return_, self.names.replay)

    def find_handler(
        self, received: Received, event: ReceivedEvent, progress: Progress
    ) -> Handler | None:
        """Return the handler of a delivery, ``None`` if this service has none."""
        if self.is_trusted(received):
            if progress.handler is not None:
                handler = self.registry.handlers.get(progress.handler)
            else:
                handler = self._by_key.get(received.event_key)
            # If a handler moved to another queue (QUEUE), its old one stays bound to the return
            # exchange until an operator unbinds it. Both queues receive the retry, and running it
            # from both would double it each time.
            return handler if handler and handler.queue == received.queue else None
        name = event.name
        if not received.exchange:
            # Published to the default exchange: the routing key is the queue's name.
            header = received.headers.get(headers.EVENT_NAME) or received.headers.get("task")
            # The name is cached below, so limit its length.
            name = header if isinstance(header, str) and len(header) <= MAX_NAME else name
        key = (received.queue, name)
        if key not in self._found:
            if len(self._found) > 10_000:
                self._found.clear()
            self._found[key] = self.registry.find(received.queue, name)
        return self._found[key]


def celery_headers(
    event: ReceivedEvent, progress: Progress, handler: Handler, payload: Payload, size: int
) -> dict[str, Any]:
    """Return the headers of the message that Celery receives; none is the publisher's.

    Args:
        size: bytes of the body that the payload was decoded from.
    """
    return {
        "lang": "py",
        "task": handler.name,
        "id": task_id(event.service, event.id, handler.name, event.replay_id),
        "root_id": event.correlation_id,
        "parent_id": event.causation_id,
        "retries": progress.attempt - 1,
        "argsrepr": _representation(list(payload.args), size),
        "kwargsrepr": _representation(dict(payload.kwargs), size),
        "origin": event.service,
        "ignore_result": handler.ignore_result,
        "amqp_event": event,
    }


def _representation(value: list[Any] | dict[str, Any], size: int) -> str:
    """Return plain data as text of at most :data:`MAX_REPR` characters."""
    if size <= MAX_REPR:
        # saferepr takes longer than the rest of the dispatch.
        text = repr(value)
        if len(text) <= MAX_REPR:
            return text
    return str(saferepr(value, MAX_REPR))
