"""``AMQP_EVENTS``, read once into frozen dataclasses.

Parsing never raises: it returns what could be read and the problems found, which the system
checks show (:mod:`django_amqp_events.checks`). Whoever needs working settings calls
:func:`get_settings`, which raises :class:`ConfigurationError` when there is an error.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final, Literal

from django.conf import settings as django_settings
from django.core.signals import setting_changed

from .exceptions import ConfigurationError

SETTING: Final = "AMQP_EVENTS"

#: Seconds, bytes and lengths stay below this: what is larger is a mistake, and AMQP's integers
#: and Python's dates end somewhere.
MAX: Final = 2**31
#: Seconds that may be waited for a confirm: half of the lease that a row of the outbox has, so that
#: its holder can renew it before and after.
LONGEST_CONFIRM: Final = 30.0
#: AMQP's limit for names and routing keys (a short string's length is one byte).
MAX_NAME: Final = 255
#: Seconds that a row of the inbox is kept at the least.
INBOX_MIN: Final = 30 * 86_400.0
#: Options that a handler takes, lower case as in the decorator, UPPER in settings.
POLICY_OPTIONS: Final = (
    "max_retries",
    "retry_backoff",
    "retry_backoff_max",
    "retry_jitter",
    "default_retry_delay",
    "autoretry_for",
    "dont_autoretry_for",
)
TASK_OPTIONS: Final = ("time_limit", "soft_time_limit", "rate_limit", "ignore_result")
DEFAULT_OPTIONS: Final = (*POLICY_OPTIONS, *TASK_OPTIONS, "queue", "strict", "once", "using")
HANDLER_OPTIONS: Final = (*DEFAULT_OPTIONS, "events", "handler", "enabled", "bind")
EVENT_OPTIONS: Final = ("contract",)

PublishMode = Literal["outbox", "on_commit", "immediate"]
Unrouted = Literal["warn", "ignore", "raise", "hold"]
BackendName = Literal["amqp", "memory", "inline"]
TopologyMode = Literal["verify", "auto", "external"]

PUBLISH_MODES: Final = ("outbox", "on_commit", "immediate")
UNROUTED_POLICIES: Final = ("warn", "ignore", "raise", "hold")
BACKENDS: Final = ("amqp", "memory", "inline")
TOPOLOGY_MODES: Final = ("verify", "auto", "external")
QUEUE_TYPES: Final = ("quorum", "classic")
#: What is done faster than by the plain way through py-amqp and Celery, each to be switched off.
FAST_PATHS: Final = ("frames", "reads", "acks", "deletes", "chunks")


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong or doubtful in settings or declarations.

    Attributes:
        code: ``E…`` for what stops events from working, ``W…`` for what endangers them; the
            id of the system check without its prefix.
        message: what is wrong, and where.
        hint: what to do.
    """

    code: str
    message: str
    hint: str

    @property
    def is_error(self) -> bool:
        return self.code.startswith("E")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSettings:
    """Limits of the archive queue; each one loses archived events, so there is none by default.

    Attributes:
        ttl: seconds after which an archived event that nobody mirrored is dropped.
        max_length: number of archived events above which the oldest is dropped.
    """

    ttl: float | None = None
    max_length: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionSettings:
    """How long ``events_prune`` keeps settled rows; nothing else deletes a row.

    Attributes:
        succeeded: seconds since an event was replayed with success, ``None`` for ever.
        discarded: seconds since it was discarded, in the archive or the outbox, ``None`` for ever.
        inbox: seconds since a handler with ``once`` has handled it, ``None`` for ever; longer
            where a retry schedule asks for it
        (:func:`django_amqp_events.worker.once.minimum_retention`).
        batches: seconds since a replay batch has ended, ``None`` for ever.
        snapshots: seconds since the figures of the dashboard were taken, ``None`` for ever.
        alerts: seconds since an alert has ended, ``None`` for ever.
    """

    succeeded: float | None = 30 * 86_400.0
    discarded: float | None = 90 * 86_400.0
    inbox: float | None = INBOX_MIN
    batches: float | None = 90 * 86_400.0
    snapshots: float | None = 7 * 86_400.0
    alerts: float | None = 90 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSettings:
    """From when on something is a trouble; ``None`` switches that alert off.

    Attributes:
        mail: tell ADMINS by e-mail; signals are sent either way.
        growth: events that came into the archive within an hour, above which it is one.
        mirror_lag, outbox_lag: seconds that messages wait in the archive queue, and events in the
            outbox.
        away: seconds that the broker does not answer.
        stale: seconds without figures of the dashboard.
        groups: tell of kinds of failures that are new, or came back.
    """

    mail: bool = False
    growth: int | None = 100
    mirror_lag: float | None = 300.0
    outbox_lag: float | None = 300.0
    away: float | None = 60.0
    stale: float | None = 300.0
    groups: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The parsed ``AMQP_EVENTS``.

    Attributes:
        service: namespace of this service's queues; ``""`` while dormant.
        events: options per event name that settings declare.
        handlers: options per handler name that settings declare, lower-case keys.
        defaults: options for every handler of this service.
        autodiscover: names of the modules that are imported from each app.
        publish: mode of :meth:`Event.publish`.
        unrouted: what an event that no queue is bound for is: a log line, nothing, an error, or
            (with the outbox) kept until one is.
        backend: ``amqp``, or ``memory`` and ``inline`` that need no broker.
        confirm_timeout: seconds to wait for a publisher confirm, connecting included; at most
            :data:`LONGEST_CONFIRM`.
        max_body: largest body in bytes, published or handled.
        prefix: in front of every name on the broker: environments on one vhost.
        exchange: name of the shared topic exchange, without the prefix.
        queue_type: ``quorum``, or the weaker ``classic``.
        topology: what a worker does about the topology when it starts.
        archive: limits of the archive queue.
        management_url: ``http://user:password@host:15672`` of RabbitMQ's management API.
        celery_app: dotted path of the Celery app where it is not the current one.
        database: alias of the outbox, and whose transaction ``on_commit`` waits for.
        retention: how long ``events_prune`` keeps events that are settled.
        renamed_handlers: today's name of handlers that archived events know by an older one.
        alerts: when somebody is told.
        editing: whether archived events may be replayed with another payload.
        redact: dotted path of what takes out of payloads what pages must not show.
        fast_paths: which of :data:`FAST_PATHS` are taken.
    """

    service: str = ""
    events: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    handlers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    autodiscover: tuple[str, ...] = ("events", "handlers")
    publish: PublishMode = "outbox"
    unrouted: Unrouted = "warn"
    backend: BackendName = "amqp"
    confirm_timeout: float = 10.0
    max_body: int = 1024 * 1024
    prefix: str = ""
    exchange: str = "events"
    queue_type: str = "quorum"
    topology: TopologyMode = "verify"
    archive: ArchiveSettings = ArchiveSettings()
    management_url: str = ""
    celery_app: str = ""
    database: str = "default"
    retention: RetentionSettings = RetentionSettings()
    renamed_handlers: Mapping[str, str] = field(default_factory=dict)
    alerts: AlertSettings = AlertSettings()
    editing: bool = False
    redact: str = ""
    fast_paths: frozenset[str] = frozenset(FAST_PATHS)


class Reader:
    """Reads keys of a dict and collects the problems."""

    def __init__(self, raw: Mapping[str, Any], where: str, problems: list[Problem]) -> None:
        self.raw = raw
        self.where = where
        self.problems = problems

    def wrong(self, key: str, value: object, what: str) -> None:
        self.problems.append(
            Problem("E003", f"{self.where}[{key!r}] is {value!r:.120}.", f"It is {what}.")
        )

    def take(self, key: str, default: Any, test: Callable[[Any], bool], what: str) -> Any:
        value = self.raw.get(key, default)
        if value is default or test(value):
            return value
        self.wrong(key, value, what)
        return default

    def text(self, key: str, default: str = "") -> str:
        return str(self.take(key, default, lambda v: isinstance(v, str), "a text"))

    def choice(self, key: str, default: str, choices: Iterable[str]) -> Any:
        names = tuple(choices)
        what = "one of " + ", ".join(repr(name) for name in names)
        return self.take(key, default, lambda v: v in names, what)

    def seconds(
        self, key: str, default: float | None, longest: float | None = None
    ) -> float | None:
        value: object = self.raw.get(key, default)
        if isinstance(value, timedelta):
            value = value.total_seconds()
        if value is default:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < MAX:
            self.wrong(key, self.raw[key], "a positive number of seconds or a timedelta")
            return default
        if longest is not None and value > longest:
            self.wrong(key, self.raw[key], f"{longest:g} seconds at most")
            return default
        return float(value)

    def count(self, key: str, default: int | None, what: str) -> int | None:
        value: int | None = self.take(
            key,
            default,
            lambda v: isinstance(v, int) and not isinstance(v, bool) and 0 < v < MAX,
            what,
        )
        return value

    def known(self, keys: Iterable[str]) -> None:
        """Report keys that are none of *keys*, each with the nearest that is."""
        names = tuple(keys)
        for key in self.raw:
            if key not in names:
                self.problems.append(unknown_key(self.where, key, names))


def unknown_key(where: str, key: object, known: Iterable[str]) -> Problem:
    """Return the problem of an unknown key."""
    names = tuple(known)
    near = difflib.get_close_matches(str(key).upper(), [name.upper() for name in names], n=1)
    if near:
        original = next(name for name in names if name.upper() == near[0])
        hint = f"Did you mean {original!r}?"
    else:
        hint = "Known keys are " + ", ".join(sorted(names)) + "."
    return Problem("E002", f"{where} has the unknown key {key!r}.", hint)


KEYS: Final = (
    "SERVICE",
    "EVENTS",
    "HANDLERS",
    "DEFAULTS",
    "AUTODISCOVER",
    "PUBLISH",
    "UNROUTED",
    "BACKEND",
    "CONFIRM_TIMEOUT",
    "MAX_BODY",
    "PREFIX",
    "EXCHANGE",
    "QUEUE_TYPE",
    "TOPOLOGY",
    "ARCHIVE",
    "MANAGEMENT_URL",
    "CELERY_APP",
    "DATABASE",
    "RETENTION",
    "RENAMED_HANDLERS",
    "ALERTS",
    "EDITING",
    "REDACT",
    "FAST_PATHS",
)

#: What a service's name may be.
SERVICE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


def parse(raw: object, *, debug: bool = False) -> tuple[Settings, tuple[Problem, ...]]:
    """Read the value of ``AMQP_EVENTS``.

    Args:
        raw: the setting; ``None`` or ``{}`` where it is not set (dormant).
        debug: Django's DEBUG, which makes ``auto`` the default of ``TOPOLOGY``.
    """
    problems: list[Problem] = []
    default_topology: TopologyMode = "auto" if debug else "verify"
    if not raw:
        return Settings(topology=default_topology), (
            Problem(
                "W001",
                "django_amqp_events is installed, but AMQP_EVENTS is not set: no event is "
                "published or handled.",
                'Set AMQP_EVENTS = {"SERVICE": "name-of-this-service"}, or take the app out of '
                "INSTALLED_APPS.",
            ),
        )
    if not isinstance(raw, Mapping):
        return Settings(topology=default_topology), (
            Problem("E003", f"AMQP_EVENTS is a {type(raw).__name__}.", "It is a dict."),
        )
    read = Reader(raw, SETTING, problems)
    read.known(KEYS)

    service = read.text("SERVICE")
    if "SERVICE" not in raw:
        problems.append(
            Problem(
                "E001",
                'AMQP_EVENTS has no "SERVICE".',
                "Name this service; the name stands in front of its queues.",
            )
        )
    elif not SERVICE.fullmatch(service):
        problems.append(
            Problem(
                "E004",
                f'AMQP_EVENTS["SERVICE"] is {service!r}.',
                "It is letters, digits, - and _; a dot or a colon would let its names meet "
                "those of another service or of the infrastructure.",
            )
        )
    prefix = read.text("PREFIX")
    if prefix and not SERVICE.fullmatch(prefix):
        problems.append(
            Problem(
                "E004",
                f'AMQP_EVENTS["PREFIX"] is {prefix!r}.',
                "It is letters, digits, - and _, such as staging-; with a dot or a colon these "
                "names would look like those of a service without a prefix.",
            )
        )
    exchange = read.text("EXCHANGE", "events")
    if not exchange:
        read.wrong("EXCHANGE", exchange, "the name of a topic exchange")
    for key, name in (("EXCHANGE", prefix + exchange), ("PREFIX", prefix + service)):
        problems.extend(name_problems(name, f"AMQP_EVENTS[{key!r}]"))
    if service and exchange.startswith(f"{service}:"):
        problems.append(
            Problem(
                "E004",
                f'AMQP_EVENTS["EXCHANGE"] is {exchange!r}, a name of this service\'s own '
                "infrastructure.",
                "Choose a name without the service and a colon in front.",
            )
        )
    settings = Settings(
        service=service,
        prefix=prefix,
        exchange=exchange,
        events=_options(read, "EVENTS", EVENT_OPTIONS),
        handlers=_options(read, "HANDLERS", HANDLER_OPTIONS),
        defaults=_lowered(
            read, f"{read.where}['DEFAULTS']", raw.get("DEFAULTS", {}), DEFAULT_OPTIONS
        ),
        autodiscover=_names(read, "AUTODISCOVER", ("events", "handlers")),
        publish=read.choice("PUBLISH", "outbox", PUBLISH_MODES),
        unrouted=read.choice("UNROUTED", "warn", UNROUTED_POLICIES),
        backend=read.choice("BACKEND", "amqp", BACKENDS),
        confirm_timeout=read.seconds("CONFIRM_TIMEOUT", 10.0, LONGEST_CONFIRM) or 10.0,
        max_body=read.count("MAX_BODY", 1024 * 1024, "a number of bytes above 0") or 1024 * 1024,
        queue_type=read.choice("QUEUE_TYPE", "quorum", QUEUE_TYPES),
        topology=read.choice("TOPOLOGY", default_topology, TOPOLOGY_MODES),
        archive=_archive(read),
        management_url=_management_url(read),
        celery_app=read.text("CELERY_APP"),
        database=read.text("DATABASE", "default"),
        retention=_retention(read),
        renamed_handlers=_renamed(read),
        alerts=_alerts(read),
        editing=read.take("EDITING", False, lambda v: isinstance(v, bool), "True or False"),
        redact=_redact(read),
        fast_paths=_fast_paths(read),
    )
    return settings, tuple(problems)


def name_problems(name: str, where: str) -> list[Problem]:
    """Return what RabbitMQ has against an exchange or queue of that name."""
    problems = []
    if len(name.encode("utf-8", "surrogatepass")) > MAX_NAME:
        problems.append(
            Problem(
                "E005",
                f"{where}: {name!r:.80} takes more than AMQP's {MAX_NAME} bytes.",
                "Choose shorter names for the service, the prefix, the queue or the handler.",
            )
        )
    if name.startswith("amq."):
        problems.append(
            Problem(
                "E004",
                f"{where}: {name!r:.80} begins with 'amq.', which RabbitMQ keeps for itself.",
                "Choose another name.",
            )
        )
    if any(ord(char) < 32 or "\ud800" <= char <= "\udfff" for char in name):
        problems.append(
            Problem(
                "E004",
                f"{where}: {name!r:.80} has control characters or lone surrogates.",
                "Take them out.",
            )
        )
    return problems


def _options(read: Reader, key: str, known: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    value = read.raw.get(key, {})
    if not isinstance(value, Mapping):
        read.wrong(key, value, "a dict of dicts by name")
        return {}
    options = {}
    for name, entry in value.items():
        if not isinstance(name, str):
            read.wrong(key, name, "a dict whose keys are names")
            continue
        options[name] = _lowered(read, f"{read.where}[{key!r}][{name!r}]", entry, known)
    return options


def _lowered(read: Reader, where: str, value: object, known: tuple[str, ...]) -> dict[str, Any]:
    """Return *value* with the lower-case names of the decorator."""
    if not isinstance(value, Mapping):
        read.problems.append(
            Problem("E003", f"{where} is {value!r:.120}.", "It is a dict of options.")
        )
        return {}
    inner = Reader(value, where, read.problems)
    inner.known(name.upper() for name in known)
    return {str(k).lower(): v for k, v in value.items() if str(k) in {n.upper() for n in known}}


def _names(read: Reader, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
    value = read.raw.get(key, default)
    if not isinstance(value, (list, tuple, set, frozenset)) or not all(
        isinstance(name, str) for name in value
    ):
        read.wrong(key, value, "a list of module names")
        # Better no module than one that was not meant.
        return ()
    return tuple(value)


def _archive(read: Reader) -> ArchiveSettings:
    value = read.raw.get("ARCHIVE", {})
    if not isinstance(value, Mapping):
        read.wrong("ARCHIVE", value, "a dict with TTL and MAX_LENGTH")
        return ArchiveSettings()
    inner = Reader(value, f"{SETTING}['ARCHIVE']", read.problems)
    inner.known(("TTL", "MAX_LENGTH"))
    return ArchiveSettings(
        ttl=inner.seconds("TTL", None),
        max_length=inner.count("MAX_LENGTH", None, "a number of events above 0"),
    )


_TOLD: Final = ("MAIL", "GROWTH", "MIRROR_LAG", "OUTBOX_LAG", "AWAY", "STALE", "GROUPS")
_KEPT: Final = ("SUCCEEDED", "DISCARDED", "INBOX", "BATCHES", "SNAPSHOTS", "ALERTS")


def _retention(read: Reader) -> RetentionSettings:
    value = read.raw.get("RETENTION", {})
    if not isinstance(value, Mapping):
        read.wrong("RETENTION", value, f"a dict with {', '.join(_KEPT[:-1])} and {_KEPT[-1]}")
        # Nothing is deleted on a guess.
        return RetentionSettings(
            succeeded=None, discarded=None, inbox=None, batches=None, snapshots=None, alerts=None
        )
    inner = Reader(value, f"{SETTING}['RETENTION']", read.problems)
    inner.known(_KEPT)
    kept = RetentionSettings()
    inbox = _age(inner, "INBOX", kept.inbox)
    if inbox is not None and inbox < INBOX_MIN:
        inner.wrong("INBOX", value["INBOX"], "at least 30 days: an event may come again as long")
        inbox = None
    return RetentionSettings(
        succeeded=_age(inner, "SUCCEEDED", kept.succeeded),
        discarded=_age(inner, "DISCARDED", kept.discarded),
        inbox=inbox,
        batches=_age(inner, "BATCHES", kept.batches),
        snapshots=_age(inner, "SNAPSHOTS", kept.snapshots),
        alerts=_age(inner, "ALERTS", kept.alerts),
    )


def _alerts(read: Reader) -> AlertSettings:
    value = read.raw.get("ALERTS", {})
    if not isinstance(value, Mapping):
        read.wrong("ALERTS", value, f"a dict with {', '.join(_TOLD[:-1])} and {_TOLD[-1]}")
        return AlertSettings()
    inner = Reader(value, f"{SETTING}['ALERTS']", read.problems)
    inner.known(_TOLD)
    limits = AlertSettings()
    growth = limits.growth
    if value.get("GROWTH", growth) is None:
        growth = None
    else:
        growth = inner.count("GROWTH", growth, "a number of events above 0, or None")
    return AlertSettings(
        mail=bool(inner.take("MAIL", limits.mail, lambda v: isinstance(v, bool), "True or False")),
        growth=growth,
        mirror_lag=_age(inner, "MIRROR_LAG", limits.mirror_lag),
        outbox_lag=_age(inner, "OUTBOX_LAG", limits.outbox_lag),
        away=_age(inner, "AWAY", limits.away),
        stale=_age(inner, "STALE", limits.stale),
        groups=bool(
            inner.take("GROUPS", limits.groups, lambda v: isinstance(v, bool), "True or False")
        ),
    )


def _age(read: Reader, key: str, default: float | None) -> float | None:
    return None if key in read.raw and read.raw[key] is None else read.seconds(key, default)


def _renamed(read: Reader) -> dict[str, str]:
    """Return each old name with the name that it has today, through every renaming between."""
    value = read.raw.get("RENAMED_HANDLERS", {})
    if not isinstance(value, Mapping) or not all(
        isinstance(name, str) and name for pair in value.items() for name in pair
    ):
        read.wrong("RENAMED_HANDLERS", value, "a dict of today's names by old names")
        return {}
    renamed = {}
    for old in value:
        new, seen = value[old], {old}
        while new in value and new not in seen:
            seen.add(new)
            new = value[new]
        if new in seen:
            read.wrong("RENAMED_HANDLERS", value, f"no circle; {old!r} comes back to {new!r}")
            return {}
        renamed[old] = new
    return renamed


def _redact(read: Reader) -> str:
    """Return the path of the hook; what is wrong names none, so that payloads stay hidden."""
    value = read.raw.get("REDACT", "")
    if not isinstance(value, str):
        read.wrong("REDACT", value, "the dotted path of a function")
        return repr(value)
    return value


def _fast_paths(read: Reader) -> frozenset[str]:
    value = read.raw.get("FAST_PATHS", FAST_PATHS)
    if (
        isinstance(value, (str, Mapping))
        or not isinstance(value, Collection)
        or not all(isinstance(name, str) and name in FAST_PATHS for name in value)
    ):
        read.wrong("FAST_PATHS", value, f"a list of {', '.join(map(repr, FAST_PATHS))}, or []")
        return frozenset()
    return frozenset(value)


def _management_url(read: Reader) -> str:
    url = read.text("MANAGEMENT_URL")
    if url and not re.match(r"^https?://[^/\s]+", url):
        read.wrong("MANAGEMENT_URL", url, "a URL such as http://user:password@host:15672")
        return ""
    return url


@lru_cache(maxsize=1)
def load() -> tuple[Settings, tuple[Problem, ...]]:
    """Parse Django's settings, once until they change."""
    return parse(getattr(django_settings, SETTING, None), debug=bool(django_settings.DEBUG))


