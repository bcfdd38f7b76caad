"""The system checks: each problem shows up, and a correct project has none."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, Task, _state
from django.core import checks as django_checks
from django.db import connections
from hypothesis import given
from hypothesis import strategies as st
from pytest_django import Settings as DjangoSettings

import django_amqp_events
from django_amqp_events import checks, conf, handler
from django_amqp_events.apps import CHECKS
from django_amqp_events.checks import project as checks_project
from django_amqp_events.checks import settings as checks_settings
from django_amqp_events.checks.settings import check_discovery
from django_amqp_events.declare.registry import build, get_registry
from django_amqp_events.worker import bootstrap
from tests.conftest import Database, on

from .. import project
from ..test_fuzz_settings import nested

ROOT = Path(__file__).resolve().parents[3]
HERE = project.__name__
PREFIX = "django_amqp_events."
Check = Callable[..., list[str]]


@pytest.fixture
def run(settings: DjangoSettings, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Run the checks on a correct project with some changes; returns ids without prefix."""

    def run(
        *, celery: dict[str, Any] | None = None, deploy: bool = False, **keys: Any
    ) -> list[str]:
        monkeypatch.setattr(project, "app", project.make_app(**(celery or {})))
        settings.AMQP_EVENTS = correct(**keys)
        return ids(deploy=deploy)

    return run


def correct(**keys: Any) -> dict[str, Any]:
    return {
        "SERVICE": "billing",
        "CELERY_APP": f"{HERE}.app",
        "EVENTS": {"shop.order.created": {"CONTRACT": f"{HERE}.order_created"}},
        "HANDLERS": handling("fits"),
        "TOPOLOGY": "verify",
        **keys,
    }


def handling(function: str, **options: Any) -> dict[str, Any]:
    return {
        "billing.handler": {
            "EVENTS": ["shop.order.created"],
            "HANDLER": f"{HERE}.{function}",
            **options,
        }
    }


def messages(*, deploy: bool = False) -> list[django_checks.CheckMessage]:
    found = django_checks.run_checks(tags=[CHECKS], include_deployment_checks=deploy)
    for message in found:
        assert isinstance(message.id, str)
        assert re.fullmatch(r"django_amqp_events\.[EW]\d{3}", message.id)
        # The id says what the level is.
        assert message.is_serious() is message.id.startswith(f"{PREFIX}E")
    return list(found)


def ids(*, deploy: bool = False) -> list[str]:
    return [str(message.id).removeprefix(PREFIX) for message in messages(deploy=deploy)]


def text() -> str:
    return "\n".join(f"{message.msg} {message.hint}" for message in messages())


# -- the whole ----------------------------------------------------------------------------


def test_a_correct_project_has_no_message(run: Check) -> None:
    assert run() == []
    assert run(deploy=True) == []


def test_without_a_service_there_is_one_message(run: Check, settings: DjangoSettings) -> None:
    settings.AMQP_EVENTS = None
    assert ids() == ["W001"]
    assert ids(deploy=True) == ["W001"]
    settings.AMQP_EVENTS = {}
    assert ids() == ["W001"]
    settings.AMQP_EVENTS = "billing"
    assert ids() == ["E003"]
    run()
    settings.AMQP_EVENTS = {k: v for k, v in correct().items() if k != "SERVICE"}
    assert ids() == ["E001"]


