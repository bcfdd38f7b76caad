"""For the tests of projects that publish and handle events; none of it needs a broker.

:func:`capture_events`   what does this code publish?
:func:`memory_events`    what do the handlers make of it, retries and all?
:class:`override_events` other settings and declarations, for a block or a test

Examples are in docs/testing.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, overload

from django.conf import settings as django_settings
from django.test.utils import TestContextDecorator, override_settings

from .conf import SETTING, PublishMode, get_settings
from .declare.declarations import HandlerDeclaration, declarations, default_name
from .declare.patterns import pattern_matches
from .decorators import HandlerFunction, Publishable
from .exceptions import ConfigurationError, PublishError
from .memory import Clock, MemoryBackend, Waiting
from .message import decoding
from .message.archive_message import Archived, Outcome
from .message.types import Message, Received
from .publish.publisher import PendingPublish, divert

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
    """An event that was published while events were captured.

    Attributes:
        name: its full name.
        payload: its arguments by name, as a handler would get them: what JSON makes of them.
        event_id: what ``publish`` returned.
        mode: ``outbox``, ``on_commit`` or ``immediate``.
        headers: the headers given with ``using(headers=…)``.
        correlation_id, causation_id: see :class:`~django_amqp_events.ReceivedEvent`.
        published_at: when it was published, aware.
    """

    name: str
    payload: Mapping[str, Any]
    event_id: str
    mode: PublishMode
    headers: Mapping[str, Any] = field(default_factory=dict)
    correlation_id: str | None = None
    causation_id: str | None = None
    published_at: datetime | None = None


class CapturedEvents(Sequence[CapturedEvent]):
    """The events captured so far, in the order of the calls that published them.

    An event that waits for a commit is among them as long as its savepoint is not rolled back.
    """

    def __init__(self) -> None:
        self._pending: list[PendingPublish] = []

    # The backend: it accepts everything, and what was published is known by its `Pending`.

    def publish(
        self, messages: Sequence[Message], *, mandatory: bool
    ) -> Sequence[PublishError | None]:
        """Accept *messages* without publishing them."""
        return [None] * len(messages)

    def now(self) -> datetime:
        """Return the time of the wall clock."""
        return datetime.now(UTC)

    def _watch(self, pending: PendingPublish) -> None:
        self._pending.append(pending)

    def _settle(self) -> None:
        """Drop what was rolled back; the list does not change any more."""
        self._pending = [item for item in self._pending if item.called or item.waiting]
        for item in self._pending:
            item.called = True

    def _all(self) -> list[CapturedEvent]:
        return [
            _captured(message, pending.mode)
            for pending in list(self._pending)
            if pending.called or pending.waiting
            for message in pending.messages
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
        """Return the only event (of a name, a pattern or a declared event).

        Raises:
            AssertionError: there are none or several; says what was captured.
        """
        found = self.named(name)
        if len(found) != 1:
            wanted = name.name if isinstance(name, Publishable) else name
            raise AssertionError(
                f"{len(found)} events named {wanted!r} were published, not one; captured: "
                f"{', '.join(self.names) or 'nothing'}"
            )
        return found[0]

    def clear(self) -> None:
        """Forget what was captured so far."""
        self._pending.clear()


def _captured(message: Message, mode: PublishMode) -> CapturedEvent:
    received = Received(
        queue="",
        exchange=message.exchange,
        routing_key=message.routing_key,
        body=message.body,
        headers=message.headers,
        properties=message.properties,
    )
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
    """Keep everything that is published in the block from any broker, and tell what it was.

    Validation goes on as ever. In ``outbox`` and ``on_commit`` mode an event counts as published
    when its transaction commits or, inside Django's ``TestCase``, as long as no savepoint around it
    was rolled back. Blocks may be nested: the inner one captures.

    Example::

        with capture_events() as events:
            place_order(...)
        assert events.one("shop.order.created").payload["order_id"] == 1
    """
    captured = CapturedEvents()
    try:
        with divert(captured, captured._watch):  # noqa: SLF001 - a backend in disguise
            yield captured
    finally:
        captured._settle()  # noqa: SLF001


# -- handling -----------------------------------------------------------------------------


@contextmanager
def memory_events(start: datetime | None = None) -> Iterator[MemoryBackend]:
    """Publish to a broker in memory and handle events there, with a clock of the test's own.

    Handlers run when :meth:`~MemoryBackend.run` or :meth:`~MemoryBackend.advance` is called,
    and then as in a worker: arguments, retries, archive. Inside Django's ``TestCase``, events
    that wait only for its commit, which never comes, are published by both.

    Args:
        start: where the clock starts, aware; the present by default.

    Example::

        with memory_events() as broker:
            order_created.publish(order_id=1)
            broker.run()
            broker.advance(seconds=4)
            assert broker.archived == []
    """
    backend = MemoryBackend(get_settings(), Clock(start))
    with divert(backend, backend.watch):
        yield backend


# -- settings -----------------------------------------------------------------------------


class override_events(TestContextDecorator):  # noqa: N801 - used like override_settings
    """Change keys of ``AMQP_EVENTS`` for a block, a test or a ``TestCase`` class.

    Keys replace those of the setting, the others stay. Whatever ``@event`` and ``@handler``
    declare meanwhile is forgotten at the end.

    Args:
        handlers: only these of the declared handlers exist: functions, task classes or names.
        events: only these of the declared events have their contract: events or names.
        keys: keys of ``AMQP_EVENTS``, such as ``UNROUTED="raise"``.

    Example::

        @override_events(handlers=[send_invoice], DEFAULTS={"MAX_RETRIES": 1})
        def test_invoice_is_tried_twice(): ...
    """

    def __init__(
        self,
        *,
        handlers: Iterable[Any] | None = None,
        events: Iterable[Any] | None = None,
        **keys: Any,
    ) -> None:
        super().__init__()
        lower = [key for key in keys if key != key.upper()]
        if lower:
            raise ConfigurationError(
                f"override_events() got {', '.join(map(repr, lower))}; keys of AMQP_EVENTS are "
                f"upper case"
            )
        self.handlers = None if handlers is None else list(handlers)
        self.events = None if events is None else list(events)
        self.keys = keys
        self._undo: list[Callable[[], None]] = []

    def enable(self) -> None:
        """Begin."""
        state = declarations.snapshot()
        raw = {**(getattr(django_settings, SETTING, None) or {}), **self.keys}
        kept_events, kept_handlers = state
        if self.handlers is not None:
            names = {_handler_name(item) for item in self.handlers}
            kept_handlers = tuple(item for item in kept_handlers if _handler_name(item) in names)
            known = {*map(_handler_name, kept_handlers), *raw.get("HANDLERS", {})}
            _refuse_unknown("handlers", names - known)
            raw["HANDLERS"] = {
                name: options
                for name, options in raw.get("HANDLERS", {}).items()
                if name in names or "HANDLERS" in self.keys
            }
        if self.events is not None:
            names = {item.name if isinstance(item, Publishable) else item for item in self.events}
            kept_events = tuple(item for item in kept_events if item.name in names)
            known = {*(item.name for item in kept_events), *raw.get("EVENTS", {})}
            _refuse_unknown("events", names - known)
            raw["EVENTS"] = {
                name: options
                for name, options in raw.get("EVENTS", {}).items()
                if name in names or "EVENTS" in self.keys
            }
        override = override_settings(**{SETTING: raw})

        def undo() -> None:
            override.disable()
            declarations.restore(state)

        declarations.restore((kept_events, kept_handlers))
        self._undo.append(undo)
        override.enable()

    def disable(self) -> None:
        """End."""
        self._undo.pop()()


def _handler_name(item: Any) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, HandlerFunction):
        return item.name
    if isinstance(item, HandlerDeclaration):
        return item.name or default_name(item.target)
    declared = next((one for one in declarations.snapshot()[1] if one.target is item), None)
    return _handler_name(declared) if declared else default_name(item)


def _refuse_unknown(what: str, names: Iterable[object]) -> None:
    unknown = sorted(map(str, names))
    if unknown:
        raise ConfigurationError(
            f"override_events({what}=…) names {', '.join(unknown)}, which nobody declares; import "
            f"the module that does, or correct the name"
        )
