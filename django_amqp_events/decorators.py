"""The decorators ``@event`` and ``@handler``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)
from uuid import UUID

from asgiref.sync import sync_to_async
from django.db import close_old_connections

from .callables import deferred
from .conf import PublishMode, get_settings
from .declare import contracts
from .declare.declarations import (
    Declared,
    EventDeclaration,
    HandlerDeclaration,
    declarations,
    default_name,
    dotted,
)
from .declare.registry import get_registry
from .declare.upcasting import Upcaster
from .exceptions import ConfigurationError, DirectCallError
from .options import Format, HandlerWords
from .publish import publisher
from .publish.publisher import NO_OPTIONS, Options

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
C = TypeVar("C")
U = TypeVar("U", bound=Upcaster)


class OptionWords(TypedDict, total=False):
    """Options of ``using(…)``; see :class:`publisher.Options`."""

    mode: PublishMode | None
    event_id: str | UUID | None
    correlation_id: str | UUID | None
    causation_id: str | UUID | None
    headers: Mapping[str, str | int | float | bool]
    using: str | None


class EventOptions(TypedDict, total=False):
    """Options of ``@event``."""

    format: Format
    validate: bool
    publisher: str
    search: Sequence[str]


class Publishable(Declared, Generic[P]):
    """An event and options, ready to be published."""

    def __init__(
        self,
        name: str,
        contract: Callable[P, Any] | None = None,
        options: Options = NO_OPTIONS,
    ) -> None:
        self.name = name
        self.contract = contract
        self.options = options

    @property
    def function(self) -> Callable[P, Any] | None:
        return self.contract

    def using(self, **options: Unpack[OptionWords]) -> Publishable[P]:
        """Return the same event with options; see :class:`publisher.Options`.

        Options have a call of their own, so that they cannot collide with names of the payload::

            order_created.using(mode="immediate", event_id=…).publish(order_id=1)
        """
        changes: dict[str, Any] = {**options}
        return Publishable(self.name, self.contract, replace(self.options, **changes))

    def publish(self, /, *args: P.args, **payload: P.kwargs) -> str:
        """Validate and publish; see :func:`publisher.publish_event`.

        Returns:
            the event id.
        """
        full: Mapping[str, Any] = payload
        if self.contract is not None:
            full = contracts.bind_contract(
                self.name, self.contract, payload, *args, validate=self._validates()
            )
        elif args:
            raise DirectCallError(f"event {self.name!r} has no contract. Pass its payload by name")
        return publisher.publish_event(self.name, full, options=self.options, validate=False)

    def _validates(self) -> bool:
        known = get_registry().events.get(self.name)
        return bool(known.validate if known is not None else get_settings().validate)

    async def apublish(self, /, *args: P.args, **payload: P.kwargs) -> str:
        """Validate and publish from asynchronous code.

        With ``outbox`` and ``on_commit`` it runs in the thread of Django's synchronous code, so
        that it sees the transaction; with ``immediate`` in any thread, since otherwise all
        synchronous code of the process would wait for the confirm.
        """
        immediate = (self.options.mode or get_settings().publish) == "immediate"

        def publish() -> str:
            if not immediate:
                return self.publish(*args, **payload)
            # No request ends in this thread.
            close_old_connections()
            try:
                return self.publish(*args, **payload)
            finally:
                close_old_connections()

        return await sync_to_async(publish, thread_sensitive=not immediate)()

    def publish_many(self, payloads: Iterable[Mapping[str, Any]]) -> list[str]:
        """Publish many; see :func:`publisher.publish_many`."""
        publisher.require_payload_list(self.name, payloads)
        contract, validate = self.contract, self._validates()
        bound = [
            contracts.bind_contract(self.name, contract, payload, validate=validate)
            if contract is not None
            else payload
            for payload in payloads
        ]
        return publisher.publish_many(self.name, bound, options=self.options, validate=False)

    __call__ = publish

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


class Event(Publishable[P]):
    """A declared event. Calling it publishes it."""

    def __init__(self, name: str, contract: Callable[P, Any]) -> None:
        # First, because it copies the function's attributes, which could be ours.
        functools.update_wrapper(self, contract)
        super().__init__(name, contract)

    @overload
    def handler(self, target: type[C], /) -> type[C]: ...  # type: ignore[overload-overlap]
    @overload
    def handler(self, target: Callable[Q, R], /) -> HandlerFunction[Q, R]: ...
    @overload
    def handler(self, /, *, name: str = ..., **options: Unpack[HandlerWords]) -> Decorator: ...
    def handler(
        self,
        target: Callable[..., Any] | None = None,
        /,
        *,
        name: str = "",
        **options: Unpack[HandlerWords],
    ) -> Any:
        """Declare a handler of this event, with the options of :func:`handler`."""
        decorate = handler(self, name=name, **options)
        return decorate if target is None else decorate(target)

    def upcast_from(self, older: str | Publishable[Any]) -> Callable[[U], U]:
        """Declare how the payload of an older version of this event becomes one of this version.

        The function gets the older payload as a dict and returns the newer one. Handlers of this
        event receive the older one too, through it::

            @order_created_v2.upcast_from(order_created)
            def with_currency(payload):
                return {**payload, "currency": "EUR"}
        """
        source = older.name if isinstance(older, Publishable) else older
        if not isinstance(source, str):
            raise ConfigurationError(
                f"upcast_from() of event {self.name!r} got {older!r:.80} instead of an event. "
                f"Write @order_created_v2.upcast_from(order_created), or pass its name"
            )

        def declare(function: U) -> U:
            if not callable(function) or deferred(function):
                raise ConfigurationError(
                    f"{dotted(function)}, an upcaster of event {self.name!r}, is not an ordinary "
                    f"function. Write one that takes a dict and returns a dict"
                )
            declarations.add_event(
                EventDeclaration(name=self.name, upcasters=((source, function),))
            )
            return function

        return declare


def event(name: str, **options: Unpack[EventOptions]) -> Callable[[Callable[P, Any]], Event[P]]:
    """Declare an event whose payload the function's signature and body validate.

    A service that only handles the event can declare it too.

    Args:
        name: the event's full name, such as ``"shop.order.created"``.
        options: keys of ``AMQP_EVENTS["EVENTS"]`` in lower case; docs/settings.md lists them.
    """
    if not isinstance(name, str):
        raise ConfigurationError(
            f"@event got {name!r} instead of a name. Write @event('shop.order.created')"
        )

    def declare(contract: Callable[P, Any]) -> Event[P]:
        declarations.add_event(EventDeclaration(name=name, contract=contract, options=options))
        return Event(name, contract)

    return declare


class HandlerFunction(Declared, Generic[P, R]):
    """A declared handler. Calling it runs the function in this process."""

    def __init__(self, declaration: HandlerDeclaration) -> None:
        # First, because it copies the function's attributes, which could be ours.
        functools.update_wrapper(self, declaration.target)
        self._declaration = declaration

    @property
    def function(self) -> Callable[..., Any]:
        return self._declaration.target

    @property
    def name(self) -> str:
        """The handler's name."""
        return self._declaration.name or default_name(self._declaration.target)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self._declaration.target(*args, **kwargs)
        return result

    def apply(self, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run it locally as a Celery task; returns Celery's EagerResult."""
        from .worker.task import task_for

        return task_for(self.name).apply(args=args, kwargs=dict(kwargs or {}))

    if not TYPE_CHECKING:  # so that a type checker refuses them

        def delay(self, *args: Any, **kwargs: Any) -> Any:
            raise DirectCallError.of(self.name)

        apply_async = delay

    def __repr__(self) -> str:
        return f"<handler {self.name}>"


class Decorator(Protocol):
    """Turns a function into a handler; returns a Celery task class unchanged."""

    @overload
    def __call__(self, target: type[C], /) -> type[C]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, target: Callable[Q, R], /) -> HandlerFunction[Q, R]: ...


