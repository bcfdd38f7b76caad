"""Bind the payload of an event to the parameters of a handler."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
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
    accepted = _parameters(handler)
    given = dict(kwargs)
    if accepted.drops_unknown:
        given = {key: value for key, value in given.items() if key in accepted.names}
    if not args and accepted.required <= given.keys() <= accepted.by_keyword:
        return (), given
    try:
        accepted.signature.bind(*args, **given)
    except TypeError as exc:
        raise InvalidArguments(
            f"handler {handler.name!r} takes {accepted.signature}, which does not match the "
            f"event's payload: {exc}"
        ) from None
    return tuple(args), given


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a handler.

    Attributes:
        drops_unknown: whether unknown keyword arguments are dropped.
        required, by_keyword: keyword arguments that include all of the first and only members of
            the second are valid, which saves binding them to the signature.
    """

    signature: inspect.Signature
    drops_unknown: bool
    required: frozenset[str]
    by_keyword: frozenset[str]

    @property
    def names(self) -> Mapping[str, inspect.Parameter]:
        return self.signature.parameters


@cache
def _parameters(handler: Handler) -> Parameters:
    signature = handler.signature
    parameters = signature.parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return Parameters(
        signature=signature,
        drops_unknown=not handler.strict and all(p.kind is not p.VAR_KEYWORD for p in parameters),
        required=frozenset(p.name for p in named if p.default is p.empty),
        by_keyword=frozenset(p.name for p in named if p.kind is not p.POSITIONAL_ONLY),
    )
