"""Validate a payload against the signature and body of its contract."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..exceptions import InvalidEventError
from .declarations import dotted

#: Names and contracts that are remembered at most: some are made at run time.
REMEMBERED: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """The signature of a contract, read once.

    Attributes:
        contract: kept, so that no other one gets its identity.
        required: names without a default.
        defaults: by name and in order; ``None`` where the signature has more than plain names.
        positional, keyword_only: the names, as the contract is called with them.
    """

    contract: Callable[..., Any]
    signature: inspect.Signature
    required: frozenset[str]
    defaults: Mapping[str, Any] | None
    positional: Sequence[str]
    keyword_only: Sequence[str]

    def filled(self, payload: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a payload with its defaults; ``None`` where it is more than plain or wrong."""
        if self.defaults is None:
            return None
        full = {**self.defaults, **payload}
        # One more than there are is surplus.
        return full if len(full) == len(self.defaults) and payload.keys() >= self.required else None


#: By identity: a contract may be any callable, hashable or not.
_forms: dict[int, _Form] = {}


def _form(contract: Callable[..., Any]) -> _Form:
    form = _forms.get(id(contract))
    if form is not None and form.contract is contract:
        return form
    signature = inspect.signature(contract)
    parameters = signature.parameters.values()
    kinds = {
        kind: [parameter.name for parameter in parameters if parameter.kind is kind]
        for kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }
    plain = sum(map(len, kinds.values())) == len(parameters)
    form = _Form(
        contract=contract,
        signature=signature,
        required=frozenset(
            each.name for each in parameters if each.default is inspect.Parameter.empty
        ),
        defaults={each.name: each.default for each in parameters} if plain else None,
        positional=kinds[inspect.Parameter.POSITIONAL_OR_KEYWORD],
        keyword_only=kinds[inspect.Parameter.KEYWORD_ONLY],
    )
    if len(_forms) >= REMEMBERED:
        _forms.clear()
    _forms[id(contract)] = form
    return form


def bind_contract(
    name: str, contract: Callable[..., Any], payload: Mapping[str, Any], *args: Any
) -> dict[str, Any]:
    """Bind a payload to the signature of its contract and run the contract's body.

    Returns:
        the payload with the contract's defaults filled in.

    Raises:
        InvalidEventError: the arguments do not fit. Whatever the body raises goes through.
    """
    form = _form(contract)
    if not args and type(payload) is dict and (full := form.filled(payload)) is not None:
        contract(
            *[full[parameter] for parameter in form.positional],
            **{parameter: full[parameter] for parameter in form.keyword_only},
        )
        return full
    if not hasattr(payload, "keys"):
        raise InvalidEventError(
            f"a payload of event {name!r} is a {type(payload).__name__} ({payload!r:.80}); it is "
            f"a dict with names as keys"
        )
    signature = form.signature
    try:
        bound = signature.bind(*args, **payload)
    except TypeError as exc:
        by_name = args and isinstance(args[0], Mapping)
        raise InvalidEventError(
            f"event {name!r} does not fit its contract: {exc}; it is {dotted(contract)}{signature}"
            + ("; give the payload by name, as in publish(**payload)" if by_name else "")
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
                    f"event {name!r} was given {len(value)} arguments without a name"
                )
        else:
            full[parameter.name] = value
    return full
