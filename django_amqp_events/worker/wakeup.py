"""Wake a worker's event loop from another thread."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Wakeup:
    """Calls a function in the event loop soon after :meth:`wake`, which any thread may call.

    A thread of the pool has a result for the loop, which would see it only after a poll of up to a
    second.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def register(self, hub: Any) -> None:
        """Register with an event loop, which forgets it when a connection is lost."""
        hub.add_reader(self._reader, self._woken)

    def wake(self) -> None:
        with suppress(OSError):  # enough are written, or the worker has ended
            self._writer.send(b"\0")

    def close(self) -> None:
        """Call nothing more, since the worker ends."""
        self._reader.close()
        self._writer.close()

    def _woken(self) -> None:
        with suppress(BlockingIOError):
            self._reader.recv(4096)
        self._call()
