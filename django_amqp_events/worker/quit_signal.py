"""Let SIGQUIT wait for the event loop.

Celery's handler stops the pool where the signal arrives. In the middle of the write of a job, the
pool would wait for ever for that job's end; in that of ``ThreadPoolExecutor.submit()``, for a lock
that this thread holds.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class QuitSignal:
    """A handler of the signal for a cold shutdown that calls the former one in the event loop.

    A second signal calls it at once.

    Args:
        wake: has :meth:`deliver` called in the event loop.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._loop_runs = False
        self._former: Callable[..., Any] | None = None
        self._waiting: tuple[int, FrameType | None] | None = None

    def install(self) -> None:
        """Replace Celery's handler, where this is the main thread; when the loop runs."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._loop_runs = True
        remapped = os.environ.get("REMAP_SIGTERM") == "SIGQUIT"
        for number in (signal.SIGQUIT, signal.SIGTERM) if remapped else (signal.SIGQUIT,):
            former = signal.getsignal(number)
            if callable(former) and former != self._handle:
                self._former = former
                signal.signal(number, self._handle)

    def loop_ended(self) -> None:
        """Call the former handler at once from now on."""
        self._loop_runs = False
        self.deliver()

    @property
    def waiting(self) -> bool:
        return self._waiting is not None

    def deliver(self) -> None:
        """Call the former handler, if a signal waits."""
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._call(*waiting)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._loop_runs and not self.waiting:
            self._waiting = number, frame
            self._wake()
        else:
            self._waiting = None  # not a second time in the event loop
            self._call(number, frame)

    def _call(self, number: int, frame: FrameType | None) -> None:
        if self._former is not None:
            self._former(number, frame)
