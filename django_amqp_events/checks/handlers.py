"""Checks of contracts and handlers."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any, Final

from celery import Task
from celery.local import Proxy

from ..declare import declarations
from ..declare.registry import EventType, Handler
from ..options import Problem
from .project import Project

# -- handlers and contracts ---------------------------------------------------------------


def check_contracts(project: Project) -> Iterator[Problem]:
    """Contracts whose body or signature cannot validate anything (E022)."""
    for event in project.registry.events.values():
        if event.contract is None:
            continue
        where = f"The contract {declarations.dotted(event.contract)} of event {event.name!r}"
        if _never_runs(event.contract) or inspect.iscoroutinefunction(event.contract):
            yield Problem(
                "E022",
                f"{where} is asynchronous or a generator, so its body would never run.",
                "Write it as a plain function: it is called with the payload and raises.",
            )
        elif _signature(event.contract) is None:
            yield Problem(
                "E022",
                f"{where} has no signature that Python can read.",
                "Write it as a plain function whose arguments are the payload.",
            )


def check_handlers(project: Project) -> Iterator[Problem]:
    """Handlers that cannot be called (E013, E014) or do not match an event (E011, E012)."""
    for handler in project.registry.handlers.values():
        unusable = _unusable(handler)
        if unusable:
            yield unusable
            continue
        for event in project.registry.events.values():
            if event.contract is not None and handler.matches(event.name):
                yield from _compare(handler, event)


def _unusable(handler: Handler) -> Problem | None:
    """Return why a handler's callable cannot be a handler."""
    target: Any = handler.target
    where = f"Handler {handler.name!r} ({declarations.dotted(target)})"
    if isinstance(target, (Proxy, Task)):
        return Problem(
            "E013",
            f"{where} is a Celery task already.",
            "Take @shared_task or @app.task away: a handler becomes a task by itself. A task "
            "class, derived from celery.Task, may be a handler.",
        )
    if handler.is_task_class:
        if not issubclass(target, Task):
            return Problem(
                "E013",
                f"{where} is a class, but no Celery task class.",
                "Derive it from celery.Task, or name a function.",
            )
        run = inspect.getattr_static(target, "run")
        if not inspect.isfunction(run) or target.run is Task.run:
            return Problem(
                "E013",
                f"{where} has no method run() of its own.",
                "Write run(self, …) with the event's payload as its arguments.",
            )
        target = run
    if _never_runs(target):
        return Problem(
            "E013",
            f"{where} is a generator: calling it runs nothing.",
            "Take the yield out of it.",
        )
    signature = _signature(target)
    if signature is None:
        return Problem(
            "E013",
            f"{where} has no signature that Python can read.",
            "Wrap it in a function whose arguments are the event's payload.",
        )
    parameters = list(signature.parameters.values())
    if handler.bind or handler.is_task_class:
        if not parameters or parameters[0].kind not in _POSITIONAL:
            return Problem(
                "E014",
                f"{where} gets the task as its first argument, but takes none.",
                "Add self in front of its arguments, or take bind away.",
            )
        if parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
            del parameters[0]
    needed = [
        parameter.name
        for parameter in parameters
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty
    ]
    if needed:
        return Problem(
            "E013",
            f"{where} takes {listed(needed)} by position only, but a payload is given by name.",
            "Take the / out of its arguments.",
        )
    return None


_POSITIONAL: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


def _compare(handler: Handler, event: EventType) -> Iterator[Problem]:
    """Yield what of an event's payload a handler misses or does not take."""
    contract = _signature(event.contract)
    if contract is None:
        return
    given = [p.name for p in contract.parameters.values() if p.kind not in _VARIABLE]
    anything = any(p.kind is p.VAR_KEYWORD for p in contract.parameters.values())
    own = handler.signature.parameters.values()
    takes = {p.name: p for p in own if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    where = f"Handler {handler.name!r} ({declarations.dotted(handler.target)})"
    missing = [name for name, p in takes.items() if p.default is p.empty and name not in given]
    if missing and not anything:
        yield Problem(
            "E011",
            f"{where} needs {listed(missing)}, which event {event.name!r} does not have.",
            f"The contract {declarations.dotted(event.contract)} gives "
            f"{listed(given) or 'nothing'}. "
            f"Correct the name, or give the argument a default.",
        )
    surplus = [name for name in given if name not in takes]
    if handler.strict and surplus and not any(p.kind is p.VAR_KEYWORD for p in own):
        yield Problem(
            "E012",
            f"{where} is strict and does not take {listed(surplus)}, which event "
            f"{event.name!r} has.",
            "Add the argument, or take strict away: what a handler does not take is left out.",
        )


_VARIABLE: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _signature(target: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):
        return None


def _never_runs(target: Any) -> bool:
    return inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target)


def listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
