"""Waiting for what other processes do, and having them wait."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class NotInTime(AssertionError):
    """What was waited for did not come before the deadline.

    On a machine that does several things at once that may be the machine. The test is run once
    more, and named (`only_rerun` in pyproject.toml, `TOO_MANY` in conftest.py); a count that is
    wrong never is.
    """


def until(condition: Callable[[], T], what: str, deadline: float = 30.0) -> T:
    """Return the first truthy answer; fail after *deadline* seconds of `Stopwatch`."""
    watch = Stopwatch()
    while True:
        asked = time.monotonic()
        if answer := condition():
            return answer
        took = time.monotonic() - asked
        if watch.seconds > deadline:
            raise NotInTime(f"not within {deadline:g} s: {what}: {answer!r}")
        # What takes the broker or a database long, or is long in coming, is asked less often.
        time.sleep(max(0.02, min(2 * took, 0.5), min(watch.seconds / 10, 0.2)))


class Stopwatch:
    """Seconds in which the machine could do what is waited for.

    While a process waits for a processor that others use, a second counts as a tenth: a deadline
    is for what hangs, not for a machine that is busy. Where Linux does not tell (PSI), all count.
    """

    def __init__(self) -> None:
        self._began, self._stalled = time.monotonic(), _stalled()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began - 0.9 * (_stalled() - self._stalled)


def _stalled() -> float:
    """Return the seconds, since the start, in which a process of the machine had no processor."""
    try:
        some = Path("/proc/pressure/cpu").read_text().partition("\n")[0]
    except OSError:
        return 0.0
    return int(some.rpartition("=")[2]) / 1e6


def is_usable(channel: Any) -> bool:
    """Return True if neither RabbitMQ nor a lost connection has closed a channel of py-amqp."""
    return bool(channel.is_open and channel.connection and channel.connection.connected)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process with all its threads for the time of a block.

    The signal alone does not: one thread has to be scheduled to take it, and on a busy machine the
    others go on until then.

    Raises:
        NotInTime: it still runs.
    """
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: _all_stopped(pid), f"process {pid} stops")
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def state_of(pid: int, thread: int | None = None) -> str:
    """Return the kernel's letter for what a process, or one thread of it, is doing."""
    stat = Path(f"/proc/{pid}/task/{thread or pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0]


def _all_stopped(pid: int) -> bool:
    """Return True if no thread can continue."""
    try:
        threads = [int(each.name) for each in Path(f"/proc/{pid}/task").iterdir()]
        return all(state_of(pid, thread) in "TZX" for thread in threads)
    except (FileNotFoundError, ProcessLookupError):  # it, or a thread, has just gone
        return not Path(f"/proc/{pid}").exists()
