"""Count the calls of a handler, in any number of processes and threads, at almost no cost.

A file of slots, one for each thread that counts, mapped into memory: a call adds one to its own
slot, without waiting for a lock or the disk. Nothing but the standard library: it is imported in
the peers' virtual environment too.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from pathlib import Path

SLOTS = 256
_SIZE = 8


class Tally:
    """Counted calls; slot 0 has the number of used slots."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._map: mmap.mmap | None = None
        self._mine = threading.local()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Use new slots in a child."""
        self._mine = threading.local()

    def reset(self) -> None:
        """Start at 0, before the first call."""
        self.path.write_bytes(bytes(SLOTS * _SIZE))
        self._map = None

    def _opened(self) -> mmap.mmap:
        if self._map is None:
            with self.path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), SLOTS * _SIZE)
        return self._map

    def _slot(self) -> memoryview[int]:
        opened = self._opened()
        with self.path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            (taken,) = struct.unpack_from("@Q", opened)
            if taken + 1 >= SLOTS:
                raise RuntimeError(f"more than {SLOTS - 1} threads count")
            struct.pack_into("@Q", opened, 0, taken + 1)
        start = (taken + 1) * _SIZE
        return memoryview(opened)[start : start + _SIZE].cast("Q")

    def hit(self) -> None:
        """Count one call."""
        try:
            slot = self._mine.slot
        except AttributeError:
            slot = self._mine.slot = self._slot()
        slot[0] += 1

    @property
    def count(self) -> int:
        """All calls so far."""
        return sum(struct.unpack(f"@{SLOTS}Q", self._opened()[:])[1:])
