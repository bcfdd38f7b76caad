"""Which databases are asked: only those that events are written to, each alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from django.db import connections

from django_amqp_events import Options, OutboxError, databases, publish_event
from django_amqp_events.models import ArchivedEvent, OutboxEvent
from django_amqp_events.testing import override_events
from tests import forked
from tests.conftest import routed_by

#: Entries of DATABASES.
SQLITE = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
FILE = {"ENGINE": "django.db.backends.sqlite3", "NAME": "/nowhere/db.sqlite3"}
TENANT = {**FILE, "OPTIONS": {"options": "-c search_path=tenant"}}
NOWHERE = {"ENGINE": "django.db.backends.sqlite3", "NAME": "/nowhere/at/all.sqlite3"}
NO_DRIVER = {"ENGINE": "django.db.backends.oracle", "NAME": "x"}


class Replicas:
    """The router of Django's documentation."""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        return "replica"

    def db_for_write(self, model: Any, **hints: Any) -> str:
        return "default"

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        return True


class Events:
    """Keeps this app in one database, and other apps out of it."""

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return "events" if model._meta.app_label == "django_amqp_events" else None

    db_for_read = db_for_write

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        return (db == "events") == (app_label == "django_amqp_events")


@pytest.fixture
def aliases(request: pytest.FixtureRequest) -> Iterator[None]:
    entries = connections.configure_settings(dict(request.param))
    with patch.dict(connections.databases, entries, clear=True):
        yield


