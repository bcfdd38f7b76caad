"""Rows: the database goes away while the mirror, the outbox, `once` or a result backend needs it.

A server is killed and started again. SQLite has none: somebody holds a lock on its file, for longer
than anybody waits for it.
"""

from __future__ import annotations

import json
import re
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from tests.acceptance.harness import Worker, until
from tests.integration.wire import ACK, NACK
from tests.service_database import Database

from .publishers import (
    RELAY,
    claimed,
    lasting,
    leave,
    mirrored,
    relayed,
    unhandled,
)
from .rows import row
from .world import (
    ARCHIVE,
    DEADLINE,
    World,
)

GROUP = "Databases"
#: Seconds for which the database is down: without the time that a server takes to start, and
#: longer than anybody waits for SQLite's lock.
KILLED, LOCKED, PATIENCE = 1.0, 2.5, 1
#: Seconds of SQLite's lock where a process has to meet it in the middle of its work.
LONG = 4.0
#: Seconds between attempts: the third one finds the database again.
DELAY = "2"
MIRRORING = f"mirroring {ARCHIVE}"
#: What a process reports of a server that is down, and of SQLite's lock.
DOWN = re.compile("is unreachable|has locked the database")
#: Seconds over which a part of the events is published.
SLOWLY = 4.0

OUTBOX = "django_amqp_events_outboxevent"
EVENTS = "django_amqp_events_archivedevent"
#: Sessions of the service that wait for a lock, and transactions between two statements.
_BLOCKED = {
    "postgresql": "FROM pg_stat_activity WHERE datname = current_database() "
    "AND wait_event_type = 'Lock'",
    "mariadb": "FROM information_schema.processlist WHERE db = database() "
    "AND state LIKE 'Waiting for %'",
}
_OPEN = {
    "postgresql": "FROM pg_stat_activity WHERE datname = current_database() "
    "AND state = 'idle in transaction'",
    "mariadb": "FROM information_schema.innodb_trx JOIN information_schema.processlist "
    "ON id = trx_mysql_thread_id WHERE db = database() AND command = 'Sleep'",
}
#: Lets writers of a table wait in their transaction.
_HOLD = {"postgresql": "LOCK TABLE {} IN EXCLUSIVE MODE", "mariadb": "LOCK TABLES {} READ"}
#: What a client is told while one database refuses connections.
_REFUSED = {
    "sqlite": "is locked",
    "postgresql": "not currently accepting",
    "mariadb": "Access denied",
}


def begin(world: World) -> int:
    """Shorten the database timeouts; return how often the database is stopped."""
    world.environ(TESTPROJECT_DELAY=DELAY, TESTPROJECT_DATABASE=_impatient(world.database))
    world.declare()
    return 2 if world.events < 1000 else 4


# -- who needs it -------------------------------------------------------------------------


@row(GROUP, "The database is down while the mirror writes to it")
def database_mirror(world: World) -> None:
    """Mirroring continues with the same messages; no row is doubled."""
    times = begin(world)
    world.keep(world.worker)
    mirror = world.mirror()
    for _ in range(times):
        slowly(world, times, lasting=lasting(world))
        if world.grounds.server is None:
            # If it could not even read, it would take no message.
            lose(world, lambda: unacked(world, ARCHIVE), "messages unacked", only_commits=True)
        else:
            with held(world.database, EVENTS):
                lose(world, lambda: sessions(world, _BLOCKED), "transactions of the mirror")
    world.settle()
    mirrored(world, exactly=False)
    assert DOWN.search(mirror.log)


@row(GROUP, "The database is down while publishers write to the outbox")
def database_outbox(world: World) -> None:
    """A transaction that failed is repeated by its publisher, under the same ids.

    It may have been committed all the same: `call` may be called twice.
    """
    times = begin(world)
    world.keep(world.worker)
    world.relay()
    for _ in range(times):
        # Transactions enough for the lock to come before the last one.
        slowly(world, times, mode="outbox", size=1 if world.grounds.server is None else 5)
        if world.grounds.server is None:
            lose(world, lambda: len(pending(world)), "events whose transaction waits")
        else:
            with held(world.database, OUTBOX):
                lose(world, lambda: sessions(world, _BLOCKED), "transactions of publishers")
    relayed(world)
    assert world.service.ledger(what="refused"), "no transaction failed"


