"""A private database server: its own port and data, gone when its process ends."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

import apt_install
from machine import HOST, Process, ScriptError, free_ports, run, wait_until

START_TIMEOUT = 60.0
STOP_TIMEOUT = 20.0
#: Runs the server if this process is root's: the servers refuse that.
UNPRIVILEGED = "nobody"

#: A database's columns and its applied migrations, which can differ in what columns do not show.
Schema = tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]


class DatabaseServer(ABC):
    """A database server with its own directory and port, which ends with this process.

    ::

        server = Postgres.start()
        server.create("shop"); server.settings("shop")
        server.kill(); server.start_again(); server.end()

    Attributes:
        kind: as tests and options name it.
        title: as its documentation names it.
        packages, units: of apt, and their systemd units.
        end_signal: ends it at once.
    """

    kind: ClassVar[str]
    title: ClassVar[str]
    packages: ClassVar[Sequence[str]]
    units: ClassVar[Sequence[str]] = ()
    end_signal: ClassVar[signal.Signals]
    HOST = HOST
    USER = "events"

    def __init__(self, *, durable: bool, parent: Path | None = None) -> None:
        # Not below pytest's directories, which only their owner may enter.
        self.directory = Path(tempfile.mkdtemp(prefix=f"{self.kind}-", dir=parent))
        self.port = free_ports(1)[0]
        self.durable = durable
        self._process: Process | None = None
        #: The template and the schema of borrowed databases; databases to lend, by template.
        self._lent: dict[str, tuple[str, Schema]] = {}
        self._spare: dict[str, list[str]] = {}

    @classmethod
    def start(cls, *, durable: bool = False, parent: Path | None = None) -> Self:
        """Start a server in a new directory; apt installs it if it is missing.

        Args:
            durable: a commit waits for the disk, which tests do not need.
            parent: where to make the directory; all users can enter it.
        """
        programs = cls.programs()
        server = cls(durable=durable, parent=parent)
        if os.geteuid() == 0:
            shutil.chown(server.directory, UNPRIVILEGED)
        try:
            run(*setpriv(), *server._initialisation(programs), cwd="/")
            server.start_again()
        except BaseException:
            server.end()
            raise
        return server

    @classmethod
    def programs(cls) -> Path:
        """Return the directory of the server's programs; install them if they are missing."""
        if (programs := cls._programs()) is None:
            why = f"This machine has no {cls.title} server"
            apt_install.install(cls.packages, why=why, units=cls.units)
            programs = cls._programs()
        if programs is None:
            raise ScriptError(f"apt's {' '.join(cls.packages)} has no {cls.title} server.")
        return programs

    # -- databases

    @abstractmethod
    def settings(self, name: str = "") -> dict[str, Any]:
        """Return the entry of a database in DATABASES, by default of one that always exists."""

    @abstractmethod
    def connect(self, database: str = "", *, autocommit: bool = True) -> Any:
        """Connect as the administrator, with the driver that Django uses."""

    def execute(self, *statements: str, database: str = "") -> list[tuple[Any, ...]]:
        """Execute statements and return the rows of the last one."""
        with self.connect(database) as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return list(cursor.fetchall()) if cursor.description else []

    @abstractmethod
    def create(self, name: str, template: str = "") -> None:
        """Create a database, empty or as a copy of one that nobody is connected to."""

    @abstractmethod
    def drop(self, name: str) -> None:
        """End the connections to a database and drop it."""

    def borrow(self, template: str = "") -> str:
        """Return the name of a database of the caller's own: empty, or a copy of another one."""
        # Creating the tables takes much longer than emptying them.
        if spare := self._spare.get(template):
            return spare.pop()
        name = f"test_{secrets.token_hex(6)}"
        self.create(name, template)
        self._lent[name] = template, self._schema(name)
        return name

    def give_back(self, name: str) -> None:
        """End the use of a borrowed database; it is lent again if its tables are the same."""
        template, schema = self._lent[name]
        if not template or schema != self._schema(name):
            self.drop(name)
            return
        self._restore(name, template, sorted({table for table, *_ in schema[0]}))
        self._spare.setdefault(template, []).append(name)

    def _schema(self, name: str) -> Schema:
        columns = self.execute(
            "SELECT table_name, column_name, data_type, character_maximum_length "
            f"FROM information_schema.columns WHERE table_schema IN ('public', '{name}') "
            "ORDER BY table_name, ordinal_position",
            database=name,
        )
        migrations = "SELECT app, name FROM django_migrations ORDER BY app, name"
        has_migrations = any(table == "django_migrations" for table, *_ in columns)
        return columns, self.execute(migrations, database=name) if has_migrations else []

    @abstractmethod
    def _restore(self, name: str, template: str, tables: Sequence[str]) -> None:
        """End the connections to a copy of a template, and make its rows the same again."""

    @abstractmethod
    def refusing(self, name: str) -> AbstractContextManager[None]:
        """End the connections to one database, and refuse new ones for a block."""

    @abstractmethod
    def read_only(self, name: str) -> AbstractContextManager[None]:
        """End the connections to one database, and refuse writes for a block, as in a failover."""

    # -- the process

    @property
    def pid(self) -> int:
        """The server's pid; 0 before the start."""
        return self._process.pid if self._process is not None else 0

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.alive

    def start_again(self) -> None:
        """Start with the data that is there; return when the server is ready."""
        deadline = time.monotonic() + START_TIMEOUT
        prefix = setpriv(f"--pdeathsig={self.end_signal.name.removeprefix('SIG')}")
        while not (self.alive and self._ready()):
            if time.monotonic() > deadline:
                raise ScriptError(f"{self.title} does not answer:\n{self.log}")
            # After a kill, one of its processes may still hold its memory: try again.
            if not self.alive:
                command = self._command(self.programs())
                log = self.directory / "log"
                self._process = _spawn(*prefix, *command, output=log)
            time.sleep(0.1)

    def kill(self) -> None:
        """Kill the server with SIGKILL; return when all its processes are gone."""
        self._end(signal.SIGKILL)

    def end(self) -> None:
        """Shut down at once and delete the data."""
        self._end(self.end_signal)
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def log(self) -> str:
        """The last lines of its log."""
        path = self.directory / "log"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    def _end(self, number: int) -> None:
        if self._process is None or not self.alive:
            return
        family = [self._process]
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            family += [Process.of(int(pid)) for pid in children]
        self._process.send(number)
        if not wait_until(lambda: not any(each.alive for each in family), STOP_TIMEOUT):
            raise ScriptError(f"{self.title} does not end:\n{self.log}")

    @classmethod
    @abstractmethod
    def _programs(cls) -> Path | None:
        """Return the directory of the server's programs, if they are installed."""

    @abstractmethod
    def _initialisation(self, programs: Path) -> list[str | Path]:
        """Return the command that creates ``data`` in the directory."""

    @abstractmethod
    def _command(self, programs: Path) -> list[str | Path]:
        """Return the command of the server."""

    @abstractmethod
    def _ready(self) -> bool:
        """Return True if the server, which runs, accepts connections."""


