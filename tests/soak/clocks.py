"""Step the clock of single processes while they run, with Debian's libfaketime.

It is loaded into the server that the processes are forked from. Each process reads its offset from
a file of its own, once per second. Only the wall clock is faked.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import apt_install  # in scripts/
from machine import ScriptError

#: Names the file of a process.
FILE: Final = "FAKETIME_TIMESTAMP_FILE"
#: Seconds by which a clock is stepped at most.
MOST: Final = 300
_PROBE: Final = f"""
import os, threading, time
real = time.clock_gettime(time.CLOCK_MONOTONIC)
before = time.time()
with open(os.environ[{FILE!r}], "w") as file:
    file.write("+100")
threading.Event().wait(2.5)
assert 102 < time.time() - before < 110
assert 2 < time.monotonic() - real < 10
"""


def environ(directory: Path) -> dict[str, str]:
    """Return the environment of a program whose forks have clocks that can be stepped.

    Processes that are started later find a file in this process's environment. It is empty if the
    library cannot be installed, or does not work here.
    """
    library = _find()
    if library is None and os.geteuid() == 0:
        with contextlib.suppress(ScriptError):
            apt_install.install(["faketime"], why="This machine has no libfaketime")
        library = _find()
    if library is None:
        return {}
    file = directory / "clock"
    step(file, 0)
    faked = {
        "LD_PRELOAD": str(library), "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_CACHE_DURATION": "1", FILE: str(file),
    }  # fmt: skip
    probe = [sys.executable, "-c", _PROBE]
    try:
        subprocess.run(probe, env={**os.environ, **faked}, check=True, timeout=60)
    except (subprocess.SubprocessError, OSError) as exc:
        print(f"libfaketime does not work here: {exc}", file=sys.stderr)
        return {}
    step(file, 0)
    os.environ[FILE] = str(file)
    return faked


def step(file: Path, seconds: float) -> None:
    """Set the clock of the processes with this file, relative to the real one."""
    new = file.with_suffix(".new")
    new.write_text(f"{seconds:+.0f}\n")
    new.replace(file)


def _find() -> Path | None:
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    return found[0] if found else None
