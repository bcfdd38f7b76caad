"""The identity of this process, which lets others on the machine detect its death.

An identity consists of the place where it has a meaning, the process id and the start time. The
place is a hash of the host name, the boot of the kernel, and the namespace of process ids:
containers share host names and boots, and a process id is unique in its namespace only. The
number of a namespace is reused only after all of its processes have ended.
"""

from __future__ import annotations

import hashlib
import os
import socket
from functools import lru_cache
from pathlib import Path
from typing import Final
from uuid import uuid4

_PROC: Final = Path("/proc")


def identity() -> str:
    """Return the identity of this process; a random one where nothing can be told from it."""
    return _identity(os.getpid())


def place() -> str:
    """Return the first part of the identities that :func:`has_died` can judge here, or ``""``."""
    where, known, _ = identity().partition(".")
    return where if known else ""


def has_died(other: str) -> bool:
    """Return True if the process of an identity has ended; False if it has not, or is unknown."""
    where, _, rest = other.partition(".")
    pid, _, started = rest.partition(".")
    if not where or where != place() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass  # it exists, and belongs to another user
    actual = _started(pid)
    return bool(actual) and actual != started


@lru_cache(maxsize=1)
def _identity(pid: int) -> str:
    started = _started("self")
    return f"{_place(pid)}.{pid}.{started}" if _place(pid) and started else uuid4().hex


def _place(pid: int) -> str:
    try:
        status = (_PROC / "self/status").read_text()
        boot = (_PROC / "sys/kernel/random/boot_id").read_text()
        pids = (_PROC / "self/ns/pid").readlink()
    except OSError:
        return ""
    # A /proc of an outer namespace shows other numbers, of which the process's own is the last.
    if f"\nNSpid:\t{pid}\n" not in status:
        return ""
    parts = f"{socket.gethostname()} {boot} {pids}"
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


def _started(pid: str) -> str:
    """Return when a process started, in clock ticks since the boot; ``""`` if it is unknown."""
    try:
        stat = (_PROC / pid / "stat").read_text(errors="replace")
    except OSError:
        return ""
    # Field 22 of proc_pid_stat(5); the second, a name in parentheses, may contain anything.
    return stat.rpartition(")")[2].split()[19]


# Forked processes may be in another namespace.
os.register_at_fork(after_in_child=_identity.cache_clear)
