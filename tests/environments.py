"""Virtual environments from the lock files of tools that the suite's own has no room for."""

from __future__ import annotations

import fcntl
import sys
from functools import cache
from pathlib import Path

from machine import run

ROOT = Path(__file__).resolve().parents[1]


@cache
def environment(name: str) -> Path:
    """Return the environment of requirements/NAME.txt, installed once per .venv."""
    # Its scripts name this path; a link to it may be gone tomorrow.
    venv = Path(sys.prefix).resolve() / "share" / f"{name}-tools"
    venv.parent.mkdir(exist_ok=True)
    with venv.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test processes may need it
        requirements = ROOT / "requirements" / f"{name}.txt"
        bootstrap = ROOT / "scripts" / "bootstrap.py"
        run(sys.executable, bootstrap, "--venv", venv, "--lock", requirements)
    return venv