CASES: list[Any] = [
    pytest.param({"default": SQLITE}, (), (), ["default"], id="one"),
    pytest.param({"default": SQLITE, "b": SQLITE}, (), ("b",), ["b", "default"], id="own first"),
    pytest.param({"default": {}, "b": SQLITE}, (), (), ["b"], id="dummy default"),
    pytest.param({"default": SQLITE, "b": NO_DRIVER}, (), (), ["default", "b"], id="no driver"),
    pytest.param(
        {"default": SQLITE, "replica": SQLITE}, (Replicas(),), (), ["default"], id="replica"
    ),
    pytest.param(
        {"default": FILE, "readonly": {**FILE, "CONN_MAX_AGE": 9}, "tenant": TENANT}, (), (),
        ["default", "tenant"],
        id="the same twice",
    ),
    pytest.param(
        {"default": SQLITE, "b": {**SQLITE, "TEST": {"MIRROR": "default"}}}, (), (), ["default"],
        id="mirror",
    ),
    pytest.param(
        {"default": SQLITE, "events": SQLITE}, (Events(),), (), ["events"], id="its own database"
    ),
    pytest.param(
        {"default": SQLITE, "events": SQLITE}, (Events(),), ("default",), ["default", "events"],
        id="an own one against the routers",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("aliases", "routers", "own", "expected"), CASES, indirect=["aliases"])
def test_which_databases_are_written(
    aliases: None, routers: tuple[Any, ...], own: tuple[str, ...], expected: list[str]
) -> None:
    with routed_by(*routers):
        for model in (OutboxEvent, ArchivedEvent):
            assert databases.written(model, *own) == expected


@pytest.mark.django_db
def test_a_table_that_introspection_does_not_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """django-tenants lists the tenant's schema alone, and queries find the tables of both."""
    monkeypatch.setattr(connections["default"].introspection, "table_names", lambda *_: [])
    assert databases.has_table("default", OutboxEvent)


@pytest.mark.parametrize("aliases", [{"default": SQLITE, "replica": SQLITE}], indirect=True)
def test_no_event_is_published_where_no_relay_would_find_it(aliases: None) -> None:
    with (
        routed_by(Replicas()),
        override_events(SERVICE="shop", CELERY_APP="tests.celery_app.app"),
        pytest.raises(OutboxError, match="'replica' is no database of the outbox"),
    ):
        publish_event("shop.order.created", {}, options=Options(using="replica"))


_PROGRAM = """
import io, json, sys, types
import django
from django.conf import settings
from django.urls import path
given = json.loads(sys.argv[1])
settings.configure(
    AMQP_EVENTS={"SERVICE": "shop", "DATABASE": given["database"], "AUTODISCOVER": [],
                 "HANDLERS": given.get("handlers", {})},
    INSTALLED_APPS=["django.contrib.contenttypes", "django_amqp_events"],
    DATABASES=given["databases"], USE_TZ=True, ROOT_URLCONF="urls", ALLOWED_HOSTS=["*"],
    DATABASE_ROUTERS=given["routers"],
)
django.setup()
from celery import Celery
Celery("shop", broker="amqp://nobody@127.0.0.1:1//").set_default()
from django.core.management import call_command
from django.test import Client
from django.http import HttpResponse
from django_amqp_events import conf
from django_amqp_events.databases import non_atomic
from django_amqp_events.declare.registry import get_registry
from django_amqp_events.monitor import event_locations
from django_amqp_events.publish import outbox, outbox_rows
from django_amqp_events.archive import inbox_retention
sys.modules["urls"] = types.ModuleType("urls")
sys.modules["urls"].urlpatterns = [path("", non_atomic(lambda request: HttpResponse()))]
call_command("migrate", database=given["database"], verbosity=0)
said = io.StringIO()
def run(name, *args):
    try:
        call_command(name, *args, stdout=said, stderr=said)
    except BaseException as exc:
        return str(exc)
    return ""
found = conf.get_settings()
print(json.dumps({
    "relay": run("events_relay", "--until-empty"),
    "prune": run("events_prune"),
    "view": Client().get("/").status_code,
    "outboxes": [each.alias for each in outbox.read_status(found)],
    "tables": outbox_rows.tables(found),
    "inboxes": inbox_retention.databases(),
    "paused": "paused" in said.getvalue(),
    "found": len(event_locations.locate("17", found, get_registry()).events),
}))
"""


def report(given: dict[str, Any], program: str = _PROGRAM) -> dict[str, Any]:
    """Return what a program says of the databases that it is given."""
    done = forked.run(
        [sys.executable, "-c", program, json.dumps(given)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


OTHERS: list[Any] = [
    pytest.param({"reports": NOWHERE}, None, id="unreachable"),
    pytest.param({"reports": NO_DRIVER}, None, id="no driver"),
    pytest.param({"default": {}}, Events, id="dummy default"),
    pytest.param({"replica": SQLITE}, Replicas, id="replica"),
    pytest.param({"replica": SQLITE}, None, id="the same twice"),
]


@pytest.mark.parametrize(("others", "router"), OTHERS)
def test_other_aliases_stop_nothing(
    others: dict[str, Any], router: type | None, tmp_path: Path
) -> None:
    """Each has ATOMIC_REQUESTS, so that Django would open a transaction there for each view."""
    unread = others.get("reports") in (NOWHERE, NO_DRIVER)
    main = "events" if "default" in others else "default"
    entries: dict[str, Any] = {main: {**SQLITE, "NAME": str(tmp_path / "db.sqlite3")}}
    for alias, entry in others.items():
        same = entries[main] if alias == "replica" else entry
        entries[alias] = {**same, "ATOMIC_REQUESTS": True} if entry else {}
    routers = [f"{router.__module__}.{router.__name__}"] if router else []
    found = report({"databases": entries, "database": main, "routers": routers})
    # It may have an outbox with events that must not be handled twice.
    assert ("database 'reports' cannot be read" in found.pop("prune")) == unread
    assert found == {
        "relay": "",
        "view": 200,
        "outboxes": [main],
        "tables": [main],
        "inboxes": [main],
        "paused": False,
        "found": 0,
    }


def test_a_database_that_a_handler_names_must_answer(tmp_path: Path) -> None:
    """What waits in its outbox is unknown, so no command may report that all is well."""
    main = {**SQLITE, "NAME": str(tmp_path / "db.sqlite3")}
    handler = {"EVENTS": ["a.b"], "HANDLER": "builtins.print", "ONCE": True, "USING": "named"}
    given = {"databases": {"default": main, "named": NOWHERE}, "database": "default", "routers": [],
             "handlers": {"h": handler}}  # fmt: skip
    program = _PROGRAM.partition("print(json.dumps(")[0] + _NAMED
    assert report(given, program) == {"status": "unknown", "relayed": False}


_NAMED = """
from django_amqp_events.publish.relay import Relay
told = []
Relay(app=None, settings=found, alias="named", needed=False, alone=False, tell=told.append,
      stop=lambda: bool(told)).run(until_empty=True)
print(json.dumps({
    "status": {each.alias: each.severity for each in outbox.read_status(found)}["named"],
    "relayed": not told,
}))
"""
