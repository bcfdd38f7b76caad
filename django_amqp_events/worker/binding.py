"""Bind the payload of an event to the parameters of a handler."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from copy import deepcopy
from functools import cache
from typing import Any, Final

from billiard.exceptions import SoftTimeLimitExceeded

from ..declare import newest
from ..declare.declarations import dotted
from ..declare.registry import Handler
from ..declare.validation import Validator, Violation
from .verdict import ContractViolated, InvalidArguments, describe

_BY_NAME: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def bind(
    handler: Handler, args: Any, kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for a handler, without keyword arguments that it does not accept.

    With ``validate``, they are values of the handler's type hints.

    Raises:
        InvalidArguments: an argument is missing, or a strict handler does not accept one.
        ContractViolated: an argument violates its type hint.
    """
    if kwargs.keys() == _names(handler) and not args and not handler.validate:
        return (), dict(kwargs)
    signature = _signature(handler)
    parameters = signature.parameters
    if not handler.strict and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
        kwargs = {key: value for key, value in kwargs.items() if key in parameters}
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as exc:
        raise InvalidArguments(
            f"handler {handler.name!r} takes {signature}, which does not match the event's "
            f"payload: {exc}"
        ) from None
    if handler.validate:
        try:
            converted = validator(handler).from_json(bound.arguments)
        except Violation as exc:
            raise ContractViolated(
                f"the payload violates the type hints of handler {handler.name!r}: {exc}"
            ) from exc.__cause__
        bound.arguments = converted
        # In the form that the payload came in: by position or by name.
        named = {
            key: converted[key]
            for key in kwargs
            if key in parameters and parameters[key].kind in _BY_NAME
        }
        return bound.args[: len(args)], {**named, **bound.kwargs}
    return tuple(args), dict(kwargs)


def upcast(
    handler: Handler, event_name: str, args: Any, kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the payload of an older event as that of the one that a handler takes.

    Raises:
        ContractViolated: an upcaster failed.
    """
    how = handler.upcast_of(event_name) if handler.upcasts else None
    if how is None:
        return kwargs
    route = f"from {how.source!r} to {how.target!r}"
    if args:
        raise ContractViolated(
            f"the payload has {len(args)} arguments without a name, which cannot be upcast {route}"
        )
    payload: Any = deepcopy(dict(kwargs))  # an upcaster may change what it gets
    for step in how.steps:
        try:
            payload = step(payload)
        except SoftTimeLimitExceeded:
            raise
        except Exception as exc:
            failure = describe(exc, traced=False)
            raise ContractViolated(
                f"the upcaster {dotted(step)} failed {route}: {failure.first_line}"
            ) from exc
        if not isinstance(payload, Mapping) or not all(isinstance(key, str) for key in payload):
            raise ContractViolated(
                f"the upcaster {dotted(step)} returned a {type(payload).__name__} {route}. Return "
                f"a dict with the arguments by name"
            )
    upcasted: Mapping[str, Any] = payload
    return upcasted


def version_of(handler: Handler, payload: Mapping[str, Any]) -> newest.Version | None:
    """Return the version in a payload, ``None`` for a handler without ``newest``.

    Raises:
        InvalidArguments: the payload has no valid version.
    """
    if handler.newest is None:
        return None
    try:
        return newest.read(handler.newest, payload)
    except ValueError as exc:
        raise InvalidArguments(f"handler {handler.name!r} has newest, but {exc}") from None


@cache
def _signature(handler: Handler) -> inspect.Signature:
    return handler.signature


@cache
def _names(handler: Handler) -> AbstractSet[str] | None:
    """Return all parameters of a handler that takes each by name, for a quick comparison."""
    parameters = _signature(handler).parameters
    return frozenset(parameters) if all(p.kind in _BY_NAME for p in parameters.values()) else None


@cache
def validator(handler: Handler) -> Validator:
    """Return the validator of a handler, made once per process.

    Raises:
        ConfigurationError: the handler's type hints cannot be enforced.
    """
    return Validator(handler.signature, handler.target)
