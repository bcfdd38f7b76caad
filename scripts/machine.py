"""Processes and ports of this machine, with nothing but the standard library.

Scripts, tests, benchmarks and the demo share this module. It runs before anything is installed.
"""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

HOST = "127.0.0.1"


class ScriptError(RuntimeError):
    """A script cannot continue; the message says why and what to do."""


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Run a script's *main* and exit; a ScriptError is printed without a traceback."""
    try:
        sys.exit(main())
    except ScriptError as exc:
        sys.exit(str(exc))


def run(*command: str | Path, **options: Any) -> str:
    """Run a command without input and return what it prints.

    Raises:
        ScriptError: the command failed, does not exist or took longer than *timeout* (seconds).
    """
    words = [str(word) for word in command]
    try:
        done: subprocess.CompletedProcess[str] = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, **options
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ScriptError(f"`{shlex.join(words)}`: {exc}") from exc
    if done.returncode:
        said = f"{done.stdout}{done.stderr}".strip()[-4000:]
        raise ScriptError(f"`{shlex.join(words)}` failed ({done.returncode}):\n{said}")
    return done.stdout


def process_birth(pid: int) -> str | None:
    """Return when a process started, in the kernel's ticks, or None if it does not run.

    The kernel reuses a pid, so only pid and birth together identify a process. A zombie counts as
    dead once its threads, and with them its sockets, are gone.
    """
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] not in "ZX" or len(list(Path(f"/proc/{pid}/task").iterdir())) > 1:
            return fields[19]
    return None


@dataclass(slots=True)
class Process:
    """A process by pid and birth, so that a signal never reaches another one."""

    pid: int
    birth: str
    child: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, pid: int, child: subprocess.Popen[bytes] | None = None) -> Process:
        return cls(pid, process_birth(pid) or "", child)

    @classmethod
    def spawn(cls, *command: str | Path, output: Path, **options: Any) -> Process:
        """Start a command in a session of its own, which a terminal's Ctrl-C does not reach."""
        with output.open("ab") as log:
            child = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **options,
            )
        return cls.of(child.pid, child)

    @property
    def identity(self) -> dict[str, Any]:
        """The keyword arguments that find this process again, for JSON."""
        return {"pid": self.pid, "birth": self.birth}

    @property
    def alive(self) -> bool:
        if self.child is not None:
            return self.child.poll() is None  # also collects an ended child
        return process_birth(self.pid) == self.birth

    def release(self) -> None:
        """Let the process outlive this one without Python's ResourceWarning."""
        if self.child is not None:
            self.child.returncode = 0
            self.child = None

    def send(self, number: int) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout: float) -> bool:
        """Return True if the process ends within *timeout* seconds."""
        return wait_until(lambda: not self.alive, timeout, interval=0.02)

    def end(self, timeout: float = 5.0) -> None:
        self.send(signal.SIGTERM)
        if not self.wait(timeout):
            self.send(signal.SIGKILL)
            self.wait(10)


def wait_until(condition: Callable[[], bool], timeout: float, *, interval: float = 0.05) -> bool:
    """Return True when *condition* is true, or False after *timeout* seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True


def free_ports(count: int) -> list[int]:
    """Return free loopback ports below the ephemeral range.

    `bind(0)` gives an ephemeral port. While a server is down, the kernel could give the same port
    to a client that reconnects; the client would connect to itself and keep the server out.
    """
    floor = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = range(10240, max(min(floor, 60000), 12000))
    ports: list[int] = []
    for port in random.SystemRandom().sample(candidates, 1000):
        if port_is_free(port):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise ScriptError("No free loopback ports below the ephemeral range.")


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
