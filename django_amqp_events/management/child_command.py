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

from django.core.management import get_commands

from ..service_loop import BACKOFF, POLL_INTERVAL

#: Seconds after SIGTERM until a command is killed.
GRACE: Final = 15.0
PARENT_CHECK_SECONDS: Final = 0.5


@dataclass(slots=True, kw_only=True)
class ChildCommand:
    """A management command in a child process, which starts as this one was started.

    It gets this process's id (``--parent``) and ends with it, even if that is killed. It has a
    process group of its own, so Ctrl-C at a terminal reaches only this process, which then stops
    the command.

    Args:
        line: the name of the command and its options.
        tell: receives a line of text when the command ends unasked.
        stop: polled often; returns True to stop the command.
        grace: seconds after SIGTERM until it is killed; RabbitMQ redelivers what it has not
            settled.

    Attributes:
        problem: why it ended last, until it has run for some time.
    """

    line: tuple[str, ...]
    tell: Callable[[str], object]
    stop: Callable[[], bool]
    grace: float = GRACE
    problem: str = ""
    _failures: int = 0

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
                if time.monotonic() > began + BACKOFF.last:
                    self._failures, self.problem = 0, ""
        finally:
            code = self._end(process)
        if self.stop():
            return 0.0
        if not code:
            self._failures = 0
        wait = BACKOFF.delay(self._failures)
        if code:
            self._failures += 1
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self.problem = f"{self.line[0]} ended with {how}"
            self.tell(f"{self.problem}; restarting it in {wait:g} s")
        return wait

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603 - our own command line
            [sys.executable, *_program(), *self.line, "--parent", str(os.getpid())],
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


def _program() -> list[str]:
    """Return Python's options and the program that has run this management command.

    It is the project's ``manage.py``, which may prepare what its commands need.
    """
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in get_commands() and name in sys.orig_argv:
        words = sys.orig_argv[1 : sys.orig_argv.index(name)]
        return [_script() if word == sys.argv[0] else word for word in words]
    return ["-P", *(f"-W{option}" for option in sys.warnoptions), "-m", "django"]


def _script() -> str:
    """Return the path of the program; absolute, since a project may change its directory."""
    main, typed = getattr(sys.modules["__main__"], "__file__", None) or "", sys.argv[0]
    return main if Path(main).name == Path(typed).name else typed


def _path() -> list[str]:
    """Return the import path for a child process.

    Celery puts the working directory first. Unless the program lies there, it moves to the end:
    a project's ``celery.py`` would be imported instead of Celery.
    """
    here, program = Path.cwd(), Path(_script()).absolute().parent
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
