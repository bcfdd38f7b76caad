"""Checks of handlers and type hints."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Final

from ..declare.declarations import EventDeclaration, dotted, readable_signature
from ..declare.registry import Handler
from ..declare.validation import Validator
from ..exceptions import ConfigurationError
from ..options import Problem
from .project import Project

_VARIABLE: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_handlers(project: Project) -> Iterator[Problem]:
    """Handlers that do not match an event (E011, E012)."""
    for handler in project.registry.handlers.values():
        for event in project.registry.events.values():
            if event.contract is not None and handler.matches(event.name):
                yield from _compare(handler, event)


def check_validation(project: Project) -> Iterator[Problem]:
    """Type hints that VALIDATE cannot enforce (E080)."""
    hinted = [
        (readable_signature(event.contract), event.contract)
        for event in project.registry.events.values()
        if event.validate and event.contract is not None
    ]
    hinted += [
        (handler.signature, handler.target)
        for handler in project.registry.handlers.values()
        if handler.validate
    ]
    problems: list[Problem] = []
    for signature, target in hinted:
        try:
            if signature is not None:
                Validator(signature, target)
        except ConfigurationError as exc:
            problems += exc.problems
    # One, if pydantic is missing.
    return iter(dict.fromkeys(problems))


def _where(handler: Handler) -> str:
    return f"Handler {handler.name!r} ({dotted(handler.target)})"


def _compare(handler: Handler, event: EventDeclaration) -> Iterator[Problem]:
    """Yield the differences between an event's payload and a handler's arguments."""
    contract = readable_signature(event.contract)
    if contract is None:
        return
    given = [p.name for p in contract.parameters.values() if p.kind not in _VARIABLE]
    own = handler.signature.parameters.values()
    takes = {p.name: p for p in own if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    missing = [name for name, p in takes.items() if p.default is p.empty and name not in given]
    if missing and not _takes_anything(contract):
        yield Problem(
            "E011",
            f"{_where(handler)} needs {listed(missing)}, which event {event.name!r} does not have.",
            f"Correct the name, or give the argument a default. The contract "
            f"{dotted(event.contract)} has {listed(given) or 'no arguments'}.",
        )
    surplus = [name for name in given if name not in takes]
    if handler.strict and surplus and not _takes_anything(handler.signature):
        yield Problem(
            "E012",
            f"{_where(handler)} is strict, but does not take {listed(surplus)} of event "
            f"{event.name!r}.",
            "Add the argument, or remove strict to leave it out.",
        )


def _takes_anything(signature: inspect.Signature) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


def listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
