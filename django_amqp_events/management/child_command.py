"""Management commands in child processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from django.conf import settings

from ..exceptions import ConfigurationError
from ..service_loop import BACKOFF, POLL_INTERVAL

#: Seconds after SIGTERM until a command is killed.
GRACE: Final = 15.0
PARENT_CHECK_SECONDS: Final = 0.5


@dataclass(slots=True, kw_only=True)
class ChildCommand:
    """A management command in a child process.

    It gets this process's id (``--parent``) and ends with it, even if that is killed. It has a
    process group of its own, so Ctrl-C at a terminal reaches only this process, which then stops
    the command.

    Args:
        line: the name of the command and its options.
        tell: receives a line of text when the command ends unasked.
        stop: polled often; returns True to stop the command.
        grace: seconds after SIGTERM until it is killed; RabbitMQ redelivers what it has not
            settled.

    Raises:
        ConfigurationError: the settings are not in a module, which a child process could import.
    """

    line: tuple[str, ...]
    tell: Callable[[str], object]
    stop: Callable[[], bool]
    grace: float = GRACE
    _failures: int = 0

    def __post_init__(self) -> None:
        if not settings.SETTINGS_MODULE:
            raise ConfigurationError(
                f"{self.line[0]} cannot run in a child process, because the settings are not in a "
                f"module (settings.configure()); switch it off with --no-… and run it separately"
            )

    def run(self) -> float:
        """Run the command until it ends or is stopped; return the seconds until it may run again.

        They grow with each failure, unless the command has run for longer than the longest delay.

        Raises:
            OSError: the process cannot be started.
        """
        began = time.monotonic()
        process = self._start()
        try:
            while process.poll() is None and not self.stop():
                time.sleep(POLL_INTERVAL)
        finally:
            code = self._end(process)
        if self.stop():
            return 0.0
        if not code or time.monotonic() > began + BACKOFF.last:
            self._failures = 0
        wait = BACKOFF.delay(self._failures)
        if code:
            self._failures += 1
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self.tell(f"{self.line[0]} ended with {how}; restarting it in {wait:g} s")
        return wait

    def _start(self) -> subprocess.Popen[bytes]:
        name, *options = self.line
        return subprocess.Popen(  # noqa: S603 - our own command line
            [
                sys.executable,
                "-P",
                *(f"-W{option}" for option in sys.warnoptions),
                "-m",
                "django",
                name,
                *options,
                "--settings",
                str(settings.SETTINGS_MODULE),
                "--parent",
                str(os.getpid()),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_path())},
            stdin=subprocess.DEVNULL,
            process_group=0,
        )

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        """Stop the process if it runs; return its exit code."""
        process.terminate()
        try:
            return process.wait(self.grace)
        except subprocess.TimeoutExpired:
            self.tell(
                f"killing {self.line[0]} (process {process.pid}), which did not stop in "
                f"{self.grace:g} s"
            )
            process.kill()
            return process.wait()


def _path() -> list[str]:
    """Return the import path for a child process.

    Celery puts the working directory first. Unless the program lies there, it moves to the end:
    a project's ``celery.py`` would be imported instead of Celery.
    """
    here, program = Path.cwd(), Path(sys.argv[0]).absolute().parent
    path = [entry for entry in sys.path if entry]
    if here == program:
        return path
    return sorted(path, key=lambda entry: Path(entry) == here)


def follow(parent: int | None) -> None:
    """Send this process SIGTERM when *parent* ends."""
    if parent is None:
        return

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=look, name="amqp-events-parent", daemon=True).start()
