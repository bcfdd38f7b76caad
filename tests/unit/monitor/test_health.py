"""Probes: what they report, and what the page tells. Real processes: the acceptance suite."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection
from django.test import Client, override_settings
from django.urls import path

from django_amqp_events import handler, liveness, process_identity
from django_amqp_events.conf import get_settings
from django_amqp_events.databases import Now
from django_amqp_events.declare.declarations import declarations
from django_amqp_events.models import OutboxEvent, Snapshot
from django_amqp_events.monitor import health
from django_amqp_events.monitor.health import health_view
from django_amqp_events.publish import outbox_rows
from django_amqp_events.testing import override_events
from tests.commands import run_command

urlpatterns = [path("healthz/events", health_view)]


@pytest.fixture
def parts() -> Iterator[list[liveness.Part]]:
    with override_events(SERVICE="probed"):
        liveness.listen(get_settings())
        yield liveness.parts
    liveness.parts.clear()


def part(name: str, problem: str = "", seconds: float | None = 0.0) -> liveness.Part:
    turned = None if seconds is None else time.monotonic() - seconds
    return liveness.Part(name=name, problem=lambda: problem, turned=turned)


def probe(*arguments: str) -> tuple[int, dict[str, str]]:
    code, out, _ = run_command("events_health", "--format", "json", *arguments)
    return code, {each["part"]: each["problem"] for each in json.loads(out)["processes"]}


def test_a_part_that_is_not_ready_is_alive(parts: list[liveness.Part]) -> None:
    parts += [part("relay", "it is paused"), part("worker", seconds=None)]
    assert probe("--live") == (0, {"relay": "", "worker": ""})
    assert probe("--ready") == (1, {"relay": "it is paused", "worker": ""})
    assert probe("--ready", "--part", "worker") == (0, {"worker": ""})


def test_without_a_file_descriptor_the_answer_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any answer, a process that works would be restarted by its probes."""
    monkeypatch.setattr(liveness, "RETRY_SECONDS", 0.0)
    ours, theirs = socket.socketpair()
    turns = iter([OSError(errno.EMFILE, "too many open files"), ours, OSError(errno.EINVAL, "")])

    def accept() -> tuple[socket.socket, str]:
        turn: Any = next(turns)
        if isinstance(turn, OSError):
            raise turn
        return turn, ""

    listening: Any = SimpleNamespace(accept=accept)
    liveness._answer(listening)
    with theirs:
        assert json.loads(theirs.recv(65536))["process"] == os.getpid()


def test_a_loop_that_hangs(parts: list[liveness.Part]) -> None:
    parts.append(part("mirror", seconds=health.HANGING_SECONDS + 10))
    code, found = probe("--live")
    assert (code, list(found)) == (1, ["mirror"])
    assert found["mirror"].startswith("its loop has not turned for 31")
    assert found["mirror"].endswith("restart it")


def test_a_part_that_does_not_run(parts: list[liveness.Part]) -> None:
    parts.append(part("relay"))
    code, found = probe("--live", "--part", "companion")
    assert (code, list(found)) == (1, ["relay", "mirror", "batches"])
    assert found["mirror"] == "no process of this container runs it: start events_mirror"


def test_as_text(parts: list[liveness.Part]) -> None:
    parts += [part("relay"), part("mirror", "it is paused")]
    code, out, _ = run_command("events_health", "--ready")
    assert code == 1
    assert out.splitlines()[0].startswith("relay (process ")
    assert out.splitlines()[0].endswith("): ready")
    assert out.splitlines()[1].endswith("): it is paused")
    assert run_command("events_health", "--live", verbosity=0)[:2] == (0, "")


def test_a_name_that_another_user_has_bound(parts: list[liveness.Part]) -> None:
    parts.append(part("relay"))
    name = f"\0amqp-events/probed/{process_identity.place()}"
    with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as other:
        one.bind(f"{name}.x")
        other.bind(f"{name}.1.x")
        assert probe("--live") == (0, {"relay": ""})


@pytest.mark.parametrize("ended", [True, False])
def test_a_process_that_does_not_finish_its_answer(
    parts: list[liveness.Part], *, ended: bool
) -> None:
    """It has ended while it was asked, which is no fault; or it fails at each question."""
    parts.append(part("relay"))
    other = socket.socket(socket.AF_UNIX)
    other.bind(f"\0amqp-events/probed/{process_identity.place()}.1.1")
    other.listen()

    def accept() -> None:
        for _ in range(1 if ended else 2):
            connection, _ = other.accept()
            if ended:
                other.close()
            connection.close()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    code, found = probe("--live")
    thread.join(10)
    other.close()
    assert code == int(not ended)
    assert found.get("", "") == ("" if ended else "it does not answer within 5 s: restart it")


