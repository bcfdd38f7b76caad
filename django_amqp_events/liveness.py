"""Tell ``events_health`` what the parts of this process do, such as a worker or a relay.

Each part has a file below the folder for temporary files (``TMPDIR``), which only its user can
read. The file's age says when the loop turned last, its content why the part is not ready. Its
name ends with the identity of the process, so a file that a dead process has left is told apart.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from . import conf, process_identity

logger = logging.getLogger(__name__)

#: Seconds between writes, at least.
WRITE_SECONDS: Final = 1.0
#: Tell apart parts of the same name, such as the relays of several databases.
_numbers = itertools.count(1)


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
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _write(self, *, rests: bool) -> None:
        self._next = time.monotonic() + WRITE_SECONDS
        settings, _ = conf.load()
        if not (self.name and settings.service and process_identity.place()):
            return
        try:
            if self._path is None:
                folder = _folder(settings)
                folder.mkdir(exist_ok=True)
                name = f"{self.name}.{process_identity.identity()}.{next(_numbers)}"
                self._path = folder / name
            # A reader never sees half of it.
            new = self._path.with_name(f".{self._path.name}")
            new.write_text(json.dumps({"problem": self.problem(), "rests": rests}))
            new.replace(self._path)
        except OSError as exc:
            if not self._warned:
                logger.warning("events_health cannot examine this process: %s", exc)
            self._path, self._warned = None, True


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


def read(settings: conf.Settings) -> list[PartState] | None:
    """Return the parts of a service's processes in this container; remove files of dead ones.

    Returns:
        ``None`` if this system does not show its processes.
    """
    place = process_identity.place()
    if not place:
        return None
    try:
        folder = _folder(settings)
    except OSError as exc:
        logger.warning("the files of processes cannot be read: %s", exc)
        return []
    states = []
    for path in sorted(folder.glob("*")):
        part, where, process, started = path.name.split(".")[:4]
        if process_identity.has_died(f"{where}.{process}.{started}"):
            path.unlink(missing_ok=True)
        elif where == place:  # not of another container
            with suppress(FileNotFoundError):  # the part has just ended
                states.append(
                    PartState(
                        part=part,
                        process=int(process),
                        turned=path.stat().st_mtime,
                        **json.loads(path.read_text()),
                    )
                )
    return states


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
