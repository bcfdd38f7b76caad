"""Small disks in memory, which only this process and those that it starts can see.

They are mounted in a namespace of its own, so the kernel removes them when the last process ends.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from machine import ScriptError, run

#: Of each disk; it takes as much memory as is on it.
SIZE: Final = "512m"
#: Of the write-ahead log of RabbitMQ, which is 512 MB by default.
BROKER: Final = "raft.wal_max_size_bytes = 67108864"
#: Statements for the same purpose.
SERVERS: Final = {
    "postgresql": ("ALTER SYSTEM SET max_wal_size = '128MB'", "SELECT pg_reload_conf()")
}
#: At making a disk smaller that others write to.
ATTEMPTS: Final = 50
_NEW_NAMESPACE: Final = 0x00020000  # sched.h


def mount(*directories: Path) -> bool:
    """Mount a disk on each directory; return False if that is not possible, as without root.

    Call it before any other thread is started: the namespace is the calling thread's.
    """
    if os.geteuid() != 0 or ctypes.CDLL(None).unshare(_NEW_NAMESPACE):
        return False
    try:
        run("mount", "--make-rprivate", "/")
        for directory in directories:
            directory.mkdir()
            run("mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=755", "soak", directory)
    except ScriptError:
        return False
    return True


@contextmanager
def filled(directory: Path) -> Iterator[None]:
    """Make a disk as small as what is on it, in this block.

    Raises:
        ScriptError: it has grown at each attempt.
    """
    try:
        for attempt in range(ATTEMPTS):
            found = os.statvfs(directory)
            used = (found.f_blocks - found.f_bfree) * found.f_frsize
            try:
                _resize(directory, str(used))
                break
            except ScriptError:  # it has grown in the meantime
                if attempt == ATTEMPTS - 1:
                    raise
        yield
    finally:
        _resize(directory, SIZE)


def _resize(directory: Path, size: str) -> None:
    run("mount", "-o", f"remount,size={size}", directory)


def unmount(*directories: Path) -> None:
    for directory in directories:
        with suppress(ScriptError):
            run("umount", "--lazy", directory)
