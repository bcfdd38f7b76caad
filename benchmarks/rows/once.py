"""A handler that writes one row, with `once`.

PostgreSQL, a pool of two processes, one row by the ORM. With `once`, the row commits together with
an inbox row, so that a second delivery changes nothing; plain Celery has no such guarantee. Both
keep their connections to the database open, and commits wait for the disk.
"""

from __future__ import annotations

from collections.abc import Callable

from ..ground import Ground
from ..measured import OURS, PLAIN, Measured, Size, Table, Target, in_turn
from ..processes import BenchmarkError
from . import Tell
from .handling import draining

WITHOUT = f"{OURS}, without once"


def run(ground: Ground, size: Size, tell: Tell) -> list[Measured]:
    total = size.number(4000, 1000)

    def writing(who: str, *, once: bool) -> Callable[[], float]:
        database = ground.database("postgresql")

        def after() -> None:
            with ground.sql(database["NAME"]) as cursor:
                cursor.execute("SELECT count(*) FROM store_order")
                rows = cursor.fetchone()[0]
                cursor.execute("SELECT count(*) FROM django_amqp_events_inboxentry")
                inbox = cursor.fetchone()[0]
                cursor.execute("TRUNCATE store_order, django_amqp_events_inboxentry")
            if (rows, inbox) != (total, total if once else 0):
                raise BenchmarkError(f"{who}: {rows} rows, {inbox} in the inbox, not {total}")

        return draining(ground, who, total, work="row", once=once, database=database, after=after)

    runs = {
        OURS: writing(OURS, once=True),
        PLAIN: writing(PLAIN, once=False),
        WITHOUT: writing(OURS, once=False),
    }
    return [
        Table(
            what="Handler doing one ORM write, PostgreSQL, prefork 2, once",
            unit="events/s",
            better="more",
            values=in_turn(runs, size.turns(4, 1), tell),
            targets=Target.pair(PLAIN, reach=1.0, stretch=1.2),
            counted="as many rows, and inbox rows, as events; the queue is empty",
        )
    ]
