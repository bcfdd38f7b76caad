"""The services of the demo: their commands, and their workers and web servers."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
RUN = ROOT / ".run" / "demo"
sys.path.insert(0, str(ROOT / "scripts"))

from machine import Process, ScriptError, run, wait_until  # noqa: E402 - no package

#: Seconds that a worker has for a warm shutdown before it is killed.
STOP_TIMEOUT = 12.0
COMMAND_TIMEOUT = 120.0
#: The kernel kills the process when the demo ends, even if the demo is killed (util-linux).
TIED = ("setpriv", "--pdeathsig", "KILL", "--")


class DemoError(ScriptError):
    """The demo cannot continue; the message names the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One of the two services: a settings module and the environment that it reads."""

    name: str
    environment: Mapping[str, str]

    def with_environment(self, **more: str) -> Service:
        return replace(self, environment={**self.environment, **more})

    @property
    def env(self) -> dict[str, str]:
        prefixes = ("AMQP_", "CELERY_", "DJANGO_", "EXAMPLE_")
        return {
            **{key: value for key, value in os.environ.items() if not key.startswith(prefixes)},
            **self.environment,
            "DJANGO_SETTINGS_MODULE": f"example_project.{self.name}",
            "PYTHONUNBUFFERED": "1",
        }

    def manage(self, *arguments: str) -> str:
        """Run a command of `manage.py` and return its output."""
        command = (sys.executable, "manage.py", *arguments)
        try:
            return run(*command, cwd=ROOT, env=self.env, timeout=COMMAND_TIMEOUT)
        except ScriptError as exc:
            raise DemoError(f"service {self.name}: {exc}") from exc

    def manage_json(self, *arguments: str) -> Any:
        return json.loads(self.manage(*arguments, "--format", "json"))

    def log(self, role: str) -> Path:
        return RUN / "log" / f"{self.name}-{role}.log"


@dataclass(slots=True)
class Worker:
    """A running worker, mirror or web server: its main process and the children of that."""

    service: Service
    role: str
    main: Process
    family: list[Process] = field(default_factory=list)

    @classmethod
    def start(cls, service: Service, role: str, *arguments: str, keep: bool = False) -> Worker:
        """Start a Python program, from the main thread: a tied process ends with its thread.

        Args:
            keep: do not tie it to this process.
        """
        command = (*(() if keep else TIED), sys.executable, *arguments)
        # In a session of its own: Ctrl-C reaches the demo, which then stops its workers.
        main = Process.spawn(*command, output=service.log(role), cwd=ROOT, env=service.env)
        return cls(service, role, main)

    def find_children(self) -> None:
        """Note the processes of its session, to check later that they have ended."""
        known = {process.pid for process in self.processes}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError, ValueError, IndexError):
                pid = int(stat.parent.name)
                session = int(stat.read_text().rpartition(")")[2].split()[3])
                if session == self.main.pid and pid not in known:
                    self.family.append(Process.of(pid))

    @property
    def processes(self) -> list[Process]:
        return [self.main, *self.family]

    def check(self) -> None:
        """Raise DemoError if the main process has ended."""
        if not self.main.alive:
            log = self.service.log(self.role)
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise DemoError(
                f"the {self.role} of {self.service.name} has ended. {shown(log)} says:\n{tail}"
            )


def stop(workers: list[Worker]) -> None:
    """Shut down all workers warm, and kill what is left after :data:`STOP_TIMEOUT`."""
    for worker in workers:
        worker.find_children()
        worker.main.send(signal.SIGTERM)
    wait_until(lambda: not any(worker.main.alive for worker in workers), STOP_TIMEOUT)
    for worker in workers:
        worker.find_children()
    processes = [process for worker in workers for process in worker.processes]
    for process in processes:
        process.send(signal.SIGKILL)
    wait_until(lambda: not any(process.alive for process in processes), 5)


def until(condition: Callable[[], bool], timeout: float, failure: str) -> None:
    """Wait for a condition; raise DemoError with *failure* after *timeout* seconds."""
    if not wait_until(condition, timeout):
        raise DemoError(f"{failure} (waited {timeout:.0f} s)")


def shown(path: Path) -> str:
    """Return a path relative to the project's folder."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
