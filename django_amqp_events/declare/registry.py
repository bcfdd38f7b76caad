"""The events and handlers of this service, from decorators and settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations, product
from types import MappingProxyType
from typing import Any

from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from .. import conf
from ..callables import deferred
from ..conf import Settings
from ..options import (
    EVENT_OPTIONS,
    HANDLER_OPTIONS,
    POLICY_OPTIONS,
    TASK_OPTIONS,
    Problem,
    as_tuple,
    read_options,
)
from . import newest
from .declarations import (
    Declared,
    EventDeclaration,
    HandlerDeclaration,
    contract_problem,
    declarations,
    default_name,
    dotted,
    handler_problem,
    signature_of,
)
from .patterns import (
    full_name_problem,
    is_pattern,
    pattern_matches,
    pattern_problem,
    patterns_overlap,
)
from .retry_policy import RetryPolicy
from .upcasting import Upcast, Upcasters, upcasts


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """A handler of this service with all its options, which docs/settings.md describes.

    Attributes:
        key: routing key on the return and replay exchanges, unique to the handler.
        queue: full name of its queue.
        patterns: event names and topic patterns.
        target: the user's function or Celery task class.
        time_limit, soft_time_limit: seconds.
        using: alias of the database that it writes to, ``""`` for ``DATABASE``.
        upcasts: older events that it receives as one that its patterns match.
        newest: paths in the payload to the value that names a thing, and to its version; events
            that are not newer than what was handled are skipped.
    """

    name: str
    key: str
    queue: str
    patterns: tuple[str, ...]
    target: Callable[..., Any]
    bind: bool = False
    strict: bool = False
    policy: RetryPolicy = field(default_factory=RetryPolicy)
    time_limit: float | None = None
    soft_time_limit: float | None = None
    rate_limit: str | int | float | None = None
    ignore_result: bool = True
    once: bool = False
    using: str = ""
    validate: bool = False
    upcasts: tuple[Upcast, ...] = ()
    newest: tuple[str, str] | None = None

    def __hash__(self) -> int:
        return hash(self.key)  # its target need not be hashable

    @property
    def is_task_class(self) -> bool:
        return inspect.isclass(self.target)

    @property
    def is_async(self) -> bool:
        target: Any = self.target
        return deferred(target.run if self.is_task_class else target) == "async"

    @property
    def signature(self) -> inspect.Signature:
        """The parameters that take the payload, without the task."""
        target: Any = self.target
        own = signature_of(target.run if self.is_task_class else target)
        parameters = list(own.parameters.values())
        if (self.bind or self.is_task_class) and parameters:
            parameters = parameters[1:]
        return own.replace(parameters=parameters)

    @property
    def bindings(self) -> tuple[str, ...]:
        """The names and patterns that its queue is bound to."""
        return tuple(dict.fromkeys([*self.patterns, *(upcast.source for upcast in self.upcasts)]))

    def matches(self, event_name: str) -> bool:
        """Return True if its patterns match an event, which it then receives as it is."""
        return any(pattern_matches(pattern, event_name) for pattern in self.patterns)

    def upcast_of(self, event_name: str) -> Upcast | None:
        """Return how it receives an older event, None if it receives that one as it is."""
        return next((upcast for upcast in self.upcasts if upcast.source == event_name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """All events and handlers of this service."""

    events: Mapping[str, EventDeclaration]
    handlers: Mapping[str, Handler]
    problems: tuple[Problem, ...] = ()

    def by_queue(self) -> dict[str, tuple[Handler, ...]]:
        """Return the handlers of each queue."""
        queues: dict[str, tuple[Handler, ...]] = {}
        for handler in self.handlers.values():
            queues[handler.queue] = (*queues.get(handler.queue, ()), handler)
        return queues

    def find(self, queue: str, event_name: str) -> Handler | None:
        """Return the handler of a first delivery from the events exchange."""
        receivers = self.receivers(event_name)
        return next((handler for handler in receivers if handler.queue == queue), None)

    def only_event(self, queue: str) -> str:
        """Return the name of the only event that a queue is bound to, ``""`` if it is not one."""
        handlers = self.by_queue().get(queue, ())
        bound = {name for handler in handlers for name in handler.bindings}
        return bound.pop() if len(bound) == 1 and not any(map(is_pattern, bound)) else ""

    def receivers(self, event_name: str) -> Iterator[Handler]:
        """Yield the handlers that receive an event, as it is or upcast."""
        for handler in self.handlers.values():
            if handler.matches(event_name) or handler.upcast_of(event_name):
                yield handler


def build(
    settings: Settings,
    events: Iterable[EventDeclaration] = (),
    handlers: Iterable[HandlerDeclaration] = (),
) -> Registry:
    """Merge settings over the declarations of decorators, key by key."""
    builder = _Builder(settings)
    declared = builder.events(events)
    upcasters = builder.upcasters(declared)
    registry = Registry(
        events=MappingProxyType(declared),
        handlers=MappingProxyType(
            {
                name: replace(handler, upcasts=upcasts(upcasters, handler.matches))
                for name, handler in builder.handlers(handlers).items()
            }
        ),
    )
    builder.check_overlaps(registry)
    builder.check_newest(registry)
    return replace(registry, problems=tuple(builder.problems))


class _Builder:
    """Builds events and handlers, and collects the problems."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.problems: list[Problem] = []

    def report(self, code: str, what: str, hint: str, place: str = "") -> None:
        self.problems.append(Problem(code, what, hint, place))

    # -- events --

    def events(self, declared: Iterable[EventDeclaration]) -> dict[str, EventDeclaration]:
        events: dict[str, EventDeclaration] = {}
        for event in declared:
            where = dotted(event.contract)
            self.check_name("E006", where, event.name, full_name_problem(event.name))
            self.add_event(events, event.name, event.contract, event.options, where)
            known = events[event.name]
            upcasters = known.upcasters + event.upcasters
            events[event.name] = replace(known, upcasters=upcasters)
        for name, options in self.settings.events.items():
            where = f"AMQP_EVENTS['EVENTS'][{name!r}]"
            self.check_name("E006", where, name, full_name_problem(name))
            given = {**options}
            contract = given.pop("contract", None)
            if contract is not None:
                contract = self.load(contract, f"{where}['CONTRACT']")
            self.add_event(events, name, contract, given, where)
        default = self.settings.validate
        return {
            name: event if event.validate is not None else replace(event, validate=default)
            for name, event in events.items()
        }

    def add_event(
        self,
        events: dict[str, EventDeclaration],
        name: str,
        contract: Callable[..., Any] | None,
        options: Mapping[str, Any],
        where: str,
    ) -> None:
        """Merge a declaration over the earlier ones of the same event."""
        known = events.get(name, EventDeclaration(name=name))
        if known.contract is not None and contract not in (None, known.contract):
            self.report(
                "E008",
                f"Event {name!r} has two contracts: {dotted(known.contract)} and "
                f"{dotted(contract)}.",
                "Remove one of them. A service that handles the event can import its declaration.",
            )
            contract = None
        elif contract is not None and (wrong := contract_problem(contract)):
            what = f"The contract {dotted(contract)} of event {name!r} {wrong[0]}."
            self.report("E022", what, wrong[1])
            contract = None
        values = read_options(EVENT_OPTIONS, options, where, self.problems, "E009")
        events[name] = replace(known, contract=contract or known.contract, **values)

    def upcasters(self, events: Mapping[str, EventDeclaration]) -> Upcasters:
        """Return the next version of each older event, and the upcaster to it."""
        following: dict[str, tuple[str, Callable[..., Any]]] = {}
        for event in events.values():
            for source, function in event.upcasters:
                where = f"The upcaster {dotted(function)} of event {event.name!r}"
                known = following.setdefault(source, (event.name, function))
                if source not in events:
                    self.report(
                        "E081",
                        f"{where} reads event {source!r:.80}, which is not declared.",
                        "Correct the name, or declare the older event too, with @event or EVENTS.",
                    )
                elif known != (event.name, function):
                    self.report(
                        "E008",
                        f"{where} and {dotted(known[1])} of event {known[0]!r} read the same event "
                        f"{source!r}.",
                        "Remove one of them.",
                    )
        return following

    def check_name(self, code: str, where: str, name: object, wrong: str | None) -> None:
        if wrong:
            self.report(
                code,
                f"{where}: {name!r:.80} is not a valid name: {wrong}.",
                "Use words separated by dots, such as shop.order.created.",
            )

    # -- handlers --

    def handlers(self, declared: Iterable[HandlerDeclaration]) -> dict[str, Handler]:
        merged: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}
        for declaration in declared:
            name = declaration.name or default_name(declaration.target)
            if name in merged:
                self.report_duplicate(name, merged[name][0], declaration.target)
            else:
                options = {**_class_options(declaration.target), **declaration.options}
                merged[name] = (declaration.target, options)
        for name, settings in self.settings.handlers.items():
            where = f"AMQP_EVENTS['HANDLERS'][{name!r}]"
            given = {**settings}
            path = given.pop("handler", None)
            target, options = merged.get(name, (None, {}))
            if path is not None:
                loaded = self.load(path, f"{where}['HANDLER']")
                if loaded is None:
                    continue
                if target is not None and target is not loaded:
                    self.report_duplicate(name, target, loaded)
                    continue
                target, options = loaded, options or _class_options(loaded)
            if target is not None:
                merged[name] = (target, {**options, **given})
            elif given.get("enabled") is not False:
                self.report(
                    "E007",
                    f"{where} has no 'HANDLER', and no decorator declares a handler of that name.",
                    "Add 'HANDLER' with the dotted path of a function, or correct the name.",
                )
        handlers = {}
        for name, (target, options) in merged.items():
            if options.get("enabled") is not False:
                handler = self.handler(name, target, {**self.settings.defaults, **options})
                if handler is not None:
                    handlers[name] = handler
        return handlers

    def report_duplicate(self, name: str, first: Any, second: Any) -> None:
        self.report(
            "E008",
            f"Two handlers are named {name!r}: {dotted(first)} and {dotted(second)}.",
            "Give one of them another name. A handler can take several events, as in "
            "@handler('a', 'b').",
        )

    def handler(
        self, name: str, target: Callable[..., Any], options: Mapping[str, Any]
    ) -> Handler | None:
        """Return a handler, or None if it has an error."""
        before = len(self.problems)
        where = f"Handler {name!r} ({dotted(target)})"
        values = self.read(options, where)
        values.setdefault("validate", self.settings.validate)
        if values.get("newest"):
            if values.get("once") is False:
                self.report(
                    "E009",
                    f"{where}: newest needs once, which is False.",
                    "Remove once from the handler, or ONCE from DEFAULTS: newest sets it.",
                )
            values["once"] = True
        queue = values.pop("queue", None) or name
        namespace = f"{self.settings.prefix}{self.settings.service}."
        for own in (name,) if queue is name else (name, queue):
            if wrong := "it has a colon" if ":" in str(own) else full_name_problem(own):
                self.check_name("E004", where, own, wrong)
            else:
                self.problems.extend(conf.name_problems(namespace + own, where))
        events = as_tuple(values.pop("events", None) or ())
        patterns = tuple(getattr(event, "name", event) for event in events)
        if not patterns:
            self.report(
                "E006", f"{where} names no events.", "Add the event names or topic patterns."
            )
        for pattern in patterns:
            self.check_name("E006", where, pattern, pattern_problem(pattern))
        if not callable(target):
            self.report(
                "E007", f"{where} is not callable.", "Use a function or a Celery task class."
            )
        elif unusable := handler_problem(target, bind=values.get("bind") is True):
            self.report(unusable[0], f"{where} {unusable[1]}.", unusable[2])
        if any(problem.is_error for problem in self.problems[before:]):
            return None
        return Handler(
            name=name,
            key=namespace + name,
            queue=namespace + queue,
            patterns=patterns,
            target=target,
            **values,
        )

    def read(self, options: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the valid options of a handler or of ``DEFAULTS``, retry options as policy."""
        given = {**options}
        for key in ("autoretry_for", "dont_autoretry_for"):
            if key in given:
                classes = []
                for item in as_tuple(given[key]):
                    if not isinstance(item, str):
                        classes.append(item)
                    elif loaded := self.load(item, where, f": {key}"):
                        classes.append(loaded)
                given[key] = tuple(classes)
        values = read_options(HANDLER_OPTIONS, given, where, self.problems, "E009")
        hard, soft = values.get("time_limit"), values.get("soft_time_limit")
        if hard and soft and soft >= hard:
            self.report(
                "E009",
                f": soft_time_limit ({soft} s) is not below time_limit ({hard} s).",
                "Lower soft_time_limit, so that the handler can stop before it is killed.",
                where,
            )
        for unused in ("enabled", "handler"):
            values.pop(unused, None)
        policy = RetryPolicy(**{key: values.pop(key) for key in POLICY_OPTIONS if key in values})
        if policy.retry_backoff > policy.retry_backoff_max:
            self.report(
                "E009",
                f": retry_backoff ({policy.retry_backoff} s) is above retry_backoff_max "
                f"({policy.retry_backoff_max} s).",
                "Raise retry_backoff_max, or lower retry_backoff.",
                where,
            )
        return {**values, "policy": policy}

    def load(self, path: Any, where: str, option: str = "") -> Any:
        """Return the callable of a dotted path, without our decorators; None if there is none.

        A user's decorators, such as transaction.atomic, are part of it.
        """
        target = path
        if isinstance(path, str):
            try:
                # Built-in exceptions are named without their module.
                target = import_string(path if "." in path else f"builtins.{path}")
            except Exception as exc:  # noqa: BLE001 - importing runs the user's module
                self.report(
                    "E007",
                    f"{option}: {path!r} cannot be imported: {type(exc).__name__}: {exc}.",
                    "Correct the dotted path, or fix the module.",
                    where,
                )
                return None
        if isinstance(target, Declared):
            target = target.function
        if not callable(target):
            self.report(
                "E007",
                f"{option}: {path!r:.80} is not callable.",
                "Use the dotted path of a function or a class.",
                where,
            )
            return None
        return target

    # -- checks of the whole --

    def check_overlaps(self, registry: Registry) -> None:
        """Report handlers of one queue that could match the same event.

        RabbitMQ puts one copy into a queue however many bindings match, so one of the handlers
        would never receive the event.
        """
        for queue, handlers in registry.by_queue().items():
            for first, second in combinations(handlers, 2):
                for left, right in product(first.bindings, second.bindings):
                    if patterns_overlap(left, right):
                        self.report(
                            "E010",
                            f"Handlers {first.name!r} and {second.name!r} share the queue "
                            f"{queue!r}, and {left!r} and {right!r} can match the same event, "
                            f"which RabbitMQ puts into the queue once.",
                            "Give one of them a queue of its own.",
                        )

    def check_newest(self, registry: Registry) -> None:
        """Report events without the version that a handler with ``newest`` reads."""
        for handler in registry.handlers.values():
            for event in registry.events.values():
                if not handler.newest or not event.contract or not handler.matches(event.name):
                    continue
                if wrong := newest.contract_problem(handler.newest, event.contract):
                    self.report(
                        "E043",
                        f"Handler {handler.name!r} has newest={handler.newest}, but the contract "
                        f"of event {event.name!r} {wrong}.",
                        "Correct the paths, or add the version to the contract.",
                    )


def _class_options(target: Any) -> dict[str, Any]:
    """Return the options that a Celery task class sets itself, without Celery's defaults."""
    if not inspect.isclass(target):
        return {}
    return {
        key: value
        for cls in reversed(target.__mro__)
        if not cls.__module__.startswith("celery.")
        for key, value in vars(cls).items()
        if key in POLICY_OPTIONS or key in TASK_OPTIONS
    }


@lru_cache(maxsize=1)
def get_registry() -> Registry:
    """Return the registry of this process.

    Raises:
        ConfigurationError: settings or declarations have errors.
    """
    settings = conf.get_settings()
    registry = build(settings, *declarations.snapshot())
    conf.raise_errors(registry.problems)
    return registry


def _forget(*, setting: str, **_: Any) -> None:
    if setting in (conf.SETTING, "DEBUG"):
        get_registry.cache_clear()


declarations.listeners.append(get_registry.cache_clear)
setting_changed.connect(_forget, dispatch_uid="django_amqp_events.declare.registry")
