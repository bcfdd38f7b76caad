"""Validate a payload against the signature and body of its contract."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final

from ..callables import unrun
from ..exceptions import ConfigurationError, InvalidEventError
from .declarations import dotted, signature_of
from .validation import Validator, Violation

#: Limit of the names and contracts in memory, since some are made at run time.
REMEMBERED: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """The signature of a contract; the fast way needs ``positional`` and ``keyword_only`` only."""

    signature: inspect.Signature
    required: frozenset[str]
    #: By name and in order; ``None`` if the signature has ``/``, ``*args`` or ``**kwargs``.
    defaults: Mapping[str, Any] | None
    positional: Sequence[str]
    keyword_only: Sequence[str]

    def filled(self, payload: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a payload with its defaults; ``None`` if it needs the slow way or is invalid."""
        if self.defaults is None:
            return None
        full = {**self.defaults, **payload}
        valid = len(full) == len(self.defaults) and payload.keys() >= self.required
        return full if valid else None

    def call(self, contract: Callable[..., Any], full: Mapping[str, Any]) -> None:
        """Call the contract with a payload that :meth:`filled` has returned."""
        _run(
            contract,
            [full[parameter] for parameter in self.positional],
            {parameter: full[parameter] for parameter in self.keyword_only},
        )


def _run(contract: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Run the body of a contract; what it returns is ignored."""
    result = contract(*args, **kwargs)
    if result is not None and (what := unrun(result)):
        raise ConfigurationError(
            f"the contract {dotted(contract)} returned {what}, so its body may not have run. "
            f"Write an ordinary function"
        )


@lru_cache(maxsize=REMEMBERED)
def _form(contract: Callable[..., Any]) -> _Form:
    signature = signature_of(contract)
    parameters = signature.parameters.values()
    kinds = {
        kind: [parameter.name for parameter in parameters if parameter.kind is kind]
        for kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }
    plain = sum(map(len, kinds.values())) == len(parameters)
    return _Form(
        signature=signature,
        required=frozenset(
            parameter.name
            for parameter in parameters
            if parameter.default is inspect.Parameter.empty
        ),
        defaults={parameter.name: parameter.default for parameter in parameters} if plain else None,
        positional=kinds[inspect.Parameter.POSITIONAL_OR_KEYWORD],
        keyword_only=kinds[inspect.Parameter.KEYWORD_ONLY],
    )


@lru_cache(maxsize=REMEMBERED)
def _validator(contract: Callable[..., Any]) -> Validator:
    return Validator(signature_of(contract), contract)


def _make_validator(contract: Callable[..., Any]) -> Validator:
    # A callable object need not be hashable.
    make = _validator if isinstance(contract, Hashable) else _validator.__wrapped__
    return make(contract)


def _enforce(
    name: str,
    contract: Callable[..., Any],
    given: dict[str, Any],
    call: Callable[[dict[str, Any]], object],
    *,
    decoded: bool,
) -> dict[str, Any]:
    """Call a contract with arguments of its type hints, and return the arguments to publish."""
    validator = _make_validator(contract)
    try:
        typed = validator.from_json(given) if decoded else validator.from_python(given)
        if surplus := validator.surplus(given, typed):
            raise Violation(f"it does not accept {', '.join(surplus)}")
        call(typed)
        return validator.to_json(typed)
    except Violation as exc:
        raise InvalidEventError(
            f"event {name!r} violates the type hints of its contract {dotted(contract)}: {exc}"
        ) from exc.__cause__


def _mismatches(signature: inspect.Signature, payload: Mapping[str, Any]) -> list[str]:
    """Return the missing and unknown arguments, in Python's words."""
    named = {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    return [
        *(
            f"missing a required argument: {name!r}"
            for name, parameter in named.items()
            if parameter.default is parameter.empty and name not in payload
        ),
        *(
            f"got an unexpected keyword argument {name!r}"
            for name in payload
            if not _accepts(signature, name)
        ),
    ]


def _accepts(signature: inspect.Signature, name: str) -> bool:
    try:
        signature.bind_partial(**{name: None})
    except TypeError:
        return False
    return True


def _violations(
    contract: Callable[..., Any],
    signature: inspect.Signature,
    payload: Mapping[str, Any],
    *,
    decoded: bool,
) -> list[str]:
    """Return how the arguments that the signature accepts violate the type hints."""
    known = {name: value for name, value in payload.items() if _accepts(signature, name)}
    given = signature.bind_partial(**known).arguments
    validator = _make_validator(contract)
    try:
        (validator.from_json if decoded else validator.from_python)(given)
    except Violation as exc:
        return [str(exc)]
    return []


def bind_contract(
    name: str,
    contract: Callable[..., Any],
    payload: Mapping[str, Any],
    *args: Any,
    validate: bool = False,
    decoded: bool = False,
) -> dict[str, Any]:
    """Bind a payload to the signature of its contract and run the contract's body.

    Args:
        validate: enforce the contract's type hints. The body gets values of their types, the
            returned payload has those that Django's JSON encoder writes.
        decoded: the payload was decoded from JSON.

    Returns:
        the payload with the contract's defaults filled in.

    Raises:
        InvalidEventError: the arguments do not match the signature, or violate the type hints. An
            exception of the body is not caught.
        ConfigurationError: the type hints cannot be enforced, or the body did not run.
    """
    # A callable object need not be hashable.
    form = (_form if isinstance(contract, Hashable) else _form.__wrapped__)(contract)
    if not args and type(payload) is dict and (full := form.filled(payload)) is not None:
        if validate:
            return _enforce(name, contract, full, partial(form.call, contract), decoded=decoded)
        form.call(contract, full)
        return full
    if not hasattr(payload, "keys"):
        raise InvalidEventError(
            f"a payload of event {name!r} is a {type(payload).__name__} ({payload!r:.80}). Use a "
            f"dict with the arguments by name"
        )
    signature = form.signature
    try:
        bound = signature.bind(*args, **payload)
    except TypeError as exc:
        problems = [str(exc)] if args else _mismatches(signature, payload) or [str(exc)]
        if validate and not args:
            problems += _violations(contract, signature, payload, decoded=decoded)
        by_name = args and isinstance(args[0], Mapping)
        raise InvalidEventError(
            f"event {name!r} does not match its contract: {'; '.join(problems)} "
            f"({dotted(contract)}{signature})"
            + (". Pass the payload by name, as in publish(**payload)" if by_name else "")
        ) from exc
    bound.apply_defaults()
    if validate:

        def call(typed: dict[str, Any]) -> None:
            bound.arguments = typed
            _run(contract, bound.args, bound.kwargs)

        bound.arguments = _enforce(name, contract, bound.arguments, call, decoded=decoded)
    else:
        _run(contract, bound.args, bound.kwargs)
    return _by_name(name, bound)


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
