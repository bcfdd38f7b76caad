"""`--keep` and `--stop`: what was left running is written down, and found again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .evidence import Shape
from .place import RUN, Place, shown
from .processes import Service, Worker, stop
from .screen import Screen

from broker import Node, Process, process_birth  # isort: skip - processes.py has its path

STATE = RUN / "kept.json"


def write(place: Place, workers: list[Worker], reports: list[dict[str, Any]]) -> None:
    """Write down what runs, and what it has declared."""
    state = {
        "private": place.node is not None,
        "url": place.url,
        "management_url": place.management_url,
        "vhost": place.vhost,
        "prefix": place.prefix,
        "workers": [
            [{"pid": process.pid, "birth": process.birth} for process in worker.processes]
            for worker in workers
        ],
        "reports": reports,
    }
    STATE.touch(mode=0o600)
    STATE.write_text(json.dumps(state, indent=2))


def read() -> dict[str, Any]:
    """Return what was written down; nothing where none of it runs any more."""
    try:
        state: dict[str, Any] = json.loads(STATE.read_text())
    except (OSError, ValueError):
        return {}
    processes = [process for worker in state["workers"] for process in worker]
    alive = any(process_birth(one["pid"]) == one["birth"] for one in processes)
    return state if alive or Node.attach(RUN / "broker") else {}


def explain(screen: Screen, place: Place, service: Service) -> None:
    """Say what runs where, and how to end it."""
    environment = RUN / "env"
    environment.touch(mode=0o600)
    pairs = service.environment.items()
    environment.write_text("".join(f"export {key}='{value}'\n" for key, value in pairs))
    screen.heading("Left running")
    screen.write(f"  broker      {place.url}")
    if place.management_url:
        url = urlsplit(place.management_url)
        page = url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()
        screen.write(f"  management  {page}, user {url.username}, password {url.password}")
    screen.write(f"  look        . {shown(environment)}; .venv/bin/python manage.py events_status")
    screen.write("  stop        make demo ARGS=--stop")


def end(screen: Screen) -> int:
    """End what runs; returns the exit code."""
    state = read()
    if not state:
        screen.write("nothing runs")
        return 0
    workers = []
    for processes in state["workers"]:
        main, *family = (Process(**process) for process in processes)
        workers.append(Worker(Service(name="", environment={}, data=Path()), main, family))
    place = Place(
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
        place.clear_away([Shape.of(report) for report in state["reports"]])
    STATE.unlink(missing_ok=True)
    left = [process.pid for process in ended if process.alive]
    screen.write(f"still running: {left}" if left else f"{len(ended)} processes stopped")
    return 1 if left else 0
