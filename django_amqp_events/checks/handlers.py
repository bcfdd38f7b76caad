"""Checks of handlers, type hints and search paths."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any, Final

from django.utils.module_loading import import_string

from ..archive.search_values import pairs
from ..callables import unrun
from ..catalogue.json_schema import may_have_value, object_schema
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


def check_search(project: Project) -> Iterator[Problem]:
    """Paths of SEARCH that no payload has (W070), or that REDACT hides (W071)."""
    for event in project.registry.events.values():
        where = f"SEARCH of event {event.name!r} has the path"
        for path in event.search:
            if event.contract is not None and not _has_value(event.contract, path):
                yield Problem(
                    "W070",
                    f"{where} {path!r}, at which the contract {dotted(event.contract)} has no "
                    f"value.",
                    "Correct the path. It ends at a text, number or boolean, or a list of them.",
                )
        for path in _redacted(project.settings.redact, event):
            yield Problem(
                "W071",
                f"{where} {path!r}, which REDACT hides, so its values are not searched.",
                "Remove the path, or let REDACT show it.",
            )


def _has_value(contract: Callable[..., Any], path: str) -> bool:
    schema = object_schema(contract)
    try:
        return may_have_value(schema, path.split("."), schema.get("definitions", {}))
    except RecursionError:  # a list of itself
        return True


def _redacted(hook: str, event: EventDeclaration) -> list[str]:
    """Return the paths of an event whose value a redaction hook changes in a payload of texts."""
    payload: dict[str, Any] = {}
    for path in event.search:
        *parents, key = path.split(".")
        inner: Any = payload
        for parent in parents:
            inner = inner.setdefault(parent, {}) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            inner.setdefault(key, "value")
    try:
        shown = import_string(hook)(event.name, deepcopy(payload)) if hook and payload else payload
        if unrun(shown):  # E070, or the hook fails for each payload
            return []
    except Exception:  # noqa: BLE001 - the hook may need a real payload; E070 reports a bad path
        return []
    kept = set(pairs(event.search, shown))
    return [path for path, value in pairs(event.search, payload) if (path, value) not in kept]


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
    anything = any(p.kind is p.VAR_KEYWORD for p in contract.parameters.values())
    own = handler.signature.parameters.values()
    takes = {p.name: p for p in own if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    missing = [name for name, p in takes.items() if p.default is p.empty and name not in given]
    if missing and not anything:
        yield Problem(
            "E011",
            f"{_where(handler)} needs {listed(missing)}, which event {event.name!r} does not have.",
            f"Correct the name, or give the argument a default. The contract "
            f"{dotted(event.contract)} has {listed(given) or 'no arguments'}.",
        )
    surplus = [name for name in given if name not in takes]
    if handler.strict and surplus and not any(p.kind is p.VAR_KEYWORD for p in own):
        yield Problem(
            "E012",
            f"{_where(handler)} is strict, but does not take {listed(surplus)} of event "
            f"{event.name!r}.",
            "Add the argument, or remove strict to leave it out.",
        )


def listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
