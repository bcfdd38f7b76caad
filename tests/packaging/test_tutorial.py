"""The tutorial and the README, line by line, in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conftest import Vhost
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"
README = ROOT / "README.md"
#: What runs until it is stopped, and what may be asked again until it says what the page says.
SERVERS = ("events_worker", "runserver")
QUESTIONS = ("events_status", "events_groups")
LATER = ": at the end"
PROJECT = "\n## 1. "

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
            process.terminate()  # a suite that runs in the background ignores SIGINT
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
        "MANAGEMENT_URL": fresh_vhost.management_url,
        "PYTHONUNBUFFERED": "1",
    }
    person = Reader(tmp_path, environment)
    yield person
    for name in list(person.running):
        person.stop(name)


Block = tuple[str, str]


def blocks(page: Path, start: str = "") -> list[Block]:
    """Return the code blocks of a page: language and text, without the indentation of a list."""
    text = page.read_text().partition(start)[2] if start else page.read_text()
    found = re.findall(r"^(?: *|\d\. )```(\w+)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return [(kind, textwrap.dedent(text)) for kind, text in found]


def follow(reader: Reader, kind: str, text: str) -> None:
    if kind == "python":
        reader.write(text)
    elif kind == "text":
        reader.sees("events_worker", text.splitlines())
    else:
        for command, shown in re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", text, re.MULTILINE):
            reader.type(command, shown.splitlines())


def test_the_tutorial(reader: Reader) -> None:
    """Without the installation, which test_package tests."""
    lines = blocks(TUTORIAL, PROJECT)
    assert {kind for kind, _ in lines} == {"python", "console", "text"}
    for kind, text in lines:
        follow(reader, kind, text)


def test_the_readme_in_one_service_with_two_files(reader: Reader, fresh_vhost: Vhost) -> None:
    """It takes Django, Celery and RabbitMQ for granted: the tutorial's first files."""
    for kind, text in blocks(TUTORIAL, PROJECT)[:3]:
        follow(reader, kind, text)
    follow(reader, "console", "$ python manage.py startapp invoices\n")
    (_, code), (_, settings), (_, commands), *_ = blocks(README)
    *files, call = code.split("\n\n\n# ")
    for file in files:
        head, _, body = file.partition("\n")
        reader.write(f"# {head.removeprefix('# ').partition(',')[0]}\n{body}")
    place = re.search(r"http://\S*:15672", settings)
    assert place is not None
    mine = settings.replace(place[0], fresh_vhost.management_url)
    mine += f'INSTALLED_APPS += ["orders", "invoices"]\nCELERY_BROKER_URL = "{fresh_vhost.url}"\n'
    reader.write(f"# shop/settings.py{LATER}\n{mine}")
    follow(reader, "console", commands.replace("$ manage.py", "$ python manage.py"))
    publish = f"from orders.events import order_created; {call.splitlines()[1]}"
    follow(reader, "console", f"$ python manage.py shell --command {shlex.quote(publish)}\n")
    reader.sees("events_worker", ["invoice for order 1: 9.90"])
