"""The declarations made by decorators in this process."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.apps import apps

from ..options import Format


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
        self._lock = threading.Lock()
        self.events: list[EventDeclaration] = []
        self.handlers: list[HandlerDeclaration] = []
        #: Called after each change, so that the registry is built again.
        self.listeners: list[Callable[[], object]] = []

    def _changed(self) -> None:
        for listener in self.listeners:
            listener()

    def add_event(self, declaration: EventDeclaration) -> None:
        with self._lock:
            self.events.append(declaration)
        self._changed()

    def add_handler(self, declaration: HandlerDeclaration) -> None:
        with self._lock:
            self.handlers.append(declaration)
        self._changed()

    def snapshot(self) -> Snapshot:
        with self._lock:
            return tuple(self.events), tuple(self.handlers)

    def restore(self, state: Snapshot) -> None:
        with self._lock:
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


def default_name(target: Callable[..., Any]) -> str:
    """Return ``app_label.function``; outside of an app, the top-level package is the label."""
    module = getattr(target, "__module__", "") or ""
    config = apps.get_containing_app_config(module) if apps.apps_ready else None
    label = config.label if config else module.partition(".")[0]
    return f"{label}.{getattr(target, '__name__', 'handler')}"