@row(GROUP, "The database is down while a relay waits for confirms")
def database_relay(world: World) -> None:
    """The confirms arrive while it is down. The relay records them when it is back."""
    times = begin(world)
    world.keep(world.worker)
    leave(world)
    proxy = world.proxy()
    proxy.hold = {ACK, NACK}
    with world.behind(proxy.url):
        relay = world.command(*RELAY)

    def confirm(hold: set[tuple[int, int]]) -> None:
        """Let the confirms through, and hold back those that come now."""
        proxy.release()
        proxy.hold = hold

    for left in reversed(range(times)):
        until(lambda: any(link.held for link in proxy.links), DEADLINE, "a batch is confirmed")
        hold = {ACK, NACK} if left else set()
        lose(world, partial(int, claimed(world)), "rows leased by the relay",
             meanwhile=partial(confirm, hold), seconds=LONG)  # fmt: skip
    relayed(world)
    assert DOWN.search(relay.log)


@row(GROUP, "The database is down while handlers with `once` write to it")
def database_once(world: World) -> None:
    """Also between their last statement and their commit: what does not commit is tried again."""
    times = begin(world)
    sqlite = world.grounds.server is None
    world.keep(world.worker if sqlite else partial(world.worker, "threads", 8))
    work = 0.02 if sqlite else max(0.1, 16 / world.events)
    for number in range(times):
        slowly(world, times, work=work, passing=0.0, lasting=0.0)
        if sqlite:
            # Who reads lets others write, but not commit.
            only_commits = number % 2 == 0
            lose(world, lambda: unacked(world), "messages unacked", only_commits=only_commits,
                 seconds=LONG)  # fmt: skip
        else:
            lose(world, lambda: sessions(world, _OPEN), "transactions of handlers")
    world.settle()
    ledger = world.ledger.read()
    again = {
        event_id
        for event_id, handler, attempt, _ in ledger.started
        if handler == "effect" and ledger.ended[event_id, handler, attempt - 1, None]
    }
    assert again, "no commit failed"


@row(GROUP, "The database fails over: connections are lost, then it is read-only for a while")
def database_failover(world: World) -> None:
    """Relay, publishers, handlers with `once` and the mirror resume by themselves.

    A connection that is made while it is read-only stays so, as one to a replica does.
    """
    times = begin(world)
    leave(world)
    world.keep(world.worker)
    mirror = world.mirror()
    with fails_over(world):
        relay = world.command(*RELAY)
        until(lambda: pauses(world, relay, "relaying the outbox"), DEADLINE, "it is paused")
    until(lambda: resumed(mirror, MIRRORING), DEADLINE, "the mirror has resumed")
    until(lambda: not pending(world), DEADLINE, "what was left is published")
    # As in production, it outlasts a failover, so that no relay publishes again.
    world.environ(TESTPROJECT_LEASE="60")
    for _ in range(times - 1):
        slowly(world, times, mode="outbox", size=1, lasting=lasting(world))
        until(lambda: pending(world), DEADLINE, "events whose transaction waits")
        with fails_over(world):
            # Attempts that fail meanwhile end in the archive, if one was in progress.
            refused(world)
    relayed(world)
    mirrored(world, exactly=False)


def refused(world: World) -> None:
    """Wait until a transaction of a publisher fails, which repeats it."""

    def number() -> int:
        return len(world.service.ledger(what="refused"))

    before = number()
    until(lambda: number() > before, DEADLINE, "a publisher's transaction fails")


def pauses(world: World, process: Worker, work: str) -> int:
    why = "is read-only" if world.grounds.server else "is locked"
    return len(re.findall(f"{work}.* is paused.*{why}", process.log))


def resumed(process: Worker, work: str) -> bool:
    """Return True if a process works; a paused one does not report the same error again."""
    return process.log.rfind(f"{work} has resumed") >= process.log.rfind(f"{work} is paused")


@row(GROUP, "The result backend's database is down (django-celery-results, extended)", share=0.5)
def database_results(world: World) -> None:
    """Every run stores a result, or fails to; nothing comes of it."""
    results = world.grounds.database()
    world.environ(TESTPROJECT_RESULTS=_impatient(results))
    backend = {"result_backend": "django-db", "result_extended": True}
    world.service.celery = {**world.service.celery, **backend}
    times = begin(world)
    worker = world.worker()
    for _ in range(times):
        # Each works until the next event arrives, so one is always unacknowledged.
        slowly(world, times, work=max(0.02, SLOWLY * times / world.events), lasting=0.0)
        until(lambda: unacked(world), DEADLINE, "handlers run")
        with closed(results):
            world.hit("result backend down")
            # The backend tries three times before it gives up.
            time.sleep(2 * LOCKED)
    world.settle()
    assert not unhandled(world)
    assert _REFUSED[world.grounds.kind] in worker.log, "no result was refused"
    ((stored,),) = results.query("SELECT count(*) FROM django_celery_results_taskresult")
    assert 0 < stored < len(world.ledger.units)


