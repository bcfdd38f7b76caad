#!/usr/bin/env python3
"""Make .venv from the lock file. Quick when nothing has changed.

    python3 scripts/bootstrap.py [--venv DIR] [--constraint FILE]

Needs nothing but Python; where the system's Python has no `venv` module, apt installs it.
"""

# Old Pythons must be able to read this file, to be told what they lack.
from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "dev.txt"
NEWEST, OLDEST = 14, 11


def main() -> int:
    parser = argparse.ArgumentParser(description="Make a virtual environment from the lock file.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--constraint", type=Path, action="append", default=[])
    options = parser.parse_args()

    if sys.version_info < (3, OLDEST):
        _run_by_a_newer_python()

    python = options.venv / "bin" / "python"
    stamp = options.venv / "stamp"
    wanted = _fingerprint([LOCK, *options.constraint])
    known = stamp.read_text() if python.exists() and stamp.exists() else ""
    if known == wanted:
        return 0

    began = f"making {_shown(options.venv)} from {_shown(LOCK)} ..."
    print(began, file=sys.stderr, flush=True)
    if known.partition("\n")[0] != wanted.partition("\n")[0]:  # another Python
        _make_venv(options.venv)
    stamp.unlink(missing_ok=True)
    constraints = [arg for file in options.constraint for arg in ("--constraint", str(file))]
    _quietly(
        [str(python), "-m", "pip", "install", "--require-hashes", "--only-binary", ":all:"]
        + ["--no-deps", "--disable-pip-version-check", "--requirement", str(LOCK), *constraints]
    )
    stamp.write_text(wanted)
    return 0


def _fingerprint(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return f"{sys.version.splitlines()[0]} {sys.base_prefix}\n{digest.hexdigest()}\n"


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _run_by_a_newer_python() -> None:
    for minor in range(NEWEST, OLDEST - 1, -1):
        found = shutil.which(f"python3.{minor}")
        if found:
            os.execv(found, [found, *sys.argv])  # noqa: S606 (it replaces this process)
    sys.exit(
        f"Python 3.{OLDEST} or newer is needed; {sys.executable} is {sys.version.split()[0]}. "
        f"Remedy: install one, or name it: make PYTHON=/path/to/python3.{OLDEST} ..."
    )


def _make_venv(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
    command = [sys.executable, "-m", "venv", str(directory)]
    try:
        import ensurepip  # noqa: F401  (Debian keeps it in a package of its own)
        import venv  # noqa: F401
    except ImportError:
        import apt_install

        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        try:
            apt_install.install(
                [f"python{version}-venv"], why=f"Python {version} has no venv module here"
            )
        except apt_install.AptError as exc:
            sys.exit(f"Python's venv module is missing, and {exc}")
    _quietly(command)


def _quietly(command: list[str]) -> None:
    """Run a command; its output is worth reading only where it fails."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\n`{' '.join(command)}` failed ({done.returncode}).")


if __name__ == "__main__":
    sys.exit(main())
