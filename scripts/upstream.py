#!/usr/bin/env python3
"""Run the core tests on the newest pre-releases of the libraries below the package.

    python3 scripts/upstream.py [arguments of pytest]

The environment is .run/upstream; the lock file gives all other packages.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from machine import exit_with, run

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".run" / "upstream"
PYTHON = VENV / "bin" / "python"
LIBRARIES = ("amqp", "asgiref", "billiard", "celery", "django", "django-celery-results", "kombu")
CORE = ("tests/unit/worker", "tests/unit/broker", "tests/contract", "tests/acceptance/worker")


def main() -> int:
    scripts = ROOT / "scripts"
    run(sys.executable, scripts / "bootstrap.py", "--venv", VENV)
    pip = (PYTHON, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "install", "--upgrade", "--pre", *LIBRARIES)
    frozen = run(*pip, "freeze").splitlines()
    print(*(line for line in frozen if line.lower().startswith(LIBRARIES)), sep="\n", flush=True)
    run(PYTHON, scripts / "wheel.py")
    suite = [str(PYTHON), str(scripts / "suite.py"), *(sys.argv[1:] or CORE)]
    return subprocess.run(suite, check=False).returncode


if __name__ == "__main__":
    exit_with(main)
