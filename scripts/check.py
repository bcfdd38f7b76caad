#!/usr/bin/env python3
"""All gates but the tests, two at a time; the output of those that fail.

.venv/bin/python scripts/check.py [names]
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
BIN = Path(PYTHON).parent


def manage(settings: str, *arguments: str) -> list[str]:
    return [PYTHON, "-W", "error", "manage.py", *arguments, "--settings", settings]


DEPLOY = ("check", "--deploy", "--fail-level", "WARNING")
GATES: dict[str, list[str]] = {  # the slowest first
    "mypy": [PYTHON, "-m", "mypy"],
    "ruff": [PYTHON, "-m", "ruff", "check", "."],
    "format": [PYTHON, "-m", "ruff", "format", "--check", "."],
    "layers": [str(BIN / "lint-imports"), "--no-logo"],
    "migrations": manage("example_project.shop", "makemigrations", "--check", "--dry-run"),
    "deploy-shop": manage("example_project.shop", *DEPLOY),
    "deploy-billing": manage("example_project.billing", *DEPLOY),
}


def main() -> int:
    chosen = sys.argv[1:] or list(GATES)
    if unknown := set(chosen) - set(GATES):
        sys.exit(f"No such gate: {', '.join(sorted(unknown))}. There are: {', '.join(GATES)}.")
    with ThreadPoolExecutor(max_workers=2) as pool:
        results = list(pool.map(run, chosen))
    return 0 if all(results) else 1


def run(name: str) -> bool:
    began = time.monotonic()
    done = subprocess.run(
        GATES[name],
        cwd=ROOT,
        # The gates judge the settings' own defaults, not what this shell happens to hold.
        env={
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("AMQP_", "DJANGO_"))
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    passed = done.returncode == 0
    verdict = "ok" if passed else f"FAILED ({done.returncode})"
    line = f"{name:<16} {verdict}  {time.monotonic() - began:.1f} s"
    print(line if passed else f"{line}\n{done.stdout.rstrip()}\n", flush=True)
    return passed


if __name__ == "__main__":
    sys.exit(main())