def _spawn(*command: str | Path, output: Path) -> Process:
    """Start a process in a thread that lives as long as this process."""
    if threading.current_thread() is threading.main_thread():
        return Process.spawn(*command, output=output, cwd="/")
    return _thread().submit(Process.spawn, *command, output=output, cwd="/").result()


@cache
def _thread() -> ThreadPoolExecutor:
    # --pdeathsig is about the thread that starts a process.
    return ThreadPoolExecutor(1)


def main(server_class: type[DatabaseServer], usage: str | None) -> int:
    """Run the command of this process's arguments with a private server."""
    if len(sys.argv) < 2:
        sys.exit(usage)
    server = server_class.start()
    try:
        env = os.environ | {"AMQP_EVENTS_TEST_DATABASE": json.dumps(server.settings())}
        # The command ends with this process, as the server does.
        command = ["setpriv", "--pdeathsig=TERM", "--", *sys.argv[1:]]
        return subprocess.run(command, env=env, check=False).returncode
    finally:
        server.end()


def setpriv(*options: str) -> list[str]:
    """Return the prefix of a command that must not run as root."""
    if os.geteuid() == 0:
        options = (f"--reuid={UNPRIVILEGED}", "--clear-groups", *options)
    return ["setpriv", *options, "--"] if options else []


def filled(cursor: Any, tables: Sequence[str]) -> list[str]:
    """Return the tables that have rows."""
    each = [f"SELECT '{table}' WHERE EXISTS (SELECT 1 FROM {table})" for table in tables]
    cursor.execute(" UNION ALL ".join(each))
    return [table for (table,) in cursor.fetchall()]
