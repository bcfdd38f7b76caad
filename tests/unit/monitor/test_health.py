"""Probes: what they report, and what the page tells. Real processes: the acceptance suite."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.db import connection
from django.test import Client, override_settings
from django.urls import path

from django_amqp_events import liveness, process_identity
from django_amqp_events.models import OutboxEvent
from django_amqp_events.monitor import health
from django_amqp_events.monitor.health import health_view
from django_amqp_events.testing import override_events
from tests.commands import run_command

urlpatterns = [path("healthz/events", health_view)]


Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write the file of a part of this process."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def write(name: str, problem: str = "", *, seconds: float = 0.0, rests: bool = False) -> None:
        part = liveness.Part(name, lambda: problem)
        (part.rest if rests else part.turn)()
        path = next(tmp_path.glob(f"*/probed/{name}.*"))
        os.utime(path, (time.time() - seconds,) * 2)

    with override_events(SERVICE="probed"):
        yield write


def probe(*arguments: str) -> tuple[int, dict[str, str]]:
    code, out, _ = run_command("events_health", "--format", "json", *arguments)
    return code, {each["part"]: each["problem"] for each in json.loads(out)["processes"]}


def test_a_part_that_is_not_ready_is_alive(write: Write) -> None:
    write("relay", "it is paused")
    write("worker", rests=True, seconds=3600)
    assert probe("--live") == (0, {"relay": "", "worker": ""})
    assert probe("--ready") == (1, {"relay": "it is paused", "worker": ""})
    assert probe("--ready", "--part", "worker") == (0, {"worker": ""})


def test_a_loop_that_hangs(write: Write) -> None:
    write("mirror", seconds=health.HANGING_SECONDS + 10)
    code, found = probe("--live")
    assert (code, list(found)) == (1, ["mirror"])
    assert found["mirror"].startswith("its loop has not turned for 31")
    assert found["mirror"].endswith("restart it")


def test_a_part_that_does_not_run(write: Write) -> None:
    write("relay")
    code, found = probe("--live", "--part", "companion")
    assert (code, list(found)) == (1, ["relay", "mirror", "batches"])
    assert found["mirror"] == "no process of this container runs it: start events_mirror"


def test_as_text(write: Write) -> None:
    write("mirror", "it is paused")
    write("relay")
    code, out, _ = run_command("events_health", "--ready")
    assert code == 1
    assert out.splitlines()[0].endswith("): it is paused")
    assert out.splitlines()[1].startswith("relay (process ")
    assert out.splitlines()[1].endswith("): ready")
    assert run_command("events_health", "--live", verbosity=0)[:2] == (0, "")


def test_the_files_of_dead_processes_and_other_containers(write: Write, tmp_path: Path) -> None:
    write("relay")
    [ours] = tmp_path.glob("*/probed/relay.*")
    if not (child := os.fork()):
        liveness.Part("mirror", lambda: "").turn()
        os._exit(0)
    os.waitpid(child, 0)
    elsewhere = ours.with_name(f"worker.0123456789abcdef.{os.getpid()}.1")
    elsewhere.write_text("{")
    assert len(list(ours.parent.iterdir())) == 3
    assert probe("--live") == (0, {"relay": ""})
    assert set(ours.parent.iterdir()) == {ours, elsewhere}


def test_a_part_that_has_ended_or_cannot_write(
    write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    part = liveness.Part("relay", lambda: "")
    part.turn()
    part.end()
    assert list(probe("--live")[1]) == [""]
    [folder] = tmp_path.iterdir()
    shutil.rmtree(folder)
    folder.touch()
    part.rest()
    part.rest()
    assert caplog.text.count("cannot examine this process") == 1
    assert list(probe("--live")[1]) == [""]


def test_another_service_is_not_examined(write: Write) -> None:
    write("relay")
    with override_events(SERVICE="probed2"):
        assert probe("--live") == (
            1, {"": "no process of service 'probed2' runs in this container"}
        )  # fmt: skip
        told = run_command("events_health", "--live")[1]
        assert told == "no process of service 'probed2' runs in this container\n"


def test_a_system_without_proc(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_identity, "place", lambda: "")
    code, out, err = run_command("events_health", "--live")
    assert (code, out) == (2, "")
    assert "does not show its processes" in err


# -- the page ----------------------------------------------------------------------------------


@pytest.fixture
def billing() -> Iterator[None]:
    """A service that publishes with the outbox."""
    with (
        override_events(SERVICE="billing", PUBLISH="outbox"),
        override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=[]),
    ):
        yield


def page() -> tuple[int, bool, str]:
    answer = Client().get("/healthz/events")
    return answer.status_code, *answer.json().values()


@pytest.mark.django_db
def test_a_healthy_process(billing: None) -> None:
    assert page() == (200, True, "")


@pytest.mark.django_db(transaction=True)
def test_a_database_without_the_table(billing: None) -> None:
    with connection.schema_editor() as editor:
        editor.delete_model(OutboxEvent)
    try:
        found = page()
    finally:
        with connection.schema_editor() as editor:
            editor.create_model(OutboxEvent)
    problem = (
        "The outbox in database 'default' cannot be read: a table is missing; run `manage.py "
        "migrate`."
    )
    assert found == (503, False, problem)


@pytest.mark.parametrize("atomic", [True, False])
def test_an_unreachable_database(
    billing: None, monkeypatch: pytest.MonkeyPatch, atomic: bool
) -> None:
    """No test database here, so each query fails; not even ATOMIC_REQUESTS needs one."""
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", atomic)
    code, ok, problem = page()
    assert (code, ok) == (503, False)
    assert problem.startswith("The outbox in database 'default' cannot be read: ")
    assert "RuntimeError" not in problem


def test_who_is_not_logged_in_may_ask() -> None:
    """As the middleware that requires a login looks at it."""
    assert health_view.login_required is False  # type: ignore[attr-defined]
