"""Let SIGQUIT wait while a job is given to a pool of threads.

``ThreadPoolExecutor`` holds a lock then. Celery's signal handler, which runs in the same thread,
shuts the executor down, and would wait for that lock for ever.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class QuitSignal:
    """A handler of the signal for a cold shutdown that calls the former one, after a block."""

    def __init__(self) -> None:
        self._blocked = False
        self._former: Callable[..., Any] | None = None
        self._waiting: tuple[int, FrameType | None] | None = None

    def install(self) -> None:
        """Replace Celery's handler, where this is the main thread; again after each connection."""
        if threading.current_thread() is not threading.main_thread():
            return
        remapped = os.environ.get("REMAP_SIGTERM") == "SIGQUIT"
        for number in (signal.SIGQUIT, signal.SIGTERM) if remapped else (signal.SIGQUIT,):
            former = signal.getsignal(number)
            if callable(former) and former != self._handle:
                self._former = former
                signal.signal(number, self._handle)

    def __enter__(self) -> None:
        self._blocked = True

    def __exit__(self, *_: object) -> None:
        self._blocked = False
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._handle(*waiting)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._blocked:
            self._waiting = number, frame
        elif self._former is not None:
            self._former(number, frame)
