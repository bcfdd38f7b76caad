"""``AMQP_EVENTS``, read once into frozen dataclasses.

Parsing never raises. It returns what could be read and the problems found, which the system checks
show (:mod:`django_amqp_events.checks`); :func:`get_settings` raises them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import Any, Final, Literal, get_args

from django.conf import settings as django_settings
from django.core.signals import setting_changed

from .exceptions import ConfigurationError
from .options import (
    DEFAULT_OPTIONS,
    EVENT_OPTIONS,
    HANDLER_OPTIONS,
    LONGEST_TTL,
    Format,
    Invalid,
    Problem,
    Reader,
    accept,
    age,
    boolean,
    choice,
    count,
    has_control_characters,
    keys,
    mapping,
    option,
    optional,
    read_options,
    seconds,
    size,
    string,
    unchecked,
)

SETTING: Final = "AMQP_EVENTS"

#: Seconds to wait for a confirm at most: half the lease of an outbox row, so that its holder can
#: renew it before and after.
LONGEST_CONFIRM: Final = 30.0
#: Longest consumer timeout in seconds; RabbitMQ's own number, in milliseconds, is above it.
LONGEST_CONSUMER: Final = 86400.0
#: AMQP's limit for names and routing keys in bytes (a short string has a length of one byte).
MAX_NAME: Final = 255
DAY: Final = 86_400.0
#: Seconds that an inbox row is kept at least.
INBOX_MIN: Final = 30 * DAY
#: Valid names of services and prefixes.
SERVICE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")

PublishMode = Literal["outbox", "on_commit", "immediate"]
Unrouted = Literal["warn", "ignore", "raise", "hold"]
BackendName = Literal["amqp", "memory", "inline"]
TopologyMode = Literal["verify", "auto", "external"]

PUBLISH_MODES: Final = get_args(PublishMode)


# -- readers of single keys ---------------------------------------------------------------


def _seconds(valid: str, *, least: float = 0.0, most: float = inf) -> Reader:
    def read(value: Any) -> float:
        number = seconds(value)
        if not least <= number <= most:
            raise Invalid(valid)
        return number

    return read


_ttl: Final = _seconds(
    f"from a millisecond to {LONGEST_TTL} seconds (ten years), as RabbitMQ takes it",
    least=0.001,
    most=LONGEST_TTL,
)
_inbox: Final = _seconds(
    "at least 30 days, in which an event may be delivered again", least=INBOX_MIN
)
#: A name, a path, or a minus and a path.
_MODULE: Final = re.compile(r"(?!\d)\w+|-?(?!\d)\w+(\.(?!\d)\w+)+")


def _autodiscover(value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple, set, frozenset)) or not all(
        isinstance(name, str) and _MODULE.fullmatch(name) for name in value
    ):
        raise Invalid(
            "a list of names of modules ('events'), paths of modules ('shop.events') and paths "
            "with a minus ('-shop.events')",
            instead=(),
        )
    return tuple(value)


def _redact(value: Any) -> str:
    if not isinstance(value, str):
        # A path that cannot be imported: payloads stay hidden.
        raise Invalid("the dotted path of a function", instead=repr(value))
    return value


def _renamed_handlers(value: Any) -> dict[str, str]:
    """Return the current name of each old one."""
    if not isinstance(value, Mapping) or not all(
        isinstance(name, str) and name for pair in value.items() for name in pair
    ):
        raise Invalid('a dict such as {"old name": "new name"}')
    if again := sorted(value.keys() & value.values()):
        raise Invalid(f"current names as values; {again[0]!r} is an old one too")
    return dict(value)


# -- settings -----------------------------------------------------------------------------

_age: Final = optional(seconds)


# docs/settings.md describes each key. Times are seconds, sizes bytes.


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSettings:
    """Limits of the archive queue. Each one loses archived events, so there is none by default."""

    ttl: float | None = option(optional(_ttl), default=None)
    max_length: int | None = option(optional(count("events")), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionSettings:
    """How long ``events_prune`` keeps settled rows; ``None`` is for ever.

    A retry schedule can keep inbox rows longer
    (:func:`django_amqp_events.archive.inbox_retention.minimum_retention`).
    """

    succeeded: float | None = option(_age, default=30 * DAY)
    discarded: float | None = option(_age, default=90 * DAY)
    inbox: float | None = option(optional(_inbox), default=INBOX_MIN)
    batches: float | None = option(_age, default=90 * DAY)
    snapshots: float | None = option(_age, default=7 * DAY)
    alerts: float | None = option(_age, default=90 * DAY)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSettings:
    """Limits above which an alert is raised; ``None`` switches that alert off."""

    mail: bool = option(boolean, default=False)
    growth: int | None = option(optional(count("events")), default=100)
    mirror_lag: float | None = option(_age, default=300.0)
    outbox_lag: float | None = option(_age, default=300.0)
    away: float | None = option(_age, default=60.0)
    groups: bool = option(boolean, default=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistorySettings:
    """Limits of the stream that keeps all events of the exchange; at least one is set."""

    max_age: float | None = option(optional(age), default=None)
    max_bytes: int | None = option(optional(size), default=None)


def _section(section: type) -> Reader:
    *first, last = keys(section)
    return mapping(f"a dict with {', '.join(first)} and {last}")


_by_name: Final = mapping("a dict of options by name")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The parsed ``AMQP_EVENTS``; ``service`` is ``""`` while it is not set.

    ``events``, ``handlers`` and ``defaults`` have the options that settings give, under the
    decorator's names in lower case.
    """

    service: str = option(string, default="")
    events: Mapping[str, Mapping[str, Any]] = option(_by_name, default_factory=dict)
    handlers: Mapping[str, Mapping[str, Any]] = option(_by_name, default_factory=dict)
    defaults: Mapping[str, Any] = option(mapping("a dict of options"), default_factory=dict)
    autodiscover: tuple[str, ...] = option(_autodiscover, default=("events", "handlers"))
    publish: PublishMode = option(choice(*PUBLISH_MODES), default="outbox")
    format: Format = option(choice(*get_args(Format)), default="celery")
    unrouted: Unrouted = option(choice(*get_args(Unrouted)), default="warn")
    backend: BackendName = option(choice(*get_args(BackendName)), default="amqp")
    confirm_timeout: float = option(
        _seconds(f"{LONGEST_CONFIRM:g} seconds at most", most=LONGEST_CONFIRM), default=10.0
    )
    consumer_timeout: float = option(
        _seconds(
            "a day at most, in seconds; RabbitMQ's consumer_timeout is in milliseconds",
            most=LONGEST_CONSUMER,
        ),
        default=1800.0,
    )
    max_body: int = option(count("bytes"), default=1024 * 1024)
    prefix: str = option(string, default="")
    exchange: str = option(
        accept(
            lambda value: isinstance(value, str) and value != "", "the name of a topic exchange"
        ),
        default="events",
    )
    queue_type: str = option(choice("quorum", "classic"), default="quorum")
    topology: TopologyMode = option(choice(*get_args(TopologyMode)), default="verify")
    archive: ArchiveSettings = option(_section(ArchiveSettings), default=ArchiveSettings())
    management_url: str = option(
        accept(
            lambda value: isinstance(value, str) and bool(re.match(r"https?://[^/\s]+|\Z", value)),
            "a URL such as http://user:password@host:15672",
        ),
        default="",
    )
    celery_app: str = option(string, default="")
    database: str = option(string, default="default")
    retention: RetentionSettings = option(_section(RetentionSettings), default=RetentionSettings())
    renamed_handlers: Mapping[str, str] = option(_renamed_handlers, default_factory=dict)
    history: HistorySettings | None = option(optional(_section(HistorySettings)), default=None)
    alerts: AlertSettings = option(_section(AlertSettings), default=AlertSettings())
    editing: bool = option(boolean, default=False)
    redact: str = option(_redact, default="")
    metrics: bool = option(boolean, default=False)
    validate: bool = option(boolean, default=False)


