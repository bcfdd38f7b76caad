"""The mirror.

Archive messages, each with a traceback of 20 kB, are read from the broker and stored in the
database. The comparison is the minimum of any mirror: read, `bulk_create` of the same rows, commit,
ack, without a check for duplicates, groups or replays. PostgreSQL waits for the disk with each
commit; SQLite is a file.
"""

from __future__ import annotations

from collections.abc import Callable

from ..ground import Ground
from ..measured import OURS, Measured, Size, Table, Target, in_turn
from ..processes import BenchmarkError
from . import Tell

INSERT = "bulk insert, ack after commit"


def run(ground: Ground, size: Size, tell: Tell) -> list[Measured]:
    number = size.number(5000, 1000)
    found: list[Measured] = []

    def reading(vendor: str, do: str) -> Callable[[], float]:
        database = ground.database(vendor)
        vhost = ground.vhost("archive")
        program = ground.program("archive", vhost, database=database)
        program.ask("declare")
        words = {"number": number} if do == "inserted" else {}

        def run() -> float:
            program.ask("clear")
            program.ask("fill", number=number)
            answer = program.ask(do, **words)
            vhost.expect(0, "bench:archive")
            if answer["rows"] != number:
                raise BenchmarkError(f"{do}: {answer['rows']} rows, not {number}")
            return number / float(answer["seconds"])

        return run

    for vendor, name in (("sqlite3", "SQLite"), ("postgresql", "PostgreSQL")):
        runs = {OURS: reading(vendor, "mirrored"), INSERT: reading(vendor, "inserted")}
        found.append(
            Table(
                what=f"Mirror, {name}",
                unit="rows/s",
                better="more",
                values=in_turn(runs, size.turns(5), tell),
                targets=Target.pair(INSERT, reach=0.8, stretch=0.95),
                counted="as many rows as messages; the queue is empty",
            )
        )
    return found
