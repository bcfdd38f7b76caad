"""What a service takes of RabbitMQ and PostgreSQL, for docs/capacity.md.

``make capacity``, or ``ARGS="queues connections messages rows"``: about nine minutes, on a private
broker and database. Memory is what Erlang reports as allocated after a garbage collection
of all its processes; disk is what the node's data directory occupies.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from urllib.parse import quote

from .ground import Ground, Vhost
from .processes import until

COLLECTED = "[garbage_collect(P) || P <- processes()], timer:sleep(500), erlang:memory(total)."
HANDLERS = (10, 100, 300)
MESSAGES = (10_000, 50_000)
ROWS = 100_000
#: Seconds after which a broker, or a worker, has become idle.
SETTLE = 8.0
MB = 1024 * 1024

#: Megabytes of memory and of disk.
Used = tuple[float, float]


def used(ground: Ground) -> Used:
    """Return what the idle node uses."""
    time.sleep(SETTLE)
    memory = int(ground.node.ctl("eval", COLLECTED).split()[-1])
    files = (path for path in (ground.node.directory / "data").rglob("*") if path.is_file())
    return memory / MB, sum(path.stat().st_blocks * 512 for path in files) / MB


def queues(ground: Ground) -> None:
    """Declare services with more and more handlers; nothing consumes their queues."""
    print("handlers  queues  exchanges  bindings  memory  disk (MB, more than before)")
    for handlers in HANDLERS:
        before = used(ground)
        vhost = ground.vhost(f"queues{handlers}")
        program = ground.program("publish_events", vhost, handlers=handlers)
        names = program.ask("declare")
        program.kill()
        memory, disk = (now - then for now, then in zip(used(ground), before, strict=True))
        counts = (len(names[key]) for key in ("all_queues", "exchanges", "bindings"))
        print("{:8}  {:6}  {:9}  {:8}".format(handlers, *counts), f" {memory:6.1f}  {disk:4.1f}")
        ground.node.delete_vhost(vhost.name)


def connections(ground: Ground) -> None:
    """Run workers with a companion; count their connections and channels."""
    print("process                                   connections  channels")
    database = ground.database("sqlite3")
    with_publisher = alone = (0, 0)
    for pool, number, handlers in (
        ("prefork", 2, 10), ("prefork", 8, 10), ("prefork", 2, 100), ("threads", 8, 10),
    ):  # fmt: skip
        vhost = ground.vhost(f"connections-{pool}{number}")
        tally = ground.tally()
        given: dict[str, Any] = {
            "handlers": handlers, "database": database, "tally": str(tally.path),
            "work": "fail_once", "countdown": 3,
        }  # fmt: skip
        program = ground.program("publish_events", vhost, **given)
        program.ask("declare")
        worker = ground.command(
            "events_worker", "-P", pool, "-c", str(number), "-l", "WARNING", vhost=vhost, **given
        )
        for _ in range(3):
            program.ask("each")
        # Each event fails once, so a retry is published.
        until(lambda count=6 * handlers, tally=tally: tally.count >= count, 90, "retries",
              alive=worker)  # fmt: skip
        time.sleep(SETTLE)
        with_publisher = opened(ground, vhost)
        program.kill()
        time.sleep(SETTLE)
        alone = opened(ground, vhost)
        name = f"events_worker, {pool}, -c {number}, {handlers} handlers"
        print(f"{name:42}{alone[0]:11}{alone[1]:10}")
        worker.stop()
    difference = [a - b for a, b in zip(with_publisher, alone, strict=True)]
    print(f"{'a process that publishes':42}{difference[0]:11}{difference[1]:10}")


def opened(ground: Ground, vhost: Vhost) -> tuple[int, int]:
    """Return the number of connections and of channels in a vhost."""
    path = f"/api/vhosts/{quote(vhost.name, safe='')}"
    found = (ground.node.http("GET", f"{path}/{kind}") for kind in ("connections", "channels"))
    return tuple(len(each) for each in found)  # type: ignore[return-value]


def messages(ground: Ground) -> None:
    """Leave events of 500 bytes in the queue of a handler."""
    print("events waiting  memory  disk (MB, more than before)")
    vhost = ground.vhost("messages")
    program = ground.program("publish_events", vhost)
    (queue,) = program.ask("declare")["queues"]
    program.ask("one_by_one", number=1)
    template = vhost.take(queue)
    program.kill()
    before, done = used(ground), 0
    for total in MESSAGES:
        vhost.fill([template], total - done)
        done = total
        memory, disk = (now - then for now, then in zip(used(ground), before, strict=True))
        print(f"{total:14,}  {memory:6.1f}  {disk:5.1f}")


def rows(ground: Ground) -> None:
    """Fill the inbox, and count the bytes that PostgreSQL uses for a row with its indexes."""
    entry = ground.database("postgresql")
    table = "django_amqp_events_inboxentry"
    with ground.sql(entry["NAME"]) as cursor:
        sql = (
            f"INSERT INTO {table} (id, service, handler, source, event_id, name, handled_at, "  # noqa: S608 - ours
            "superseded) "
            "SELECT gen_random_uuid(), 'billing', 'invoices.send_invoice', 'shop', "
            "gen_random_uuid()::text, 'shop.order.created', now() - n * interval '1 second', false "
            f"FROM generate_series(1, {ROWS}) n"
        )
        cursor.execute(sql)
        cursor.execute(f"SELECT pg_total_relation_size('{table}')")
        print(f"a row of the inbox, with its indexes: {cursor.fetchone()[0] / ROWS:.0f} bytes")


PARTS: dict[str, Callable[[Ground], None]] = {
    part.__name__: part for part in (queues, connections, messages, rows)
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capacity", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one of {', '.join(PARTS)}")
    chosen = parser.parse_args().parts or list(PARTS)
    if unknown := set(chosen) - PARTS.keys():
        parser.error(f"no part is called {', '.join(sorted(unknown))}")
    for name in chosen:
        with ExitStack() as stack:
            ground = Ground(stack)
            print(f"-- {name}: RabbitMQ {ground.node.version}, {os.cpu_count()} cores", flush=True)
            PARTS[name](ground)
    return 0


if __name__ == "__main__":
    sys.exit(main())
