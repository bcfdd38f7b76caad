"""The measured processes: each participant has its own interpreter.

A peer's patches and imports stay in its process. The peers have their own virtual environment
below ``.run/bench/``, created from ``requirements/bench.txt`` on first use.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from machine import ScriptError, run

ROOT = Path(__file__).resolve().parent.parent
#: Seconds for one answer; the longest run takes a few minutes.
ANSWER = 1800.0


class BenchmarkError(ScriptError):
    """A benchmark failed or counted wrong; the message says why."""


def environment(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of a participant, without the caller's settings."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PYTHON", "DJANGO", "AMQP_", "CELERY", "BENCH"))
    }
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
        "BENCH": json.dumps(given),
    }


#: The kernel kills the process when this one ends, even if this one is killed (util-linux).
TIED = ("setpriv", "--pdeathsig", "KILL", "--")


class Child:
    """A process of a participant, and its log."""

    def __init__(self, command: Sequence[str], given: Mapping[str, Any], log: Path) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*TIED, *command],
                env=environment(given),
                cwd=log.parent,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if isinstance(self, Program) else output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def said(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-4000:]

    def stop(self, timeout: float = 60.0) -> None:
        """Send SIGTERM and wait."""
        if self.alive:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill it and all of its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(30)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class Program(Child):
    """A process that runs one command after another (:mod:`benchmarks.programs.serving`).

    It stays from round to round, so its connections are open and its code is warm.
    """

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for the answer."""
        assert self.process.stdin is not None  # noqa: S101 - for mypy
        assert self.process.stdout is not None  # noqa: S101
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise BenchmarkError(f"{self.log.stem} has ended:\n{self.said()}") from None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(ANSWER):
                raise BenchmarkError(f"{self.log.stem} does not answer {do!r}:\n{self.said()}")
        line = self.process.stdout.readline()
        if not line:
            raise BenchmarkError(f"{self.log.stem} ended during {do!r}:\n{self.said()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@cache
def peers() -> str:
    """Return the interpreter of the peers' environment; create it if it is missing."""
    venv = ROOT / ".run" / "bench" / "peers"
    lock = ROOT / "requirements" / "bench.txt"
    run(sys.executable, ROOT / "scripts" / "bootstrap.py", "--venv", venv, "--lock", lock)
    return str(venv / "bin" / "python")


def resident(pid: int) -> float:
    """Return the megabytes of a process, with shared pages divided among their processes."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise BenchmarkError("this system has no smaps_rollup for the memory of processes")


def children(pid: int) -> list[int]:
    """Return the children of a process, such as a pool, that any of its threads has started."""
    listed = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for text in listed for child in text.split()]


def until(
    condition: Any, seconds: float, what: str, *, interval: float = 0.02, alive: Child | None = None
) -> None:
    """Wait until *condition* is true.

    Raises:
        BenchmarkError: *seconds* have passed, or the process *alive* has ended.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if alive is not None and not alive.alive:
            raise BenchmarkError(f"{alive.log.stem} has ended:\n{alive.said()}")
        if time.monotonic() > deadline:
            said = f":\n{alive.said()}" if alive is not None else ""
            raise BenchmarkError(f"not within {seconds:g} s: {what}{said}")
        time.sleep(interval)
