"""Fork pool processes while no other thread writes to a log.

In a forked process Python renews the locks of logging's handlers, but not the lock within the
stream of a handler (``io.BufferedWriter``). If a thread, such as that of the settlement, wrote to
the log while the main thread forked, the new process would wait for that lock at its first log
line: its run would never end, and a warm shutdown would wait for it. A reaper that replaced the
process after each second event stood still after 91 of them (Python 3.11).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

#: Longest time in seconds for which a fork waits for a handler: one that logs to another handler
#: could wait for the forking thread.
TIMEOUT: Final = 2.0


class _Held(threading.local):
    """The locks that a forking thread holds."""

    def __init__(self) -> None:
        self.locks: list[Any] = []


_held = _Held()


@cache
def install() -> None:
    """Hold the locks of all handlers during each fork of this process."""
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_forget)


def _hold() -> None:
    for handler in _handlers():
        lock: Any = handler.lock
        if lock is not None and lock.acquire(timeout=TIMEOUT):
            _held.locks.append(lock)


def _release() -> None:
    while _held.locks:
        _held.locks.pop().release()


def _forget() -> None:
    """Release nothing: logging has renewed the locks."""
    _held.locks.clear()


def _handlers() -> Iterator[logging.Handler]:
    """Yield the handlers of all loggers, those of several loggers more than once."""
    for logger in (logging.root, *tuple(logging.root.manager.loggerDict.values())):
        if isinstance(logger, logging.Logger):
            yield from tuple(logger.handlers)
