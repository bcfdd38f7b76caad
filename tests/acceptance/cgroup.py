"""A memory limit by the kernel, for a test that needs a real out-of-memory kill."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A control group below this process's own. A process that writes its pid there is limited."""

    path: Path

    @property
    def kills(self) -> int:
        """How many processes the kernel has killed in it."""
        for name in ("memory.oom_control", "memory.events"):
            file = self.path / name
            if file.exists():
                lines = dict(line.split() for line in file.read_text().splitlines())
                return int(lines["oom_kill"])
        raise LookupError(f"no count of kills in {self.path}")


@contextmanager
def memory_limit(size: int) -> Iterator[MemoryLimit | None]:
    """Make a group with *size* bytes; ``None`` where this user or machine may make none.

    It lies below the group that this process is in, whose own limits hold for it too.
    """
    made = _make(size)
    try:
        yield MemoryLimit(made) if made else None
    finally:
        if made is not None:
            deadline = time.monotonic() + 20
            while (made / "cgroup.procs").read_text() and time.monotonic() < deadline:
                time.sleep(0.05)
            made.rmdir()


def _make(size: int) -> Path | None:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            parent, limit = ROOT / "memory", "memory.limit_in_bytes"
        elif not controllers:
            parent, limit = ROOT, "memory.max"
        else:
            continue
        made = parent / path.lstrip("/") / f"amqp-events-{os.getpid()}-{time.monotonic_ns()}"
        try:
            made.mkdir()
        except OSError:
            continue
        try:
            (made / limit).write_text(str(size))
        except OSError:  # no memory controller below this group
            made.rmdir()
            continue
        with suppress(OSError):
            (made / "memory.swap.max").write_text("0")
        return made
    return None
