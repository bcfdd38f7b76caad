"""The events that a service knows, with their contracts and handlers, as JSON values. Pure.

A service knows the events that it declares and those that its handlers subscribe to.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Final

from ..broker.topology import Names
from ..conf import Settings
from ..declare.declarations import EventDeclaration, dotted, signature_of
from ..declare.patterns import is_pattern
from ..declare.registry import Handler, Registry
from .json_schema import object_schema, source

#: Version of the document.
VERSION: Final = 1


def document(settings: Settings, registry: Registry) -> dict[str, Any]:
    """Describe all events that this service knows, ordered by name.

    docs/commands/catalogue.md describes the keys.
    """
    handlers = sorted(registry.handlers.values(), key=lambda handler: handler.name)
    subscribed = {name for handler in handlers for name in handler.bindings}
    return {
        "version": VERSION,
        "service": settings.service,
        "prefix": settings.prefix,
        "exchange": Names.of(settings).events,
        "types": source(),
        "events": [
            _event(settings, registry.events.get(name, EventDeclaration(name=name)), handlers)
            for name in sorted(subscribed.union(registry.events))
        ],
    }


def _event(
    settings: Settings, declaration: EventDeclaration, handlers: Iterable[Handler]
) -> dict[str, Any]:
    name, contract = declaration.name, declaration.contract
    pattern = is_pattern(name)
    return {
        "name": name,
        "publisher": "" if pattern else declaration.publisher or name.partition(".")[0],
        "format": declaration.format or settings.format,
        "contract": _described(contract) if contract else None,
        "payload": object_schema(signature_of(contract), contract) if contract else None,
        "handlers": [
            handler.name
            for handler in handlers
            if name in handler.bindings or (not pattern and handler.matches(name))
        ],
    }


def _described(function: Callable[..., Any]) -> dict[str, str]:
    # Not an inherited docstring, such as that of celery.Task.
    docstring = inspect.cleandoc(getattr(function, "__doc__", None) or "")
    return {"function": dotted(function), "docstring": docstring}
