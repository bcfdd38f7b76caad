"""celery-amqp-events 0.1.0, in the virtual environment that `make bench` compares with too."""

from __future__ import annotations

import re
from pathlib import Path

from tests.environments import ROOT, environment


def interpreter() -> Path:
    """Return the peer's interpreter; install it if need be."""
    return environment("bench") / "bin" / "python"


def version(name: str) -> str:
    """Return the version that the peer has of a package."""
    lock = (ROOT / "requirements" / "bench.txt").read_text()
    (found,) = re.findall(rf"^{name}==(\S+)", lock, re.MULTILINE)
    return str(found)
