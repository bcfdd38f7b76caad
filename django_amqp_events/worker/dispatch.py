"""What a delivery is: whose, how far, and whether now. No broker and no Celery worker in it.

The worker's consumer and the in-memory broker read deliveries with the same code.
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
from ..message import decoding, headers, messages
from ..message.messages import Payload, Progress, Received
from ..message.text import shown
from .verdict import Verdict

#: What is due within this many seconds is held for so long instead of taking another turn
#: through the broker, whose shortest delay is a second.
HOLDABLE: Final = 0.1
#: Characters of arguments that Celery gets to see in words, for its logs and events.
MAX_REPR: Final = 1024


@dataclass(slots=True, kw_only=True, eq=False)
class Reading:
    """A delivery as it was read.

    Attributes:
        event, handler: ``None`` as far as they could not be read.
    """

    received: Received
    event: ReceivedEvent | None = None
    progress: Progress = field(default_factory=Progress)
    handler: Handler | None = None

    @property
    def known(self) -> tuple[ReceivedEvent, Handler]:
        """Event and handler of a delivery that got as far as a handler.

        Raises:
            LookupError: it did not; only its raw bytes can be archived.
        """
        if self.event is None or self.handler is None:
            raise LookupError(f"a delivery from {self.received.queue!r} has no handler")
        return self.event, self.handler

    @property
    def title(self) -> str:
        """Who it is, for logs."""
        if self.event is None:
            return f"a message from {self.received.queue!r}"
        handler = self.handler.name if self.handler else "nobody"
        return f"event {self.event.name!r} ({shown(self.event.id)}) for {handler}"

    def remaining(self, now: datetime) -> float:
        """Return the seconds until it is due; 0 or less where it is."""
        due_at = self.progress.due_at
        return 0.0 if due_at is None else (due_at - now).total_seconds()


class Dispatcher:
    """Says what a delivery is: whose, and whether now. Pure but for the time, an argument."""

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
            event, progress, handler and payload; instead of the payload a verdict where it
            cannot be handled.
        """
        if received.unreadable:
            verdict = Verdict(kind="archive", reason="malformed", detail=received.unreadable)
            return None, Progress(), None, verdict
        trusted = self.trusts(received)
        event: ReceivedEvent | None = None
        progress, handler = Progress(), None
        try:
            event, progress = decoding.identify(received, trusted=trusted)
            handler = self.whose(received, event, progress)
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

    def trusts(self, received: Received) -> bool:
        """Say whether it came back to this service, so that our own headers are believed."""
        return received.exchange in (self.names.return_, self.names.replay)

    def whose(self, received: Received, event: ReceivedEvent, progress: Progress) -> Handler | None:
        """Return the handler of a delivery."""
        if self.trusts(received):
            if progress.handler is not None:
                handler = self.registry.handlers.get(progress.handler)
            else:
                handler = self._by_key.get(received.event_key)
            # A queue that the handler has left (QUEUE) stays bound to what returns until
            # somebody unbinds it, so the handler's own queue has got this as well: run from
            # both, each retry would make two of it.
            return handler if handler and handler.queue == received.queue else None
        name = event.name
        if not received.exchange:
            # Put on the queue by hand: the routing key is the queue's name.
            header = received.headers.get(headers.EVENT_NAME) or received.headers.get("task")
            # Kept below, so a name that no event can have must not come that far.
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
    """Return all headers that Celery gets to see; none is the publisher's.

    Args:
        size: bytes of the body that the payload was decoded from.
    """
    return {
        "lang": "py",
        "task": handler.name,
        "id": messages.task_id(event.service, event.id, handler.name, event.replay_id),
        "root_id": event.correlation_id,
        "parent_id": event.causation_id,
        "retries": progress.attempt - 1,
        "argsrepr": _words(list(payload.args), size),
        "kwargsrepr": _words(dict(payload.kwargs), size),
        "origin": event.service,
        "ignore_result": handler.ignore_result,
        "amqp_event": event,
    }


def _words(value: list[Any] | dict[str, Any], size: int) -> str:
    """Return plain data in words, at most :data:`MAX_REPR` characters."""
    if size <= MAX_REPR:
        # Celery's own takes longer than all else that is done with a delivery here.
        text = repr(value)
        if len(text) <= MAX_REPR:
            return text
    return str(saferepr(value, MAX_REPR))
