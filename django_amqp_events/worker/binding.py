"""Bind the payload of an event to the parameters of a handler."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

from ..declare.registry import Handler
from .verdict import InvalidArguments


def bind(
    handler: Handler, args: Any, kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for a handler, without keyword arguments that it does not accept.

    Raises:
        InvalidArguments: an argument is missing, or a strict handler does not accept one.
    """
    signature = _signature(handler)
    parameters = signature.parameters
    if not handler.strict and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
        kwargs = {key: value for key, value in kwargs.items() if key in parameters}
    try:
        signature.bind(*args, **kwargs)
    except TypeError as exc:
        raise InvalidArguments(
            f"handler {handler.name!r} takes {signature}, which does not match the event's "
            f"payload: {exc}"
        ) from None
    return tuple(args), dict(kwargs)


@cache
def _signature(handler: Handler) -> inspect.Signature:
    return handler.signature
