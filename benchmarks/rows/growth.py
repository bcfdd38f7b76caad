"""How cost grows.

*Handlers*: one worker (a pool of two) with a growing number of handlers, each with its queue: the
memory of all its processes, its start-up time, and how fast it drains a backlog spread over all
queues. *Services*: a growing number of services on one exchange; the event has one handler, or one
in each service. *Payload*: growing payloads, published and handled, compared with Celery.
*Archive*: a growing number of archived rows in PostgreSQL, while 2,000 more are mirrored and 1,000
replayed. All sizes have a turn in each round, except the archive, which only grows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..ground import Ground, counted, measured_drain
from ..measured import OURS, PLAIN, Curve, Measured, Size, in_turn
from ..processes import BenchmarkError, Program, until
from . import Tell
from .handling import draining
from .memory import memory
from .publish import Publisher

BRIEF = False
FLAT = 1.3
SHARED = "bench.shared"

#: Returns the turn for a size.
Run = Callable[[int], Callable[[], float]]


def run(ground: Ground, size: Size, tell: Tell) -> list[Measured]:
    return [
        *of_handlers(ground, size, tell),
        *of_services(ground, size, tell),
        *of_payload(ground, size, tell),
        *of_archive(ground, size, tell),
    ]


def turns(
    sizes: Sequence[int], runs: Mapping[str, Run], rounds: int, tell: Tell
) -> dict[str, dict[float, list[float]]]:
    """Give each participant a turn with each size in each round."""
    several = len(runs) > 1
    names = {
        (size, who): f"{who} {size:,}" if several else f"{size:,}" for size in sizes for who in runs
    }
    values = in_turn({name: runs[who](size) for (size, who), name in names.items()}, rounds, tell)
    return {who: {float(size): values[names[size, who]] for size in sizes} for who in runs}


# -- handlers ----------------------------------------------------------------------------------


def of_handlers(ground: Ground, size: Size, tell: Tell) -> list[Measured]:
    sizes = (1, 20) if size.short else (1, 10, 100, 500)
    total = size.number(5000, 1000)
    starts: dict[float, list[float]] = {size: [] for size in sizes}
    megabytes: dict[float, list[float]] = {size: [] for size in sizes}

    def prepared(handlers: int) -> Callable[[], float]:
        vhost = ground.vhost(f"handlers{handlers}")
        program = ground.program("publish_events", vhost, handlers=handlers)
        queues = program.ask("declare")["queues"]
        program.ask("each")
        templates = [vhost.take(queue) for queue in queues]

        def run() -> float:
            vhost.fill(templates, handlers)
            tally = ground.tally()
            began = time.perf_counter()
            worker = ground.worker(
                "service_events", vhost, handlers=handlers, tally=str(tally.path)
            )
            until(lambda: tally.count >= handlers, 300, "each queue is consumed", interval=0.005,
                  alive=worker)  # fmt: skip
            starts[handlers].append(time.perf_counter() - began)
            time.sleep(1)
            megabytes[handlers].append(sum(memory(worker)))
            # It consumes while this publishes; the rest is measured.
            vhost.fill(templates, total)
            rate = measured_drain(tally, handlers + total, worker, warm=0.3)
            counted(tally, handlers + total, vhost, worker, *queues)
            return rate

        return run

    rates = turns(sizes, {OURS: prepared}, size.turns(3, 1), tell)
    words: dict[str, Any] = {"x": "handlers", "counted": "as many calls as events"}
    return [
        Curve(what="Memory by handlers, main process and pool", unit="MB", better="less",
              values={OURS: megabytes}, line=True, **words),
        Curve(what="Start-up by handlers", unit="s", better="less", values={OURS: starts},
              line=True, **words),
        Curve(what="Handled events by handlers in one worker", unit="events/s", better="more",
              values=rates, flat=FLAT, **words),
    ]  # fmt: skip


# -- services ----------------------------------------------------------------------------------


def of_services(ground: Ground, size: Size, tell: Tell) -> list[Measured]:
    sizes = (1, 4) if size.short else (1, 4, 16)
    number = size.number(500, 100)
    publishers: dict[int, Publisher] = {}
    shared: dict[int, list[str]] = {}
    for services in sizes:
        publishers[services] = publisher = Publisher(ground, "publish_events", shared=SHARED)
        shared[services] = ["bench.bench.shared"]
        for other in range(1, services):
            program = ground.program(
                "publish_events", publisher.vhost, service=f"service{other}", first=other * 100,
                shared=SHARED,
            )  # fmt: skip
            program.ask("declare")
            program.kill()
            shared[services].append(f"service{other}.bench.shared")

    def of_all(services: int) -> Callable[[], float]:
        publisher, queues = publishers[services], shared[services]

        def run() -> float:
            answer = publisher.program.ask("named", number=number, event=SHARED)
            for queue in queues:
                publisher.vhost.expect(number, queue)
            publisher.vhost.purge(*queues)
            return number / float(answer["seconds"])

        return run

    rounds = size.turns(5)
    one = turns(
        sizes, {OURS: lambda each: publishers[each].rate("one_by_one", number)}, rounds, tell
    )
    every = turns(sizes, {OURS: of_all}, rounds, tell)
    words: dict[str, Any] = {
        "x": "services", "unit": "events/s", "better": "more",
        "counted": "each queue has exactly the published events",
    }  # fmt: skip
    return [
        Curve(what="Published events by services on one exchange, one with a handler",
              values=one, flat=FLAT, **words),
        Curve(what="Published events by services on one exchange, all with a handler",
              values=every, **words,
              notes=("The broker writes a copy for each service before it confirms.",)),
    ]  # fmt: skip


# -- payload -----------------------------------------------------------------------------------


def of_payload(ground: Ground, size: Size, tell: Tell) -> list[Measured]:
    sizes = (1000, 100_000) if size.short else (1000, 10_000, 100_000, 1_000_000)
    publishers = {
        OURS: Publisher(ground, "publish_events"),
        PLAIN: Publisher(ground, "publish_plain"),
    }

    def published(who: str, body: int) -> Callable[[], float]:
        number = size.number(max(30, min(500, 30_000_000 // body)), 50)
        return publishers[who].rate("one_by_one", number, size=body)

    def handled(who: str, body: int) -> Callable[[], float]:
        total = size.number(max(300, min(5000, 100_000_000 // body)), 200)
        return draining(ground, who, total, body=body)

    publishing, handling = (
        turns(sizes, {who: partial(run, who) for who in publishers}, size.turns(3, 1), tell)
        for run in (published, handled)
    )
    words: dict[str, Any] = {"x": "bytes of payload", "unit": "events/s", "better": "more"}
    return [
        Curve(what="Published events by payload", values=publishing, **words,
              counted="the queue has exactly the published events"),
        Curve(what="Handled events by payload, prefork 2", values=handling, **words,
              counted="as many calls as events"),
    ]  # fmt: skip


# -- archive -----------------------------------------------------------------------------------


def of_archive(ground: Ground, size: Size, tell: Tell) -> list[Measured]:
    sizes = (1000, 10_000) if size.short else (1000, 10_000, 100_000, 1_000_000)
    more, again = size.number(2000, 500), size.number(1000, 300)
    database = ground.database("postgresql")
    vhost = ground.vhost("archive")
    program: Program = ground.program("archive", vhost, database=database)
    (queue,) = program.ask("declare")["queues"]
    mirrored: dict[float, list[float]] = {}
    replayed: dict[float, list[float]] = {}
    for rows in sizes:
        program.ask("grow", rows=rows)
        mirrored[rows], replayed[rows] = [], []
        for _ in range(size.turns(3, 1)):
            program.ask("fill", number=more)
            answer = program.ask("mirrored")
            vhost.expect(0, "bench:archive")
            if answer["rows"] != more:
                raise BenchmarkError(f"{answer['rows']} rows, not {more}")
            mirrored[rows].append(more / answer["seconds"])
            program.ask("archived", number=again)
            answer = program.ask("replayed")
            vhost.expect(again, queue)
            vhost.purge(queue)
            replayed[rows].append(again / answer["seconds"])
        tell(f"{rows:,} rows: mirrored {mirrored[rows][-1]:,.0f}/s, "
             f"replayed {replayed[rows][-1]:,.0f}/s")  # fmt: skip
    words: dict[str, Any] = {"x": "archived rows", "better": "more", "flat": FLAT}
    return [
        Curve(what="Mirrored rows by rows in the archive", unit="rows/s", values={OURS: mirrored},
              counted="rows in the database", **words),
        Curve(what="Replayed events by rows in the archive", unit="events/s",
              values={OURS: replayed}, counted="messages in the handler's queue", **words),
    ]  # fmt: skip
