"""System checks: what is wrong or dangerous, found before a worker or a publish finds it.

They read settings, declarations and the Celery app's configuration, and never the broker:
what differs there is ``manage.py events_declare --check``'s business. Ids are
``django_amqp_events.E…`` and ``W…``; an id is never used for something else. Each is in
docs/checks.md with its remedy.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import ipaddress
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from celery import Celery, Task
from celery.local import Proxy
from django.apps import apps
from django.conf import settings as django_settings
from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as CheckWarning
from django.db import DEFAULT_DB_ALIAS, connections, router
from django.utils.connection import ConnectionDoesNotExist
from django.utils.module_loading import import_string
from kombu.transport import supports_librabbitmq

from . import broker, conf, lifecycle, registry, topology
from .conf import Problem, Settings
from .exceptions import ConfigurationError
from .registry import EventType, Handler, Registry

#: Largest message that RabbitMQ takes by default from 4.0 on (max_message_size).
BROKER_MAXIMUM: Final = 16 * 1024 * 1024

_CELERY_OPTIONS: Final = (
    "accept_content",
    "broker_channel_error_retry",
    "task_always_eager",
    "task_default_queue",
    "task_queues",
    "task_routes",
    "worker_cancel_long_running_tasks_on_connection_loss",
    "worker_pool",
)
_DANGEROUS_CONTENT: Final = {
    "pickle": "pickle",
    "application/x-python-serialize": "pickle",
    "yaml": "yaml",
    "application/x-yaml": "yaml",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A broker as the Celery app reaches it."""

    transport: str
    user: str
    login_method: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """All that the checks look at.

    Attributes:
        celery: the Celery options that matter here; empty where there is no app to read.
    """

    settings: Settings
    registry: Registry
    celery: Mapping[str, Any] = field(default_factory=dict)
    servers: frozenset[Server] = frozenset()
    problems: tuple[Problem, ...] = ()


Check = Callable[[Project], Iterable[Problem]]


def check(**_kwargs: Any) -> list[CheckMessage]:
    """Check settings, declarations and the Celery app; for every ``manage.py check``."""
    return _run(CHECKS, with_problems=True)


def check_deployment(**_kwargs: Any) -> list[CheckMessage]:
    """Check what matters in production only; for ``manage.py check --deploy``."""
    return _run(DEPLOYMENT_CHECKS, with_problems=False)


def _run(checks: Sequence[Check], *, with_problems: bool) -> list[CheckMessage]:
    settings, found = conf.load()
    raw = getattr(django_settings, conf.SETTING, None)
    if not raw or not isinstance(raw, Mapping):
        return [_message(problem) for problem in found if with_problems]
    declared = registry.build(settings, *registry.declarations.snapshot())
    project = _look(settings, declared)
    problems = [*found, *declared.problems, *project.problems] if with_problems else []
    for function in checks:
        problems.extend(function(project))
    return [_message(problem) for problem in problems]


def _message(problem: Problem) -> CheckMessage:
    kind = Error if problem.is_error else CheckWarning
    return kind(problem.message, hint=problem.hint, id=f"django_amqp_events.{problem.code}")


# -- the Celery app -----------------------------------------------------------------------


def _look(settings: Settings, declared: Registry) -> Project:
    """Read what the checks need; what cannot be read is a problem of its own."""
    project = Project(settings=settings, registry=declared)
    if settings.backend != "amqp":
        return project

    def failed(code: str, message: str, hint: str) -> Project:
        return Project(
            settings=settings, registry=declared, problems=(Problem(code, message, hint),)
        )

    if not settings.celery_app and broker.is_fallback(broker.current_celery_app()):
        return failed(
            "E015",
            "The project has no Celery app, so events have no broker and no worker.",
            "Make one as Celery's guide for Django says, and import it in the project's "
            '__init__.py; or name it: AMQP_EVENTS["CELERY_APP"] = "project.celery.app".',
        )
    try:
        app = broker.celery_app(settings)
    except ConfigurationError as exc:
        return failed("E016", f"{exc}.", "Correct CELERY_APP, or leave it out for the current app.")
    except Exception as exc:  # noqa: BLE001 - the user's module may raise anything
        return failed(
            "E016",
            f'AMQP_EVENTS["CELERY_APP"] is {settings.celery_app!r}, whose import fails: '
            f"{type(exc).__name__}: {exc}.",
            "Correct the module that fails.",
        )
    try:
        return Project(
            settings=settings,
            registry=declared,
            celery={name: getattr(app.conf, name) for name in _CELERY_OPTIONS},
            servers=frozenset(_servers(app)),
        )
    except Exception as exc:  # noqa: BLE001 - configuration is read from the user's modules
        return failed(
            "E017",
            f"The configuration of the Celery app {app.main!r} cannot be read: "
            f"{type(exc).__name__}: {exc}.",
            "Correct it; `celery -A … inspect ping` would fail as well.",
        )


