#!/usr/bin/env python3
"""Run all gates except the tests, two at a time, and print the output of those that fail.

.venv/bin/python scripts/check.py [names]
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from machine import ScriptError, exit_with, run

ROOT = Path(__file__).resolve().parent.parent
MANAGE = (sys.executable, "-W", "error", "manage.py")
DEPLOY = (*MANAGE, "check", "--deploy", "--fail-level", "WARNING", "--settings")
MIGRATIONS = ("makemigrations", "--check", "--dry-run", "--settings", "example_project.shop")
GATES = {  # the slowest first
    "mypy": (sys.executable, "-m", "mypy"),
    "ruff": (sys.executable, "-m", "ruff", "check", "."),
    "format": (sys.executable, "-m", "ruff", "format", "--check", "."),
    "layers": (Path(sys.executable).parent / "lint-imports", "--no-logo"),
    "migrations": (*MANAGE, *MIGRATIONS),
    "deploy-shop": (*DEPLOY, "example_project.shop"),
    "deploy-billing": (*DEPLOY, "example_project.billing"),
}


def main() -> int:
    chosen = sys.argv[1:] or list(GATES)
    if unknown := set(chosen) - set(GATES):
        raise ScriptError(f"No such gate: {', '.join(sorted(unknown))}. Gates: {', '.join(GATES)}.")
    with ThreadPoolExecutor(max_workers=2) as pool:
        return 0 if all(list(pool.map(passes, chosen))) else 1


def passes(name: str) -> bool:
    began = time.monotonic()
    # The gates judge the settings' own defaults, whatever this shell has set.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("AMQP_", "DJANGO_"))}
    failure = ""
    try:
        run(*GATES[name], cwd=ROOT, env=env)
    except ScriptError as exc:
        failure = f"\n{exc}\n"
    verdict = "FAILED" if failure else "ok"
    print(f"{name:<16} {verdict}  {time.monotonic() - began:.1f} s{failure}", flush=True)
    return not failure


if __name__ == "__main__":
    exit_with(main)
