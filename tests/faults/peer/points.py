"""The ledger and the points of the test project, for a service without our package.

See testproject's ``ledger`` and ``points``: the same lines, in the same files, and a process that
kills itself under the same conditions.
"""

from __future__ import annotations

import json
import os
import signal
import time
import zlib
from pathlib import Path
from typing import Any

POINTS: dict[str, dict[str, Any]] = json.loads(os.environ.get("TESTPROJECT_POINTS", "{}"))
WHERE = Path(os.environ["TESTPROJECT_DIR"])


def write(what: str, **more: Any) -> None:
    """Add a line to the file of this process, and wait until the disk has it."""
    line = {"at": time.time(), "pid": os.getpid(), "what": what, **more}
    path = WHERE / f"ledger.{os.getpid()}.jsonl"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(file, (json.dumps(line, default=str) + "\n").encode())
    os.fsync(file)
    os.close(file)


def point(name: str, event_id: str) -> None:
    """Kill this process, or its group, if it is this event's turn."""
    if (plan := POINTS.get(name)) is None:
        return
    if zlib.crc32(f"{plan.get('seed', 0)}{event_id}".encode()) % plan.get("every", 1):
        return
    if not _mine(f"point-{name}-{event_id}"):
        return
    if not any(_mine(f"point-{name}.{number}") for number in range(plan["times"])):
        return
    write("killed", point=name, by=event_id, signal=int(signal.SIGKILL), hand=0)
    if plan.get("whom") == "worker":
        os.killpg(os.getpgid(0), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _mine(name: str) -> bool:
    try:
        os.close(os.open(WHERE / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
