"""The cost of the history.

The same service with `HISTORY` and without: the time of one event call (immediate, confirmed),
`publish_many`, and what the events leave on the broker's disk and in its memory. The handler's
queue is purged after each turn; the history keeps the events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import capacity
from ..ground import Ground
from ..measured import OURS, Measured, Size, Table, in_turn
from . import Tell
from .publish import Publisher

WITHOUT = "without HISTORY"
HISTORY: dict[str, Any] = {"HISTORY": {"MAX_AGE": "14d"}}
MILLION = 1_000_000


def run(ground: Ground, size: Size, tell: Tell) -> list[Measured]:
    publishers = {
        OURS: Publisher(ground, "publish_events", events_settings=HISTORY),
        WITHOUT: Publisher(ground, "publish_events"),
    }
    number, many = size.number(1000, 200), size.number(10_000, 2000)

    def milliseconds(rate: Callable[[], float]) -> Callable[[], float]:
        return lambda: 1000 / rate()

    one = in_turn(
        {name: milliseconds(each.rate("one_by_one", number)) for name, each in publishers.items()},
        size.turns(5),
        tell,
    )
    rates = in_turn(
        {name: each.rate("many", many) for name, each in publishers.items()}, size.turns(5), tell
    )
    memory, disk = _left(ground, publishers, size.number(100_000, 20_000))
    counted = "after each turn, the handler's queue has exactly the published events"
    return [
        Table(what="One event call, confirmed, with and without a history", unit="ms",
              better="less", values=one, counted=counted),
        Table(what="Many events by one call, with and without a history", unit="events/s",
              better="more", values=rates, counted=counted),
        Table(what="Disk for a million events of 500 bytes, handled", unit="MB", better="less",
              values=disk, counted=counted),
        Table(what="Memory of the broker for these", unit="MB", better="less", values=memory,
              counted=counted),
    ]  # fmt: skip


def _left(
    ground: Ground, publishers: dict[str, Publisher], number: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the memory and disk that handled events occupy, by participant."""
    memory: dict[str, list[float]] = {}
    disk: dict[str, list[float]] = {}
    for name, publisher in publishers.items():
        before = capacity.used(ground)
        for _ in range(0, number, 10_000):
            publisher.program.ask("many", number=10_000)
            publisher.vhost.expect(10_000, publisher.queue)
            publisher.vhost.purge(publisher.queue)
        after = capacity.used(ground)
        memory[name] = [after[0] - before[0]]
        disk[name] = [(after[1] - before[1]) * MILLION / number]
    return memory, disk
