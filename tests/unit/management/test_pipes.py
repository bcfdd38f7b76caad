"""Every command whose output cannot be written, as after ``| head -1``: the same exit code."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError
from django.db import OperationalError, connection

from django_amqp_events.archive import eligibility, tables
from django_amqp_events.archive.batches import batch_states
from django_amqp_events.models import State
from tests.commands import run_command, run_program

from ..admin import admin_world as world

pytestmark = pytest.mark.django_db

ROOT = Path(__file__).parents[3]
#: The arguments of commands that need no broker, and their exit codes; ``ID`` is an archived event.
RUNS: list[tuple[int, list[str]]] = [
    (0, ["events_archive", "index"]),
    (0, ["events_batches", "list"]),
    (0, ["events_batches", "show", "BATCH"]),
    (0, ["events_batches", "pause", "BATCH"]),
    (1, ["events_batches", "resume", "BATCH"]),
    (0, ["events_batches", "cancel", "BATCH"]),
    (1, ["events_batches", "show", "MISSING"]),
    (2, ["events_batches", "show"]),
    (2, ["events_batches", "list", "BATCH"]),
    (0, ["events_catalogue"]),
    (2, ["events_catalogue", "--check", "MISSING"]),
    (0, ["events_groups", "--limit", "1"]),
    (0, ["events_groups", "--rebuild"]),
    (0, ["events_prune"]),
    (0, ["events_replay", "ID", "--dry-run"]),
    (0, ["events_replay", "ID", "--discard", "--comment", "old"]),
    (0, ["events_replay", "--handler", "book"]),
    (0, ["events_replay", "ID", "--background", "--comment", "fixed"]),
    (0, ["events_replay", "--handler", "book", "--background", "--comment", "fixed"]),
    (1, ["events_replay", "MISSING"]),
    (1, ["events_replay", "MISSING", "--dry-run"]),
    (1, ["events_replay", "MISSING", "--background", "--comment", "fixed"]),
    (1, ["events_replay", "DONE", "--limit", "1"]),
    (1, ["events_replay", "ID", "DONE", "--limit", "1", "--dry-run"]),
    (0, ["events_replay", "ID", "OTHER", "--limit", "1", "--dry-run"]),
    (2, ["events_replay"]),
    # RabbitMQ is unreachable.
    (2, ["events_declare"]),
    (0, ["events_find", "ID"]),
    (1, ["events_find", "MISSING"]),
    (2, ["events_recover"]),
    (2, ["events_replay", "ID"]),
    (2, ["events_status"]),
]


#: Commands without ``--format``.
TEXT_ONLY = {"events_archive", "events_groups", "events_prune", "events_recover"}


@contextmanager
def closed_pipe() -> Iterator[Any]:
    """Yield an output that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    out = os.fdopen(writing, "w")
    yield out
    # The command has put /dev/null in its place, or this raises BrokenPipeError.
    out.close()


def run(arguments: list[str], out: Any, err: Any) -> int:
    name, *rest = arguments
    command = import_module(f"django_amqp_events.management.commands.{name}").Command(out, err)
    try:
        parsed = command.create_parser("manage.py", name).parse_args(rest)
        command.handle(**vars(parsed))
    except CommandError as exc:
        return exc.returncode
    except SystemExit as exc:
        return int(exc.code or 0)
    return 0


def filled(arguments: list[str]) -> list[str]:
    """Make the rows that the arguments name."""
    row, other = world.make(), world.make()
    done = world.make(State.SUCCEEDED)
    batch = batch_states.freeze(tables.rows().filter(pk=other.pk), by="ada")
    batch_states.start(batch.pk, by="ada", reason="fixed")
    values = {
        "ID": row.event_id,
        "OTHER": other.event_id,
        "DONE": done.event_id,
        "BATCH": str(batch.pk),
        "MISSING": "nowhere",
    }
    return [values.get(argument, argument) for argument in arguments]


def test_a_locale_without_a_character(settings: Any) -> None:
    settings.AMQP_EVENTS = world.EVENTS
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    assert run(filled(["events_replay", "ID", "--dry-run"]), out, io.StringIO()) == 0


@pytest.mark.parametrize("json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize(("code", "arguments"), RUNS, ids=[" ".join(run) for _, run in RUNS])
def test_exit_codes_whoever_reads(
    settings: Any, code: int, arguments: list[str], json: bool
) -> None:
    settings.AMQP_EVENTS = world.EVENTS
    if json and TEXT_ONLY.isdisjoint(arguments):
        arguments = [*arguments, "--format", "json"]
    assert run(filled(arguments), io.StringIO(), io.StringIO()) == code
    with closed_pipe() as out, closed_pipe() as err:
        assert run(filled(arguments), out, err) == code


@pytest.mark.parametrize("arguments", [run for _, run in RUNS], ids=" ".join)
def test_exit_codes_without_a_database(
    settings: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    """Nothing is known then, but that such a text is no id of a batch."""

    def away(*_: object) -> None:
        raise OperationalError("connection refused")

    settings.AMQP_EVENTS = world.EVENTS
    given, out, err = filled(arguments), io.StringIO(), io.StringIO()
    with monkeypatch.context() as patched:
        patched.setattr(connection, "cursor", away)
        code = run(given, out, err)
    known = {"events_catalogue": 0, "events_batches show MISSING": 1}
    assert code == known.get(" ".join(arguments), 2), out.getvalue()


@pytest.mark.parametrize(
    ("code", "arguments"), [(0, ["events_prune"]), (1, ["events_archive", "export"])]
)
def test_a_process_without_stdout_does_its_work(
    settings: Any, monkeypatch: pytest.MonkeyPatch, code: int, arguments: list[str]
) -> None:
    settings.AMQP_EVENTS = world.EVENTS
    monkeypatch.setattr(sys, "stdout", None)
    assert run(arguments, None, None) == code


@contextmanager
def full_disk() -> Iterator[Any]:
    with Path("/dev/full").open("w") as out:
        yield out


@pytest.mark.parametrize("output", [closed_pipe, full_disk])
@pytest.mark.parametrize("events", [50, 1])
def test_an_export_ends_when_nothing_can_be_written(
    settings: Any, events: int, output: Any
) -> None:
    settings.AMQP_EVENTS = world.EVENTS
    for _ in range(events):
        world.make()
    with output() as out:
        err = io.StringIO()
        assert run(["events_archive", "export"], out, err) == 1
    assert "stopped" in err.getvalue()
    assert "50 events exported" not in err.getvalue()


def test_a_name_does_not_control_the_terminal(settings: Any) -> None:
    settings.AMQP_EVENTS = world.EVENTS
    row = world.make(handler="evil\x1b[2J", name="shop.\x1b[2J", event_id="\x1b[2J")
    batch = batch_states.freeze(tables.rows(), by="ada")
    batch_states.skip(batch.pk, eligibility.examine({row.pk: 0}, eligibility.REPLAY).skipped)
    for arguments in (
        ["events_replay", row.event_id, "--dry-run"],
        ["events_batches", "show", str(batch.pk)],
    ):
        _code, out, err = run_command(*arguments)
        assert "evil\\x1b[2J" in out
        assert "\x1b" not in out + err


def test_a_process_prints_no_error() -> None:
    line = f"{sys.executable} -m django events_catalogue | head -1; echo ${{PIPESTATUS[0]}}"
    env = {**os.environ, "DJANGO_SETTINGS_MODULE": "example_project.shop"}
    done = run_program("/bin/bash", "-c", line, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ["0"]
    assert "BrokenPipe" not in done.stderr
