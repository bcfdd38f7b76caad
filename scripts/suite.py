#!/usr/bin/env python3
"""Run the test suite against the installed wheel.

    .venv/bin/python scripts/suite.py [--changed] [arguments of pytest]

`--changed` runs the tests of the packages that differ from the main branch. `-n 0` runs all tests
in one process, for instance with `-s`.

pytest runs in .run/suite, a copy of the project without django_amqp_events/. An import there finds
the wheel; in the source folder, a template or migration missing from the wheel would go unnoticed.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import chromium
from broker import find_server
from machine import exit_with

PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
ROOT = Path(__file__).resolve().parent.parent
STAGE = ROOT / ".run" / "suite"
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".*_cache", ".hypothesis", ".run", ".venv", "__pycache__", "build", "dist",
    "django_amqp_events",
)  # fmt: skip
#: Where brokers and databases, which write each message and row through to the disk, need no disk.
MEMORY = Path("/dev/shm")  # noqa: S108 (what is made there has a random name)
ROOM = 4 << 30  # bytes
#: Each process runs one module or class at a time, in the order of tests/conftest.py: the longest
#: first. pytest-xdist itself uses a single process for --pdb and --collect-only.
PARALLEL = ("--numprocesses", "auto", "--dist", "loadscope", "--no-loadscope-reorder")


def main() -> int:
    arguments = sys.argv[1:]
    if "--changed" in arguments:
        arguments = [each for each in arguments if each != "--changed"] + changed()
    # Install here what is missing, where a question can be asked and progress is visible.
    if not os.environ.get("AMQP_URL"):
        find_server()
    paths = [each for each in arguments if each.startswith("tests")]
    browsers = not paths or any("browser" in each or each.strip("/") == "tests" for each in paths)
    if browsers and "--quick" not in arguments:
        chromium.find()
    shutil.rmtree(STAGE, ignore_errors=True)
    shutil.copytree(ROOT, STAGE, symlinks=True, ignore=LEFT_OUT)
    command = [sys.executable, "-m", "pytest", *PARALLEL, *arguments]
    env = os.environ | {
        "AMQP_EVENTS_SUITE_ON_WHEEL": "1",
        # More processes than cores: most of the time, a test waits for another process. Each takes
        # up to 1 GB, and has databases and a broker of its own.
        "PYTEST_XDIST_AUTO_NUM_WORKERS": str(2 * (os.cpu_count() or 1)),
        # The copy is made anew each time; rewriting its assertions takes seconds for each process.
        "PYTHONPYCACHEPREFIX": str(ROOT / ".run" / "pycache"),
        "PATH": str(Path(sys.executable).parent) + os.pathsep + os.environ.get("PATH", os.defpath),
    }
    # Nothing of the caller's comes before the wheel, and what is compiled is kept.
    for name in ("PYTHONPATH", "DJANGO_SETTINGS_MODULE", "PYTHONDONTWRITEBYTECODE"):
        env.pop(name, None)
    if "TMPDIR" not in env and is_roomy(MEMORY):
        env["TMPDIR"] = str(MEMORY)
    sys.stdout.flush()
    return counted(command, env)


def is_roomy(directory: Path) -> bool:
    """Return True if brokers and databases have room in a file system, and programs may run."""
    try:
        about = os.statvfs(directory)
    except OSError:
        return False
    room = about.f_bavail * about.f_frsize
    return room > ROOM and not about.f_flag & os.ST_NOEXEC and os.access(directory, os.W_OK)


def counted(command: list[str], env: dict[str, str]) -> int:
    """Run pytest and print the processor time of all processes that it has started."""
    # What loses its parent, a broker for instance, becomes a child of this process.
    with suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    began = time.monotonic()
    pytest = subprocess.Popen(command, cwd=STAGE, env=env)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: pytest.send_signal(number))
    ended = None
    while ended is None:
        pid, status = os.wait()
        if pid == pytest.pid:
            ended = pytest.returncode = os.waitstatus_to_exitcode(status)
    with suppress(ChildProcessError):  # none is left
        until = time.monotonic() + 5
        while time.monotonic() < until:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.1)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    minutes = (used.ru_utime + used.ru_stime) / 60
    print(f"{minutes:.1f} min of processor time in {(time.monotonic() - began) / 60:.1f} min")
    return ended


def changed() -> list[str]:
    """Return the test folders and modules of what has changed since the main branch."""
    base = _git("merge-base", "HEAD", "origin/main") or _git("rev-parse", "HEAD~1")
    files = _git("diff", "--name-only", *base)
    files += _git("ls-files", "--others", "--exclude-standard")
    paths: set[str] = set()
    for file in map(Path, files):
        if file.parts[0] == "tests":
            is_test = file.name.startswith("test_") and (ROOT / file).exists()
            paths.add(str(file if is_test else file.parent))
        elif file.parts[0] == "django_amqp_events":
            package = file.parts[1].removesuffix(".py")
            paths.update(
                f"tests/{kind}/{package}" for kind in ("unit", "integration", "acceptance")
            )
            paths.add(f"tests/unit/test_{package}.py")
        elif file.suffix == ".md":
            paths.add("tests/unit/test_docs.py")
    found = sorted(path for path in paths if (ROOT / path).exists())
    if not found:
        sys.exit("No test belongs to what has changed.")
    print(f"testing {' '.join(found)}", flush=True)
    return found


def _git(*arguments: str) -> list[str]:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=False)
    return done.stdout.split()


if __name__ == "__main__":
    exit_with(main)