def get_settings() -> Settings:
    """Return the settings of this process.

    Raises:
        ConfigurationError: AMQP_EVENTS is not set, or has errors; each is named.
    """
    settings, problems = load()
    errors = [problem for problem in problems if problem.is_error]
    if errors:
        raise ConfigurationError(describe(errors))
    if not settings.service:
        raise ConfigurationError(
            "AMQP_EVENTS is not set, so events can be neither published nor handled; set "
            'AMQP_EVENTS = {"SERVICE": "name-of-this-service"}'
        )
    return settings


def describe(problems: Iterable[Problem]) -> str:
    """Write problems as one text, a line each."""
    return "\n".join(f"{problem.message} {problem.hint}" for problem in problems)


def _reload(*, setting: str, **_: Any) -> None:
    if setting in (SETTING, "DEBUG"):
        load.cache_clear()


setting_changed.connect(_reload, dispatch_uid="django_amqp_events.conf")


def from_env(
    settings: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return *settings* with what the environment says put in; for settings modules.

    The library itself reads no environment. Variables, as celery-amqp-events named them:

    ``AMQP_EVENTS_MAX_RETRIES``
        retries of every handler that does not say otherwise (``DEFAULTS``).
    ``AMQP_EVENTS_ARCHIVED_MESSAGE_TTL``
        milliseconds; archived events older than this are dropped.
    ``AMQP_EVENTS_ARCHIVED_QUEUE_LENGTH``
        number; the oldest archived events above it are dropped.

    Example::

        AMQP_EVENTS = from_env({"SERVICE": "billing"})

    Raises:
        ConfigurationError: a variable is no whole number that makes sense.
    """
    environ = os.environ if environ is None else environ
    merged = dict(settings)
    retries = _env_number(environ, "AMQP_EVENTS_MAX_RETRIES", minimum=0)
    if retries is not None:
        merged["DEFAULTS"] = {**merged.get("DEFAULTS", {}), "MAX_RETRIES": retries}
    ttl = _env_number(environ, "AMQP_EVENTS_ARCHIVED_MESSAGE_TTL", minimum=1)
    length = _env_number(environ, "AMQP_EVENTS_ARCHIVED_QUEUE_LENGTH", minimum=1)
    archive = dict(merged.get("ARCHIVE", {}))
    if ttl is not None:
        archive["TTL"] = timedelta(milliseconds=ttl)
    if length is not None:
        archive["MAX_LENGTH"] = length
    if archive:
        merged["ARCHIVE"] = archive
    return merged


def _env_number(environ: Mapping[str, str], name: str, *, minimum: int) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        number = int(text)
    except ValueError:
        number = minimum - 1
    if not minimum <= number < MAX * 1000:  # milliseconds
        raise ConfigurationError(
            f"the environment variable {name} is {text!r:.80}; it is a whole number from {minimum} "
            f"up to {MAX * 1000 - 1}"
        )
    return number
