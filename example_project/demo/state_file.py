"""What is left running is written down, found again, and ended: `--keep`, `--serve`, `--stop`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from .accounting import ServiceTopology
from .processes import Service, Worker, stop
from .sandbox import RUN, Sandbox, shown
from .screen import Screen

from broker import Node  # isort: skip - processes.py has its path
from machine import Process, process_birth  # isort: skip

if TYPE_CHECKING:
    from .run import Demo

STATE = RUN / "kept.json"
#: What a server in the background writes.
OUTPUT = RUN / "serve.log"
#: What outlives the beginning of the next run.
STAYS = {"lock", OUTPUT.name}


def write(demo: Demo, *, server: bool = False) -> None:
    """Write down what runs, and what it has declared.

    Args:
        server: this process looks after it, and ends it when it is asked to.
    """
    place = demo.sandbox
    assert place is not None  # noqa: S101 - set up
    state = {
        "server": _written(Process(pid=os.getpid(), birth=process_birth(os.getpid()) or ""))
        if server
        else None,
        "release": demo.release,
        "private": place.node is not None,
        "url": place.url,
        "management_url": place.management_url,
        "vhost": place.vhost,
        "prefix": place.prefix,
        "workers": [
            [_written(process) for process in worker.processes]
            for worker in [*demo.webs, *demo.workers]
        ],
        "reports": demo.reports,
    }
    new = STATE.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_text(json.dumps(state, indent=2))
    new.replace(STATE)


def _written(process: Process) -> dict[str, Any]:
    return {"pid": process.pid, "birth": process.birth}


def read() -> dict[str, Any]:
    """Return what was written down; nothing where none of it runs any more."""
    try:
        state: dict[str, Any] = json.loads(STATE.read_text())
    except (OSError, ValueError):
        return {}
    processes = [process for worker in state["workers"] for process in worker]
    alive = any(process_birth(one["pid"]) == one["birth"] for one in processes)
    return state if alive or server(state) or Node.attach(RUN / "broker") else {}


def server(state: dict[str, Any]) -> Process | None:
    """Return the process that looks after all the others, where there is one."""
    process = Process(**state["server"]) if state.get("server") else None
    return process if process is not None and process.alive else None


def explain(screen: Screen, demo: Demo) -> None:
    """Say what runs where."""
    environment = RUN / "env"
    environment.touch(mode=0o600)
    pairs = demo.services[0].environment.items()
    environment.write_text("".join(f"export {key}='{value}'\n" for key, value in pairs))
    place = demo.sandbox
    assert place is not None  # noqa: S101 - set up
    screen.heading("Left running")
    for name, address in demo.addresses.items():
        screen.write(f"  {name:<11} {address}/admin/")
    screen.write(f"  log in      user {demo.user}, password {demo.password}")
    screen.write(f"  broker      {place.url}")
    if place.management_url:
        url = urlsplit(place.management_url)
        page = url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()
        screen.write(f"  management  {page}, user {url.username}, password {url.password}")
    screen.write(f"  look        . {shown(environment)}; .venv/bin/python manage.py events_status")


def end(screen: Screen) -> int:
    """End what runs; returns the exit code."""
    state = read()
    if not state:
        screen.write("nothing runs")
        return 0
    workers = []
    for processes in state["workers"]:
        main, *family = (Process(**process) for process in processes)
        none = Service(name="", environment={}, data=Path())
        workers.append(Worker(none, "", main, family))
    place = Sandbox(
        url=state["url"],
        management_url=state["management_url"],
        prefix=state["prefix"],
        vhost=state["vhost"],
        node=Node.attach(RUN / "broker"),
    )
    ended = [*place.processes(), *(process for w in workers for process in w.processes)]
    screen.status("stopping …")
    stop(workers)
    if place.node is not None or not state["private"]:
        place.clear_away([ServiceTopology.of(report) for report in state["reports"]])
    STATE.unlink(missing_ok=True)
    left = [process.pid for process in ended if process.alive]
    screen.write(f"still running: {left}" if left else f"{len(ended)} processes stopped")
    return 1 if left else 0
