#!/usr/bin/env python3
"""Run a command with a private PostgreSQL: its own port and data, gone when the command ends.

    python3 scripts/postgresql.py make test

The command finds AMQP_EVENTS_TEST_DATABASE=postgresql and libpq's PGHOST, PGPORT, PGUSER and
PGDATABASE in its environment. The server is looked for, else installed by apt; the service that
apt's package brings is neither started nor left behind.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import apt_install

from broker import free_ports

START_TIMEOUT = 60.0
STOP_TIMEOUT = 20.0


class PostgresError(RuntimeError):
    """The server could not be found, started or driven; the message says why."""


class Postgres:
    """A private server: its own directory and port, and nothing on disk that outlives it.

    ::

        server = Postgres.start()
        server.kill(); server.start_again(); server.end()

    It ends with the process that started it, however that goes.
    """

    USER = "events"
    HOST = "127.0.0.1"

    def __init__(
        self, directory: Path, programs: Path, port: int, *, durable: bool = False
    ) -> None:
        self.directory = directory
        self.port = port
        self.durable = durable
        self._programs = programs
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, *, durable: bool = False) -> Postgres:
        """Start one in a new directory on a free port.

        With `durable` a commit waits for the disk, which tests have no use for.
        """
        programs = find()
        # Not below pytest's directories, which nobody but their owner may enter.
        directory = Path(tempfile.mkdtemp(prefix="postgresql-"))
        server = cls(directory, programs, free_ports(1)[0], durable=durable)
        if somebody := _somebody():
            shutil.chown(directory, somebody)
        try:
            server._initialise()
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
        """The postmaster's; 0 before it was started."""
        return self._process.pid if self._process is not None else 0

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start_again(self) -> None:
        """Start it on the data that is there; returns when it answers."""
        command = [str(self._programs / "postgres"), "-D", str(self.directory / "data")]
        command += ["-p", str(self.port), "-k", str(self.directory)]
        for option in (
            "listen_addresses=127.0.0.1",
            f"fsync={'on' if self.durable else 'off'}",
            "max_connections=60",
        ):
            command += ["-c", option]
        deadline = time.monotonic() + START_TIMEOUT
        while not self._answers():
            if time.monotonic() > deadline:
                raise PostgresError(f"PostgreSQL does not answer:\n{self.log}")
            if not self.alive:
                # After a kill its memory may still be held by one of its processes: once more.
                with (self.directory / "log").open("ab") as log:
                    self._process = subprocess.Popen(
                        [*_as_somebody(end_with_us=True), *command],
                        cwd="/",
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL for the postmaster; returns when all of its processes are gone."""
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        """Immediate shutdown."""
        self._signal(signal.SIGQUIT)

    def end(self) -> None:
        """Stop it for good."""
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _initialise(self) -> None:
        command = [str(self._programs / "initdb"), "--pgdata", str(self.directory / "data")]
        command += ["--username", self.USER, "--auth", "trust", "--encoding", "UTF8"]
        command += ["--locale", "C.UTF-8", "--no-sync"]
        done = subprocess.run(
            [*_as_somebody(), *command],
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise PostgresError(f"{done.stdout}{done.stderr}\n`{' '.join(command)}` failed.")

    def _answers(self) -> bool:
        if self._process is None or not self.alive:
            return False
        try:
            state = (self.directory / "data" / "postmaster.pid").read_text().split()
        except OSError:
            return False
        return state[:1] == [str(self._process.pid)] and state[-1] == "ready"

    def _signal(self, number: int) -> None:
        if self._process is None or not self.alive:
            return
        family = _family(self._process.pid)
        self._process.send_signal(number)
        self._process.wait(STOP_TIMEOUT)
        deadline = time.monotonic() + STOP_TIMEOUT
        while any(_same(pid, began) for pid, began in family.items()):
            if time.monotonic() > deadline:
                raise PostgresError(f"PostgreSQL does not end:\n{self.log}")
            time.sleep(0.05)

    @property
    def log(self) -> str:
        """The last of what it said."""
        path = self.directory / "log"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""


def main() -> int:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    try:
        server = Postgres.start()
    except PostgresError as exc:
        sys.exit(f"No PostgreSQL: {exc}")
    try:
        return subprocess.run(
            sys.argv[1:],
            env=os.environ | server.environ | {"AMQP_EVENTS_TEST_DATABASE": "postgresql"},
            check=False,
        ).returncode
    finally:
        server.end()


def find() -> Path:
    """The directory of initdb and pg_ctl."""
    for attempt in range(2):
        if on_path := shutil.which("initdb"):
            return Path(on_path).resolve().parent
        if found := sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=_major):
            return found[-1].parent
        if attempt == 0:
            try:
                apt_install.install(
                    ["postgresql"],
                    why="no PostgreSQL server was found on this machine",
                    services=["postgresql.service"],
                )
            except apt_install.AptError as exc:
                raise PostgresError(str(exc)) from exc
    raise PostgresError("apt's package brought no initdb.")


def _major(path: Path) -> int:
    return int(path.parent.parent.name)


def _somebody() -> str | None:
    """The user to run it as, where we are root: PostgreSQL refuses that."""
    if os.geteuid() != 0:
        return None
    known = {user.pw_name for user in pwd.getpwall()}
    return next(user for user in ("postgres", "nobody") if user in known)


def _as_somebody(*, end_with_us: bool = False) -> list[str]:
    options: list[str] = []
    if somebody := _somebody():
        options += [f"--reuid={somebody}", "--clear-groups"]
    if end_with_us and shutil.which("setpriv"):
        options.append("--pdeathsig=QUIT")
    return ["setpriv", *options, "--"] if options else []


def _family(pid: int) -> dict[int, str]:
    """A process's children, each with the time at which it began."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return {int(child): began for child in children if (began := _began(int(child)))}
    return {}


def _began(pid: int) -> str:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    return ""


def _same(pid: int, began: str) -> bool:
    return _began(pid) == began


if __name__ == "__main__":
    sys.exit(main())