def handler(
    *events: str | Publishable[Any], name: str = "", **options: Unpack[HandlerWords]
) -> Decorator:
    """Declare a handler of one or several events, or of topic patterns.

    It returns a :class:`HandlerFunction`, or a Celery task class unchanged.

    Args:
        events: names, patterns such as ``"shop.order.*"``, or declared events.
        name: the handler's name, ``app_label.function`` by default.
        options: those of ``HANDLERS`` in docs/settings.md, in lower case.
    """
    named = {"events", "handler"}.intersection(options)
    if named or not events or not all(isinstance(item, (str, Publishable)) for item in events):
        raise ConfigurationError(
            "@handler got no event names or patterns, or the option events or handler. Write "
            "@handler('shop.order.*'), or @order_created.handler with a declared event"
        )
    names = tuple(item.name if isinstance(item, Publishable) else item for item in events)

    def declare(target: Callable[..., Any]) -> Any:
        if isinstance(target, HandlerFunction):
            raise ConfigurationError(
                f"{dotted(target)} is already a handler. Pass all its events to one decorator, as "
                f"in @handler('shop.order.created', 'shop.order.paid')"
            )
        declaration = HandlerDeclaration(
            target=target, name=name, options={**options, "events": names}
        )
        declarations.add_handler(declaration)
        return target if inspect.isclass(target) else HandlerFunction(declaration)

    return declare
