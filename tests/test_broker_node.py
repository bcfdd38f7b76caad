"""The private RabbitMQ node of the suite and the demo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import apt_install
import broker
from broker import BrokerError, Node
from machine import ScriptError
from tests.commands import run_program

pytestmark = pytest.mark.slow

SCRIPT = Path(broker.__file__)


def processes_below(directory: Path) -> list[str]:
    """Command lines of all processes that name the directory or work in it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            here = str((entry / "cwd").readlink())
        except OSError:
            continue
        if (str(directory) in command or here.startswith(str(directory))) and int(
            entry.name
        ) != os.getpid():
            found.append(f"{entry.name}: {command}")
    return found


def run_script(*args: str) -> subprocess.CompletedProcess[str]:
    return run_program(sys.executable, SCRIPT, *args)


def test_the_command_line_starts_and_stops_a_node(tmp_path: Path) -> None:
    where = ["--dir", str(tmp_path / "broker")]
    assert run_script("stop", *where).returncode == 0
    try:
        started = run_script("start", *where)
        assert started.returncode == 0, started.stderr
        node = Node.attach(tmp_path / "broker")
        assert node is not None
        assert node.amqp_url() in started.stdout
        assert run_script("start", *where).stdout == started.stdout
        node.add_vhost("kept")

        node.kill()  # its state file stays
        assert Node.attach(tmp_path / "broker") is None
        assert run_script("start", *where).returncode == 0
        again = Node.attach(tmp_path / "broker")
        assert again is not None
        assert again.pid != node.pid
        assert "kept" in {v["name"] for v in again.http("GET", "/api/vhosts")}
    finally:
        assert run_script("stop", *where).returncode == 0
    assert not processes_below(tmp_path)
    assert run_script("stop", *where).returncode == 0


def test_without_any_server_the_error_names_the_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ScriptError("Installing packages needs root.")

    monkeypatch.setattr(broker, "_find_scripts", lambda: None)
    monkeypatch.setattr(broker, "_docker_answers", lambda: False)
    monkeypatch.setattr(apt_install, "install", refuse)
    with pytest.raises(BrokerError, match="AMQP_URL") as caught:
        broker.find_server()
    assert "needs root" in str(caught.value)
