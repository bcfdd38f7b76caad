"""The events and handlers of this service, from decorators and settings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from .. import conf
from ..conf import (
    POLICY_OPTIONS,
    TASK_OPTIONS,
    Problem,
    Settings,
)
from ..exceptions import ConfigurationError
from .declarations import (
    EventDeclaration,
    HandlerDeclaration,
    declarations,
    default_name,
    dotted,
)
from .patterns import (
    is_pattern,
    pattern_matches,
    pattern_problem,
    patterns_overlap,
)
from .retry_policy import RetryPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class EventType:
    """An event that this service knows.

    Attributes:
        contract: function whose signature and body validate a payload, if there is one.
    """

    name: str
    contract: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """A handler of this service, with every option resolved.

    Attributes:
        name: ``app_label.function`` unless given.
        key: routing key on the return and replay exchanges; no other handler has it.
        queue: full name of the queue that it is handled from.
        patterns: event names and topic patterns that it handles.
        target: the user's function or Celery task class.
        bind: the function takes the task as its first argument.
        strict: arguments that it does not take are an error instead of being dropped.
        policy: when a failure is tried again.
        time_limit, soft_time_limit: seconds; prefork pools only.
        rate_limit: Celery's rate limit, such as ``"10/m"``.
        ignore_result: store no successful results.
        once: its effects in the database happen once per event.
        using: alias of the database that it writes to, ``""`` for ``DATABASE``.
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

    @property
    def is_task_class(self) -> bool:
        return inspect.isclass(self.target)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.target)

    @property
    def signature(self) -> inspect.Signature:
        """Signature of what the payload is bound to, without the task itself."""
        target: Any = self.target
        own = inspect.signature(target.run if self.is_task_class else target)
        parameters = list(own.parameters.values())
        if (self.bind or self.is_task_class) and parameters:
            parameters = parameters[1:]
        return own.replace(parameters=parameters)

    def matches(self, event_name: str) -> bool:
        """Return True if the handler receives events of that name."""
        return any(pattern_matches(pattern, event_name) for pattern in self.patterns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """All events and handlers of this service."""

    events: Mapping[str, EventType]
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
        for handler in self.handlers.values():
            if handler.queue == queue and handler.matches(event_name):
                return handler
        return None


def build(
    settings: Settings,
    events: Iterable[EventDeclaration] = (),
    handlers: Iterable[HandlerDeclaration] = (),
) -> Registry:
    """Put decorators and settings together.

    Settings merge over the decorator key by key when they name the same handler.
    """
    problems: list[Problem] = []
    return Registry(
        events=MappingProxyType(_events(settings, events, problems)),
        handlers=MappingProxyType(_handlers(settings, handlers, problems)),
        problems=tuple(problems),
    )


def _events(
    settings: Settings, declared: Iterable[EventDeclaration], problems: list[Problem]
) -> dict[str, EventType]:
    found: dict[str, EventType] = {}
    for declaration in declared:
        _check_event_name(declaration.name, declaration.source or declaration.name, problems)
        known = found.get(declaration.name)
        if known and known.contract is not declaration.contract:
            problems.append(
                Problem(
                    "E008",
                    f"Event {declaration.name!r} is declared twice: by "
                    f"{dotted(known.contract)} and by {dotted(declaration.contract)}.",
                    "Keep one; a service that handles the event imports it from there.",
                )
            )
            continue
        found[declaration.name] = EventType(name=declaration.name, contract=declaration.contract)
    for name, options in settings.events.items():
        where = f"AMQP_EVENTS['EVENTS'][{name!r}]"
        _check_event_name(name, where, problems)
        contract = options.get("contract")
        if contract is not None:
            contract = _load(contract, f"{where}['CONTRACT']", problems)
            if contract is None:
                continue
            if not callable(contract):
                problems.append(
                    Problem(
                        "E007",
                        f"{where}['CONTRACT'] is not callable.",
                        "Name the function whose arguments are the event's payload.",
                    )
                )
                continue
            known = found.get(name)
            if known and known.contract not in (None, contract):
                problems.append(
                    Problem(
                        "E008",
                        f"{where} names the contract {dotted(contract)}, but "
                        f"{dotted(known.contract)} is declared for this event.",
                        "Take one of the two away.",
                    )
                )
                continue
        elif name in found:
            continue
        found[name] = EventType(name=name, contract=contract)
    return found


def _check_event_name(name: str, where: str, problems: list[Problem]) -> None:
    wrong = pattern_problem(name)
    if wrong is None and is_pattern(name):
        wrong = "an event that is published has a full name, without * and #"
    if wrong:
        problems.append(
            Problem(
                "E006",
                f"{where}: {name!r:.80} is no event name: {wrong}.",
                "Use words with dots between them, such as shop.order.created.",
            )
        )


def _handlers(
    settings: Settings, declared: Iterable[HandlerDeclaration], problems: list[Problem]
) -> dict[str, Handler]:
    merged: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}
    for declaration in declared:
        name = declaration.name or default_name(declaration.target)
        if name in merged:
            other = merged[name][0]
            problems.append(
                Problem(
                    "E008",
                    f"Two handlers are named {name!r}: {dotted(other)} and {declaration.source}.",
                    "Give one of them another name=…; one handler takes several events as "
                    "@handler('a', 'b').",
                )
            )
            continue
        merged[name] = (
            declaration.target,
            {**_class_options(declaration.target), **declaration.options},
        )
    for name, options in settings.handlers.items():
        where = f"AMQP_EVENTS['HANDLERS'][{name!r}]"
        known = merged.get(name)
        path = options.get("handler")
        if path is None:
            if known is None:
                if options.get("enabled", True) is False:
                    continue
                problems.append(
                    Problem(
                        "E007",
                        f"{where} has no HANDLER, and no decorator declares a handler of "
                        f"that name.",
                        "Add HANDLER with the dotted path of a function, or correct the name.",
                    )
                )
                continue
            target = known[0]
        else:
            loaded = _load(path, f"{where}['HANDLER']", problems)
            if loaded is None:
                continue
            if known is not None and loaded is not known[0]:
                problems.append(
                    Problem(
                        "E008",
                        f"{where} names {dotted(loaded)}, but a decorator gives this name to "
                        f"{dotted(known[0])}.",
                        "Give one of them another name, or take HANDLER out.",
                    )
                )
                continue
            target = loaded
        given = {key: value for key, value in options.items() if key != "handler"}
        merged[name] = (target, {**(known[1] if known else _class_options(target)), **given})
    handlers: dict[str, Handler] = {}
    for name, (target, options) in merged.items():
        effective = {**settings.defaults, **options}
        enabled = effective.pop("enabled", True)
        if enabled is False:
            continue
        if enabled is not True:
            problems.append(
                Problem(
                    "E009",
                    f"Handler {name!r} ({dotted(target)}): enabled is {enabled!r:.80}.",
                    "It is True or False.",
                )
            )
        handler = _handler(settings, name, target, effective, problems)
        if handler is not None:
            handlers[name] = handler
    _check_overlaps(handlers, problems)
    _check_defaults(settings, problems)
    return handlers


