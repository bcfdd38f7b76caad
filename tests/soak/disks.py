"""Small disks in memory, which only this process and those that it starts can see.

They are mounted in a namespace of its own, so the kernel removes them when the last process ends.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from machine import ScriptError, run

#: Of each disk.
MEGABYTES: Final = 512
#: Of the write-ahead log of RabbitMQ, which is 512 MB by default.
BROKER: Final = "raft.wal_max_size_bytes = 67108864"
#: Statements for the same purpose.
SERVERS: Final = {
    "postgresql": ("ALTER SYSTEM SET max_wal_size = '128MB'", "SELECT pg_reload_conf()")
}
#: Bytes of the largest and of the smallest parts that fill a disk.
PART: Final = 64 << 20
BLOCK: Final = 4096
_NEW_NAMESPACE: Final = 0x00020000  # sched.h
_FILLER: Final = "filler"


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
            options = f"size={MEGABYTES}m,mode=755"
            run("mount", "-t", "tmpfs", "-o", options, "soak", directory)
    except ScriptError:
        return False
    return True


@contextmanager
def filled(directory: Path) -> Iterator[None]:
    """Leave no free block on a disk in this block."""
    path = directory / _FILLER
    try:
        with path.open("wb") as file:
            size, part = 0, PART
            while part >= BLOCK:
                try:
                    os.posix_fallocate(file.fileno(), size, part)
                    size += part
                except OSError as exc:
                    if exc.errno != errno.ENOSPC:
                        raise
                    part //= 2
            yield
    finally:
        path.unlink(missing_ok=True)


def unmount(*directories: Path) -> None:
    for directory in directories:
        with suppress(ScriptError):
            run("umount", "--lazy", directory)
