"""The tutorial, line by line, in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conftest import Vhost
from tests.waiting import until

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"
#: What runs until it is stopped, and what may be asked again until it says what the page says.
SERVERS = ("events_worker", "runserver")
QUESTIONS = ("events_status", "events_groups")
LATER = ": at the end"

pytestmark = pytest.mark.timeout(300)


@dataclass
class Reader:
    """Somebody who does what the page says."""

    folder: Path
    environment: dict[str, str]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def write(self, text: str) -> None:
        head, _, rest = text.partition("\n")
        name = head.removeprefix("# ")
        path = self.folder / name.removesuffix(LATER)
        before = path.read_text() if name.endswith(LATER) else ""
        path.write_text(f"{before}\n{rest}")

    def type(self, command: str, shown: Sequence[str]) -> None:
        name = next((each for each in SERVERS if each in command), "")
        if name:
            self.serve(name, command)
            self.sees(name, shown)
        elif any(each in command for each in QUESTIONS):
            until(lambda: all(line in self.run(command) for line in shown), command, 60)
        else:
            said = self.run(command)
            assert all(line in said for line in shown), said

    def run(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=self.environment, timeout=120,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}"
        return done.stdout

    def serve(self, name: str, command: str) -> None:
        self.stop(name)
        if name == "runserver":
            command += f" --noreload {free_port()}"
        with (self.folder / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                shlex.split(command), cwd=self.folder, env=self.environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def sees(self, name: str, shown: Sequence[str]) -> None:
        log = self.folder / f"{name}.log"
        # The port is the page's.
        wanted = [line.replace("8000/", "") for line in shown]
        until(lambda: all(line in log.read_text() for line in wanted), f"{name}: {wanted}", 60)

    def stop(self, name: str) -> None:
        if process := self.running.pop(name, None):
            process.send_signal(signal.SIGINT)
            process.wait(60)


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


@pytest.fixture
def reader(tmp_path: Path, fresh_vhost: Vhost) -> Iterator[Reader]:
    programs = Path(sys.executable).parent
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AMQP_", "DJANGO_"))}
    environment = kept | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "AMQP_URL": fresh_vhost.url,
        "PYTHONUNBUFFERED": "1",
    }
    person = Reader(tmp_path, environment)
    yield person
    for name in list(person.running):
        person.stop(name)


def test_line_by_line(reader: Reader) -> None:
    """Without the installation, which test_package tests."""
    _, _, page = PAGE.read_text().partition("\n## 1. ")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert {kind for kind, _ in blocks} == {"python", "console", "text"}
    for kind, text in blocks:
        if kind == "python":
            reader.write(text)
        elif kind == "text":
            reader.sees("events_worker", text.splitlines())
        else:
            for command, shown in re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", text, re.MULTILINE):
                reader.type(command, shown.splitlines())