def slowly(world: World, parts: int, **options: Any) -> None:
    """Publish a part of all events over some seconds, and immediately unless said otherwise.

    The part before it is through by then: no event meets the fault in all of its attempts.
    """
    before = sum(worker.name == "publisher" for worker in world.started)
    until(lambda: world.ledger.read().through >= before, DEADLINE, "the part before is published")
    count = world.events // parts
    world.publisher(count, **{"mode": "immediate", "pause": SLOWLY / count, **options})


# -- events in flight ----------------------------------------------------------------------


def unacked(world: World, queue: str = "") -> int:
    if not queue:
        return world.unacked(time.time())
    return int(world.eyes.queue(queue).get("messages_unacknowledged", 0))


def pending(world: World) -> set[str]:
    ledger = world.ledger.read()
    return ledger.intended - ledger.accepted


def sessions(world: World, which: Mapping[str, str]) -> int:
    """Count such sessions of the service."""
    if "innodb_trx" in which[world.grounds.kind]:
        # InnoDB renews this table only when it has not been read for 0.1 s.
        time.sleep(0.15)
    ((number,),) = world.database.query(f"SELECT count(*) {which[world.grounds.kind]}")
    return int(number)


# -- how it goes down ---------------------------------------------------------------------


def lose(
    world: World,
    hand: Callable[[], int],
    what: str,
    *,
    meanwhile: Callable[[], object] = bool,
    only_commits: bool = False,
    seconds: float = LOCKED,
) -> None:
    """Take the database away while something is in hand, and give it back.

    Args:
        hand: how much it is; with SQLite it is looked at when the lock is there.
        meanwhile: done while it is away.
        only_commits: with SQLite nothing but commits has to wait.
        seconds: of SQLite's lock.
    """
    server = world.grounds.server
    if server is None:
        with locked(world.database, only_commits=only_commits):
            number = until(hand, DEADLINE, what)
            world.hit(f"database locked, {what}", in_flight=number)
            meanwhile()
            time.sleep(seconds)
        return
    number = until(hand, DEADLINE, what)
    world.hit(f"database killed, {what}", None, signal.SIGKILL, in_flight=number, pid=server.pid)
    server.kill()
    meanwhile()
    time.sleep(KILLED)
    server.start_again()


@contextmanager
def locked(database: Database, *, only_commits: bool = False) -> Iterator[None]:
    """Hold SQLite's lock."""
    holder = sqlite3.connect(database.settings["NAME"], timeout=60, isolation_level=None)
    try:
        holder.execute("BEGIN" if only_commits else "BEGIN EXCLUSIVE")
        # Whoever has read holds a lock that others read and write beside, but do not commit.
        holder.execute("SELECT count(*) FROM django_migrations").fetchall()
        yield
    finally:
        holder.close()


@contextmanager
def held(database: Database, table: str) -> Iterator[None]:
    """Let writers of a table wait in their transaction."""
    assert database.server is not None
    holder = database.server.connect(database.settings["NAME"], autocommit=False)
    try:
        holder.cursor().execute(_HOLD[database.server.kind].format(table))
        yield
    finally:
        holder.close()


@contextmanager
def fails_over(world: World) -> Iterator[None]:
    """End all connections, and refuse writes in this block; SQLite is locked."""
    server, name = world.database.server, world.database.settings["NAME"]
    world.hit("database fails over")
    with locked(world.database) if server is None else server.read_only(name):
        yield


@contextmanager
def closed(database: Database) -> Iterator[None]:
    """Stop one database and leave the others running."""
    server = database.server
    with locked(database) if server is None else server.refusing(database.settings["NAME"]):
        yield


def _impatient(database: Database) -> str:
    """Write a database's settings for a process that waits shortly for SQLite's lock."""
    settings = database.settings
    if "sqlite" in settings["ENGINE"]:
        settings = {**settings, "OPTIONS": {**settings["OPTIONS"], "timeout": PATIENCE}}
    return json.dumps(settings)
