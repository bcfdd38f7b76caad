"""An append-only file in which the contract's handlers write that they ran."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from django_amqp_events import current_event

PATH = "CONTRACT_LEDGER"

#: The clock of the process that runs the handlers; the in-memory world sets its own.
now: Callable[[], datetime] = lambda: datetime.now(UTC)  # noqa: E731 - to be replaced


def write(handler: str, **more: Any) -> None:
    """Write a line: the handler, its event, the time and *more*."""
    event = current_event()
    assert event is not None, "not in a handler"
    line = {
        "handler": handler,
        "event": event.id,
        "name": event.name,
        "attempt": event.attempt,
        "replay_id": event.replay_id,
        "at": now().isoformat(),
        "due_at": event.due_at.isoformat() if event.due_at else None,
        "pid": os.getpid(),
        **more,
    }
    # One write to a file opened for appending: lines of several processes do not mix.
    with Path(os.environ[PATH]).open("ab", buffering=0) as file:
        file.write(json.dumps(line, default=str).encode() + b"\n")


def lines(handler: str, event_id: str | None = None) -> list[dict[str, Any]]:
    """Return a handler's lines, oldest first."""
    path = Path(os.environ[PATH])
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [
        line
        for line in found
        if line["handler"] == handler and (event_id is None or line["event"] == event_id)
    ]
