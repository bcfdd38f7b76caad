"""The file that tells a later command what runs: for `--keep`, `--serve`, `--fix` and `--stop`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from .processes import RUN, Service, Worker, stop
from .sandbox import Sandbox
from .screen import Screen

from broker import Node  # isort: skip - processes.py adds its path
from machine import Process  # isort: skip

STATE = RUN / "kept.json"


def write(
    sandbox: Sandbox,
    workers: Sequence[Worker],
    *,
    release: int,
    server: bool = False,
) -> None:
    """Write down what runs.

    Args:
        server: this process watches the others, and ends them on a signal.
    """
    state = {
        "server": Process.of(os.getpid()).identity if server else None,
        "release": release,
        "private": sandbox.node is not None,
        "sandbox": {key: getattr(sandbox, key) for key in ("url", "management_url", "vhost")},
        "workers": [[process.identity for process in each.processes] for each in workers],
    }
    partial = STATE.with_suffix(".new")
    partial.touch(mode=0o600)
    partial.write_text(json.dumps(state, indent=2))
    partial.replace(STATE)


def read() -> dict[str, Any]:
    """Return the state, or {} if none of its processes runs."""
    try:
        state: dict[str, Any] = json.loads(STATE.read_text())
    except (OSError, ValueError):
        return {}
    alive = any(Process(**each).alive for worker in state["workers"] for each in worker)
    return state if alive or server(state) or Node.attach(RUN / "broker") else {}


def server(state: dict[str, Any]) -> Process | None:
    """Return the process of `make serve`, if it runs."""
    process = Process(**state["server"]) if state.get("server") else None
    return process if process is not None and process.alive else None


def end(screen: Screen) -> int:
    """End everything that runs; return the exit code."""
    state = read()
    if not state:
        screen.write("nothing runs")
        return 0
    workers = []
    for processes in state["workers"]:
        main, *family = (Process(**process) for process in processes)
        workers.append(Worker(Service(name="", environment={}), "", main, family))
    node = Node.attach(RUN / "broker")
    ended = [process for worker in workers for process in worker.processes]
    ended += node.processes if node is not None else []
    screen.status("stopping …")
    stop(workers)
    if node is not None or not state["private"]:
        sandbox = Sandbox(**state["sandbox"], node=node)
        sandbox.clean_up()
    STATE.unlink(missing_ok=True)
    left = [process.pid for process in ended if process.alive]
    screen.write(f"still running: {left}" if left else f"{len(ended)} processes stopped")
    return 1 if left else 0
