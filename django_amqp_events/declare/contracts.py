"""Validate a payload against the signature and body of its contract."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from ..callables import unrun
from ..exceptions import ConfigurationError, InvalidEventError
from .declarations import dotted, signature_of
from .validation import REMEMBERED, Validator, Violation

_EMPTY = inspect.Parameter.empty
_signature = lru_cache(maxsize=REMEMBERED)(signature_of)


@lru_cache(maxsize=REMEMBERED)
def _validator(contract: Callable[..., Any]) -> Validator:
    return Validator(signature_of(contract), contract)


@lru_cache(maxsize=REMEMBERED)
def _defaults(contract: Callable[..., Any]) -> dict[str, Any] | None:
    """Return the arguments of a contract with their defaults, if each has one name."""
    parameters = signature_of(contract).parameters
    if any(p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters.values()):
        return None
    return {name: parameter.default for name, parameter in parameters.items()}


def _remembered(function: Any, contract: Callable[..., Any]) -> Any:
    try:
        hash(contract)
    except TypeError:  # a callable object need not be hashable
        return function.__wrapped__(contract)
    return function(contract)


def bind_contract(
    name: str,
    contract: Callable[..., Any],
    payload: Mapping[str, Any],
    *args: Any,
    validate: bool = False,
) -> dict[str, Any]:
    """Bind a payload to the signature of its contract and run the contract's body.

    Args:
        validate: enforce the contract's type hints. The body gets values of their types; objects
            in the returned payload are dicts of their fields.

    Returns:
        the payload with the contract's defaults filled in.

    Raises:
        InvalidEventError: the arguments do not match the signature, or violate the type hints. An
            exception of the body is not caught.
        ConfigurationError: the type hints cannot be enforced, or the body did not run.
    """
    if not hasattr(payload, "keys"):
        raise InvalidEventError(
            f"a payload of event {name!r} is a {type(payload).__name__} ({payload!r:.80}). Use a "
            f"dict with the arguments by name"
        )
    if not (args or validate) and (known := _remembered(_defaults, contract)) is not None:
        # bind() would take a tenth of an outbox call; it explains what does not match.
        full = {**known, **payload}
        if len(full) == len(known) and all(value is not _EMPTY for value in full.values()):
            _run(contract, (), full)
            return full
    signature: inspect.Signature = _remembered(_signature, contract)
    try:
        bound = signature.bind(*args, **payload)
    except TypeError as exc:
        by_name = args and isinstance(args[0], Mapping)
        raise InvalidEventError(
            f"event {name!r} does not match its contract: {exc} ({dotted(contract)}{signature})"
            + (". Pass the payload by name, as in publish(**payload)" if by_name else "")
        ) from exc
    bound.apply_defaults()
    if not validate:
        _run(contract, bound.args, bound.kwargs)
        return _by_name(name, bound)
    validator: Validator = _remembered(_validator, contract)
    try:
        plain = validator.to_json(bound.arguments)
        bound.arguments = validator.from_json(plain)
        _run(contract, bound.args, bound.kwargs)
        bound.arguments = plain
    except Violation as exc:
        raise InvalidEventError(
            f"event {name!r} violates the type hints of its contract {dotted(contract)}: {exc}"
        ) from exc.__cause__
    return _by_name(name, bound)


def _run(contract: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Run the body of a contract; what it returns is ignored."""
    result = contract(*args, **kwargs)
    if result is not None and (what := unrun(result)):
        raise ConfigurationError(
            f"the contract {dotted(contract)} returned {what}, so its body may not have run. "
            f"Write an ordinary function"
        )


def _by_name(event: str, bound: inspect.BoundArguments) -> dict[str, Any]:
    """Return bound arguments as a payload."""
    full: dict[str, Any] = {}
    for parameter in bound.signature.parameters.values():
        value = bound.arguments[parameter.name]
        if parameter.kind is parameter.VAR_KEYWORD:
            full.update(value)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            if value:
                raise InvalidEventError(
                    f"event {event!r} was published with {len(value)} unnamed arguments. Pass the "
                    f"payload by name"
                )
        else:
            full[parameter.name] = value
    return full