def _servers(app: Celery) -> Iterator[Server]:
    """Yield every broker that the app may connect to.

    No kombu connection is made: it would import the transport's client library.
    """
    options = app.conf
    for option in (options.broker_read_url, options.broker_write_url):
        for url in broker.urls(option):
            scheme, separator, _ = str(url).partition("://")
            # As in kombu: the option wins, and a scheme may be written in capitals.
            given = options.get("broker_transport") or (scheme.lower() if separator else "amqp")
            transport = str(given)
            if transport == "amqp" and supports_librabbitmq():
                transport = "librabbitmq"
            # py-amqp logs in as guest where nobody is named (amqp.Connection).
            user = _url_user(str(url)) or options.get("broker_user") or "guest"
            yield Server(
                transport=transport,
                user=str(user),
                login_method=str(options.get("broker_login_method") or ""),
            )


def _url_user(url: str) -> str:
    try:
        return urlsplit(url).username or ""
    except ValueError:
        return ""


# -- handlers and contracts ---------------------------------------------------------------


def check_contracts(project: Project) -> Iterator[Problem]:
    """Contracts whose body or signature cannot validate anything (E022)."""
    for event in project.registry.events.values():
        if event.contract is None:
            continue
        where = f"The contract {registry.dotted(event.contract)} of event {event.name!r}"
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
    """Handlers that nothing can call (E013, E014) or that do not fit an event (E011, E012)."""
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
    where = f"Handler {handler.name!r} ({registry.dotted(target)})"
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
            f"{where} takes {_listed(needed)} by position only, but a payload is given by name.",
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
    where = f"Handler {handler.name!r} ({registry.dotted(handler.target)})"
    missing = [name for name, p in takes.items() if p.default is p.empty and name not in given]
    if missing and not anything:
        yield Problem(
            "E011",
            f"{where} needs {_listed(missing)}, which event {event.name!r} does not have.",
            f"The contract {registry.dotted(event.contract)} gives {_listed(given) or 'nothing'}. "
            f"Correct the name, or give the argument a default.",
        )
    surplus = [name for name in given if name not in takes]
    if handler.strict and surplus and not any(p.kind is p.VAR_KEYWORD for p in own):
        yield Problem(
            "E012",
            f"{where} is strict and does not take {_listed(surplus)}, which event "
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


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


# -- our own settings ---------------------------------------------------------------------


def check_discovery(project: Project) -> Iterator[Problem]:
    """Declarations beside the settings, in a package that is no app (W012)."""
    package = str(getattr(django_settings, "SETTINGS_MODULE", None) or "").rpartition(".")[0]
    while package:
        for name in project.settings.autodiscover:
            module = f"{package}.{name}"
            if module in sys.modules or apps.get_containing_app_config(module) is not None:
                continue
            try:
                found = importlib.util.find_spec(module)
            except (ImportError, ValueError):
                continue
            if found is not None:
                yield Problem(
                    "W012",
                    f"There is a module {module}, but {package!r} is no installed app, so what it "
                    f"declares is not found.",
                    f"Add {package!r} to INSTALLED_APPS, or move the module into an app.",
                )
        package = package.rpartition(".")[0]


def check_database(project: Project) -> Iterator[Problem]:
    """A DATABASE that there is none of (E021)."""
    alias = project.settings.database
    databases = getattr(django_settings, "DATABASES", None)
    known = list(databases) if isinstance(databases, Mapping) else []
    if alias != DEFAULT_DB_ALIAS and alias not in known:
        yield Problem(
            "E021",
            f'AMQP_EVENTS["DATABASE"] is {alias!r}, which DATABASES does not have.',
            f"It is the alias of the outbox, or whose commit a publish waits for: "
            f"{_listed(map(str, known)) or repr(DEFAULT_DB_ALIAS)}.",
        )


def check_renamed(project: Project) -> Iterator[Problem]:
    """RENAMED_HANDLERS that send replays to a wrong handler (E023) or to none (W013)."""
    handlers = project.registry.handlers
    for old, new in project.settings.renamed_handlers.items():
        if old in handlers:
            yield Problem(
                "E023",
                f'AMQP_EVENTS["RENAMED_HANDLERS"] says that {old!r} is named {new!r} today, but '
                f"there is a handler {old!r}, whose archived events would be replayed to the "
                f"other one.",
                "Take the entry out, or give the handler another name.",
            )
        if new not in handlers:
            near = difflib.get_close_matches(new, handlers, n=1)
            yield Problem(
                "W013",
                f'AMQP_EVENTS["RENAMED_HANDLERS"] says that {old!r} is named {new!r} today, but '
                f"no handler is: archived events of {old!r} cannot be replayed.",
                (f"Did you mean {near[0]!r}? " if near else "")
                + "Name today's handler, or take the entry out once nothing of it is archived.",
            )


def check_redaction(project: Project) -> Iterator[Problem]:
    """A redaction hook that cannot be called: every payload would be hidden (E070)."""
    path = project.settings.redact
    if not path:
        return
    try:
        why = "" if callable(import_string(path)) else "it is not callable"
    except Exception as exc:  # noqa: BLE001 - a project's module may raise anything
        why = f"it cannot be imported ({type(exc).__name__}: {exc})"
    if why:
        yield Problem(
            "E070",
            f'AMQP_EVENTS["REDACT"] is {path!r:.120}, and {why}: the admin and exports hide every '
            f"payload.",
            "Name a function that takes an event's name and its payload and returns a dict.",
        )


def check_archive_database(project: Project) -> Iterator[Problem]:
    """A service whose failed events no database can take (W014, W015)."""
    if not project.registry.handlers:
        # Nothing of it is ever archived.
        return
    alias = lifecycle.database()
    try:
        connection = connections[alias]
    except ConnectionDoesNotExist:
        connection = None
    if connection is None or connection.settings_dict["ENGINE"] == "django.db.backends.dummy":
        yield Problem(
            "W014",
            f"There is no database {alias!r} for the archive: events that failed stay in their "
            f"queue, where they can neither be seen nor replayed.",
            "Set DATABASES, and run `manage.py migrate`.",
        )
    elif not (getattr(django_settings, "USE_TZ", True) or connection.features.supports_timezones):
        yield Problem(
            "W015",
            f"USE_TZ is False, and the database {alias!r} ({connection.display_name}) then takes "
            f"no times with a time zone, which all times of the archive have: events_mirror "
            f"cannot store an event.",
            "Set USE_TZ = True, or send the archive's tables to PostgreSQL with a router.",
        )


def check_once(project: Project) -> Iterator[Problem]:
    """Handlers with ``once`` that are async (E040), or that have no inbox table (E041)."""
    databases = getattr(django_settings, "DATABASES", None)
    known = databases if isinstance(databases, Mapping) else {}
    for handler in project.registry.handlers.values():
        if not handler.once:
            if handler.using:
                yield Problem(
                    "W040",
                    f"Handler {handler.name!r} has using={handler.using!r} without once.",
                    "It says which database once is about; add once=True, or take it out.",
                )
            continue
        if handler.is_async:
            yield Problem(
                "E040",
                f"Handler {handler.name!r} has once and is async, and Django's transactions do "
                f"not work in async code.",
                "Write it as an ordinary function, or take once out and make its second run "
                "harmless.",
            )
        alias = handler.using or project.settings.database
        entry = known.get(alias)
        engine = entry.get("ENGINE") if isinstance(entry, Mapping) else None
        if engine in (None, "", "django.db.backends.dummy"):
            yield Problem(
                "E041",
                f"Handler {handler.name!r} has once on database {alias!r}, which DATABASES does "
                f"not have.",
                f"Name in using the alias that it writes to: {_listed(map(str, known)) or 'none'}.",
            )
        elif not router.allow_migrate_model(
            alias, apps.get_model("django_amqp_events", "InboxEntry")
        ):
            yield Problem(
                "E041",
                f"The database routers keep the inbox's table out of database {alias!r}, to which "
                f"handler {handler.name!r} writes.",
                "Let allow_migrate() say yes there for the app django_amqp_events (model "
                "InboxEntry); its row must be in the transaction of the handler's effects.",
            )


def check_autocommit(project: Project) -> Iterator[Problem]:
    """Databases of outbox, inbox and archive on which nothing is committed (E026)."""
    handlers = project.registry.handlers.values()
    used = [h.using or project.settings.database for h in handlers if h.once]
    if handlers:
        used.append(lifecycle.database())
    if project.settings.publish == "outbox":
        used.append(project.settings.database)
    databases = getattr(django_settings, "DATABASES", None)
    known = databases if isinstance(databases, Mapping) else {}
    for alias in dict.fromkeys(used):
        entry = known.get(alias)
        if isinstance(entry, Mapping) and not entry.get("AUTOCOMMIT", True):
            yield Problem(
                "E026",
                f"DATABASES[{alias!r}] has AUTOCOMMIT off: transaction.atomic() then commits "
                f"nothing, so archive, outbox and inbox could lose what they have taken.",
                "Take AUTOCOMMIT out; for code that commits by itself make another alias.",
            )


def check_outbox(project: Project) -> Iterator[Problem]:
    """An outbox that has no table (E025), or that is asked to hold and is not used (W017)."""
    settings = project.settings
    if settings.publish != "outbox":
        if settings.unrouted == "hold":
            yield Problem(
                "W017",
                f'AMQP_EVENTS["UNROUTED"] is "hold", but PUBLISH is {settings.publish!r}: there is '
                f"no row that could be held, so an event that no queue is bound for raises.",
                'Set PUBLISH to "outbox", or say "raise".',
            )
        return
    if settings.backend != "amqp":
        return
    alias = settings.database
    databases = getattr(django_settings, "DATABASES", None)
    entry = databases.get(alias) if isinstance(databases, Mapping) else None
    if entry is None and alias != DEFAULT_DB_ALIAS:
        return  # E021
    entry = entry if isinstance(entry, Mapping) else {}
    engine = entry.get("ENGINE") or "django.db.backends.dummy"
    if engine == "django.db.backends.dummy":
        yield Problem(
            "E025",
            f'AMQP_EVENTS["PUBLISH"] is "outbox", which needs a database, and DATABASES has none '
            f"named {alias!r}.",
            'Set DATABASES, or PUBLISH to "immediate", which needs none.',
        )
    elif not router.allow_migrate_model(alias, apps.get_model("django_amqp_events", "OutboxEvent")):
        yield Problem(
            "E025",
            f"The database routers keep the outbox's table out of database {alias!r}, where "
            f"events are published.",
            "Let allow_migrate() say yes for the app django_amqp_events there, or name in DATABASE "
            "the alias where it does; an event belongs to the outbox of its own transaction.",
        )


def check_limits(project: Project) -> Iterator[Problem]:
    """Settings that give a guarantee away (W008, W009, W010)."""
    settings = project.settings
    limits = {"TTL": settings.archive.ttl, "MAX_LENGTH": settings.archive.max_length}
    given = [name for name, value in limits.items() if value is not None]
    if given:
        yield Problem(
            "W008",
            f"The archive is limited by {_listed(given)}: archived events beyond the limit are "
            f"lost.",
            "Take the limit out of AMQP_EVENTS['ARCHIVE'], or watch the archive's depth and age "
            "with `manage.py events_status`; the mirror keeps it empty.",
        )
    if settings.queue_type == "classic":
        yield Problem(
            "W009",
            'AMQP_EVENTS["QUEUE_TYPE"] is "classic": no delivery limit, so a poison message is '
            "redelivered without end, and dead letters that may be lost.",
            'Take it out; the default "quorum" works on a single node too.',
        )
    if settings.max_body > BROKER_MAXIMUM:
        yield Problem(
            "W010",
            f'AMQP_EVENTS["MAX_BODY"] is {settings.max_body}, but RabbitMQ takes messages up to '
            f"{BROKER_MAXIMUM} bytes by default.",
            "Publish a reference to large data, or raise max_message_size on the broker as well.",
        )


def check_alerts(project: Project) -> Iterator[Problem]:
    """E-mails about alerts that nobody gets (W060)."""
    if project.settings.alerts.mail and not django_settings.ADMINS:
        yield Problem(
            "W060",
            "AMQP_EVENTS['ALERTS'] has MAIL, but Django's ADMINS is empty: nobody gets the e-mail.",
            "Set ADMINS (and EMAIL_HOST, SERVER_EMAIL), or take MAIL out and use the signal "
            "alert_raised.",
        )


# -- the Celery app's configuration -------------------------------------------------------


#: Schemes that kombu hands to py-amqp, beside paths to its transport.
_TRANSPORTS: Final = ("amqp", "amqps", "pyamqp")


def check_transport(project: Project) -> Iterator[Problem]:
    """Brokers without what events rest on (E027)."""
    for transport in sorted({server.transport for server in project.servers}):
        # Only a worker or a publisher sees what a class of somebody's own is made of.
        own = ":" in transport or "." in transport
        if transport not in _TRANSPORTS and not own:
            near = difflib.get_close_matches(transport, _TRANSPORTS, n=1)
            yield Problem(
                "E027",
                f"The Celery app's broker is reached by {transport!r}, and not by py-amqp: nothing "
                f"can be published, and no worker starts.",
                f"Did you mean {near[0]}://?"
                if near
                else "Use RabbitMQ with pyamqp:// (or amqp://, where librabbitmq is not "
                "installed), or give events an app of their own with CELERY_APP.",
            )


def check_worker(project: Project) -> Iterator[Problem]:
    """Celery options with which a worker loses, doubles or endangers events."""
    celery, handlers = project.celery, project.registry.handlers
    if not celery or not handlers:
        return
    if celery["broker_channel_error_retry"] is not True:
        yield Problem(
            "E018",
            "Celery's broker_channel_error_retry is not True: when RabbitMQ closes a channel "
            "(a consumer timeout, a queue that was deleted), the worker exits.",
            "Set it to True. `manage.py events_worker` sets it for its own process; silence this "
            "check if nothing else runs the handlers.",
        )
    if celery["worker_cancel_long_running_tasks_on_connection_loss"] is not True:
        yield Problem(
            "W003",
            "Celery's worker_cancel_long_running_tasks_on_connection_loss is not True: after a "
            "lost connection a handler runs on while its event is delivered and run again.",
            "Set it to True. `manage.py events_worker` sets it for its own process.",
        )
    accepted = celery["accept_content"]
    if isinstance(accepted, Iterable):
        dangerous = {_DANGEROUS_CONTENT[c] for c in map(str, accepted) if c in _DANGEROUS_CONTENT}
        if dangerous:
            yield Problem(
                "W005",
                f"Celery's accept_content has {_listed(sorted(dangerous))}. Events are JSON only, "
                f"whatever it says, but the same worker decodes it from its other queues: whoever "
                f"may publish there can run code (pickle) or fill the memory (yaml) where the "
                f"handlers run.",
                'Set accept_content to ["json"], or run the handlers in a worker of their own.',
            )
    yield from _check_pool(str(celery["worker_pool"]), handlers.values())


def _check_pool(pool: str, handlers: Iterable[Handler]) -> Iterator[Problem]:
    if "gevent" in pool or "eventlet" in pool:
        yield Problem(
            "E019",
            f"Celery's worker_pool is {pool!r}, in which handlers are refused.",
            "Use prefork or threads; docs/pools.md has the reason.",
        )
        return
    solo = "solo" in pool
    if solo:
        yield Problem(
            "W006",
            f"Celery's worker_pool is {pool!r}: while a handler runs, the worker answers no "
            f"heartbeats, so the broker cuts the connection and delivers the event again.",
            "Use prefork or threads, or keep handlers far shorter than the heartbeat.",
        )
    limited = [h.name for h in handlers if h.time_limit or h.soft_time_limit]
    if limited and (solo or "thread" in pool):
        yield Problem(
            "W007",
            f"Handlers {_listed(limited)} have a time limit, but Celery's worker_pool is "
            f"{pool!r}, which has none.",
            "Use prefork, or limit the work inside the handler (time-outs of its requests).",
        )


def check_eager(project: Project) -> Iterator[Problem]:
    """task_always_eager, which does less than its name says (W004)."""
    if project.celery.get("task_always_eager"):
        yield Problem(
            "W004",
            "Celery's task_always_eager is on. It runs ordinary tasks in the calling process; "
            "events are published to the broker and handled by workers all the same.",
            'For development and tests set AMQP_EVENTS["BACKEND"] to "inline" or "memory".',
        )


def check_celery_queues(project: Project) -> Iterator[Problem]:
    """Celery queues with names of ours (E020) or in our namespace (W011)."""
    if not project.celery:
        return
    declared = topology.build(project.settings, project.registry)
    ours = {queue.name for queue in declared.queues}
    used = {
        "task_queues": _queue_names(project.celery["task_queues"]),
        "task_default_queue": _queue_names([project.celery["task_default_queue"]]),
        "task_routes": _routed(project.celery["task_routes"]),
    }
    for option, names in used.items():
        for name in sorted(names):
            if name in ours:
                yield Problem(
                    "E020",
                    f"Celery's {option} names {name!r}, a queue of this service's events.",
                    "Take it out. Workers consume the events' queues by themselves; Celery would "
                    "declare it with other arguments, which RabbitMQ refuses (406), and put "
                    "ordinary tasks among events.",
                )
            elif declared.owns(name):
                yield Problem(
                    "W011",
                    f"Celery's {option} names {name!r}, which begins like the names of this "
                    f"service's own queues.",
                    "Choose another name: `events_declare --delete-stale` takes it for a queue "
                    "that a removed handler has left.",
                )


def _queue_names(value: Any) -> set[str]:
    """Return names from ``task_queues``: a mapping, or queues, or names."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return set()
    names = (getattr(item, "name", item) for item in value)
    return {name for name in names if isinstance(name, str)}


def _routed(value: Any) -> set[str]:
    """Return the queues that ``task_routes`` names; routers that are functions are not asked."""
    if isinstance(value, (list, tuple)):
        return set().union(*(_routed(item) for item in value))
    if not isinstance(value, Mapping):
        return set()
    routes = (
        route.get("queue") if isinstance(route, Mapping) else route for route in value.values()
    )
    return _queue_names(list(routes))


# -- deployment ---------------------------------------------------------------------------


def check_accounts(project: Project) -> Iterator[Problem]:
    """RabbitMQ's well-known account, and passwords in the clear (W020, W022, W023)."""
    if any(s.user == "guest" and s.login_method.upper() != "EXTERNAL" for s in project.servers):
        yield Problem(
            "W020",
            "The Celery app logs in to the broker as guest, RabbitMQ's well-known account.",
            "Set broker_url with an account of this project's own, and delete guest.",
        )
    try:
        url = urlsplit(project.settings.management_url)
        host, user = url.hostname or "", url.username
    except ValueError:
        return
    if user == "guest":
        yield Problem(
            "W022",
            'AMQP_EVENTS["MANAGEMENT_URL"] logs in as guest, RabbitMQ\'s well-known account.',
            "Use an account with the tag management; declaring needs no more.",
        )
    if url.scheme == "http" and not _is_loopback(host):
        yield Problem(
            "W023",
            f'AMQP_EVENTS["MANAGEMENT_URL"] sends its password to {host!r} over plain http.',
            "Use https, or reach the management API on this machine.",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def check_backend(project: Project) -> Iterator[Problem]:
    """A backend for development in production (W021)."""
    if project.settings.backend != "amqp" and not django_settings.DEBUG:
        yield Problem(
            "W021",
            f'AMQP_EVENTS["BACKEND"] is {project.settings.backend!r}: no event leaves the process.',
            'Take it out of the settings for production; the default is "amqp".',
        )


CHECKS: Final[tuple[Check, ...]] = (
    check_discovery,
    check_contracts,
    check_handlers,
    check_database,
    check_renamed,
    check_redaction,
    check_archive_database,
    check_once,
    check_autocommit,
    check_outbox,
    check_limits,
    check_alerts,
    check_transport,
    check_worker,
    check_eager,
    check_celery_queues,
)
DEPLOYMENT_CHECKS: Final[tuple[Check, ...]] = (check_accounts, check_backend)
