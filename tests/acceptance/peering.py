"""celery-amqp-events 0.1.0 in its own virtual environment with pinned versions."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# `make test` runs in a new copy below .run/ each time.
RUN = ROOT.parent if ROOT.parent.name == ".run" else ROOT / ".run"
PINS = (
    "amqp==5.4.2",
    "billiard==4.3.2",
    "celery==5.7.0",
    "celery-amqp-events==0.1.0",
    "click==8.5.1",
    "click-didyoumean==0.3.1",
    "click-plugins==1.1.1.2",
    "click-repl==0.4.1",
    "kombu==5.7.0",
    "packaging>=24",
    "prompt_toolkit==3.0.53",
    "python-dateutil==2.9.0.post0",
    "six==1.17.0",
    "typing_extensions==4.16.0",
    "tzdata>=2025.2",
    "tzlocal==5.4.5",
    "vine==5.1.0",
    "wcwidth==0.9.4",
)


def interpreter() -> Path:
    """Return the peer's interpreter; install it if need be.

    Raises:
        AssertionError: PyPI does not answer, or does not have it.
    """
    where = RUN / f"peer-{sys.version_info.major}.{sys.version_info.minor}"
    stamp = where / "installed"
    where.mkdir(parents=True, exist_ok=True)
    with (where / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != "\n".join(PINS):
            venv.create(where, clear=False, with_pip=True)
            done = subprocess.run(
                [where / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps",
                 "--disable-pip-version-check", *PINS],
                capture_output=True, text=True, check=False, timeout=100,
            )  # fmt: skip
            assert not done.returncode, (
                f"celery-amqp-events cannot be installed from PyPI:\n{done.stderr}"
            )
            stamp.write_text("\n".join(PINS))
    return where / "bin" / "python"


def version(name: str) -> str:
    """Return the version that the peer has of a package."""
    return dict(pin.split("==") for pin in PINS if "==" in pin)[name]
