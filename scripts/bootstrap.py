#!/usr/bin/env python3
"""Create .venv from the lock file. Returns at once if nothing has changed.

    python3 scripts/bootstrap.py [--venv DIR] [--lock FILE]

Needs only Python; apt installs its `venv` module if it is missing.
"""

# Old Pythons must be able to read this file, to say what is missing.
from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEWEST, OLDEST = 14, 11


def run_by_a_newer_python() -> None:
    for minor in range(NEWEST, OLDEST - 1, -1):
        if found := shutil.which(f"python3.{minor}"):
            os.execv(found, [found, *sys.argv])  # noqa: S606 (it replaces this process)
    sys.exit(
        f"Python 3.{OLDEST} or newer is needed; {sys.executable} is {sys.version.split()[0]}. "
        f"Install one, or name it: make PYTHON=/path/to/python3.{OLDEST} ..."
    )


if sys.version_info < (3, OLDEST):
    run_by_a_newer_python()

import apt_install  # noqa: E402
from machine import exit_with, run  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description="Create a virtual environment from the lock file.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--lock", type=Path, default=ROOT / "requirements" / "dev.txt")
    options = parser.parse_args()
    venv, lock = options.venv, options.lock
    python, stamp = venv / "bin" / "python", venv / "stamp"
    interpreter = f"{sys.version.splitlines()[0]} {sys.base_prefix}"
    wanted = f"{interpreter}\n{hashlib.sha256(lock.read_bytes()).hexdigest()}\n"
    known = stamp.read_text() if python.exists() and stamp.exists() else ""
    if known == wanted:
        return 0
    print(f"creating {venv.name} from requirements/{lock.name} ...", file=sys.stderr, flush=True)
    if known.partition("\n")[0] != interpreter:
        create(venv)
    stamp.unlink(missing_ok=True)
    run(
        python, "-m", "pip", "install", "--require-hashes", "--only-binary", ":all:", "--no-deps",
        "--disable-pip-version-check", "--requirement", lock,
    )  # fmt: skip
    stamp.write_text(wanted)
    return 0


def create(venv: Path) -> None:
    shutil.rmtree(venv, ignore_errors=True)
    try:
        import ensurepip  # noqa: F401 (Debian keeps it in a package of its own)
        import venv as _  # noqa: F401
    except ImportError:
        python = f"python3.{sys.version_info.minor}"
        apt_install.install([f"{python}-venv"], why=f"{python} has no venv module")
    run(sys.executable, "-m", "venv", venv)


if __name__ == "__main__":
    exit_with(main)