def _unchecked(options: Iterable[str]) -> Mapping[str, Reader]:
    """Return readers of handler options, whose values the registry checks."""
    return dict.fromkeys(map(str.upper, options), unchecked)


KEYS: Final = keys(Settings)
_SECTIONS: Final[Mapping[str, tuple[type, Mapping[str, Reader]]]] = {
    "archive": (ArchiveSettings, keys(ArchiveSettings)),
    "retention": (RetentionSettings, keys(RetentionSettings)),
    "alerts": (AlertSettings, keys(AlertSettings)),
    "history": (HistorySettings, keys(HistorySettings)),
    "defaults": (dict, _unchecked(DEFAULT_OPTIONS)),
}
_BY_NAME: Final = {
    "events": _unchecked(["contract", *EVENT_OPTIONS]),
    "handlers": _unchecked(HANDLER_OPTIONS),
}


# -- parsing ------------------------------------------------------------------------------


def parse(raw: object, *, debug: bool = False) -> tuple[Settings, tuple[Problem, ...]]:
    """Read the value of ``AMQP_EVENTS``.

    Args:
        raw: the setting; ``None`` where it is not set. Without a key, the app is dormant.
        debug: Django's DEBUG, which makes ``auto`` the default of ``TOPOLOGY``.
    """
    settings = Settings(topology="auto" if debug else "verify")
    if not raw:
        return settings, (
            Problem(
                "W001",
                "django_amqp_events is installed, but AMQP_EVENTS is "
                f"{'not set' if raw is None else 'empty'}: no event is published or handled.",
                'Set AMQP_EVENTS = {"SERVICE": "name-of-this-service"}, or remove the app from '
                "INSTALLED_APPS.",
            ),
        )
    if not isinstance(raw, Mapping):
        kind = type(raw).__name__
        return settings, (Problem("E003", f"AMQP_EVENTS is a {kind}.", "Use a dict."),)
    problems: list[Problem] = []
    values = read_options(KEYS, raw, SETTING, problems)
    for name, (section, readers) in _SECTIONS.items():
        if values.get(name) is not None:
            where = f"{SETTING}[{name.upper()!r}]"
            values[name] = section(**read_options(readers, values[name], where, problems))
    for name, readers in _BY_NAME.items():
        entries = values.pop(name, {})
        values[name] = {}
        for key, given in entries.items():
            where = f"{SETTING}[{name.upper()!r}][{key!r}]"
            if isinstance(key, str) and isinstance(given, Mapping):
                values[name][key] = read_options(readers, given, where, problems)
            else:
                hint = "Use a string as the name, and a dict of options as the value."
                problems.append(Problem("E003", f"{where} is {given!r:.120}.", hint))
    settings = replace(settings, **values)
    problems.extend(_names(settings, raw))
    problems.extend(_history(settings))
    return settings, tuple(problems)


