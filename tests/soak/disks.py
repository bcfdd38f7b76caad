"""A small disk in memory, which only this process and those that it starts can see.

It is mounted in a namespace of its own, so the kernel removes it when the last process ends.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from machine import ScriptError, run

#: It takes as much memory as is on it.
SIZE: Final = "512m"
#: Statements that keep the logs of a server below that.
SERVERS: Final = {
    "postgresql": ("ALTER SYSTEM SET max_wal_size = '128MB'", "SELECT pg_reload_conf()")
}
#: At making a disk smaller that others write to.
ATTEMPTS: Final = 50
_NEW_NAMESPACE: Final = 0x00020000  # sched.h


def mount(directory: Path) -> bool:
    """Mount a disk on a directory; return False if that is not possible, as without root.

    Call it before any other thread is started: the namespace is the calling thread's.
    """
    if os.geteuid() != 0 or ctypes.CDLL(None).unshare(_NEW_NAMESPACE):
        return False
    try:
        run("mount", "--make-rprivate", "/")
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


def unmount(directory: Path) -> None:
    with suppress(ScriptError):
        run("umount", "--lazy", directory)
