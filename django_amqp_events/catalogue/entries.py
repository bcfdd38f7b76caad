"""The events that a service knows, with their contracts and handlers, as plain data. Pure.

A service knows the events that it declares and those that its handlers subscribe to.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from ..broker.topology import Names
from ..conf import Settings
from ..declare.declarations import EventDeclaration, dotted, signature_of
from ..declare.patterns import is_pattern
from ..declare.registry import Handler, Registry
from ..options import Format
from .json_schema import Schema, annotation_text, as_json, object_schema, source

#: Version of the document.
VERSION: Final = 1
#: A default that JSON cannot express.
UNKNOWN: Final = "…"
#: Fields of a declaration that are no options.
_NO_OPTIONS: Final = {
    *("name", "contract", "options", "format", "upcasters", "publisher"),
    *("key", "queue", "patterns", "target", "policy", "upcasts"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """An argument of a contract or handler.

    Attributes:
        name: ``**kwargs`` has its asterisks.
        type: the type hint as it is written, ``""`` without one.
        default: as JSON; ``""`` without one, :data:`UNKNOWN` for one that JSON cannot express.
    """

    name: str
    type: str
    required: bool
    default: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """What a contract or handler takes.

    Attributes:
        function: its dotted path.
    """

    function: str
    docstring: str
    arguments: tuple[Argument, ...]

    @classmethod
    def of(cls, function: Callable[..., Any], handler: Handler | None = None) -> Interface:
        """Describe a contract or, with *handler*, the target of a handler."""
        signature = handler.signature if handler else signature_of(function)
        return cls(
            function=dotted(function),
            docstring=_docstring(function),
            arguments=tuple(map(_argument, signature.parameters.values())),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """A handler with its interface.

    Attributes:
        options: those that differ from their defaults.
    """

    handler: Handler
    interface: Interface
    options: Mapping[str, Any]

    @property
    def options_line(self) -> str:
        return _one_line(self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An event, or a topic pattern that a handler subscribes to.

    Attributes:
        publisher: name of the service that publishes it: ``PUBLISHER``, or the first word of its
            name; ``""`` for a pattern.
        format: in which it is published.
        contract, function: its interface and the function; ``None`` without one.
        consumers: handlers of this service that receive it.
    """

    name: str
    publisher: str
    format: Format
    contract: Interface | None
    function: Callable[..., Any] | None
    options: Mapping[str, Any]
    consumers: tuple[Consumer, ...]

    def payload(self) -> Schema | None:
        """Return the JSON Schema of the payload, ``None`` without a contract."""
        return object_schema(self.function) if self.function else None

    @property
    def is_pattern(self) -> bool:
        return is_pattern(self.name)

    @property
    def options_line(self) -> str:
        return _one_line(self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """All events and handlers of a service, each ordered by name."""

    service: str
    prefix: str
    exchange: str
    entries: tuple[Entry, ...]
    consumers: tuple[Consumer, ...]


def build(settings: Settings, registry: Registry) -> Catalogue:
    """Describe all events and handlers of this service."""
    consumers = tuple(
        _consumer(handler)
        for handler in sorted(registry.handlers.values(), key=lambda handler: handler.name)
    )
    subscribed = {name for consumer in consumers for name in consumer.handler.bindings}
    return Catalogue(
        service=settings.service,
        prefix=settings.prefix,
        exchange=Names.of(settings).events,
        entries=tuple(
            _entry(settings, registry.events.get(name, EventDeclaration(name=name)), consumers)
            for name in sorted(subscribed.union(registry.events))
        ),
        consumers=consumers,
    )


def _entry(
    settings: Settings, declaration: EventDeclaration, consumers: tuple[Consumer, ...]
) -> Entry:
    name, contract = declaration.name, declaration.contract
    pattern = is_pattern(name)
    publisher = declaration.publisher or name.partition(".")[0]
    return Entry(
        name=name,
        publisher="" if pattern else publisher,
        format=declaration.format or settings.format,
        contract=Interface.of(contract) if contract else None,
        function=contract,
        options=_options(declaration),
        consumers=tuple(
            consumer
            for consumer in consumers
            if name in consumer.handler.bindings or (not pattern and consumer.handler.matches(name))
        ),
    )


def _consumer(handler: Handler) -> Consumer:
    return Consumer(
        handler=handler,
        interface=Interface.of(handler.target, handler),
        options=_options(handler),
    )


def _argument(parameter: inspect.Parameter) -> Argument:
    kinds = {parameter.VAR_POSITIONAL.name: "*", parameter.VAR_KEYWORD.name: "**"}
    stars = kinds.get(parameter.kind.name, "")
    default = parameter.default
    try:
        written = "" if default is parameter.empty else json.dumps(as_json(default))
    except (TypeError, ValueError):
        written = UNKNOWN
    return Argument(
        name=stars + parameter.name,
        type=annotation_text(parameter),
        required=not stars and default is parameter.empty,
        default=written,
    )


def _docstring(target: Callable[..., Any]) -> str:
    # Not an inherited one, such as that of celery.Task.
    return inspect.cleandoc(getattr(target, "__doc__", None) or "")


def _options(declared: Any) -> dict[str, Any]:
    """Return the options of an event or handler that differ from their defaults."""
    return {
        option.name: as_json(value)
        for option in fields(declared)
        if option.name not in _NO_OPTIONS
        and (value := getattr(declared, option.name)) != option.default
        and not (option.default is None and value is False)
    }


def _one_line(options: Mapping[str, Any]) -> str:
    """Write options on one line: ``bind, time_limit=30, search=["order_id"]``."""
    return ", ".join(
        name
        if value is True
        else f"{name}={value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for name, value in options.items()
    )


# -- as a document ------------------------------------------------------------------------


def document(catalogue: Catalogue) -> dict[str, Any]:
    """Return the catalogue as JSON values."""
    return {
        "version": VERSION,
        "service": catalogue.service,
        "prefix": catalogue.prefix,
        "exchange": catalogue.exchange,
        "types": source(),
        "events": [
            {
                "name": entry.name,
                "publisher": entry.publisher,
                "format": entry.format,
                "contract": _interface(entry.contract) if entry.contract else None,
                "payload": entry.payload(),
                "options": dict(entry.options),
                "handlers": [one.handler.name for one in entry.consumers],
            }
            for entry in catalogue.entries
        ],
        "handlers": [_handler(consumer) for consumer in catalogue.consumers],
    }


def _handler(consumer: Consumer) -> dict[str, Any]:
    handler, policy = consumer.handler, consumer.handler.policy
    return {
        "name": handler.name,
        "queue": handler.queue,
        "patterns": list(handler.bindings),
        "upcasts": [upcast.source for upcast in handler.upcasts],
        **_interface(consumer.interface),
        "options": dict(consumer.options),
        "retries": {
            "max_retries": policy.max_retries,
            "delays": list(map(round, policy.schedule())),
            "total": round(policy.total()),
            "jitter": policy.retry_jitter,
            "autoretry_for": list(map(dotted, policy.autoretry_for)),
            "dont_autoretry_for": list(map(dotted, policy.dont_autoretry_for)),
        },
    }


def _interface(interface: Interface) -> dict[str, Any]:
    return {**asdict(interface), "arguments": list(map(asdict, interface.arguments))}