def test_a_process_that_ends_refuses_questions_at_once(
    parts: list[liveness.Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although its thread waits for the next one; its children never answered for it."""
    parts.append(part("relay"))
    monkeypatch.setattr(liveness, "_listening", {})
    with override_events(SERVICE="ending"):
        liveness.listen(get_settings())
        assert probe("--live")[0] == 0
        if not (child := os.fork()):
            os._exit(len(liveness._listening))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert probe("--live")[0] == 0
        liveness._close()
        assert list(probe("--live")[1].values()) == [
            "no process of service 'ending' runs in this container"
        ]


def test_services_whose_names_begin_alike(parts: list[liveness.Part]) -> None:
    parts.append(part("relay"))
    with override_events(SERVICE="probed" * 8 + "1"):
        liveness.listen(get_settings())
        assert probe("--live") == (0, {"relay": ""})
    with override_events(SERVICE="probed" * 8 + "2"):
        assert list(probe("--live")[1]) == [""]


def test_another_service_is_not_examined(parts: list[liveness.Part]) -> None:
    parts.append(part("relay"))
    with override_events(SERVICE="other"):
        assert probe("--live") == (
            1, {"": "no process of service 'other' runs in this container"}
        )  # fmt: skip
        told = run_command("events_health", "--live")[1]
        assert told == "no process of service 'other' runs in this container\n"


def test_a_system_without_proc(parts: list[liveness.Part], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_identity, "place", lambda: "")
    code, out, err = run_command("events_health", "--live")
    assert (code, out) == (2, "")
    assert "does not show its processes" in err


# -- the page ----------------------------------------------------------------------------------


@pytest.fixture
def billing() -> Iterator[None]:
    """A service with a handler, which publishes with the outbox."""
    before = declarations.snapshot()

    @handler("shop.order.created", name="billing.act")
    def act() -> None: ...

    with (
        override_events(SERVICE="billing", PUBLISH="outbox"),
        override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=[]),
    ):
        yield
    declarations.restore(before)


def page() -> tuple[int, dict[str, Any]]:
    answer = Client().get("/healthz/events")
    return answer.status_code, answer.json()


def snapshot(*, seen: bool = True, age: float = 5.0, lag: float = 0.0) -> None:
    Snapshot.objects.create(
        at=datetime.now(UTC) - timedelta(seconds=age), service="billing", seen=seen, open=0,
        document=json.dumps({"mirror": {"lag": lag}}),
    )  # fmt: skip


@pytest.mark.django_db
def test_a_healthy_process(billing: None) -> None:
    snapshot(lag=2.0)
    code, found = page()
    assert code == 200
    assert 5 <= found.pop("snapshot_age") < 60
    assert found == {
        "ok": True, "problems": [], "database": True, "broker": True, "outbox_age": None,
        "mirror_lag": 2.0,
    }  # fmt: skip


@pytest.mark.django_db
def test_the_outbox_takes_over_while_the_broker_is_away(billing: None) -> None:
    snapshot(seen=False)
    code, found = page()
    assert (code, found["ok"], found["broker"]) == (200, True, False)
    assert found["problems"] == ["RabbitMQ was unreachable at the last snapshot. Check the broker."]


@pytest.mark.django_db
def test_what_delays_events_does_not_fail_the_probe(billing: None) -> None:
    snapshot(age=3600)
    row = {"service": "billing", "due_at": Now(), "size": 2, "body": b"{}"}
    for name, age in (("shop.secret.created", 900), ("shop.other", 5)):
        OutboxEvent.objects.create(
            pk=outbox_rows.new_id(), name=name, created_at=Now() - timedelta(seconds=age), **row
        )
    code, found = page()
    assert code == 200
    assert found["problems"] == [
        "There is no recent snapshot. Start `manage.py events_companion`.",
        "An event has waited in the outbox for too long. Run `manage.py events_status`.",
    ]
    assert 900 <= found["outbox_age"] < 960
    assert "secret" not in str(found)


@pytest.mark.django_db
def test_a_late_mirror(billing: None) -> None:
    snapshot(lag=3600)
    assert page()[1]["problems"] == [
        "Archived events are mirrored late. Start another `manage.py events_mirror`."
    ]


@pytest.mark.django_db(transaction=True)
def test_a_database_without_the_table(billing: None) -> None:
    snapshot()
    with connection.schema_editor() as editor:
        editor.delete_model(OutboxEvent)
    try:
        code, found = page()
    finally:
        with connection.schema_editor() as editor:
            editor.create_model(OutboxEvent)
    assert (code, found["ok"], found["database"]) == (503, False, False)
    assert found["problems"] == [
        "Database 'default' has no table for the outbox. Run `manage.py migrate`."
    ]


@pytest.mark.parametrize("atomic", [True, False])
def test_an_unreachable_database(
    billing: None, monkeypatch: pytest.MonkeyPatch, atomic: bool
) -> None:
    """No test database here, so each query fails; not even ATOMIC_REQUESTS needs one."""
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", atomic)
    code, found = page()
    assert (code, found["ok"], found["database"]) == (503, False, False)
    assert len(found["problems"]) == 2
    assert found["problems"][1].startswith("Events cannot be published, because database 'default'")
    assert "RuntimeError" not in str(found)


@pytest.mark.django_db
def test_a_service_that_only_publishes_has_no_mirror() -> None:
    with (
        override_events(SERVICE="billing", PUBLISH="outbox"),
        override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=[]),
    ):
        code, found = page()
    assert (code, found["problems"], found["snapshot_age"]) == (200, [], None)


def test_who_is_not_logged_in_may_ask() -> None:
    """As the middleware that requires a login looks at it."""
    assert health_view.login_required is False  # type: ignore[attr-defined]
