"""The events that a service knows, with their contracts and handlers, as JSON values. Pure.

A service knows the events that it declares and those that its handlers subscribe to.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, Final

from ..broker.topology import Names
from ..conf import Settings
from ..declare.declarations import EventDeclaration, dotted, signature_of
from ..declare.patterns import is_pattern
from ..declare.registry import Handler, Registry
from .json_schema import annotation_text, as_json, object_schema, source

#: Version of the document.
VERSION: Final = 1
#: A default that JSON cannot express.
UNKNOWN: Final = "…"
#: Fields of a declaration that are no options.
_NO_OPTIONS: Final = {
    *("name", "contract", "options", "format", "upcasters", "publisher"),
    *("key", "queue", "patterns", "target", "policy", "upcasts"),
}


def document(settings: Settings, registry: Registry) -> dict[str, Any]:
    """Describe all events and handlers of this service, each ordered by name.

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
        "handlers": list(map(_handler, handlers)),
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
        "contract": _interface(contract, signature_of(contract)) if contract else None,
        "payload": object_schema(contract) if contract else None,
        "options": _options(declaration),
        "handlers": [
            handler.name
            for handler in handlers
            if name in handler.bindings or (not pattern and handler.matches(name))
        ],
    }


def _handler(handler: Handler) -> dict[str, Any]:
    policy = handler.policy
    return {
        "name": handler.name,
        "queue": handler.queue,
        "patterns": list(handler.bindings),
        "upcasts": [upcast.source for upcast in handler.upcasts],
        **_interface(handler.target, handler.signature),
        "options": _options(handler),
        "retries": {
            "max_retries": policy.max_retries,
            "delays": list(map(round, policy.schedule())),
            "total": round(policy.total()),
            "jitter": policy.retry_jitter,
            "autoretry_for": list(map(dotted, policy.autoretry_for)),
            "dont_autoretry_for": list(map(dotted, policy.dont_autoretry_for)),
        },
    }


def _interface(function: Callable[..., Any], signature: inspect.Signature) -> dict[str, Any]:
    """Describe what a contract or handler takes."""
    return {
        "function": dotted(function),
        # Not an inherited one, such as that of celery.Task.
        "docstring": inspect.cleandoc(getattr(function, "__doc__", None) or ""),
        "arguments": list(map(_argument, signature.parameters.values())),
    }


def _argument(parameter: inspect.Parameter) -> dict[str, Any]:
    kinds = {parameter.VAR_POSITIONAL.name: "*", parameter.VAR_KEYWORD.name: "**"}
    stars = kinds.get(parameter.kind.name, "")
    default = parameter.default
    try:
        written = "" if default is parameter.empty else json.dumps(as_json(default))
    except (TypeError, ValueError):
        written = UNKNOWN
    return {
        "name": stars + parameter.name,
        "type": annotation_text(parameter),
        "required": not stars and default is parameter.empty,
        "default": written,
    }


def _options(declared: Any) -> dict[str, Any]:
    """Return the options of an event or handler that differ from their defaults."""
    return {
        option.name: as_json(value)
        for option in fields(declared)
        if option.name not in _NO_OPTIONS
        and (value := getattr(declared, option.name)) != option.default
        and not (option.default is None and value is False)
    }
