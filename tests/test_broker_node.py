"""The private RabbitMQ node of the suite and the demo."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import apt_install
import broker
from broker import BrokerError, Node
from machine import Process, ScriptError, process_birth, wait_until

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


def run_script(*args: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *args],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def ports_of(node: Node) -> list[int]:
    return [getattr(node, name) for name in broker.PORTS]


def test_the_node_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "import time, broker\n"
        f"node = broker.Node.start({str(tmp_path)!r})\n"
        "print(node.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert process_birth(pid) is not None
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert wait_until(lambda: process_birth(pid) is None, 15), "the Erlang VM lives on"
    assert wait_until(lambda: not processes_below(tmp_path), 15), processes_below(tmp_path)


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


def test_a_taken_port_is_exchanged(tmp_path: Path) -> None:
    old = Node.start(tmp_path)
    old.add_vhost("kept")
    old.stop()
    with socket.create_server(("127.0.0.1", old.port)):
        node = Node.start(tmp_path)
    try:
        assert not set(ports_of(node)) & set(ports_of(old))
        assert "kept" in {v["name"] for v in node.http("GET", "/api/vhosts")}
    finally:
        node.end()


def test_another_process_is_never_hit(tmp_path: Path) -> None:
    """A pid that was given out again is not the node."""
    state = {"pid": os.getpid(), "birth": "1"}
    process = Process(**state)  # type: ignore[arg-type]
    assert not process.alive
    process.send(signal.SIGKILL)
    process.end(timeout=0.1)


def test_without_any_server_the_error_names_the_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ScriptError("Installing packages needs root.")

    monkeypatch.setattr(broker, "_find_scripts", lambda: None)
    monkeypatch.setattr(broker, "_docker_answers", lambda: False)
    monkeypatch.setattr(apt_install, "install", refuse)
    with pytest.raises(BrokerError, match="AMQP_URL") as caught:
        broker.find_server()
    assert "needs root" in str(caught.value)


def test_docker_counts_only_if_its_daemon_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = tmp_path / "docker"
    monkeypatch.setenv("PATH", str(tmp_path))
    for answer, expected in (("exit 1", False), ("exit 0", False), ("echo 28.0", True)):
        docker.write_text(f"#!/bin/sh\n{answer}\n")
        docker.chmod(0o755)
        assert broker._docker_answers() == expected


#: Runs RabbitMQ here with the environment that `docker run` was given.
DOCKER = """\
import json, os, sys
from pathlib import Path
scripts, state = Path({scripts!r}), Path({state!r})
kind, *rest = sys.argv[1:]
if kind == "info":
    print("28.0")
elif kind == "run":
    given = dict(rest[i + 1].split("=", 1) for i, word in enumerate(rest) if word == "--env")
    state.write_text(json.dumps({{"pid": os.getpid(), "env": {{**os.environ, **given}}}}))
    os.execve(scripts / rest[-1], rest[-1:], {{**os.environ, **given}})
elif kind == "exec":
    os.execve(scripts / rest[1], rest[1:], json.loads(state.read_text())["env"])
elif kind == "kill":
    os.kill(json.loads(state.read_text())["pid"], 9)
"""


def test_a_node_in_docker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_node: Callable[..., Node]
) -> None:
    if (scripts := broker._find_scripts()) is None:
        pytest.skip("RabbitMQ runs in Docker anyway")
    program = DOCKER.format(scripts=str(scripts), state=str(tmp_path / "state.json"))
    (tmp_path / "docker.py").write_text(program)
    (tmp_path / "docker").write_text(
        f'#!/bin/sh\nexec {sys.executable} {tmp_path}/docker.py "$@"\n'
    )
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(broker, "_find_scripts", lambda: None)
    node = make_node()
    assert node.scripts is None
    assert node.version in node.ctl("version")
    node.kill()
    node.start_again()
    node.end()
    # The stub's epmd is no container's: Erlang has started it.
    subprocess.run(["epmd", "-port", str(node.epmd_port), "-kill"], check=False)


def test_an_old_server_is_refused(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "MINIMUM_VERSION", (99, 0))
    with pytest.raises(BrokerError, match="is older than"):
        make_node()


def test_a_report_with_a_lone_surrogate_reaches_the_controller(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Under pytest-xdist this log would end the whole session, were it not made encodable."""
    logging.getLogger(__name__).warning("half a character: %s", "\ud800")
    assert "\ud800" in caplog.text
