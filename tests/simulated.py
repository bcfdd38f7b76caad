"""Processes that a test simulates in threads, one step at a time, and clocks that it moves.

A simulated process runs the package's own code. It stops before or after one of its effects
(:func:`effect`) until it is resumed, and it can die there: then it has no further effect.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import wraps
from typing import Any

from django.db import connections

#: Seconds within which a process takes a step.
DEADLINE = 240.0


class Died(BaseException):
    """Raised where a process dies; no code handles it."""


class Process:
    """A process that stops at its effects.

    Attributes:
        until: the effect at which it stops next; ``None`` for none.
        at: the effect at which it has stopped.
        dead: it has died, or has ended.
    """

    def __init__(self) -> None:
        self.until: str | None = None
        self.at: str | None = None
        self.busy = self.dead = False
        self.raised: BaseException | None = None
        self._changed = threading.Condition()

    # -- in its own threads

    def run(self, work: Callable[[], object]) -> None:
        """Run *work* as this process."""
        _running.process = self
        try:
            work()
        except Died:
            pass
        except BaseException as exc:  # noqa: BLE001 - raised in the test
            self.raised = exc
        finally:
            _running.process = None
            connections.close_all()
            self.set_busy(False)

    def stop_at(self, effect: str) -> None:
        """Stop until the process is resumed, if it is to stop here; not in the test's thread."""
        with self._changed:
            here = threading.current_thread() is not threading.main_thread()
            if here and self.until == effect and not self.dead:
                self.at = effect
                self._changed.notify_all()
                self._changed.wait_for(lambda: self.at is None or self.dead)
            if self.dead:
                raise Died

    def set_busy(self, busy: bool) -> None:
        with self._changed:
            self.busy, self.at = busy, None
            self._changed.notify_all()

    # -- in the test's thread

    def start(self, work: Callable[[], object], until: str | None = None) -> None:
        """Start a thread of the process, and wait until it stops at an effect or ends."""
        self.busy, self.until = True, until
        threading.Thread(target=self.run, args=(work,), daemon=True).start()
        self.settle()

    def settle(self) -> None:
        """Wait until the process stops at an effect, or has nothing to do."""
        with self._changed:
            came = self._changed.wait_for(lambda: self.at or not self.busy, DEADLINE)
        assert came, "a process hangs"
        if self.raised is not None:
            raise self.raised

    def resume(self, until: str | None = None) -> None:
        """Let the process run to an effect, or until it has nothing to do."""
        self.until = until
        with self._changed:
            self.at = None
            self._changed.notify_all()
        self.settle()

    def die(self) -> None:
        """Kill the process where it is."""
        with self._changed:
            self.dead = True
            self._changed.notify_all()
        if self.at is not None:
            with self._changed:
                self._changed.wait_for(lambda: not self.busy, DEADLINE)


_running = threading.local()


def running() -> Process | None:
    """Return the process whose code this thread runs."""
    return getattr(_running, "process", None)


class acting:  # noqa: N801 (a context manager, used like a function)
    """Run a block of the test's thread as a process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def __enter__(self) -> None:
        _running.process = self._process

    def __exit__(self, *_: object) -> None:
        _running.process = None


def effect(monkeypatch: Any, target: Any, name: str) -> None:
    """Let processes stop before and after a function."""
    real = getattr(target, name)

    @wraps(real)
    def run(*args: Any, **kwargs: Any) -> Any:
        if (process := running()) is None:
            return real(*args, **kwargs)
        process.stop_at(f"before {name}")
        result = real(*args, **kwargs)
        process.stop_at(f"after {name}")
        return result

    monkeypatch.setattr(target, name, run)


class Shifted:
    """The module ``time`` for this test's processes, ahead by some seconds."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def now(self, zone: Any = UTC) -> datetime:
        return datetime.now(zone) + timedelta(seconds=self.ahead)

    def datetime(self) -> type[datetime]:
        """Return a class whose ``now()`` is ahead."""
        clock = self

        class Ahead(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
                return clock.now(tz)

        return Ahead
