"""Install npm packages exactly as a lock file names them, once for each .venv."""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import apt_install
from machine import run

FILES = (".npmrc", "package.json", "package-lock.json")


def install(folder: Path, why: str) -> Path:
    """Return the folder ``node_modules`` with the packages of a folder's ``package-lock.json``.

    The network is needed the first time only.

    Args:
        why: what the packages are needed for.

    Raises:
        ScriptError: npm is missing or failed.
    """
    lock = hashlib.sha256((folder / "package-lock.json").read_bytes()).hexdigest()
    packages = Path(sys.prefix) / "share" / "npm" / lock[:12] / "node_modules"
    if packages.exists():
        return packages
    if shutil.which("npm") is None:
        apt_install.install(["npm"], why=why)
    packages.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when it is complete, since two processes can install it at the same time.
    with tempfile.TemporaryDirectory(dir=packages.parent) as directory:
        for name in FILES:
            shutil.copy(folder / name, directory)
        options = ("--ignore-scripts", "--no-audit", "--no-fund")
        run("npm", "ci", *options, cwd=directory, timeout=300)
        with suppress(OSError):  # another process was faster
            Path(directory, "node_modules").rename(packages)
    return packages