def _check_defaults(settings: Settings, problems: list[Problem]) -> None:
    """Warn of ``DEFAULTS`` that make no sense, even where each handler has options of its own."""
    found: list[Problem] = []
    where = "AMQP_EVENTS['DEFAULTS']"
    _check_options(settings.defaults, where, found)
    for problem in found:
        what = problem.message.removeprefix(where)
        # A handler that takes it has an error of its own.
        if not any(other.message.endswith(what) for other in problems):
            problems.append(Problem("W018", problem.message, problem.hint))


def _class_options(target: Any) -> dict[str, Any]:
    """Return the options that a Celery task class sets itself, Celery's defaults left out."""
    options: dict[str, Any] = {}
    if inspect.isclass(target):
        for cls in reversed(target.__mro__):
            if cls is not object and not cls.__module__.startswith("celery."):
                options.update(
                    {
                        key: value
                        for key, value in vars(cls).items()
                        if key in POLICY_OPTIONS or key in TASK_OPTIONS
                    }
                )
    return options


def _handler(
    settings: Settings,
    name: str,
    target: Callable[..., Any],
    options: dict[str, Any],
    problems: list[Problem],
) -> Handler | None:
    before = len(problems)
    where = f"Handler {name!r} ({dotted(target)})"

    def wrong(code: str, what: str, hint: str) -> None:
        problems.append(Problem(code, f"{where}: {what}", hint))

    for key in options:
        if key not in conf.HANDLER_OPTIONS:
            problems.append(conf.unknown_key(where, key, conf.HANDLER_OPTIONS))
    if not name or ":" in name or any(char.isspace() or ord(char) < 32 for char in name):
        wrong(
            "E004",
            f"the name {name!r:.80} has a colon, a space or a control character.",
            "Use letters, digits, dots, - and _; the colon marks infrastructure.",
        )
    elif is_pattern(name) or not all(name.split(".")):
        wrong(
            "E004",
            f"the name {name!r:.80} has an empty word, * or # between its dots.",
            "Use words with dots between them.",
        )
    queue_option = options.get("queue") or name
    if not isinstance(queue_option, str) or ":" in queue_option or not queue_option.strip():
        wrong("E004", f"the queue {queue_option!r:.80} is no name.", "Use a text without a colon.")
        queue_option = name
    namespace = f"{settings.prefix}{settings.service}."
    for full in {namespace + queue_option, namespace + name}:
        problems.extend(conf.name_problems(full, where))
    patterns = options.get("events") or ()
    if isinstance(patterns, str) or not isinstance(patterns, Iterable):
        patterns = (patterns,)
    patterns = tuple(getattr(pattern, "name", pattern) for pattern in patterns)
    if not patterns:
        wrong("E006", "no event is named.", "Name the events or topic patterns that it handles.")
    for pattern in patterns:
        problem = pattern_problem(pattern)
        if problem:
            wrong("E006", f"{pattern!r:.80} is no event name or pattern: {problem}.", "Correct it.")
    policy = _check_options(options, where, problems)
    if not callable(target):
        wrong("E007", "it is not callable.", "Name a function or a Celery task class.")
    if len(problems) > before and any(problem.is_error for problem in problems[before:]):
        return None
    return Handler(
        name=name,
        key=namespace + name,
        queue=namespace + queue_option,
        patterns=patterns,
        target=target,
        bind=options.get("bind", False),
        strict=options.get("strict", False),
        policy=policy,
        time_limit=options.get("time_limit"),
        soft_time_limit=options.get("soft_time_limit"),
        rate_limit=options.get("rate_limit"),
        ignore_result=options.get("ignore_result", True),
        once=options.get("once", False),
        using=options.get("using", ""),
    )


