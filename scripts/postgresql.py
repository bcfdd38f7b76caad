#!/usr/bin/env python3
"""Run a command with a private PostgreSQL: its own port and data, gone when the command ends.

    python3 scripts/postgresql.py make test

The command gets AMQP_EVENTS_TEST_DATABASE=postgresql and libpq's PGHOST, PGPORT, PGUSER and
PGDATABASE. apt installs PostgreSQL if it is missing, without leaving its service behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import apt_install
from machine import HOST, Process, ScriptError, exit_with, free_ports, run, wait_until

START_TIMEOUT = 60.0
STOP_TIMEOUT = 20.0
#: Runs the server if this process is root's: PostgreSQL refuses that.
UNPRIVILEGED = "nobody"


class Postgres:
    """A PostgreSQL server with its own directory and port, which ends with this process.

    ::

        server = Postgres.start()
        server.kill(); server.start_again(); server.end()
    """

    USER = "events"
    HOST = HOST

    def __init__(self, directory: Path, programs: Path, *, durable: bool) -> None:
        self.directory = directory
        self.port = free_ports(1)[0]
        self.durable = durable
        self._programs = programs
        self._process: Process | None = None

    @classmethod
    def start(cls, *, durable: bool = False) -> Postgres:
        """Start a server in a new directory.

        Args:
            durable: a commit waits for the disk, which tests do not need.
        """
        # Not below pytest's directories, which only their owner may enter.
        server = cls(Path(tempfile.mkdtemp(prefix="postgresql-")), find(), durable=durable)
        if os.geteuid() == 0:
            shutil.chown(server.directory, UNPRIVILEGED)
        try:
            run(
                *_setpriv(), server._programs / "initdb", "--pgdata", server.directory / "data",
                "--username", cls.USER, "--auth", "trust", "--encoding", "UTF8",
                "--locale", "C.UTF-8", "--no-sync", cwd="/",
            )  # fmt: skip
            server.start_again()
        except BaseException:
            server.end()
            raise
        return server

    @property
    def environ(self) -> dict[str, str]:
        """libpq's variables."""
        return {
            "PGHOST": self.HOST,
            "PGPORT": str(self.port),
            "PGUSER": self.USER,
            "PGDATABASE": "postgres",
        }

    @property
    def pid(self) -> int:
        """The postmaster's pid; 0 before the start."""
        return self._process.pid if self._process is not None else 0

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.alive

    def start_again(self) -> None:
        """Start with the data that is there; return when the server is ready."""
        command: list[str | Path] = [self._programs / "postgres", "-D", self.directory / "data"]
        command += ["-p", str(self.port), "-k", self.directory, "-c", f"listen_addresses={HOST}"]
        command += ["-c", f"fsync={'on' if self.durable else 'off'}", "-c", "max_connections=60"]
        deadline = time.monotonic() + START_TIMEOUT
        while not self._ready():
            if time.monotonic() > deadline:
                raise ScriptError(f"PostgreSQL does not answer:\n{self.log}")
            # After a kill, one of its processes may still hold its memory: try again.
            if not self.alive:
                self._process = Process.spawn(
                    *_setpriv("--pdeathsig=QUIT"), *command, output=self.directory / "log", cwd="/"
                )
            time.sleep(0.1)

    def kill(self) -> None:
        """Kill the postmaster with SIGKILL; return when all its processes are gone."""
        self._end(signal.SIGKILL)

    def end(self) -> None:
        """Shut down at once and delete the data."""
        self._end(signal.SIGQUIT)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _end(self, number: int) -> None:
        if self._process is None or not self.alive:
            return
        family = [self._process]
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            family += [Process.of(int(pid)) for pid in children]
        self._process.send(number)
        if not wait_until(lambda: not any(each.alive for each in family), STOP_TIMEOUT):
            raise ScriptError(f"PostgreSQL does not end:\n{self.log}")

    def _ready(self) -> bool:
        with contextlib.suppress(OSError):
            state = (self.directory / "data" / "postmaster.pid").read_text().split()
            return self.alive and state[:1] == [str(self.pid)] and state[-1] == "ready"
        return False

    @property
    def log(self) -> str:
        """The last lines of its log."""
        path = self.directory / "log"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""


def main() -> int:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    server = Postgres.start()
    try:
        env = os.environ | server.environ | {"AMQP_EVENTS_TEST_DATABASE": "postgresql"}
        return subprocess.run(sys.argv[1:], env=env, check=False).returncode
    finally:
        server.end()


def find() -> Path:
    """Return the directory of PostgreSQL's programs; install them if they are missing."""
    if not (programs := _programs()):
        apt_install.install(
            ["postgresql"],
            why="This machine has no PostgreSQL server",
            units=["postgresql.service"],
        )
        programs = _programs()
    if not programs:
        raise ScriptError("apt's package postgresql has no initdb.")
    return programs


def _programs() -> Path | None:
    if on_path := shutil.which("initdb"):
        return Path(on_path).resolve().parent
    found = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    newest = max(found, key=lambda path: int(path.parts[-3]), default=None)
    return newest.parent if newest else None


def _setpriv(*options: str) -> list[str]:
    """Return the prefix of a command that must not run as root."""
    if os.geteuid() == 0:
        options = (f"--reuid={UNPRIVILEGED}", "--clear-groups", *options)
    return ["setpriv", *options, "--"] if options else []


if __name__ == "__main__":
    exit_with(main)
