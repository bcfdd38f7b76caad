"""The companion's options, what it does if a service ends, and commands in child processes."""

from __future__ import annotations

import socket
import subprocess
from argparse import ArgumentParser
from collections import defaultdict

import pytest

from django_amqp_events import liveness
from django_amqp_events.backoff import Backoff
from django_amqp_events.management import companion
from django_amqp_events.management.child_command import ChildCommand
from django_amqp_events.management.commands.events_companion import Command
from django_amqp_events.testing import override_events
from tests.commands import run_command

NOTHING = ("--no-mirror", "--no-relay", "--no-batches", "--no-reaper")


def line(*arguments: str) -> tuple[str, ...]:
    parser = ArgumentParser()
    companion.add_options(parser)
    return companion.command_line({**vars(parser.parse_args(arguments)), "verbosity": 1})


def test_options_are_passed_on() -> None:
    name, *options = line("--no-relay", "--metrics-port", "9540", "-l", "ERROR")
    assert name == "events_companion"
    assert options[:3] == ["--no-relay", "--metrics-port", "9540"]
    assert options[3:] == ["--loglevel", "ERROR", "--verbosity", "1"]


def test_no_process_is_needed_for_nothing() -> None:
    assert line(*NOTHING) == ()
    assert line(*NOTHING, "--metrics-port", "9540")
    with override_events(SERVICE="shop", CELERY_APP="tests.celery_app.app"):
        code, _, err = run_command("events_companion", *NOTHING)
    assert (code, "there is nothing to run" in err) == (2, True)


def test_a_service_that_fails_is_started_again_and_ends_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Backoff, "delay", lambda _self, _failures: 0.01)
    found: dict[str, list[str]] = defaultdict(list)

    def turn(part: liveness.Part) -> None:
        found[part.name].append(part.problem())

    monkeypatch.setattr(liveness.Part, "turn", turn)
    with (
        socket.create_server(("", 0)) as used,
        override_events(SERVICE="shop", CELERY_APP="tests.celery_app.app"),
    ):
        port = str(used.getsockname()[1])

        def stopped(command: Command) -> bool:
            # The other service still runs, and probes are told of this one.
            return command.stopping or (len(found["metrics"]) > 3 and "mirror" in found)

        monkeypatch.setattr(Command, "stopped", stopped)
        code, out, _ = run_command(
            "events_companion", *NOTHING[1:], "--metrics-port", port, verbosity=1
        )
    error = f"cannot listen on port {port}: Address already in use"
    assert code == 0
    assert out.count(error) == 1
    problems = {problem for problem in found["metrics"] if problem}
    assert [error in problem for problem in problems] == [True]


def test_a_command_that_fails_waits_longer_each_time() -> None:
    told: list[str] = []
    child = ChildCommand(line=("events_mirror", "--batch-size", "0"), tell=told.append, stop=bool)
    assert [child.run(), child.run()] == [0.5, 1.0]
    assert told == [
        "events_mirror ended with exit code 2; restarting it in 0.5 s",
        "events_mirror ended with exit code 2; restarting it in 1 s",
    ]


def test_a_command_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess.Popen, "terminate", lambda self: None)
    told: list[str] = []
    child = ChildCommand(
        line=("events_mirror", "--batch-size", "0"), tell=told.append, stop=lambda: True, grace=0.0
    )
    assert child.run() == 0.0
    assert "which did not stop in 0 s" in told[0]
