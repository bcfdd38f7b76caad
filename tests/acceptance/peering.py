"""celery-amqp-events 0.1.0, in the virtual environment that `make bench` compares with too."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.environments import ROOT, environment


def interpreter() -> Path:
    """Return the peer's interpreter; install it if need be."""
    return environment("bench") / "bin" / "python"


def worker(app: str, *arguments: str) -> list[str | Path]:
    """Return the command of a worker."""
    quiet = ("--without-mingle", "--without-gossip", "--without-heartbeat")
    command: list[str | Path] = [interpreter(), "-m", "celery", "-A", app, "worker"]
    return [*command, "--loglevel", "INFO", *quiet, *arguments]


def environ(project: Path, **more: str) -> dict[str, str]:
    """Return the environment of processes that import from a folder."""
    strange = ("PYTHON", "DJANGO", "AMQP_")
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith(strange)},
        "PYTHONPATH": str(project),
        "PYTHONUNBUFFERED": "1",
        # Its archive is a lazy queue, which RabbitMQ 4.3 refuses.
        "AMQP_EVENTS_ARCHIVED_MESSAGE_TTL": "0",
        "AMQP_EVENTS_ARCHIVED_QUEUE_LENGTH": "0",
        **more,
    }


def version(name: str) -> str:
    """Return the version that the peer has of a package."""
    lock = (ROOT / "requirements" / "bench.txt").read_text()
    (found,) = re.findall(rf"^{name}==(\S+)", lock, re.MULTILINE)
    return str(found)
