#!/usr/bin/env python3
"""Run the test suite against the installed wheel.

    .venv/bin/python scripts/suite.py [arguments of pytest]

pytest runs in .run/suite, a copy of the project without django_amqp_events/: what is imported
there is the wheel, whose missing templates or migrations a run in the source folder would hide.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from broker import BrokerError, find_server
from chromium import ChromiumError
from chromium import find as find_chromium

ROOT = Path(__file__).resolve().parent.parent
STAGE = ROOT / ".run" / "suite"
LEFT_OUT = {
    ".git",
    ".hypothesis",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".import_linter_cache",
    ".run",
    ".venv",
    "__pycache__",
    "build",
    "dist",
    "django_amqp_events",
}


def main() -> int:
    if not os.environ.get("AMQP_URL"):
        try:
            find_server()  # here, where a question may be asked and an installation be seen
        except BrokerError as exc:
            sys.exit(f"{exc}")
    if wants_browser(sys.argv[1:]):
        try:
            find_chromium()
        except ChromiumError as exc:
            sys.exit(f"{exc}")
    stage()
    # -B: the copy is made anew each time.
    command = [sys.executable, "-B", "-m", "pytest", *parallelism(sys.argv[1:]), *sys.argv[1:]]
    env = os.environ | {
        "AMQP_EVENTS_SUITE_ON_WHEEL": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PATH": str(Path(sys.executable).parent) + os.pathsep + os.environ.get("PATH", os.defpath),
    }
    env.pop("PYTHONPATH", None)  # nothing of the caller's comes before the wheel
    env.pop("DJANGO_SETTINGS_MODULE", None)
    os.chdir(STAGE)
    sys.stdout.flush()
    os.execve(sys.executable, command, env)  # noqa: S606 (it replaces this process)


def wants_browser(arguments: list[str]) -> bool:
    """Say whether tests/browser may be among what the arguments name."""
    paths = [each for each in arguments if each.startswith("tests")]
    return not paths or any("browser" in each or each.strip("/") == "tests" for each in paths)


def stage() -> None:
    """Copy the project, without the package, into an empty folder."""
    shutil.rmtree(STAGE, ignore_errors=True)
    STAGE.mkdir(parents=True)
    for path in ROOT.iterdir():
        if path.name in LEFT_OUT:
            continue
        if path.is_dir():
            shutil.copytree(
                path,
                STAGE / path.name,
                symlinks=True,
                ignore=lambda _, names: LEFT_OUT & set(names),
            )
        else:
            shutil.copy2(path, STAGE / path.name)


def parallelism(arguments: list[str]) -> list[str]:
    """Two processes, a module or class each at a time; one where arguments ask for something else.

    Modules are taken in tests/conftest.py's order: those that take long come first.
    """
    chosen = ("-n", "--numprocesses", "-p", "--pdb", "-s", "--capture", "--collect-only", "--co")
    if any(argument.startswith(chosen) for argument in arguments) or (os.cpu_count() or 1) < 2:
        return []
    return ["--numprocesses", "2", "--dist", "loadscope", "--no-loadscope-reorder"]


if __name__ == "__main__":
    sys.exit(main())
