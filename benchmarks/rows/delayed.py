"""Latency behind 10,000 delayed events.

10,000 events of the same handler wait for a retry in two hours. Meanwhile 20 events a second are
published and measured from the call to the first line of their handler, and compared with the same
service without waiting events. Both workers have two processes and run all the time; a figure is
the median of a turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..ground import Ground
from ..measured import OURS, Measured, Size, Table, Target, in_turn, percentile
from ..processes import until
from . import Tell
from .latency import Stage
from .memory import COUNTDOWN

BRIEF = False
EMPTY = "no delayed events"


def run(ground: Ground, size: Size, tell: Tell) -> list[Measured]:
    delayed = size.number(10_000, 1000)
    number = size.number(100, 50)
    behind, empty = Stage(ground, OURS, countdown=COUNTDOWN), Stage(ground, OURS)
    held = put_off(ground, behind, delayed)

    def median(stage: Stage) -> Callable[[], float]:
        stage.measure(20, 20)
        return lambda: percentile(stage.measure(number, 20), 50)

    values = in_turn({OURS: median(behind), EMPTY: median(empty)}, size.turns(7), tell)
    behind.vhost.expect(delayed, held, what="what waits")
    return [
        Table(
            what=f"Immediate event behind {delayed:,} delayed events, time to handler",
            unit="ms",
            better="less",
            values=values,
            targets=Target.pair(EMPTY, reach=1.1, stretch=1.0),
            counted="as many calls as events; all delayed events still wait",
        )
    ]


def put_off(ground: Ground, stage: Stage, number: int) -> str:
    """Let one event fail, and copy its retry; return the delay queue of the copies."""
    tally = ground.tally()
    other = ground.vhost("failing")
    words: dict[str, Any] = {"work": "fail_once", "countdown": COUNTDOWN, "tally": str(tally.path)}
    program = ground.program("publish_events", other, **words)
    queues = program.ask("declare")["all_queues"]
    worker = ground.worker("service_events", other, **words)
    program.ask("one_by_one", number=1)
    until(lambda: tally.count == 1, 60, "an event fails", alive=worker)
    held = [queue for queue in queues if ":delay." in queue]
    until(lambda: other.ready(*held) == 1, 60, "it waits", alive=worker)
    queue = str(next(queue for queue in held if other.ready(queue)))
    template = other.take(queue)
    worker.stop()
    stage.vhost.fill([template], number)
    stage.vhost.expect(number, queue)
    return queue
