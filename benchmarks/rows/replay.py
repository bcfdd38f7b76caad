"""Bulk replay.

One call publishes archived events to the queue of the failed handler. The comparison is a loop over
the rows that reads each, publishes it, waits for its confirm and updates it.
"""

from __future__ import annotations

from collections.abc import Callable

from ..ground import Ground
from ..measured import OURS, Measured, Size, Table, Target, in_turn
from ..processes import BenchmarkError
from . import Tell

LOOP = "one by one, with an update each"


def run(ground: Ground, size: Size, tell: Tell) -> list[Measured]:
    found: list[Measured] = []

    def replaying(vendor: str, do: str, number: int) -> Callable[[], float]:
        database = ground.database(vendor)
        vhost = ground.vhost("replay")
        program = ground.program("archive", vhost, database=database)
        (queue,) = program.ask("declare")["queues"]

        def run() -> float:
            program.ask("clear")
            program.ask("archived", number=number)
            answer = program.ask(do)
            vhost.expect(number, queue)
            vhost.purge(queue)
            if answer["accepted"] != number:
                raise BenchmarkError(f"{do}: {answer['accepted']} events, not {number}")
            return number / float(answer["seconds"])

        return run

    vendors = {"postgresql": "PostgreSQL"} | ({} if size.short else {"sqlite3": "SQLite"})
    for vendor, name in vendors.items():
        runs = {
            OURS: replaying(vendor, "replayed", size.number(10_000, 1000)),
            LOOP: replaying(vendor, "one_by_one", size.number(1000, 200)),
        }
        targets = Target.pair(LOOP, reach=7, stretch=9)
        found.append(
            Table(
                what=f"Bulk replay, {name}",
                unit="events/s",
                better="more",
                values=in_turn(runs, size.turns(5), tell),
                targets=targets if vendor == "postgresql" else targets[:0],
                counted="as many messages in the handler's queue as events",
            )
        )
    return found
