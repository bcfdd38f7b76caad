"""Validate a payload against the signature and body of its contract."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from ..exceptions import InvalidEventError
from .declarations import dotted

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


@lru_cache(maxsize=REMEMBERED)
def _form(contract: Callable[..., Any]) -> _Form:
    signature = inspect.signature(contract)
    parameters = signature.parameters.values()
    kinds = {
        kind: [parameter.name for parameter in parameters if parameter.kind is kind]
        for kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }
    plain = sum(map(len, kinds.values())) == len(parameters)
    return _Form(
        signature=signature,
        required=frozenset(
            each.name for each in parameters if each.default is inspect.Parameter.empty
        ),
        defaults={each.name: each.default for each in parameters} if plain else None,
        positional=kinds[inspect.Parameter.POSITIONAL_OR_KEYWORD],
        keyword_only=kinds[inspect.Parameter.KEYWORD_ONLY],
    )


def bind_contract(
    name: str, contract: Callable[..., Any], payload: Mapping[str, Any], *args: Any
) -> dict[str, Any]:
    """Bind a payload to the signature of its contract and run the contract's body.

    Returns:
        the payload with the contract's defaults filled in.

    Raises:
        InvalidEventError: the arguments do not match the signature. What the body raises goes
            through.
    """
    # A callable object need not be hashable.
    form = (_form if isinstance(contract, Hashable) else _form.__wrapped__)(contract)
    if not args and type(payload) is dict and (full := form.filled(payload)) is not None:
        contract(
            *[full[parameter] for parameter in form.positional],
            **{parameter: full[parameter] for parameter in form.keyword_only},
        )
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
        by_name = args and isinstance(args[0], Mapping)
        raise InvalidEventError(
            f"event {name!r} does not match its contract {dotted(contract)}{signature}: {exc}"
            + (". Pass the payload by name, as in publish(**payload)" if by_name else "")
        ) from exc
    bound.apply_defaults()
    contract(*bound.args, **bound.kwargs)
    full = {}
    for parameter in signature.parameters.values():
        value = bound.arguments[parameter.name]
        if parameter.kind is parameter.VAR_KEYWORD:
            full.update(value)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            if value:
                raise InvalidEventError(
                    f"event {name!r} was published with {len(value)} unnamed arguments. Pass the "
                    f"payload by name"
                )
        else:
            full[parameter.name] = value
    return full
