"""The declarations made by decorators in this process."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from celery import Task
from celery.local import Proxy
from django.apps import apps

from ..callables import deferred
from ..options import Format

_POSITIONAL: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventDeclaration:
    """An event declared by ``@event`` or ``EVENTS``.

    Attributes:
        contract: function whose signature and body validate a payload.
        options: without the defaults.
        format: in which it is published; ``None`` for that of the service.
        validate: whether its type hints do so too; None for the setting ``VALIDATE``.
        upcasters: functions that make its payload from that of an older event, with its name.
        publisher: name of the service that publishes it; ``""`` for the first word of its name.
        search: paths of the payload whose values find an archived event.
    """

    name: str
    contract: Callable[..., Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    format: Format | None = None
    validate: bool | None = None
    upcasters: tuple[tuple[str, Callable[..., Any]], ...] = ()
    publisher: str = ""
    search: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerDeclaration:
    """A handler declared by ``@handler``, before settings are merged over it.

    Attributes:
        target: the function or the Celery task class.
        name: ``""`` stands for ``app_label.function``.
        options: without the defaults.
    """

    target: Callable[..., Any]
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


Snapshot = tuple[tuple[EventDeclaration, ...], tuple[HandlerDeclaration, ...]]


class Declared:
    """An object that a decorator of this package has made of a user's function."""

    @property
    def function(self) -> Callable[..., Any] | None:
        """The user's function; None for an event without a contract."""
        raise NotImplementedError


class _Declarations:
    """The declarations made by decorators, in order of import."""

    def __init__(self) -> None:
        self.events: list[EventDeclaration] = []
        self.handlers: list[HandlerDeclaration] = []
        #: Called after each change, so that the registry is built again.
        self.listeners: list[Callable[[], object]] = []

    def _changed(self) -> None:
        for listener in self.listeners:
            listener()

    def add_event(self, declaration: EventDeclaration) -> None:
        self.events.append(declaration)
        self._changed()

    def add_handler(self, declaration: HandlerDeclaration) -> None:
        self.handlers.append(declaration)
        self._changed()

    def snapshot(self) -> Snapshot:
        return tuple(self.events), tuple(self.handlers)

    def restore(self, state: Snapshot) -> None:
        self.events, self.handlers = list(state[0]), list(state[1])
        self._changed()


declarations = _Declarations()


def dotted(target: Any) -> str:
    """Return the dotted path of a function or class."""
    return f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', target)}"


def signature_of(target: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a callable.

    From Python 3.14 on, annotations are evaluated when they are read. A name that only a type
    checker imports stays a forward reference.
    """
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(target, annotation_format=Format.FORWARDREF)
    return inspect.signature(target)


def readable_signature(target: Any) -> inspect.Signature | None:
    """Return the signature of a callable, None if Python cannot read it."""
    try:
        return signature_of(target)
    except (TypeError, ValueError):
        return None


def contract_problem(contract: Any) -> tuple[str, str] | None:
    """Return why a callable cannot be a contract, and the remedy; None if it can."""
    if kind := deferred(contract):
        hint = "Write an ordinary function that raises an exception for an invalid payload."
        return f"is {kind}, so its body would never run", hint
    if readable_signature(contract) is None:
        hint = "Write an ordinary function whose arguments are the payload."
        return "has no signature that Python can read", hint
    return None


def handler_problem(target: Any, *, bind: bool = False) -> tuple[str, str, str] | None:
    """Return why a callable cannot be a handler: id of the check, problem, remedy."""
    if isinstance(target, (Proxy, Task)):
        hint = "Remove @shared_task or @app.task. A class that derives from celery.Task is valid."
        return "E013", "is already a Celery task", hint
    is_class = inspect.isclass(target)
    if is_class:
        if not issubclass(target, Task):
            hint = "Derive it from celery.Task, or use a function."
            return "E013", "is a class, but not a Celery task class", hint
        run = inspect.getattr_static(target, "run")
        if not inspect.isfunction(run) or target.run is Task.run:
            hint = "Define run(self, …) with the event's payload as its arguments."
            return "E013", "does not define the method run()", hint
        target = run
    if deferred(target) == "a generator":
        return "E013", "is a generator, so calling it runs nothing", "Remove the yield."
    signature = readable_signature(target)
    if signature is None:
        hint = "Wrap it in a function whose arguments are the event's payload."
        return "E013", "has no signature that Python can read", hint
    parameters = list(signature.parameters.values())
    if bind or is_class:
        if not parameters or parameters[0].kind not in _POSITIONAL:
            hint = "Add self before the other arguments, or remove bind."
            return "E014", "does not take the task as its first argument", hint
        if parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
            del parameters[0]
    needed = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if needed:
        names = ", ".join(map(repr, needed))
        what = f"takes {names} by position only, but a payload is passed by name"
        return "E013", what, "Remove the / from its arguments."
    return None


def default_name(target: Callable[..., Any]) -> str:
    """Return ``app_label.function``; outside of an app, the top-level package is the label."""
    module = getattr(target, "__module__", "") or ""
    config = apps.get_containing_app_config(module) if apps.apps_ready else None
    label = config.label if config else module.partition(".")[0]
    return f"{label}.{getattr(target, '__name__', 'handler')}"
