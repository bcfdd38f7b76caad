"""Start-up of a worker with 200 handlers.

From the start of the process until one event has been handled from each of the 200 queues; the
events and queues are there already, and the pool has two processes. Plain Celery has 200 tasks with
a queue each, in a Django project like that of this project's worker, and without Django.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..ground import Ground, counted
from ..measured import OURS, PLAIN, Measured, Size, Table, Target, in_turn
from ..processes import until
from . import Tell
from .handling import PROJECT, SERVICES

BARE = f"{PLAIN}, without Django"


def run(ground: Ground, size: Size, tell: Tell) -> list[Measured]:
    handlers = size.number(200, 40)
    runs = {
        OURS: starting(ground, OURS, handlers),
        PLAIN: starting(ground, PLAIN, handlers, **PROJECT),
        BARE: starting(ground, PLAIN, handlers),
    }
    return [
        Table(
            what=f"Worker start-up with {handlers} handlers",
            unit="s",
            better="less",
            values=in_turn(runs, size.turns(3, 1), tell),
            targets=Target.pair(PLAIN, reach=1.0, stretch=0.8),
            counted="one call per queue; all queues are empty",
        )
    ]


def starting(ground: Ground, who: str, handlers: int, **given: Any) -> Callable[[], float]:
    """Return a function that starts a worker and waits until it has consumed all queues."""
    service, publisher = SERVICES[who]
    vhost = ground.vhost(service)
    words = {"handlers": handlers, **given}
    program = ground.program(publisher, vhost, **words)
    queues = program.ask("declare")["queues"]

    def run() -> float:
        program.ask("each")
        vhost.expect(handlers, *queues)
        tally = ground.tally()
        began = time.perf_counter()
        worker = ground.worker(service, vhost, tally=str(tally.path), **words)
        until(lambda: tally.count >= handlers, 300, "each queue is consumed", interval=0.005,
              alive=worker)  # fmt: skip
        seconds = time.perf_counter() - began
        counted(tally, handlers, vhost, worker, *queues)
        return seconds

    return run
