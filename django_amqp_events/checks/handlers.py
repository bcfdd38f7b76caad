"""Checks of contracts and handlers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any, Final

from celery import Task
from celery.local import Proxy
from django.utils.module_loading import import_string

from ..archive.search_values import pairs
from ..catalogue.json_schema import may_have_value, object_schema
from ..declare.declarations import EventDeclaration, dotted, signature_of
from ..declare.registry import Handler
from ..declare.validation import Validator
from ..exceptions import ConfigurationError
from ..options import Problem
from .project import Project

_POSITIONAL: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)
_VARIABLE: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_contracts(project: Project) -> Iterator[Problem]:
    """Contracts whose body or signature cannot validate anything (E022)."""
    for event in project.registry.events.values():
        if event.contract is None:
            continue
        where = f"The contract {dotted(event.contract)} of event {event.name!r}"
        if _is_generator(event.contract) or inspect.iscoroutinefunction(event.contract):
            yield Problem(
                "E022",
                f"{where} is asynchronous or a generator, so its body never runs.",
                "Write an ordinary function that raises an exception for an invalid payload.",
            )
        elif _signature(event.contract) is None:
            yield Problem(
                "E022",
                f"{where} has no signature that Python can read.",
                "Write an ordinary function whose arguments are the payload.",
            )


def check_handlers(project: Project) -> Iterator[Problem]:
    """Handlers that cannot be called (E013, E014) or do not match an event (E011, E012)."""
    for handler in project.registry.handlers.values():
        if unusable := _unusable(handler):
            yield Problem(unusable[0], f"{_where(handler)} {unusable[1]}.", unusable[2])
            continue
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
    signature = _signature(contract)
    if signature is None:
        return True
    schema = object_schema(contract, [*signature.parameters.values()])
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
    except Exception:  # noqa: BLE001 - the hook may need a real payload; E070 reports a bad path
        return []
    kept = set(pairs(event.search, shown))
    return [path for path, value in pairs(event.search, payload) if (path, value) not in kept]


def check_validation(project: Project) -> Iterator[Problem]:
    """Type hints that VALIDATE cannot enforce (E080)."""
    hinted = [
        (_signature(event.contract), event.contract)
        for event in project.registry.events.values()
        if event.validate and event.contract is not None
    ]
    hinted += [
        (handler.signature, handler.target)
        for handler in project.registry.handlers.values()
        if handler.validate and not _unusable(handler)
    ]
    problems = {}
    for signature, target in hinted:
        try:
            if signature is not None:
                Validator(signature, target)
        except ConfigurationError as exc:
            what, _, hint = str(exc).rpartition(". ")
            problems[f"{what[:1].upper()}{what[1:]}."] = f"{hint}."
    # One, if pydantic is missing.
    return (Problem("E080", message, hint) for message, hint in problems.items())


def _where(handler: Handler) -> str:
    return f"Handler {handler.name!r} ({dotted(handler.target)})"


def _unusable(handler: Handler) -> tuple[str, str, str] | None:
    """Return why a callable cannot be a handler: id of the check, problem, hint."""
    target: Any = handler.target
    if isinstance(target, (Proxy, Task)):
        hint = "Remove @shared_task or @app.task. A class that derives from celery.Task is valid."
        return "E013", "is already a Celery task", hint
    if handler.is_task_class:
        if not issubclass(target, Task):
            hint = "Derive it from celery.Task, or use a function."
            return "E013", "is a class, but not a Celery task class", hint
        run = inspect.getattr_static(target, "run")
        if not inspect.isfunction(run) or target.run is Task.run:
            hint = "Define run(self, …) with the event's payload as its arguments."
            return "E013", "does not define the method run()", hint
        target = run
    if _is_generator(target):
        return "E013", "is a generator, so calling it runs nothing", "Remove the yield."
    signature = _signature(target)
    if signature is None:
        hint = "Wrap it in a function whose arguments are the event's payload."
        return "E013", "has no signature that Python can read", hint
    parameters = list(signature.parameters.values())
    if handler.bind or handler.is_task_class:
        if not parameters or parameters[0].kind not in _POSITIONAL:
            hint = "Add self before the other arguments, or remove bind."
            return "E014", "does not take the task as its first argument", hint
        if parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
            del parameters[0]
    needed = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if needed:
        what = f"takes {listed(needed)} by position only, but a payload is passed by name"
        return "E013", what, "Remove the / from its arguments."
    return None


def _compare(handler: Handler, event: EventDeclaration) -> Iterator[Problem]:
    """Yield the differences between an event's payload and a handler's arguments."""
    contract = _signature(event.contract)
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


def _signature(target: Any) -> inspect.Signature | None:
    try:
        return signature_of(target)
    except (TypeError, ValueError):
        return None


def _is_generator(target: Any) -> bool:
    return inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target)


def listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
