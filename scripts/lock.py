#!/usr/bin/env python3
"""Compile requirements/dev.txt and bench.txt from pyproject.toml, with hashes, for all supported
Pythons.

    .venv/bin/python scripts/lock.py [dev.txt] [bench.txt] [--upgrade]

uv asks pip's main index, as configured on this machine; no address reaches the lock. Not the
additional ones: uv takes the hashes of a version from one place, and a folder that holds the
wheel of one Python would leave the others without.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = """\
# Made by `make lock` from pyproject.toml: {what}, Python 3.11 to 3.14.
# Installed with: pip install --require-hashes --no-deps -r requirements/{name}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """A file in requirements/, and what it is compiled of."""

    name: str
    what: str
    sources: tuple[str, ...]

    @property
    def path(self) -> Path:
        return ROOT / "requirements" / self.name


LOCKS = (
    Lock(
        name="dev.txt",
        what="all that a developer needs, and all extras",
        sources=("--all-extras", "--group", "pyproject.toml:dev", "pyproject.toml"),
    ),
    # In an environment of their own: what the project is measured beside is no part of it.
    Lock(
        name="bench.txt",
        what="the peers of benchmarks/",
        sources=("--group", "pyproject.toml:peers"),
    ),
)


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        venv.create(directory, with_pip=True)
        python = Path(directory) / "bin" / "python"
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "uv"], check=True)
        chosen = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
        for lock in LOCKS:
            if not chosen or lock.name in chosen:
                compile_lock(lock, python)
    return 0


def compile_lock(lock: Lock, python: Path) -> None:
    """Write one file, with the uv beside *python*."""
    lock.path.parent.mkdir(exist_ok=True)
    subprocess.run(
        [str(python.parent / "uv"), "pip", "compile", "--quiet", "--universal"]
        + ["--python-version", "3.11", "--generate-hashes", "--no-header", "--no-annotate"]
        + [*lock.sources, "--output-file", str(lock.path)]
        + [argument for argument in sys.argv[1:] if argument == "--upgrade"],
        cwd=ROOT,
        env=os.environ | pip_configuration(python),
        stdout=subprocess.DEVNULL,
        check=True,
    )
    text = lock.path.read_text()
    if found := re.search(
        r"^.*(?:://|--(?:index|extra-index|find-links)|/opt/|file:).*$", text, re.MULTILINE
    ):
        lock.path.unlink()
        sys.exit(f"The lock would name an address: {found[0]}")
    lock.path.write_text(HEADER.format(what=lock.what, name=lock.name) + text)


def pip_configuration(python: Path) -> dict[str, str]:
    """pip's index in uv's words; the machine's choice, read when this runs."""
    listed = subprocess.run(
        [python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    settings: dict[str, list[str]] = {}
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        settings[key.rpartition(".")[2]] = shlex.split(value)[0].split()
    names = {"index-url": "UV_DEFAULT_INDEX", "cert": "SSL_CERT_FILE"}
    return {names[option]: value[0] for option, value in settings.items() if option in names}


if __name__ == "__main__":
    sys.exit(main())
