"""Tools for the tests of projects; they need no broker. docs/testing.md has examples.

:func:`capture_events`   capture the events that code publishes
:func:`memory_events`    run the handlers on a broker in memory, with retries and archive
:class:`override_events` change settings and declarations
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar, overload

from django.conf import settings as django_settings
from django.test.utils import TestContextDecorator, override_settings

from .conf import SETTING, PublishMode
from .declare.declarations import (
    EventDeclaration,
    HandlerDeclaration,
    declarations,
    default_name,
)
from .declare.patterns import pattern_matches
from .decorators import HandlerFunction, Publishable
from .exceptions import ConfigurationError, PublishError
from .memory import Clock, MemoryBackend, Waiting
from .memory.broker import Stored
from .message import decoding
from .message.archive_message import Archived, Outcome
from .message.types import Message
from .publish.pending import Backend, Pending
from .publish.publisher import divert

D = TypeVar("D", bound=EventDeclaration | HandlerDeclaration)

__all__ = [
    "Archived",
    "CapturedEvent",
    "CapturedEvents",
    "Clock",
    "MemoryBackend",
    "Outcome",
    "Waiting",
    "capture_events",
    "memory_events",
    "override_events",
]


# -- capturing ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedEvent:
    """An event published while events were captured; see also ReceivedEvent.

    Attributes:
        payload: the arguments by name as a handler receives them, decoded from JSON.
        mode: ``outbox``, ``on_commit`` or ``immediate``.
        headers: the headers of ``using(headers=…)``.
        published_at: aware.
    """

    name: str
    payload: Mapping[str, Any]
    event_id: str
    mode: PublishMode
    headers: Mapping[str, Any] = field(default_factory=dict)
    correlation_id: str | None = None
    causation_id: str | None = None
    published_at: datetime | None = None


class CapturedEvents(Backend, Sequence[CapturedEvent]):
    """The events captured so far, in the order of the publishing calls.

    An event that waits for a commit is included unless its savepoint is rolled back.
    """

    def __init__(self) -> None:
        self._published: list[tuple[Pending, Message]] = []
        self._result: list[CapturedEvent] | None = None

    def publish(
        self, messages: Sequence[Message], *, mandatory: bool
    ) -> Sequence[PublishError | None]:
        """Confirm *messages*; :func:`capture_events` receives them before."""
        return [None] * len(messages)

    def watch(self, pending: Pending, messages: Sequence[Message]) -> None:
        """Capture *messages*."""
        self._published += [(pending, message) for message in messages]

    def _all(self) -> list[CapturedEvent]:
        if self._result is not None:
            return self._result
        return [
            _captured(message, pending.mode)
            for pending, message in self._published
            if pending.called or pending.waiting
        ]

    @overload
    def __getitem__(self, index: int) -> CapturedEvent: ...
    @overload
    def __getitem__(self, index: slice) -> list[CapturedEvent]: ...
    def __getitem__(self, index: int | slice) -> CapturedEvent | list[CapturedEvent]:
        return self._all()[index]

    def __iter__(self) -> Iterator[CapturedEvent]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __eq__(self, other: object) -> bool:
        return self._all() == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<captured events: {', '.join(event.name for event in self) or 'none'}>"

    @property
    def names(self) -> list[str]:
        """The events' names, in order."""
        return [event.name for event in self]

    def named(self, name: str | Publishable[...]) -> list[CapturedEvent]:
        """Return the events of a name, a topic pattern or a declared event."""
        pattern = name.name if isinstance(name, Publishable) else name
        return [event for event in self if pattern_matches(pattern, event.name)]

    def one(self, name: str | Publishable[...] = "#") -> CapturedEvent:
        """Return the only event of a name, a pattern or a declared event.

        Raises:
            AssertionError: there is not exactly one; the message lists the captured events.
        """
        published = self.named(name)
        if len(published) != 1:
            wanted = name.name if isinstance(name, Publishable) else name
            raise AssertionError(
                f"{len(published)} events named {wanted!r} were published instead of one; "
                f"captured: {', '.join(self.names) or 'nothing'}"
            )
        return published[0]

    def clear(self) -> None:
        """Remove the events captured so far."""
        self._published.clear()
        self._result = None if self._result is None else []


