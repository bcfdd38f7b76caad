#!/usr/bin/env python3
"""Build the package, and install the wheel into this Python's environment where it has changed.

    .venv/bin/python scripts/wheel.py             # install, if anything changed
    .venv/bin/python scripts/wheel.py --build     # sdist and wheel into dist/

The wheel is built from the sdist, so that a file which the sdist lacks is missed at once.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import uv_build

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "django_amqp_events"
SKIPPED = {"__pycache__"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--build", action="store_true", help="leave sdist and wheel in dist/")
    options = parser.parse_args()
    if options.build:
        target = ROOT / "dist"
        shutil.rmtree(target, ignore_errors=True)
        for path in build(target):
            print(path.relative_to(ROOT))
        return 0
    install()
    return 0


def build(target: Path) -> tuple[Path, Path]:
    """Build sdist and wheel into the directory; their paths."""
    target.mkdir(parents=True, exist_ok=True)
    # The backend looks for its program on the PATH.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    with _working_in(ROOT):
        sdist = target / uv_build.build_sdist(str(target))
    with tempfile.TemporaryDirectory() as unpacked:
        with tarfile.open(sdist) as archive:
            if hasattr(tarfile, "data_filter"):  # not in Debian 12's Python
                archive.extraction_filter = tarfile.data_filter
            archive.extractall(unpacked)  # noqa: S202 (we made it a moment ago)
        [source] = Path(unpacked).iterdir()
        with _working_in(source):
            wheel = target / uv_build.build_wheel(str(target))
    return sdist, wheel


def install() -> None:
    """Install the wheel, unless the one that is installed was built from the same files."""
    stamp = Path(sys.prefix) / "wheel-stamp"
    wanted = fingerprint()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    with tempfile.TemporaryDirectory() as target:
        _, wheel = build(Path(target))
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--force-reinstall"]
            + ["--disable-pip-version-check", str(wheel)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{done.stdout}\nThe wheel could not be installed.")
    stamp.write_text(wanted)


def fingerprint() -> str:
    """Of everything that goes into the wheel."""
    digest = hashlib.sha256()
    files = [
        path for path in PACKAGE.rglob("*") if path.is_file() and not SKIPPED & set(path.parts)
    ]
    files += [ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")]
    for path in sorted(files):
        digest.update(str(path.relative_to(ROOT)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def _working_in(directory: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


if __name__ == "__main__":
    sys.exit(main())