def _check_options(options: Mapping[str, Any], where: str, problems: list[Problem]) -> RetryPolicy:
    """Check the options that a handler and ``DEFAULTS`` may have; return the retry policy."""

    def wrong(what: str, hint: str) -> None:
        problems.append(Problem("E009", f"{where}: {what}", hint))

    for key in ("bind", "strict", "ignore_result", "once"):
        if not isinstance(options.get(key, False), bool):
            wrong(f"{key} is {options[key]!r}.", "It is True or False.")
    for key in ("time_limit", "soft_time_limit"):
        limit = options.get(key)
        if limit is not None and (
            isinstance(limit, bool)
            or not isinstance(limit, (int, float))
            or not 0 < limit < conf.MAX
        ):
            wrong(f"{key} is {limit!r:.80}.", "It is a number of seconds above 0.")
    if not _is_rate(options.get("rate_limit")):
        wrong(
            f"rate_limit is {options['rate_limit']!r:.80}.",
            "It is a number a second, or a text such as '10/s', '100/m' or '1000/h'.",
        )
    hard, soft = options.get("time_limit"), options.get("soft_time_limit")
    if isinstance(hard, (int, float)) and isinstance(soft, (int, float)) and soft >= hard:
        wrong(
            f"soft_time_limit ({soft} s) is not below time_limit ({hard} s).",
            "The handler would be killed before it is asked to stop.",
        )
    using = options.get("using", "")
    if not isinstance(using, str):
        wrong(f"using is {using!r:.80}.", "It is the alias of a database.")
    return _policy(options, where, problems)


