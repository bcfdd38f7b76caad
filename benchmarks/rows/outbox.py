"""The outbox.

*Up to COMMIT*: an event call in a transaction, from its start to its COMMIT, compared with the same
INSERT written by hand. A publisher that publishes between its transactions shares cores and disk
with RabbitMQ, which still processes the last event. The bare INSERT has the machine for itself; a
third participant, the INSERT with `apply_async` between the transactions, has not. At 50 a second
there is time between them, as between the requests of a web process.
*Up to published*: the same until RabbitMQ has confirmed the event and the row is settled, compared
with the INSERT and Celery's `apply_async` after the commit.
*Relay*: pending events of the outbox, published by `events_relay`, compared with `apply_async` one
by one. A figure is the median of a turn's transactions. PostgreSQL waits for the disk with each
commit, except when it deletes the row of a published event
([what that means](../docs/guarantees.md)); SQLite has Django's configuration.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from ..ground import Ground
from ..measured import OURS, PLAIN, Measured, Size, Table, Target, in_turn
from ..processes import BenchmarkError, Program
from . import Tell

INSERT = "bare INSERT"
AFTER = "INSERT, then Celery apply_async"
#: Transactions a second, with time between them.
PACE = 50


class Outbox:
    """The two participants on one database."""

    def __init__(self, ground: Ground, vendor: str, size: Size) -> None:
        database = ground.database(vendor)
        self.vhost, self.theirs = ground.vhost("outbox"), ground.vhost("plain")
        words: dict[str, Any] = {"database": database, "mode": "outbox"}
        self.events: Program = ground.program("outbox_events", self.vhost, **words)
        (self.queue,) = self.events.ask("declare")["queues"]
        self.plain: Program = ground.program(
            "outbox_plain", self.theirs, database=database, apps=["django_amqp_events"]
        )
        (self.plain_queue,) = self.plain.ask("declare")["queues"]
        self.statement = self.events.ask("statement")["statement"]
        self.vhost.purge(self.queue)
        self.number = size.number(300, 100)
        self.ours("committed")
        self.bare("committed", after=True)

    def ours(self, what: str, *, rate: float = 0) -> float:
        """Publish in transactions; return the median milliseconds."""
        answer = self.events.ask("commits", number=self.number, rate=rate)
        self.vhost.expect(self.number, self.queue)
        self.vhost.purge(self.queue)
        if rows := self.events.ask("left")["rows"]:
            raise BenchmarkError(f"{rows} events are published, and in the outbox still")
        return statistics.median(map(float, answer[what])) * 1e3

    def bare(self, what: str, *, after: bool, rate: float = 0) -> float:
        """Insert in transactions, and publish after them."""
        answer = self.plain.ask(
            "commits", number=self.number, rate=rate, statement=self.statement, after=after
        )
        self.theirs.expect(self.number if after else 0, self.plain_queue)
        self.theirs.purge(self.plain_queue)
        if (rows := self.plain.ask("empty")["rows"]) != self.number:
            raise BenchmarkError(f"{rows} rows are in the table, not {self.number}")
        return statistics.median(map(float, answer[what])) * 1e3

    def relay(self, number: int) -> float:
        """Publish the pending events; return events per second."""
        answer = self.events.ask("relay", number=number)
        if answer["accepted"] != number or self.events.ask("left")["rows"]:
            raise BenchmarkError(f"the relay published {answer['accepted']} of {number} events")
        self.vhost.expect(number, self.queue)
        self.vhost.purge(self.queue)
        return number / float(answer["seconds"])

    def one_by_one(self, number: int) -> float:
        """Publish with Celery; return events per second."""
        answer = self.plain.ask("one_by_one", number=number)
        self.theirs.expect(number, self.plain_queue)
        self.theirs.purge(self.plain_queue)
        return number / float(answer["seconds"])


def run(ground: Ground, size: Size, tell: Tell) -> list[Measured]:
    found: list[Measured] = []
    counted = "the queue has exactly the published events; the outbox is empty"
    boxes = {"PostgreSQL": Outbox(ground, "postgresql", size)}
    if not size.short:
        boxes["SQLite"] = Outbox(ground, "sqlite3", size)
    called = "Event call in a transaction, up to COMMIT"
    tables = [(f"{called}, {vendor}", box, 0) for vendor, box in boxes.items()]
    tables.insert(1, (f"{called}, PostgreSQL, {PACE} a second", boxes["PostgreSQL"], PACE))
    for what, box, rate in tables:
        found.append(
            Table(
                what=what,
                unit="ms",
                better="less",
                values=in_turn(
                    {
                        OURS: partial(box.ours, "committed", rate=rate),
                        INSERT: partial(box.bare, "committed", after=False, rate=rate),
                        AFTER: partial(box.bare, "committed", after=True, rate=rate),
                    },
                    size.turns(7),
                    tell,
                ),
                targets=Target.pair(INSERT, reach=1.2, stretch=1.1),
                counted=counted,
            )
        )
    box = boxes["PostgreSQL"]
    found.append(
        Table(
            what="The same, up to published, PostgreSQL",
            unit="ms",
            better="less",
            values=in_turn(
                {
                    OURS: partial(box.ours, "published"),
                    AFTER: partial(box.bare, "published", after=True),
                },
                size.turns(7),
                tell,
            ),
            targets=Target.pair(AFTER, reach=0.8, stretch=0.5),
            counted=counted,
        )
    )
    found.append(
        Table(
            what="Relay, PostgreSQL",
            unit="events/s",
            better="more",
            values=in_turn(
                {
                    OURS: lambda: box.relay(size.number(20_000, 2000)),
                    PLAIN: lambda: box.one_by_one(size.number(1000, 200)),
                },
                size.turns(5),
                tell,
            ),
            targets=Target.pair(PLAIN, reach=6, stretch=8),
            counted=counted,
        )
    )
    return found