def test_checks_touch_no_broker(run: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a check opened a connection")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    assert run(deploy=True) == []


def test_passwords_are_not_shown(run: Check) -> None:
    run(
        celery={"broker_url": "redis://me:secret@elsewhere//"},
        MANAGEMENT_URL="http://guest:secret@rabbit.example:15672",
    )
    shown = "\n".join(f"{m.msg} {m.hint}" for m in messages(deploy=True))
    assert "E027" in ids()
    assert "secret" not in shown


# -- each check -----------------------------------------------------------------------------


def searching(*paths: Any) -> dict[str, Any]:
    event = {"CONTRACT": f"{HERE}.order_paid", "SEARCH": list(paths)}
    return {"EVENTS": {"shop.order.created": event}, "HANDLERS": {}}


def of_contract(contract: str, function: str) -> dict[str, Any]:
    events = {"shop.order.created": {"CONTRACT": f"{HERE}.{contract}"} if contract else {}}
    return {"EVENTS": events, "HANDLERS": handling(function) if function else {}}


def of_each(functions: str, **options: Any) -> list[dict[str, Any]]:
    return [{"HANDLERS": handling(function, **options)} for function in functions.split()]


def of_celery(option: str, *values: Any, **keys: Any) -> list[dict[str, Any]]:
    return [{"celery": {option: value}, **keys} for value in values]


OURS = "billing.billing.handler"
TWO = {**handling("fits"), "billing.other": {**handling("fits")["billing.handler"]}}
#: Changes of a correct project, by the code of the only problem that each makes.
CASES: dict[str, list[dict[str, Any]]] = {
    "": [
        *of_each(
            "fits fits_by_default fits_with_keywords fits_with_some fits_exactly instance method "
            "fits_asynchronously by_position_if_at_all FittingTask takes_nothing "
            "takes_keywords_only"
        ),
        *of_each("fits_exactly fits_with_keywords fits_with_some", STRICT=True),
        *of_each("fits_bound fits_bound_anyhow FittingTask", BIND=True),
        *of_each("fits", NEWEST=("order_id", "total")),
        *of_each("misses", EVENTS=["other.#"]),
        # An event that says nothing fits.
        *(of_contract(contract, "misses") for contract in ("", "anything_goes")),
        searching("order_id", "customer.email"),
        {"RENAMED_HANDLERS": {"old": "billing.handler", "older": "billing.handler"}},
        *of_celery("broker_url", "amqp://me@a//", "amqps://me@a//", "pyamqp://me@a//"),
        *of_celery("broker_url", ["amqp://me@a", "amqp://me@b"], "AMQP://me@a//", "pyAMQP://me@a"),
        {"celery": {"broker_url": "redis://a", "broker_transport": "pyamqp"}},
        *of_celery("broker_url", "redis://a", BACKEND="memory"),
        # A service that handles nothing runs no worker for events.
        *of_celery("broker_channel_error_retry", False, HANDLERS={}),
        *of_celery("broker_heartbeat", 0, HANDLERS={}),
        *of_celery("task_queues", {"billing2.images": {}}, []),
        *of_celery("task_default_queue", None),
        *of_celery("worker_pool", "prefork", "threads", "solo"),
        *of_celery("worker_pool", "gevent", HANDLERS={}),
    ],
    "E002": [{"HANDLER": {}}],
    "E003": [{"PUBLISH": "later"}],
    "E004": [{"SERVICE": "a.b"}],
    "E005": [{"EXCHANGE": "x" * 256}],
    "E006": [{"EVENTS": {"a..b": {}}}],
    "E007": of_each("nothing"),
    "E009": [
        *of_each("fits", MAX_RETRIES=-1),
        *map(searching, ["a..b", "", "a=b", "a b", "a*", 7, ["a"]]),
        searching("order_id", "order_id"),
    ],
    "E010": [{"HANDLERS": {name: {**TWO[name], "QUEUE": "q"} for name in TWO}}],
    "E011": [
        *of_each("misses misses_keyword MissingTask"),
        *of_each("misses", EVENTS=["shop.order.*"]),
    ],
    "E012": of_each("fits takes_nothing by_position_if_at_all", STRICT=True),
    "E013": [
        *of_celery("task_queues", {OURS: {}}, 5, [5, None]),
        *of_celery("task_default_queue", OURS, "billing:archive", "events"),
        *of_celery("task_default_exchange", "events", "billing:archive"),
        {"EXCHANGE": "celery"},
        *of_celery("result_backend", "nowhere://"),
        *of_celery("task_default_rate_limit", "often", "1/y"),
        *of_celery("task_annotations", {"billing.handler": {"rate_limit": "1/y"}}),
        *of_each(
            "by_position generator asynchronous_generator celery_task Handlers TaskWithoutRun "
            "StaticTask"
        ),
        # inspect knows no signature of them.
        *({"HANDLERS": {"a.b": {"EVENTS": ["a.b"], "HANDLER": path}}}
          for path in ("operator.itemgetter", "builtins.max")),
    ],
    "E014": [
        *of_each("takes_nothing takes_keywords_only fits_with_keywords", BIND=True),
        *of_each("TaskWithoutSelf"),
    ],
    "E015": [
        {"CELERY_APP": path}
        for path in ("nowhere", f"{HERE}.nothing", f"{HERE}.no_app", "tests.unit.broken.app")
    ],
    "E018": of_celery("broker_channel_error_retry", False, None),
    "E022": [
        *(of_contract(name, "") for name in ("fits_asynchronously", "generator")),
        {"EVENTS": {"a.b": {"CONTRACT": "builtins.max"}}},
    ],
    # Its archived events would be replayed to another handler.
    "E023": [
        {"RENAMED_HANDLERS": {"billing.handler": "billing.gone"}},
        {"HANDLERS": TWO, "RENAMED_HANDLERS": {"billing.other": "billing.handler"}},
    ],
    "E027": [
        *of_celery("broker_url", "redis://localhost", "sqs://", "memory://", "filesystem://"),
        *of_celery("broker_write_url", "redis://a"),
        {"celery": {"broker_url": "amqp://me@a//", "broker_transport": "redis"}},
    ],
    "E040": of_each("fits_asynchronously", ONCE=True),
    "E043": of_each("fits", NEWEST=("order_id", "version")),
    "W003": of_celery("worker_cancel_long_running_tasks_on_connection_loss", False),
    "W008": [{"ARCHIVE": limit} for limit in ({"TTL": 5}, {"TTL": 5, "MAX_LENGTH": 5})],
    "W009": [{"QUEUE_TYPE": "classic"}],
    "W029": [{"HISTORY": {"MAX_AGE": 60}, "UNROUTED": mode} for mode in ("raise", "hold")],
    "W025": of_celery("broker_heartbeat", 0, None),
    "W075": of_celery("worker_pool", "gevent", "eventlet", "celery.concurrency.base:BasePool"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("code", "keys"), [(code, keys) for code, changes in CASES.items() for keys in changes]
)
def test_each_change_has_its_check(run: Check, code: str, keys: dict[str, Any]) -> None:
    assert run(**keys) == ([code] if code else [])


def test_messages_name_what_is_wrong(run: Check) -> None:
    for keys, words in (
        ({"HANDLERS": handling("misses")},
         ("'customer'", "'shop.order.created'", "'order_id', 'total', 'note'")),
        (searching(7), ("a list of different paths",)),
        ({"HANDLERS": handling("fits", NEWEST=("order_id", "version"))},
         ("has no argument 'version'",)),
        ({"CELERY_APP": "nowhere.app"}, ("nowhere.app",)),
        ({"ARCHIVE": {"TTL": 5}}, ("lost",)),
    ):  # fmt: skip
        run(**keys)
        shown = text()
        assert all(word in shown for word in words), shown


# -- handlers and contracts ---------------------------------------------------------------


def test_hints_that_cannot_be_enforced(run: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(VALIDATE=True) == []
    wrong = {"EVENTS": {"shop.order.created": {"CONTRACT": f"{HERE}.unknown_type"}}}
    assert run(**wrong, HANDLERS=handling("unknown_type")) == []
    assert run(**wrong, VALIDATE=True) == ["E080"]
    assert f"{HERE}.unknown_type cannot be enforced: " in text()
    assert "celery.app.base.Celery" in text()
    assert run(HANDLERS=handling("unknown_type", VALIDATE=True)) == ["E080"]
    assert run(HANDLERS=handling("unknown_type", VALIDATE=False), VALIDATE=True) == []
    # Only pydantic's absence matters, and is one message.
    monkeypatch.setitem(sys.modules, "pydantic", None)
    assert run() == []
    assert run(VALIDATE=True) == ["E080"]
    [message] = messages()
    assert message.msg.startswith("VALIDATE needs pydantic")
    assert message.hint is not None
    assert message.hint.startswith('Run pip install "django-amqp-events[contracts]", or remove')


def test_metrics_need_prometheus_client(run: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(METRICS=True) == []
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert run(METRICS=True) == ["E090"]
    assert run() == []


class Keeping:
    """A router that keeps our tables out, or only that of one model."""

    def __init__(self, model: str = "") -> None:
        self.model = model

    def allow_migrate(self, db: str, app_label: str, model_name: str = "", **_: Any) -> bool | None:
        ours = app_label == "django_amqp_events" and self.model in ("", model_name)
        return False if ours else None


def test_outbox_without_a_table(run: Check, settings: DjangoSettings) -> None:
    settings.DATABASE_ROUTERS = [Keeping()]
    assert run() == ["W014", "E025"]
    assert run(HANDLERS={}) == ["E025"]
    assert run(PUBLISH="on_commit", HANDLERS={}) == []
    # Rows are written and read below the doubles, too.
    for backend in ("memory", "inline"):
        assert run(BACKEND=backend, HANDLERS={}) == ["E025"]
        assert run(BACKEND=backend, PUBLISH="immediate", HANDLERS={}) == []


def test_outbox_without_a_database(run: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(DATABASE="orders") == ["E025"]
    assert "DATABASES has no database 'orders'" in text()
    assert run(PUBLISH="on_commit", DATABASE="orders", HANDLERS={}) == ["E025"]
    dummy = {"ENGINE": "django.db.backends.dummy"}
    monkeypatch.setattr(connections, "settings", {"default": dummy})
    assert run() == ["W014", "E025"]
    assert run(PUBLISH="immediate", HANDLERS={}) == []


def test_once_without_its_table(run: Check, settings: DjangoSettings) -> None:
    once = handling("fits", ONCE=True)
    assert run(HANDLERS=once) == []
    assert run(HANDLERS=handling("fits", ONCE=True, USING="books")) == ["E041"]
    assert "'books'" in text()
    settings.DATABASE_ROUTERS = [Keeping()]
    assert run(HANDLERS=once, PUBLISH="immediate") == ["W014", "E041"]
    settings.DATABASE_ROUTERS = [Keeping("latestversion")]
    assert run(HANDLERS=once) == []
    assert run(HANDLERS=handling("fits", NEWEST=["order_id", "order_id"])) == ["E041"]


def test_email_without_recipients(run: Check, settings: DjangoSettings) -> None:
    assert run(ALERTS={"MAIL": True}) == ["W060"]
    assert run(ALERTS={"GROWTH": 5}) == []
    settings.ADMINS = [("Ada", "ada@example.com")]
    assert run(ALERTS={"MAIL": True}) == []


# -- the Celery app -----------------------------------------------------------------------


@pytest.fixture
def _no_celery_app(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process without a Celery app."""
    monkeypatch.setattr(_state, "default_app", None)
    monkeypatch.setattr(_state._tls, "current_app", None, raising=False)


@pytest.mark.usefixtures("_no_celery_app")
def test_a_project_without_a_celery_app(run: Check) -> None:
    assert run(CELERY_APP="") == ["E015"]
    # A publisher needs it too: it knows the broker.
    assert run(CELERY_APP="", HANDLERS={}) == ["E015"]
    assert run(CELERY_APP="", deploy=True) == ["E015"]
    for backend in ("memory", "inline"):
        assert run(CELERY_APP="", BACKEND=backend) == []
    project.make_app().set_default()
    assert run(CELERY_APP="") == []
    project.make_app().set_current()
    assert run(CELERY_APP="") == []


@pytest.mark.usefixtures("_no_celery_app")
def test_the_app_of_events_is_current_for_tasks_too(
    run: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.make_app().set_default()
    assert run() == []
    project.app.set_current()
    assert ids() == ["W016"]
    assert "set_as_current=False" in text()
    project.app.set_default()
    assert ids() == []
    # Without Celery's fixup for Django, no app is the default.
    monkeypatch.setattr(_state, "default_app", None)
    assert ids() == []


def test_a_configuration_that_cannot_be_read(
    settings: DjangoSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = Celery("project", set_as_current=False, fixups=[])
    app.config_from_object("no.such.module")
    monkeypatch.setattr(project, "app", app)
    settings.AMQP_EVENTS = correct()
    assert ids() == ["E015"]
    assert "no.such.module" in text() or "No module named" in text()


@pytest.mark.parametrize("option", ["time_limit", "soft_time_limit"])
def test_time_limits_that_do_not_fit_into_the_consumer_timeout(run: Check, option: str) -> None:
    for limit, timeout, expected in ((1200, 1800, []), (1201, 1800, ["W026"]), (1201, 3600, [])):
        limited = handling("fits", **{option.upper(): limit})
        assert run(HANDLERS=limited, CONSUMER_TIMEOUT=timeout) == expected
        assert run(celery={f"task_{option}": limit}, CONSUMER_TIMEOUT=timeout) == expected
        annotations = {"task_annotations": {"billing.handler": {option: limit}}}
        assert run(celery=annotations, CONSUMER_TIMEOUT=timeout) == expected
    # A hard limit ends what a soft one may not.
    assert run(HANDLERS=handling("fits", SOFT_TIME_LIMIT=1100, TIME_LIMIT=1201)) == ["W026"]


def test_rate_limits_that_a_worker_cannot_keep(run: Check) -> None:
    for pace, expected in (("24/h", []), ("23/h", ["E042"]), (0.001, ["E042"]), (None, [])):
        assert run(HANDLERS=handling("fits", RATE_LIMIT=pace)) == expected
        assert run(HANDLERS=handling("fits"), celery={"task_default_rate_limit": pace}) == expected
        annotations = {"task_annotations": {"*": {"rate_limit": pace}}}
        assert run(HANDLERS=handling("fits"), celery=annotations) == expected
    assert run(HANDLERS=handling("fits", RATE_LIMIT="23/h"), CONSUMER_TIMEOUT=3600) == []


def test_a_rate_limit_in_a_queue_of_several_handlers(run: Check) -> None:
    limited = handling("fits", RATE_LIMIT="1/s", QUEUE="mail")
    other = {"EVENTS": ["shop.order.paid"], "HANDLER": f"{HERE}.fits", "QUEUE": "mail"}
    assert run(HANDLERS=limited) == []
    assert run(HANDLERS={**limited, "billing.other": other}) == ["W074"]


def test_declarations_in_a_package_that_is_no_app(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `startproject billing` makes is no app, and billing/handlers.py looks as if it were."""
    (tmp_path / "lonely" / "conf").mkdir(parents=True)
    for name in ("__init__", "conf/__init__", "conf/dev", "handlers"):
        (tmp_path / "lonely" / f"{name}.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    # Any override hides SETTINGS_MODULE (django.conf.UserSettingsHolder).
    monkeypatch.setattr(
        checks_settings, "django_settings", SimpleNamespace(SETTINGS_MODULE="lonely.conf.dev")
    )

    def found(*names: str) -> list[str]:
        parsed = conf.Settings(service="billing", autodiscover=names)
        looked = checks_project.Project(settings=parsed, registry=build(parsed))
        return [problem.code for problem in check_discovery(looked)]

    assert found("events", "handlers") == ["W012"]
    assert found("events") == []
    importlib.import_module("lonely.handlers")
    assert found("events", "handlers") == [], "it is imported"
    assert check_discovery in checks.CHECKS


# -- deployment ---------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["memory", "inline"])
def test_a_backend_for_development(run: Check, settings: DjangoSettings, backend: str) -> None:
    settings.DEBUG = False
    assert run(BACKEND=backend, deploy=True) == ["W021"]
    assert run(BACKEND=backend) == []
    settings.DEBUG = True
    assert run(BACKEND=backend, deploy=True) == []


class TenantRouter:
    """As that of django-tenants: it answers for the schema of the present tenant."""

    def allow_migrate(self, db: str, app_label: str, **_: Any) -> bool | None:
        schema = getattr(connections[db], "schema_name", "public")
        return schema == "public" if app_label == "django_amqp_events" else None


@pytest.mark.parametrize("schema", ["public", "tenant"])
@pytest.mark.parametrize("once", [True, False])
def test_a_router_is_asked_where_it_answers_for_all(
    run: Check, settings: DjangoSettings, schema: str, once: bool
) -> None:
    settings.DATABASE_ROUTERS = [f"{__name__}.TenantRouter"]
    connection: Any = connections["default"]
    connection.schema_name = schema
    try:
        assert run(HANDLERS=handling("fits", ONCE=once)) == []
    finally:
        del connection.schema_name


# -- what a worker does when it starts -----------------------------------------------------------


class Unhashable:
    """A callable object that compares."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other

    def __call__(self, order_id: int) -> None: ...


@dataclass(frozen=True)
class HashFails:
    """Its hash is that of a list."""

    numbers: list[int] = field(default_factory=list)

    def __call__(self, order_id: int, total: str = "") -> None: ...


class NeedsArguments(Task):
    def __init__(self, url: str) -> None:
        self.url = url

    def run(self, order_id: int) -> None: ...


class Picky(Task):
    def __init_subclass__(cls) -> None:
        raise TypeError("it is final")

    def run(self, order_id: int) -> None: ...


class Unbound(Task):
    @classmethod
    def on_bound(cls, app: Any) -> None:
        raise LookupError("it needs a setting")

    def run(self, order_id: int) -> None: ...


class UnhashableTask(Task):
    __hash__ = None  # type: ignore[assignment]

    def run(self, order_id: int) -> None: ...


def fits(order_id: int) -> None: ...


@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize(
    ("target", "options", "code"),
    [
        (fits, {}, ""),
        (Unhashable(), {"name": "billing.object"}, ""),
        (HashFails(), {"name": "billing.object"}, ""),
        (partial(fits), {}, ""),
        (NeedsArguments, {}, "E013"),
        (Picky, {}, "E013"),
        (Unbound, {}, "E013"),
        (UnhashableTask, {}, "E013"),
        (project.unknown_type, {"validate": True}, "E080"),
        (fits, {"name": "celery.chord"}, "E013"),
        (fits, {"name": "project.tasks.send"}, "E013"),
        *(
            (fits, {"queue": queue}, "E004")
            for queue in ("high,low", "a b", "a:b", "*", "a.", ".a")
        ),
        *((fits, {"queue": queue}, "") for queue in ("mail", "high-prio", "a.b", "Größe_1")),
        *(
            (fits, {"name": name}, "E004")
            for name in ("a,b", "a[b]", "a?", "a b", "a*", "<lambda> ")
        ),
    ],
)
def test_a_worker_starts_if_no_check_objects(
    run: Check, target: Any, options: dict[str, Any], code: str, validate: bool
) -> None:
    handler("shop.order.created", **options)(target)
    run(HANDLERS={}, VALIDATE=validate)
    project.app.task(name="project.tasks.send")(fits)
    assert ids() == ([code] if code else []), text()
    app = project.app
    worker = SimpleNamespace(app=app, pool_cls="solo", options={})
    start = nullcontext() if not code else pytest.raises(SystemExit, match="does not start")
    with start:
        bootstrap.install(worker)
    if not code:
        # Through -Q, as events_worker passes it.
        [queue] = {made.queue for made in get_registry().handlers.values()}
        given: list[Any] = []
        instance = SimpleNamespace(app=app, setup_queues=lambda *queues: given.extend(queues))
        bootstrap.read_queue_options(instance)
        instance.setup_queues(f"{queue},images")
        assert given[0] == ["images"]
        assert instance.amqp_events_selected == {queue}
        [name] = get_registry().handlers
        assert fnmatchcase(name, name)


# -- hostile ------------------------------------------------------------------------------


@given(
    keys=st.dictionaries(
        st.sampled_from([key for key in sorted(conf.KEYS) if key != "CELERY_APP"]),
        nested,
        max_size=5,
    ),
    celery=st.dictionaries(
        st.sampled_from(
            [
                *("broker_channel_error_retry", "broker_heartbeat", "task_default_queue"),
                *("task_default_rate_limit", "task_queues", "task_soft_time_limit"),
                *("task_time_limit", "worker_cancel_long_running_tasks_on_connection_loss"),
            ]
        ),
        nested,
        max_size=4,
    ),
)
def test_checks_never_raise(run: Check, keys: dict[str, Any], celery: dict[str, Any]) -> None:
    run(celery=celery, deploy=True, **keys)


# -- database servers ------------------------------------------------------------------


@on("mariadb")
def test_a_mariadb_without_transactions(
    archive_database: Database, settings: DjangoSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    alias = archive_database.alias
    connection: Any = connections[alias]
    settings.AMQP_EVENTS = correct(DATABASE=alias, BACKEND="memory")
    assert checks.check_databases([alias, "default"]) == []
    monkeypatch.setitem(vars(connection.features), "supports_transactions", False)
    problems = checks.check_databases([alias, "default"])
    assert [str(problem.id).removeprefix(PREFIX) for problem in problems] == ["E030"]
    connection.close()


# -- the documentation --------------------------------------------------------------------


def test_every_id_is_documented_and_tested() -> None:
    package = Path(django_amqp_events.__file__).parent
    used = {
        code
        for path in package.rglob("*.py")
        for code in re.findall(r'"([EW]\d{3})"', path.read_text(encoding="utf-8"))
    }
    documentation = (ROOT / "docs" / "checks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `django_amqp_events\.([EW]\d{3})` \|", documentation, re.MULTILINE)
    assert sorted(rows) == sorted(set(rows)), "an id stands twice"
    assert set(rows) == used
    tests = [*Path(__file__).parent.glob("*.py"), *(ROOT / "tests/unit/declare").glob("*.py")]
    tested = {code for path in tests for code in re.findall(r'"([EW]\d{3})"', path.read_text())}
    assert tested >= used
