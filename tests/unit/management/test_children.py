"""A command's child starts as the command itself was started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from django_amqp_events import liveness
from django_amqp_events.conf import get_settings
from django_amqp_events.management.commands import events_worker
from django_amqp_events.testing import override_events
from tests.waiting import until

#: Prepares what a plain `python -m django` would not have, as django-configurations does.
MANAGE = """
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
    ("where", "how"),
    [
        (".", ["{program}"]),
        ("..", ["-X", "dev", "-W", "error", "{program}"]),
        ("..", ["-m", "control"]),
        (
            "..",
            ["-c", "import sys, control as c; c.management.execute_from_command_line(sys.argv)"],
        ),
    ],
    ids=["program", "options", "module", "code"],
)
def test_a_child_starts_as_its_parent(tmp_path: Path, where: str, how: list[str]) -> None:
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
    ended = subprocess.run(
        [sys.executable, *command, "events_parent"],
        cwd=here,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "DJANGO_SETTINGS_MODULE": ""},
        capture_output=True,
        text=True,
        check=False,
    )
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