def _captured(message: Message, mode: PublishMode) -> CapturedEvent:
    received = Stored(queue="", message=message, sequence=0).received()
    event, _ = decoding.identify(received, trusted=False)
    return CapturedEvent(
        name=event.name,
        payload=decoding.decode(received, len(message.body)).kwargs,
        event_id=event.id,
        mode=mode,
        headers=event.headers,
        correlation_id=event.correlation_id,
        causation_id=event.causation_id,
        published_at=event.published_at,
    )


@contextmanager
def capture_events() -> Iterator[CapturedEvents]:
    """Capture the events published in the block; they reach no broker.

    Payloads are validated as usual. In ``outbox`` and ``on_commit`` mode an event counts as
    published when its transaction commits or, inside Django's ``TestCase``, unless a savepoint
    around it is rolled back. Blocks can be nested: the inner one captures. A replay is confirmed
    but not captured.
    """
    captured = CapturedEvents()
    try:
        with divert(captured):
            yield captured
    finally:
        captured._result = captured._all()  # noqa: SLF001


# -- handling -----------------------------------------------------------------------------


@contextmanager
def memory_events(start: datetime | None = None) -> Iterator[MemoryBackend]:
    """Publish to a broker in memory and handle events there, with its own clock.

    :meth:`~MemoryBackend.run` and :meth:`~MemoryBackend.advance` run the handlers as a worker
    does, with retries and archive. They first publish the events that wait only for the commit of
    Django's ``TestCase``, which never happens. Replays are handled, too.

    Args:
        start: the clock's first time, aware; now by default.
    """
    backend = MemoryBackend(Clock(start))
    with divert(backend):
        yield backend


# -- settings -----------------------------------------------------------------------------


class override_events(TestContextDecorator):  # noqa: N801 - used like override_settings
    """Change keys of ``AMQP_EVENTS`` for a block, a test or a ``TestCase`` class.

    Other keys keep their value. Events and handlers declared meanwhile are removed at the end.

    Args:
        handlers: the declared handlers to keep: functions, task classes or names.
        events: the declared events to keep: events or names.
        keys: keys of ``AMQP_EVENTS``, such as ``UNROUTED="raise"``.
    """

    def __init__(
        self,
        *,
        handlers: Iterable[Any] | None = None,
        events: Iterable[Any] | None = None,
        **keys: Any,
    ) -> None:
        super().__init__()
        self.handlers = None if handlers is None else list(handlers)
        self.events = None if events is None else list(events)
        self.keys = keys
        self._undo: list[Callable[[], None]] = []

    def enable(self) -> None:
        """Apply the changes."""
        state = declarations.snapshot()
        events, handlers = state
        raw = {**(getattr(django_settings, SETTING, None) or {}), **self.keys}
        if self.handlers is not None:
            handlers = self._keep("HANDLERS", self.handlers, handlers, raw)
        if self.events is not None:
            events = self._keep("EVENTS", self.events, events, raw)
        override = override_settings(**{SETTING: raw})

        def undo() -> None:
            override.disable()
            declarations.restore(state)

        declarations.restore((events, handlers))
        self._undo.append(undo)
        override.enable()

    def _keep(
        self, key: str, chosen: Iterable[Any], declared: tuple[D, ...], raw: dict[str, Any]
    ) -> tuple[D, ...]:
        """Return the chosen declarations, and keep the chosen entries of a key of *raw*."""
        names = set(map(_name, chosen))
        kept = tuple(item for item in declared if _name(item) in names)
        entries = raw.get(key, {})
        if unknown := names - {*map(_name, kept), *entries}:
            raise ConfigurationError(
                f"override_events({key.lower()}=…) names {', '.join(sorted(unknown))}, which is "
                f"not declared. Import the module that declares it, or correct the name"
            )
        raw[key] = {
            name: options for name, options in entries.items() if name in names or key in self.keys
        }
        return kept

    def disable(self) -> None:
        """Undo the changes."""
        self._undo.pop()()


def _name(item: Any) -> str:
    """Return the name of an event or a handler, however it is given."""
    if isinstance(item, str):
        return item
    if isinstance(item, (Publishable, HandlerFunction, EventDeclaration)):
        return item.name
    if isinstance(item, HandlerDeclaration):
        return item.name or default_name(item.target)
    declared = next((one for one in declarations.snapshot()[1] if one.target is item), None)
    return _name(declared) if declared else default_name(item)