def _is_rate(value: object) -> bool:
    """Return True if Celery accepts *value* as a rate limit (celery.utils.time.rate)."""
    if value is None:
        return True
    if isinstance(value, str):
        count, _, unit = value.partition("/")
        return unit in ("", "s", "m", "h") and re.fullmatch(r"\d+(\.\d+)?", count) is not None
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < conf.MAX


def _policy(options: Mapping[str, Any], where: str, problems: list[Problem]) -> RetryPolicy:
    given = {key: options[key] for key in POLICY_OPTIONS if key in options}
    for key in ("autoretry_for", "dont_autoretry_for"):
        if key in given:
            items = given[key]
            if isinstance(items, (str, type)) or not isinstance(items, Iterable):
                items = (items,)
            loaded = (
                (item, _load(item, f"{where}: {key}", problems) if isinstance(item, str) else item)
                for item in items
            )
            # A path that could not be imported has its problem already.
            given[key] = tuple(
                target for item, target in loaded if target is not None or item is None
            )
    try:
        return RetryPolicy(**given)
    except ConfigurationError as exc:
        problems.append(Problem("E009", f"{where}: {exc}.", "Correct the retry policy."))
        return RetryPolicy()


def _load(path: Any, where: str, problems: list[Problem]) -> Any:
    """Import a dotted path; what our decorators made of a function gives the function."""
    if isinstance(path, str):
        try:
            # Built-in exceptions are named without their module.
            target = import_string(path if "." in path else f"builtins.{path}")
        except Exception as exc:  # noqa: BLE001 - importing runs the user's module
            problems.append(
                Problem(
                    "E007",
                    f"{where}: {path!r} cannot be imported: {type(exc).__name__}: {exc}.",
                    "Correct the dotted path, or the module that fails.",
                )
            )
            return None
    else:
        target = path
    # Ours only (`Event`, `HandlerFunction`): a user's decorators, such as transaction.atomic,
    # are part of the handler.
    if type(target).__module__ == "django_amqp_events.decorators":
        return target.__wrapped__
    return target


def _check_overlaps(handlers: Mapping[str, Handler], problems: list[Problem]) -> None:
    """Refuse handlers of one queue that could match the same event.

    RabbitMQ puts one copy in a queue however many bindings match, so one of the handlers
    would never see the event.
    """
    sharing: dict[str, list[Handler]] = {}
    for handler in handlers.values():
        sharing.setdefault(handler.queue, []).append(handler)
    for first in handlers.values():
        later = sharing[first.queue]
        later.remove(first)
        for second in later:
            for left in first.patterns:
                for right in second.patterns:
                    if patterns_overlap(left, right):
                        problems.append(
                            Problem(
                                "E010",
                                f"Handlers {first.name!r} and {second.name!r} share the queue "
                                f"{first.queue!r}, and {left!r} and {right!r} can match the "
                                f"same event, of which the queue gets one copy.",
                                "Give one of them a queue of its own.",
                            )
                        )


@lru_cache(maxsize=1)
def get_registry() -> Registry:
    """Return the registry of this process.

    Raises:
        ConfigurationError: settings or declarations have errors.
    """
    settings = conf.get_settings()
    registry = build(settings, *declarations.snapshot())
    errors = [problem for problem in registry.problems if problem.is_error]
    if errors:
        raise ConfigurationError(conf.describe(errors))
    return registry


def _forget(*, setting: str, **_: Any) -> None:
    if setting in (conf.SETTING, "DEBUG"):
        get_registry.cache_clear()


declarations.listeners.append(get_registry.cache_clear)
setting_changed.connect(_forget, dispatch_uid="django_amqp_events.declare.registry")
