#!/usr/bin/env python3
"""Run the core tests on the newest pre-releases of the libraries below the package.

    python3 scripts/upstream.py [arguments of pytest]

The environment is made anew below .run/upstream; the lock file gives all other packages.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".run" / "upstream" / "bin" / "python"
LIBRARIES = ("amqp", "billiard", "celery", "django", "django-celery-results", "kombu")
CORE = ("tests/unit/worker", "tests/unit/broker", "tests/contract", "tests/acceptance/worker")


def main() -> int:
    run = [sys.executable, "scripts/bootstrap.py", "--venv", str(PYTHON.parent.parent)]
    subprocess.run(run, cwd=ROOT, check=True)
    install = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "--upgrade", "--pre", *LIBRARIES], cwd=ROOT, check=True)
    subprocess.run([*install[:2], "pip", "freeze"], cwd=ROOT, check=True)
    subprocess.run([str(PYTHON), "scripts/wheel.py"], cwd=ROOT, check=True)
    suite = [str(PYTHON), "scripts/suite.py", *(sys.argv[1:] or CORE)]
    return subprocess.run(suite, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
