"""A mixed backlog.

A worker with four processes starts on a backlog whose handlers take 1 ms (90 of 100 events), 50 ms
(9) and 5 s (1), in random order. The project has a handler and a queue for each; Celery's default
is one queue for all tasks, and *a queue each* has three. All have their default prefetch counts.
Measured are the events per second until the last one has ended, and how long the short ones wait
from the worker's first call to their own.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

from ..ground import Ground, counted
from ..measured import OURS, PLAIN, Curve, Measured, Size, Table, Target, in_turn, percentile
from ..processes import BenchmarkError, until
from . import Tell
from .handling import PROJECT, SERVICES

#: Seconds of a run, and how many of 100 events take so long.
SECONDS = (0.001, 0.05, 5.0)
SHARES = (90, 9, 1)
PROCESSES = 4
#: Of the waits that are drawn.
PERCENTILES = (10, 25, 50, 75, 90, 99, 100)
APART = f"{PLAIN}, a queue each"


def run(ground: Ground, size: Size, tell: Tell) -> list[Measured]:
    total = max(100, size.number(2000, 400) // 100 * 100)
    waits: dict[str, list[list[float]]] = {who: [] for who in (OURS, PLAIN, APART)}
    runs = {
        who: _draining(ground, OURS if who == OURS else PLAIN, total, waits[who], **words)
        for who, words in ((OURS, {}), (PLAIN, {"one_queue": True}), (APART, {}))
    }
    rates = in_turn(runs, size.turns(3, 1), tell)
    counts = "each event was handled once; the queues are empty after the worker has stopped"
    return [
        Table(
            what="A mixed backlog, prefork 4",
            unit="events/s",
            better="more",
            values=rates,
            targets=(Target(level="reach", factor=1.2, against=PLAIN),),
            counted=counts,
        ),
        Table(
            what="Wait of the 1 ms events in it, p99",
            unit="s",
            better="less",
            values={who: [percentile(each, 99) for each in found] for who, found in waits.items()},
            targets=(Target(level="reach", factor=0.5, against=PLAIN),),
            counted=counts,
        ),
        Curve(
            what="Wait of the 1 ms events in it",
            x="percentile",
            unit="s",
            better="less",
            values={
                who: {p: [percentile(each, p) for each in found] for p in PERCENTILES}
                for who, found in waits.items()
            },
            percentiles=True,
        ),
    ]


def _draining(
    ground: Ground, who: str, total: int, waits: list[list[float]], **given: Any
) -> Callable[[], float]:
    """Return a function that drains a backlog, and appends the waits of its short events."""
    service, publisher = SERVICES[who]
    words = {
        **(PROJECT if who == PLAIN else {}),
        "handlers": len(SECONDS), "work": "lasting", "seconds": SECONDS, **given,
    }  # fmt: skip
    vhost = ground.vhost(service)
    program = ground.program(publisher, vhost, **words)
    queues: list[str] = program.ask("declare")["queues"]
    program.ask("each")
    kinds = [vhost.take(queue) for queue in queues]
    program.kill()
    # The same order for all participants.
    order = random.Random(7).sample(range(3), total, counts=[total * n // 100 for n in SHARES])

    def run() -> float:
        vhost.fill((kinds[number] for number in order), total)
        tally, times = ground.tally(), ground.path("times")
        times.touch()
        worker = ground.worker(
            service, vhost, number=PROCESSES, tally=str(tally.path), times=str(times), **words
        )
        until(lambda: tally.count >= total, 600, "all are handled", alive=worker)
        counted(tally, total, vhost, worker, *dict.fromkeys(queues))
        found: list[tuple[int, float, float]] = list(struct.iter_unpack("@qdd", times.read_bytes()))
        if sorted(number for number, *_ in found) != sorted(order):
            raise BenchmarkError(f"{who}: {len(found):,} runs of {total:,} events")
        first = min(began for _, began, _ in found)
        waits.append([began - first for number, began, _ in found if number == 0])
        return total / (max(ended for *_, ended in found) - first)

    return run
