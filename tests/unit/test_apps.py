"""AppConfig.ready(), each time in its own process; the example project; our migrations."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from django.db import migrations, models
from django.db.migrations.loader import MigrationLoader

from django_amqp_events.models.base import PartialIndex
from tests.commands import run_example, run_program

SETTINGS = """
SECRET_KEY = "not a secret: tests only"
INSTALLED_APPS = ["django_amqp_events", "shop"]
DATABASES = {{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}}}
{}
"""
PROJECT = """
from celery import Celery
app = Celery("project", broker="pyamqp://me@127.0.0.1:1//")
app.conf.broker_channel_error_retry = True
app.conf.worker_cancel_long_running_tasks_on_connection_loss = True
app.conf.accept_content = ["json"]
"""
CONFIGURED = 'AMQP_EVENTS = {"SERVICE": "shop", "CELERY_APP": "project.app"}'
REPORT = """
import sys
import django
django.setup()
print(sorted(name for name in sys.modules if name.startswith("shop.")))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shop = tmp_path / "shop"
    shop.mkdir()
    for name in ("__init__", "events", "handlers", "signals"):
        (shop / f"{name}.py").write_text("")
    (tmp_path / "project.py").write_text(PROJECT)
    configure(tmp_path, CONFIGURED)
    return tmp_path


def configure(project: Path, text: str) -> None:
    (project / "settings.py").write_text(SETTINGS.format(text))


def python(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(project), *sys.path]))
    env = {**os.environ, "PYTHONPATH": path, "DJANGO_SETTINGS_MODULE": "settings"}
    warnings = ("-W", "error::RuntimeWarning")
    return run_program(sys.executable, *warnings, *arguments, cwd=project, env=env)


def imported(project: Path) -> str:
    done = python(project, "-c", REPORT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_declarations_are_found(project: Path) -> None:
    assert imported(project) == "['shop.events', 'shop.handlers']"


@pytest.mark.parametrize("text", ["", 'AMQP_EVENTS = {"AUTODISCOVER": ["events"]}'])
def test_without_a_service_nothing_is_imported(project: Path, text: str) -> None:
    configure(project, text)
    assert imported(project) == "[]"


@pytest.mark.parametrize("value", ["[]", '"events"', '["a b"]'])
def test_autodiscovery_can_be_off_and_is_off_when_wrong(project: Path, value: str) -> None:
    configure(project, CONFIGURED.replace("}", f', "AUTODISCOVER": {value}}}'))
    assert imported(project) == "[]"


def test_a_failing_module_is_named_and_can_be_left_out(project: Path) -> None:
    (project / "shop" / "events.py").write_text("1 / 0")
    done = python(project, "-m", "django", "check")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "shop/events.py" in done.stderr
    entry = "'-shop.events'"
    assert f"add {entry} to that list" in done.stderr
    for names in f"'events', {entry}, 'handlers'", "'shop.handlers'":
        configure(project, CONFIGURED.replace("}", f', "AUTODISCOVER": [{names}]}}'))
        assert imported(project) == "['shop.handlers']"


def test_manage_py_check_with_a_tag(project: Path) -> None:
    done = python(project, "-m", "django", "check", "--tag", "amqp_events")
    assert done.returncode == 0, done.stderr
    assert "no issues" in done.stdout
    (project / "shop" / "handlers.py").write_text(
        "from django_amqp_events import handler\n"
        "@handler('shop.order.created', bind=True)\n"
        "def nothing(): ...\n"
    )
    done = python(project, "-m", "django", "check")
    assert done.returncode == 1
    assert "django_amqp_events.E014" in done.stderr
    assert "HINT" in done.stderr


def test_ready_opens_no_connection(project: Path) -> None:
    audit = (
        "import sys\n"
        "def hook(event, args):\n"
        "    if event in ('socket.connect', 'sqlite3.connect'):\n"
        "        raise SystemExit(event)\n"
        "sys.addaudithook(hook)\n" + REPORT
    )
    done = python(project, "-c", audit)
    assert done.returncode == 0, done.stderr


def test_setup_imports_what_publishing_needs(project: Path) -> None:
    """Each command pays for what is imported. Workers, checks and pages are imported when used."""
    (project / "shop" / "events.py").write_text(
        "from django_amqp_events import event\n"
        "@event('shop.order.created')\n"
        "def created(order_id: int): ...\n"
    )
    console = ["admin", "auth", "contenttypes", "messages", "sessions"]
    apps = [f"django.contrib.{name}" for name in console]
    configure(project, f"{CONFIGURED}\nINSTALLED_APPS += {apps}")
    done = python(project, "-c", "import django, sys; django.setup(); print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert {
        "django_amqp_events.publish.publisher",
        "django_amqp_events.worker.celery_signals",
        "django_amqp_events.admin",
    } <= loaded
    assert not loaded & {
        "celery.worker",
        "opentelemetry",
        "django_amqp_events.archive",
        "django_amqp_events.checks",
        "django_amqp_events.monitor",
        "django_amqp_events.broker.provisioning",
        "django_amqp_events.worker.bootstrap",
        "django_amqp_events.worker.step",
    }
    pages = {name for name in loaded if name.startswith("django_amqp_events.admin.")}
    assert not pages


# -- the example project ---------------------------------------------------------------------------


@pytest.mark.parametrize("settings", ["shop", "billing"])
def test_a_deployment_has_nothing_to_complain_about(settings: str, tmp_path: Path) -> None:
    command = ("-W", "error", "manage.py", "check", "--deploy", "--fail-level", "WARNING")
    run_example(*command, settings=settings, EXAMPLE_DATA=str(tmp_path))


# -- migrations ------------------------------------------------------------------------------------


def test_migrations_have_ordinary_parts_only() -> None:
    """Other tools (linters, backends, patches of Django) know these."""
    loader = MigrationLoader(None)
    ours = [key for key in loader.graph.nodes if key[0] == "django_amqp_events"]
    kinds = {type(operation) for key in ours for operation in loader.get_migration(*key).operations}
    assert kinds == {migrations.CreateModel, migrations.RunPython}
    state = loader.project_state(ours)
    for model in (each for key, each in state.models.items() if key[0] == "django_amqp_events"):
        for name, field in model.fields.items():
            plain = field.deconstruct()[1].startswith("django.db.models.")
            assert plain, (model.name, name)
            assert not isinstance(field, models.GeneratedField), (model.name, name)
            assert field.db_default is models.NOT_PROVIDED, (model.name, name)
        for constraint in model.options["constraints"]:
            assert type(constraint) is models.UniqueConstraint
            assert constraint.condition is None
            assert not constraint.expressions
        for index in model.options["indexes"]:
            # MySQL has no conditions, of which Django warns.
            assert type(index) in (models.Index, PartialIndex)
            assert (index.condition, index.expressions, index.include) == (None, (), ())
