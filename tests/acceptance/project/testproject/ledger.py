"""The ledger of attempts: one append-only file per process, synced before the handler continues.

TESTPROJECT_UNSYNCED leaves out the syncing, for tests of how fast handlers are. TESTPROJECT_EPOCH
is the time at which the monotonic clock was 0, where the wall clock is not to be trusted.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from django_amqp_events import current_event


def where() -> Path:
    """The directory of the service's processes."""
    return Path(os.environ["TESTPROJECT_DIR"])


_lock = threading.Lock()
_files: dict[int, int] = {}


def write(what: str, **more: Any) -> None:
    """Add a line: time, process, step and current event."""
    event = current_event()
    line: dict[str, Any] = {
        "at": _now(),
        "pid": os.getpid(),
        "service": os.environ["TESTPROJECT_SERVICE"],
        "what": what,
    }
    if event is not None:
        line |= {"event": event.id, "name": event.name, "attempt": event.attempt}
        line["replay"] = event.replay_id
    text = json.dumps({**line, **more}, default=str) + "\n"
    with _lock:
        pid = os.getpid()
        if pid not in _files:
            path = f"{os.environ['TESTPROJECT_DIR']}/ledger.{pid}.jsonl"
            _files[pid] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(_files[pid], text.encode())
        if not os.environ.get("TESTPROJECT_UNSYNCED"):
            os.fsync(_files[pid])


def _now() -> float:
    epoch = os.environ.get("TESTPROJECT_EPOCH")
    return time.monotonic() + float(epoch) if epoch else time.time()


def _after_fork() -> None:
    global _lock  # noqa: PLW0603 - the parent may have held it
    _lock = threading.Lock()
    for descriptor in _files.values():
        os.close(descriptor)
    _files.clear()


os.register_at_fork(after_in_child=_after_fork)
