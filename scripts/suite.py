#!/usr/bin/env python3
"""Run the test suite against the installed wheel.

    .venv/bin/python scripts/suite.py [--changed] [arguments of pytest]

`--changed` runs the tests of the packages that differ from the main branch.

pytest runs in .run/suite, a copy of the project without django_amqp_events/: what is imported
there is the wheel, whose missing templates or migrations a run in the source folder would hide.
"""

from __future__ import annotations

import os
import shutil
import subprocess
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
    arguments = sys.argv[1:]
    if "--changed" in arguments:
        arguments = [each for each in arguments if each != "--changed"] + changed()
    if not os.environ.get("AMQP_URL"):
        try:
            find_server()  # here, where a question may be asked and an installation be seen
        except BrokerError as exc:
            sys.exit(f"{exc}")
    if wants_browser(arguments):
        try:
            find_chromium()
        except ChromiumError as exc:
            sys.exit(f"{exc}")
    stage()
    # -B: the copy is made anew each time.
    command = [sys.executable, "-B", "-m", "pytest", *parallelism(arguments), *arguments]
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


def changed() -> list[str]:
    """Return the test folders and modules that the changes since the main branch touch."""
    base = _git("merge-base", "HEAD", "origin/main") or _git("rev-parse", "HEAD~1")
    files = _git("diff", "--name-only", *base)
    files += _git("ls-files", "--others", "--exclude-standard")
    paths: set[str] = set()
    for file in map(Path, files):
        if file.parts[0] == "tests" and file.name.startswith("test_") and (ROOT / file).exists():
            paths.add(str(file))
        elif file.parts[0] == "tests":
            paths.add(str(file.parent))
        elif file.parts[0] == "django_amqp_events":
            package = file.parts[1].removesuffix(".py")
            folders = [f"tests/{kind}/{package}" for kind in ("unit", "integration", "acceptance")]
            paths.update(folder for folder in folders if (ROOT / folder).is_dir())
            paths.add(f"tests/unit/test_{package}.py")
        elif file.suffix == ".md":
            paths.add("tests/unit/test_docs.py")
    found = sorted(path for path in paths if (ROOT / path).exists())
    if not found:
        sys.exit("No test belongs to what has changed.")
    print(f"testing {' '.join(found)}", flush=True)
    return found


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE, check=False
    )
    return done.stdout.split()


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
    """Return the options for several processes, unless the arguments ask for something else.

    Most tests wait for a broker or a worker, so there are twice as many processes as cores. Each
    takes a module or class at a time, in the order of tests/conftest.py: the longest first.
    """
    chosen = ("-n", "--numprocesses", "-p", "--pdb", "-s", "--capture", "--collect-only", "--co")
    if any(argument.startswith(chosen) for argument in arguments):
        return []
    return [
        "--numprocesses",
        str(2 * (os.cpu_count() or 1)),
        "--dist",
        "loadscope",
        "--no-loadscope-reorder",
    ]


if __name__ == "__main__":
    sys.exit(main())
