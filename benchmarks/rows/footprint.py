"""Processes, memory and stop of an idle worker.

One handler, and a pool of one process. `events_worker` with all that runs beside the worker, after
500 events, compared with a plain `celery worker` of the same project, which has no mirror, relay,
batch runner and reaper. Shared pages are divided among the processes that share them; the stop is
the time from SIGTERM until every process has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..ground import Ground
from ..measured import OURS, Measured, Size, Table, Target, in_turn
from ..processes import Child, children, resident, until
from . import Tell

SAME = "celery worker of the same project"
EVENTS = 500
#: Seconds after the last event, so that everything that is started has started.
SETTLE = 8.0


def run(ground: Ground, size: Size, tell: Tell) -> list[Measured]:
    count: dict[str, list[float]] = {OURS: [], SAME: []}
    stop: dict[str, list[float]] = {OURS: [], SAME: []}
    database = ground.database("sqlite3")
    vhost = ground.vhost("footprint")
    program = ground.program("publish_events", vhost, database=database)
    (queue,) = program.ask("declare")["queues"]

    def measuring(who: str) -> Callable[[], float]:
        def measured() -> float:
            tally = ground.tally()
            given: dict[str, Any] = {"tally": str(tally.path), "database": database}
            if who == OURS:
                worker = ground.command(
                    "events_worker", "-c", "1", "-l", "WARNING", vhost=vhost, **given
                )
            else:
                worker = ground.worker("service_events", vhost, number=1, **given)
            program.ask("one_by_one", number=EVENTS)
            until(lambda: tally.count >= EVENTS, 60, "the events are handled", alive=worker)
            time.sleep(SETTLE)
            pids = tree(worker.pid)
            count[who].append(len(pids))
            memory = sum(map(resident, pids))
            stop[who].append(stopped(worker, pids))
            vhost.expect(0, queue)
            return memory

        return measured

    memory = in_turn({who: measuring(who) for who in count}, size.turns(3, 1), tell)
    counted = "one call per event"
    return [
        Table(what="Memory of an idle worker with all services", unit="MB", better="less",
              values=memory, targets=Target.pair(SAME, reach=2.0, stretch=1.5), counted=counted),
        Table(what="The number of its processes", unit="processes", better="less", values=count,
              targets=(Target(level="reach", factor=3, against=""),), counted=counted),
        Table(what="The time until it has stopped", unit="s", better="less", values=stop,
              targets=Target.pair("", reach=2.0, stretch=1.0), counted=counted),
    ]  # fmt: skip


def tree(pid: int) -> list[int]:
    """Return a process and all below it."""
    return [pid, *(each for child in children(pid) for each in tree(child))]


def stopped(worker: Child, pids: list[int]) -> float:
    """Stop a worker; return the seconds until its processes have ended."""
    began = time.perf_counter()
    worker.stop()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 30,
          "all processes have ended", interval=0.005)  # fmt: skip
    return time.perf_counter() - began
