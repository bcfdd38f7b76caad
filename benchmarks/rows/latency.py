"""Latency from publishing to the handler.

Another process publishes 50 events a second, one by one with confirms. The time from the start of
the call to the first line of the handler is measured: the median (p50) and the 99th percentile
(p99) of a turn. Both workers have two processes and run all the time.
"""

from __future__ import annotations

import struct
import time
from functools import partial
from pathlib import Path
from typing import Any

from ..ground import Ground
from ..measured import OURS, PLAIN, Measured, Size, Table, Target, in_turn, percentile
from ..processes import BenchmarkError, until
from . import Tell
from .handling import PROJECT, SERVICES


class Stage:
    """A publisher and a worker that run all the time."""

    def __init__(self, ground: Ground, who: str, **given: Any) -> None:
        service, publisher = SERVICES[who]
        self.vhost = ground.vhost(service)
        self.tally = ground.tally()
        self.times: Path = ground.path("times")
        self.times.touch()
        words: dict[str, Any] = {
            **(PROJECT if who == PLAIN else {}), "work": "since", "times": str(self.times),
            "tally": str(self.tally.path), **given,
        }  # fmt: skip
        self.program = ground.program(publisher, self.vhost, **words)
        (self.queue,) = self.program.ask("declare")["queues"]
        self.worker = ground.worker(service, self.vhost, **words)
        # Both processes of the pool run and are warm.
        self.measure(50, 50)

    def measure(self, number: int, rate: float) -> list[float]:
        """Publish at a pace; return the milliseconds of each event."""
        before, size = self.tally.count, self.times.stat().st_size
        self.program.ask("paced", number=number, rate=rate)
        until(lambda: self.tally.count >= before + number, 60, "all are handled", alive=self.worker)
        time.sleep(0.1)
        found = self.times.read_bytes()[size:]
        if self.tally.count != before + number or len(found) != 8 * number:
            raise BenchmarkError(f"{self.tally.count - before} calls for {number} events")
        self.vhost.expect(0, self.queue)
        return [1e3 * seconds for (seconds,) in struct.iter_unpack("@d", found)]


def run(ground: Ground, size: Size, tell: Tell) -> list[Measured]:
    stages = {who: Stage(ground, who) for who in (OURS, PLAIN)}
    number = size.number(500, 150)
    tails: dict[str, list[float]] = {who: [] for who in stages}

    def median(who: str) -> float:
        found = stages[who].measure(number, 50)
        tails[who].append(percentile(found, 99))
        return percentile(found, 50)

    middles = in_turn({who: partial(median, who) for who in stages}, size.turns(7, 1), tell)
    found: list[Measured] = []
    for name, values in (("p50", middles), ("p99", tails)):
        found.append(
            Table(
                what=f"Latency publish → handler, 50/s, {name}",
                unit="ms",
                better="less",
                values=values,
                targets=Target.pair(PLAIN, reach=1.0, stretch=0.9),
                counted="as many calls, and times, as events",
            )
        )
    return found
