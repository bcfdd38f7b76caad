"""Commands that start others: their children start as they did, and again when they end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from argparse import ArgumentParser
from collections import defaultdict
from pathlib import Path

import pytest

from django_amqp_events import liveness
from django_amqp_events.backoff import Backoff
from django_amqp_events.conf import get_settings
from django_amqp_events.management import companion
from django_amqp_events.management.child_command import ChildCommand
from django_amqp_events.management.commands import events_worker
from django_amqp_events.management.commands.events_companion import Command
from django_amqp_events.testing import override_events
from tests.commands import run_command, run_program
from tests.waiting import until

#: Prepares what a plain `python -m django` would not have, as django-configurations does.
MANAGE = """
import os
import sys
from django.conf import settings
from django.core import management
from django.core.management.base import BaseCommand

before = BaseCommand.create_parser

def create_parser(self, prog_name, subcommand):
    parser = before(self, prog_name, subcommand)
    parser.add_argument("--configuration")
    return parser

BaseCommand.create_parser = create_parser
os.chdir(os.environ["WHERE"])
settings.configure(INSTALLED_APPS=["django_amqp_events", "shop"], AMQP_EVENTS={"SERVICE": "shop"})
if __name__ == "__main__":
    management.execute_from_command_line(sys.argv)
"""
PARENT = """
from django_amqp_events.management.base import EventsCommand
from django_amqp_events.management.child_command import ChildCommand

class Command(EventsCommand):
    def run(self, options):
        told = []
        line = ("events_born", "--configuration", "Dev")
        child = ChildCommand(line=line, tell=told.append, stop=bool)
        child.run()
        print(told)
        return 0
"""
CHILD = """
import sys
from django_amqp_events.management.base import EventsCommand

class Command(EventsCommand):
    def add_arguments(self, parser):
        parser.add_argument("--parent", type=int)

    def run(self, options):
        print("born", options["configuration"], sys.warnoptions, sys.flags.dev_mode, flush=True)
        return 0
"""


@pytest.mark.parametrize(
    ("where", "to", "how"),
    [
        (".", ".", ["{program}"]),
        ("..", ".", ["-X", "dev", "-W", "error", "{program}"]),
        ("..", "project", ["{program}"]),
        ("..", ".", ["-m", "control"]),
        (
            "..",
            ".",
            ["-c", "import sys, control as c; c.management.execute_from_command_line(sys.argv)"],
        ),
    ],
    ids=["program", "options", "moving", "module", "code"],
)
def test_a_child_starts_as_its_parent(tmp_path: Path, where: str, to: str, how: list[str]) -> None:
    project = tmp_path / "project"
    commands = project / "shop" / "management" / "commands"
    commands.mkdir(parents=True)
    for folder in (commands, commands.parent, commands.parent.parent):
        (folder / "__init__.py").touch()
    (project / "control.py").write_text(MANAGE)
    (commands / "events_parent.py").write_text(PARENT)
    (commands / "events_born.py").write_text(CHILD)
    here = project / where
    command = [word.format(program=os.path.relpath(project / "control.py", here)) for word in how]
    path = [str(Path(__file__).parents[3])]
    if how[0] in ("-m", "-c"):
        path.append(str(project))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "DJANGO_SETTINGS_MODULE": ""}
    env["WHERE"] = str((here / to).resolve())
    ended = run_program(sys.executable, *command, "events_parent", cwd=here, env=env)
    assert "born Dev" in ended.stdout, ended.stderr
    assert ended.stdout.endswith("[]\n"), ended.stdout
    assert ("'error'] True" in ended.stdout) is ("-X" in how)


def test_a_companion_that_does_not_start_is_a_problem_of_its_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise nothing is mirrored or relayed, and probes report a worker that is ready."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with override_events(SERVICE="shop"):
        with events_worker.beside(("events_missing",)):

            def problems() -> list[str]:
                states = liveness.read(get_settings()) or []
                return [state.problem for state in states if state.part == "companion"]

            until(lambda: problems() == ["events_missing ended with exit code 1"], "it is told")
        assert problems() == []


# -- events_companion ------------------------------------------------------------------------------


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
