#!/usr/bin/env python3
"""Build the package, and install the wheel into this Python's environment if it has changed.

    .venv/bin/python scripts/wheel.py             # install, if anything changed
    .venv/bin/python scripts/wheel.py --build     # sdist and wheel into dist/, or another folder

The wheel is built from the sdist, so that a file missing there is noticed at once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import uv_build

from machine import exit_with, run

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "django_amqp_events"
STAMP = Path(sys.prefix) / "wheel-stamp"
OFFLINE = ("--no-index", "--no-deps", "--disable-pip-version-check")


def main() -> int:
    if sys.argv[1:2] == ["--build"]:
        target = Path(sys.argv[2]).resolve() if sys.argv[2:] else ROOT / "dist"
        shutil.rmtree(target, ignore_errors=True)
        build(target)
        print(*sorted(target.iterdir()), sep="\n")
        return 0
    wanted = fingerprint()
    if not STAMP.exists() or STAMP.read_text() != wanted:
        with tempfile.TemporaryDirectory() as directory:
            wheel = build(Path(directory))
            run(sys.executable, "-m", "pip", "install", *OFFLINE, "--force-reinstall", wheel)
        STAMP.write_text(wanted)
    return 0


def build(target: Path) -> Path:
    """Build sdist and wheel into *target*; return the wheel."""
    # The backend looks for its program on the PATH.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    os.chdir(ROOT)
    target.mkdir(parents=True, exist_ok=True)
    sdist = target / uv_build.build_sdist(str(target))
    options = (*OFFLINE, "--no-build-isolation", "--wheel-dir", target)
    run(sys.executable, "-m", "pip", "wheel", *options, sdist)
    return next(target.glob("*.whl"))


def fingerprint() -> str:
    """Return a hash of everything that goes into the wheel."""
    digest = hashlib.sha256()
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    files += [ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")]
    for path in sorted(files):
        digest.update(str(path.relative_to(ROOT)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    exit_with(main)
