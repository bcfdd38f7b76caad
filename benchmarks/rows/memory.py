"""A worker's memory while events wait for their retries.

Every event fails once and requests a retry in two hours; the pool has two processes. A figure is
the growth of the worker between 2,000 retries and all of them: its main process and its pool, with
shared pages divided among the processes that share them. This project's 100,000 events wait on the
broker. Celery's `countdown` keeps them in the worker, as it does on classic queues; it has 10,000
events and an unlimited prefetch count, since otherwise it takes hours.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..ground import Ground, Vhost
from ..measured import OURS, PLAIN, Measured, Size, Table, Target, in_turn
from ..processes import Child, children, resident, until
from . import Tell
from .handling import PROJECT, SERVICES

BRIEF = False
COUNTDOWN = 7200


def run(ground: Ground, size: Size, tell: Tell) -> list[Measured]:
    events = {OURS: size.number(100_000, 2000), PLAIN: size.number(10_000, 1000)}
    warm = size.number(2000, 500)
    main: dict[str, list[float]] = {OURS: [], PLAIN: []}

    def growing(who: str) -> Callable[[], float]:
        def run() -> float:
            of_main, of_all = grown(ground, who, warm, events[who])
            main[who].append(of_main)
            return of_all

        return run

    values = in_turn({who: growing(who) for who in events}, size.turns(1, 1), tell)
    words: dict[str, Any] = {
        "unit": "MB",
        "better": "less",
        "counted": "calls; all events wait, in the delay queue or in the worker",
        "notes": (
            f"{OURS}: {events[OURS]:,} events wait; {PLAIN}: {events[PLAIN]:,}.",
        ),
    }  # fmt: skip
    return [
        Table(
            what="Worker memory with 100,000 delayed events",
            values=values,
            targets=(
                Target(level="reach", factor=5, against=""),
                # Less than half a megabyte counts as none.
                Target(level="stretch", factor=0.5, against=""),
            ),
            **words,
        ),
        Table(what="The same, main process only", values=main, **words),
    ]


def grown(ground: Ground, who: str, warm: int, events: int) -> tuple[float, float]:
    """Return the growth of the main process, and of all processes, in megabytes."""
    service, publisher = SERVICES[who]
    vhost = ground.vhost(f"memory-{service}")
    tally = ground.tally()
    words: dict[str, Any] = {"work": "fail_once", "countdown": COUNTDOWN, "tally": str(tally.path)}
    if who == PLAIN:
        words |= {**PROJECT, "queue_type": "classic", "prefetch": 0}
    program = ground.program(publisher, vhost, **words)
    (queue,) = program.ask("declare")["queues"]
    program.ask("one_by_one", number=1)
    template = vhost.take(queue)
    program.kill()
    worker = ground.worker(service, vhost, **words)
    found = []
    for total, more in ((warm, warm), (warm + events, events)):
        vhost.fill([template], more)
        until(
            lambda total=total: tally.count >= total, events / 20 + 120,
            f"{total:,} events are tried", interval=0.1, alive=worker,
        )  # fmt: skip
        until(lambda total=total: waiting(vhost, queue) == total, 120, f"{total:,} events wait",
              interval=1.0, alive=worker)  # fmt: skip
        time.sleep(3)
        found.append(memory(worker))
    worker.kill()
    (main, pool), (main_after, pool_after) = found
    return main_after - main, main_after + pool_after - main - pool


def memory(worker: Child) -> tuple[float, float]:
    """Return the megabytes of a worker's main process, and of its pool."""
    return resident(worker.pid), sum(resident(child) for child in children(worker.pid))


def waiting(vhost: Vhost, queue: str) -> int:
    """Return the number of waiting retries, in delay queues or in the worker."""
    found = vhost.queues()
    delayed = [each for name, each in found.items() if ":delay." in name]
    if delayed:
        return sum(int(each.get("messages", 0)) for each in delayed)
    return int(found[queue].get("messages_unacknowledged", 0))
