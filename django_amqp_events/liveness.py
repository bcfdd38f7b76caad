"""Tell ``events_health`` what the parts of this process do, such as a worker or a relay.

Each part has a file below the folder for temporary files (``TMPDIR``), which only its user can
read. The file's age says when the loop turned last, its first line why the part is not ready. It is
locked while its process lives, so a file that a dead process has left is told apart.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO
from uuid import uuid4

from . import conf
from .logs import get_logger

logger = get_logger(__name__)

#: Seconds between writes, at least.
WRITE_SECONDS: Final = 1.0


class Part:
    """A part of this process that works in a loop.

    Args:
        name: ``worker``, ``companion`` (of a worker), ``reaper``, ``relay``, ``mirror``,
            ``batches`` or ``snapshots``; ``""`` if ``events_health`` does not examine it.
        problem: returns why it is not ready, ``""`` if it is.
    """

    def __init__(self, name: str, problem: Callable[[], str]) -> None:
        self.name = name
        self.problem = problem
        self._path: Path | None = None
        self._file = -1
        self._next = 0.0
        self._warned = False

    def turn(self) -> None:
        """Record that the loop turns; a call soon after another one does nothing."""
        if time.monotonic() >= self._next:
            self._write(rests=False)

    def rest(self) -> None:
        """Record that the loop may stand still, as a worker's does without a connection."""
        self._write(rests=True)

    def end(self) -> None:
        """Record that this process does not run the part any more."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._path = None

    def _write(self, *, rests: bool) -> None:
        self._next = time.monotonic() + WRITE_SECONDS
        settings, _ = conf.load()
        if not (self.name and settings.service):
            return
        try:
            if self._path is None:
                folder = _folder(settings)
                folder.mkdir(exist_ok=True)
                # Containers that share the folder have the same process ids.
                path = folder / f"{self.name}.{os.getpid()}.{uuid4().hex}"
                self._file = os.open(path, os.O_CREAT | os.O_WRONLY)
                self._path = path
                # Until this process and those that it has forked are gone.
                fcntl.flock(self._file, fcntl.LOCK_EX)
                if not os.fstat(self._file).st_nlink:
                    # A probe has removed it before it was locked.
                    os.close(self._file)
                    self._path, self._next = None, 0.0
                    return
            line = json.dumps({"problem": self.problem(), "rests": rests})
            os.pwrite(self._file, f"{line}\n".encode(), 0)
        except OSError as exc:
            if not self._warned:
                logger.warning("events_health cannot examine this process: %s", exc)
            self._warned = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PartState:
    """What a part of a running process has recorded last.

    Attributes:
        turned: when its loop turned last, in seconds since the epoch.
        rests: its loop may stand still.
    """

    part: str
    process: int
    turned: float
    problem: str
    rests: bool


def read(settings: conf.Settings) -> list[PartState]:
    """Return the parts of a service's processes in this container; remove files of dead ones."""
    states = []
    try:
        for path in sorted(_folder(settings).glob("*")):
            # The part may just have ended, or not have written yet.
            with suppress(FileNotFoundError, ValueError), path.open() as file:
                if _is_locked(file):
                    part, process, _ = path.name.split(".")
                    turned = os.fstat(file.fileno()).st_mtime
                    state = json.loads(file.readline())
                    states.append(
                        PartState(part=part, process=int(process), turned=turned, **state)
                    )
                else:
                    path.unlink()
    except OSError as exc:
        logger.warning("the files of processes cannot be read: %s", exc)
    return states


def _is_locked(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _folder(settings: conf.Settings) -> Path:
    """Return the folder with the files of a service's processes.

    Raises:
        PermissionError: another user has made the folder above it.
    """
    ours = Path(tempfile.gettempdir(), f"amqp-events-{os.getuid()}")
    ours.mkdir(mode=0o700, exist_ok=True)
    if ours.lstat().st_uid != os.getuid():
        raise PermissionError(f"{ours} belongs to another user; set TMPDIR")
    return ours / f"{settings.prefix}{settings.service}"
