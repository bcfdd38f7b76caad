"""Commands and workers of the services, as processes of their own that surely end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from machine import Process, process_birth, wait_until  # noqa: E402 - scripts/ is no package

# ruff: noqa: S603 - commands of this project

#: Seconds for a warm shutdown of a worker before it is killed.
STOP_TIMEOUT = 12.0
COMMAND_TIMEOUT = 120.0

#: Becomes the command, which the kernel kills when the demo is gone, however it went (Linux).
TIED = """
import ctypes, os, signal, sys
try:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
except (OSError, AttributeError):
    pass
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class DemoError(RuntimeError):
    """The demo cannot go on; the message names the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One of the two services: a settings module and the environment that it reads."""

    name: str
    environment: Mapping[str, str]
    data: Path

    def with_environment(self, **more: str) -> Service:
        return replace(self, environment={**self.environment, **more})

    @property
    def env(self) -> dict[str, str]:
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("AMQP_", "CELERY_", "DJANGO_", "EXAMPLE_"))
        }
        return {
            **kept,
            **self.environment,
            "DJANGO_SETTINGS_MODULE": f"example_project.{self.name}",
            "PYTHONUNBUFFERED": "1",
        }

    @property
    def database(self) -> Path:
        return self.data / f"{self.name}.sqlite3"

    def manage(self, *arguments: str, codes: tuple[int, ...] = (0,)) -> str:
        """Run a command of `manage.py` and return what it writes.

        Raises:
            DemoError: it failed; with what it said.
        """
        command = [sys.executable, "manage.py", *arguments]
        shown = f"DJANGO_SETTINGS_MODULE=example_project.{self.name} manage.py {arguments[0]}"
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=self.env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=COMMAND_TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired as exc:
            raise DemoError(f"{shown} did not end within {COMMAND_TIMEOUT:.0f} s") from exc
        if done.returncode not in codes:
            said = (done.stderr.strip() or done.stdout.strip())[-2000:]
            raise DemoError(f"{shown} ended with {done.returncode}:\n{said}")
        return done.stdout

    def manage_json(self, *arguments: str, codes: tuple[int, ...] = (0,)) -> Any:
        return json.loads(self.manage(*arguments, "--format", "json", codes=codes))

    def lines(self, *arguments: str) -> Iterator[str]:
        """Run a command and yield its lines as it writes them."""
        errors = log_of(self, arguments[0])
        with (
            errors.open("w") as stderr,
            subprocess.Popen(
                [sys.executable, "-c", TIED, "manage.py", *arguments],
                cwd=ROOT,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            ) as child,
        ):
            assert child.stdout is not None  # noqa: S101 - PIPE
            try:
                yield from child.stdout
            finally:
                if child.poll() is None:
                    with suppress(subprocess.TimeoutExpired):
                        child.wait(5)
                    child.kill()
        if child.returncode:
            raise DemoError(
                f"manage.py {arguments[0]} ended with {child.returncode}:\n"
                f"{errors.read_text()[-2000:]}"
            )


@dataclass(slots=True)
class Worker:
    """A running worker, mirror or web server: its main process, and what that has started."""

    service: Service
    role: str
    main: Process
    family: list[Process] = field(default_factory=list)

    @classmethod
    def start(cls, service: Service, role: str, *arguments: str, keep: bool) -> Worker:
        """Start it; from the main thread, for a process that is tied ends with its thread.

        Args:
            keep: not tied to this process.
        """
        path = log_of(service, role)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, *(() if keep else ("-c", TIED)), *arguments],
                cwd=ROOT,
                env=service.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A session of its own: Ctrl-C reaches the demo, which then stops its workers.
                start_new_session=True,
            )
        return cls(service, role, Process.of(child))

    def look(self) -> None:
        """Note the processes that belong to it, to know later whether they are gone."""
        known = {process.pid for process in self.family}
        for pid in session_members(self.main.pid):
            birth = process_birth(pid)
            if birth is not None and pid not in known and pid != self.main.pid:
                self.family.append(Process(pid=pid, birth=birth))

    @property
    def processes(self) -> list[Process]:
        return [self.main, *self.family]

    def complain(self) -> None:
        """Raise where the worker has ended by itself."""
        if not self.main.alive:
            log = log_of(self.service, self.role)
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise DemoError(
                f"the {self.role} of {self.service.name} has ended; the end of {log}:\n{tail}"
            )


def log_of(service: Service, role: str) -> Path:
    return service.data / "log" / f"{service.name}-{role}.log"


def stop(workers: list[Worker]) -> None:
    """Warm shutdown of all at once; what is left after :data:`STOP_TIMEOUT` is killed."""
    for worker in workers:
        worker.look()
        worker.main.send(signal.SIGTERM)
    wait_until(lambda: not any(worker.main.alive for worker in workers), STOP_TIMEOUT)
    for worker in workers:
        worker.look()
        for process in worker.processes:
            process.send(signal.SIGKILL)
    everybody = [process for worker in workers for process in worker.processes]
    wait_until(lambda: not any(process.alive for process in everybody), 5)


def session_members(session: int) -> list[int]:
    """Return the processes of a session: a worker leads one of its own."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            text = stat.read_text()
            if int(text[text.rindex(")") + 2 :].split()[3]) == session:
                members.append(int(stat.parent.name))
    return members


def until(condition: Callable[[], bool], timeout: float, failure: str) -> None:
    """Wait for a condition.

    Raises:
        DemoError: with *failure*, when it does not come true in time (seconds).
    """
    if not wait_until(condition, timeout):
        raise DemoError(f"{failure} (waited {timeout:.0f} s)")
