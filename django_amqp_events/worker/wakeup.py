"""Wake a worker's event loop: for another thread, and at a signal.

A thread of the pool has a result for the loop, which would see it only after a poll of up to a
second. Python calls the handler of a signal during a poll and polls again (PEP 475), so a
request to stop would wait for the next timer.

Celery notices the end of a pool process by a pipe, which the kernel closes before the process can
be waited for (``do_exit()``: ``exit_files()``, then ``exit_notify()``). If it looks in between,
which is frequent, it looks again only at a timer of five seconds. SIGCHLD comes afterwards.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

#: Written where a signal would be: there is no signal 0.
_NO_SIGNAL: Final = b"\0"


class Wakeup:
    """Calls a function in the event loop soon after :meth:`wake`, which any thread may call."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._reader, writer = socket.socketpair()
        self._reader.setblocking(False)
        writer.setblocking(False)
        self._writer = writer.detach()
        self._pool: Any = None
        # Only the main thread may.
        self._watches = threading.current_thread() is threading.main_thread()
        if self._watches:
            self._watch_signals()

    def register(self, hub: Any, pool: Any) -> None:
        """Register with an event loop, which forgets it when a connection is lost."""
        self._pool = pool
        hub.add_reader(self._reader, self._woken, hub)

    def wake(self) -> None:
        with suppress(OSError):  # enough are written, or the worker has ended
            os.write(self._writer, _NO_SIGNAL)

    def close(self) -> None:
        """Call nothing more, since the worker ends."""
        if self._watches:
            _forget()
        self._reader.close()
        os.close(self._writer)

    def _woken(self, hub: Any) -> None:
        with suppress(BlockingIOError):
            if signal.SIGCHLD in self._reader.recv(4096):
                # When what the process has written is read: a job that it has not accepted runs
                # again.
                hub.call_soon(self._pool.maintain_pool)
        self._call()

    def _watch_signals(self) -> None:
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL:
            # Only a signal with a handler is written.
            signal.signal(signal.SIGCHLD, _ignore)
            signal.siginterrupt(signal.SIGCHLD, False)


def _ignore(*_: object) -> None:
    """Handle SIGCHLD."""


def _forget() -> None:
    # A pool process might close the descriptor and use its number for something else.
    signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGCHLD) is _ignore:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget)