def _history(settings: Settings) -> Iterator[Problem]:
    """Yield an error for a history without a limit, which would fill the disk."""
    if settings.history == HistorySettings():
        yield Problem(
            "E003",
            "AMQP_EVENTS['HISTORY'] has no limit, so the history would fill RabbitMQ's disk.",
            "Set MAX_AGE, MAX_BYTES or both, such as {'MAX_AGE': '14d', 'MAX_BYTES': '20GB'}.",
        )


def _names(settings: Settings, raw: Mapping[Any, Any]) -> Iterator[Problem]:
    """Yield what is wrong with the names of service, prefix and exchange."""
    service, prefix, exchange = settings.service, settings.prefix, settings.exchange
    if "SERVICE" not in raw:
        yield Problem(
            "E001",
            "AMQP_EVENTS has no 'SERVICE'.",
            "Add 'SERVICE' with the name of this service, which its queues begin with.",
        )
    elif not SERVICE.fullmatch(service):
        yield Problem(
            "E004",
            f"AMQP_EVENTS['SERVICE'] is {service!r}, which is not a valid name.",
            "Use letters, digits, - and _. With a dot or a colon, its queues could have the names "
            "of another service's queues.",
        )
    if prefix and not SERVICE.fullmatch(prefix):
        yield Problem(
            "E004",
            f"AMQP_EVENTS['PREFIX'] is {prefix!r}, which is not a valid prefix.",
            "Use letters, digits, - and _, such as staging-. With a dot or a colon, the queues "
            "could have the names of a service without a prefix.",
        )
    if service and exchange.startswith(f"{service}:"):
        yield Problem(
            "E004",
            f"AMQP_EVENTS['EXCHANGE'] is {exchange!r}, which is reserved for this service's own "
            "exchanges and queues.",
            f"Choose a name that does not begin with {service}:.",
        )
    yield from name_problems(prefix + exchange, "AMQP_EVENTS['EXCHANGE']")
    # The longest name of its infrastructure ends with a digest (Names in broker/topology.py).
    yield from name_problems(f"{prefix}{service}:window.{'0' * 40}", "AMQP_EVENTS['PREFIX']")


def name_problems(name: str, where: str) -> Iterator[Problem]:
    """Yield the reasons why RabbitMQ refuses an exchange or a queue of that name."""
    if len(name.encode("utf-8", "surrogatepass")) > MAX_NAME:
        what = f"is longer than AMQP's limit of {MAX_NAME} bytes"
        hint = "Shorten the service, the prefix, the queue or the handler's name."
        yield Problem("E005", f"{where}: the name {name!r:.80} {what}.", hint)
    for wrong, what, hint in (
        (
            name.startswith("amq."),
            "begins with amq., reserved for RabbitMQ",
            "Choose another name.",
        ),
        (has_control_characters(name), "has control characters or lone surrogates", "Remove them."),
    ):
        if wrong:
            yield Problem("E004", f"{where}: the name {name!r:.80} {what}.", hint)


@lru_cache(maxsize=1)
def load() -> tuple[Settings, tuple[Problem, ...]]:
    """Parse Django's settings, once until they change."""
    return parse(getattr(django_settings, SETTING, None), debug=bool(django_settings.DEBUG))


def get_settings() -> Settings:
    """Return the settings of this process.

    Raises:
        ConfigurationError: AMQP_EVENTS is not set or empty, or has errors; each is named.
    """
    settings, problems = load()
    raise_errors(problems)
    if not settings.service:
        raise configuration_error(*problems)  # the warning W001
    return settings


def raise_errors(problems: Iterable[Problem]) -> None:
    """Raise ConfigurationError with a line for each error among *problems*, if there are any."""
    errors = [problem for problem in problems if problem.is_error]
    if errors:
        raise configuration_error(*errors)


def configuration_error(*problems: Problem) -> ConfigurationError:
    """Return an error with a line for each problem."""
    lines = (f"{problem.message} {problem.hint}" for problem in problems)
    error = ConfigurationError("\n".join(lines))
    error.problems = problems
    return error


def _reload(*, setting: str, **_: Any) -> None:
    if setting in (SETTING, "DEBUG"):
        load.cache_clear()


setting_changed.connect(_reload, dispatch_uid="django_amqp_events.conf")
