"""Let signals and the remote control command that stop a worker wait for the event loop.

Celery stops the pool in the middle of the write of a job: its handler of SIGQUIT where the signal
arrives, and the others, like ``shutdown``, after the current turn of the loop. The pool would then
wait forever for that job's end; in the middle of ``ThreadPoolExecutor.submit()``, SIGQUIT would
wait for a lock that this thread holds.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, Final

#: Signals that end a worker.
SIGNALS: Final = (signal.SIGQUIT, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignals:
    """Handlers of signals that call the former ones in the event loop.

    A second signal calls its handler at once.

    Args:
        wake: has :meth:`deliver` called in the event loop.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._loop_runs = False
        self._former: dict[int, Callable[..., Any]] = {}
        self._waiting: Callable[[], object] | None = None

    def install(self) -> None:
        """Replace Celery's handlers, where this is the main thread; when the loop runs."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._loop_runs = True
        for number in SIGNALS:
            former = signal.getsignal(number)
            if callable(former) and former != self._handle:
                self._former[number] = former
                signal.signal(number, self._handle)

    def loop_ended(self) -> None:
        """Call the former handlers at once from now on."""
        self._loop_runs = False
        self.deliver()

    @property
    def waiting(self) -> bool:
        return self._waiting is not None

    def deliver(self) -> None:
        """Call the pending stop, if any."""
        if self._waiting is not None:
            stop, self._waiting = self._waiting, None
            stop()

    def stop(self, stop: Callable[[], object]) -> None:
        """Call *stop* in the event loop; at once if the loop has ended or a stop is pending."""
        if self._loop_runs and not self.waiting:
            self._waiting = stop
            self._wake()
        else:
            self._waiting = None  # not a second time in the event loop
            stop()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.stop(partial(self._former[number], number, frame))
