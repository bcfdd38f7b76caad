"""Rows: publishers, relays, mirrors and replays that die with something in their hands."""

from __future__ import annotations

import json
import random
import signal
import time
from functools import partial

from tests.acceptance.harness import Worker, until
from tests.integration.wire import ACK, NACK

from .counts import Unit
from .rows import row
from .world import ARCHIVE, DEADLINE, LEASE, World

PUBLISHERS = "Publishers and relays"
MIRROR = "Mirror and replay"
COMPANION = "The companion"
#: Nobody answers there.
NOWHERE = "amqp://nobody@127.0.0.1:1//"
#: Seconds for which a replay, and a row of the outbox, stays with a process that died.
RESUMED, RELAYED = "2", "3"
RELAY = ("events_relay", "--batch-size", "10")


def serve(world: World) -> None:
    """Declare the topology; start workers and a mirror."""
    world.declare()
    world.keep(world.worker)


def lasting(world: World) -> float:
    """The share of events that end in the archive, in rows that are about it."""
    return min(0.3, max(0.1, 50 / world.events))


# -- publishers ---------------------------------------------------------------------------


@row(PUBLISHERS, "Publishers are killed between commit and publish")
def publisher_committed(world: World) -> None:
    """A relay publishes what is in the outbox. Nobody knows of it but the database."""
    number = 4 if world.events < 1000 else 10
    world.environ(TESTPROJECT_LEASE=str(LEASE))
    world.arm("committed", times=number // 2, of=world.events // 2)
    serve(world)
    started = [world.publisher(world.events // number, size=5, pause=0.02) for _ in range(number)]
    world.relay()
    killed = sum(publisher.wait(DEADLINE) == -signal.SIGKILL for publisher in started)
    assert killed == number // 2, f"{killed} publishers were killed"
    relayed(world, publishers=number - killed)


@row(PUBLISHERS, "Publishers (immediate) are killed while they wait for a confirm")
def publisher_immediate(world: World) -> None:
    """An unanswered publish is not counted; in half of the cases the broker has the event."""
    chance = random.Random(world.seed)
    number = 2 if world.events < 1000 else 8
    each = max(10, world.events // (number + 1))
    serve(world)
    for kill in range(number):
        proxy = world.proxy()
        with world.behind(proxy.url):
            publisher = world.publisher(each, mode="immediate", pause=0.01)
        known = world.ledger.read().intended - world.ledger.accepted
        enough = len(world.ledger.accepted) + chance.randrange(1, each - 3)
        until(partial(_accepted, world, enough), DEADLINE, "some are published")
        if kill % 2:
            proxy.flowing.clear()
        else:
            proxy.hold = {ACK, NACK}
        waits = until(partial(_stuck, world, known), DEADLINE, "one waits for its confirm")
        world.hit("publisher killed", publisher, signal.SIGKILL, in_flight=len(waits))
        proxy.end()
    world.publisher(each, mode="immediate")
    world.settle(publishers=1)


def _accepted(world: World, number: int) -> bool:
    return len(world.ledger.read().accepted) >= number


def _stuck(world: World, known: set[str]) -> set[str]:
    """Events, but for those that are known, that wait for their confirm now and did just before."""
    before = world.ledger.read().intended - world.ledger.accepted
    time.sleep(0.3)
    return before - world.ledger.read().accepted - known


# -- relays -------------------------------------------------------------------------------


def leave(world: World, count: int = 0, **options: float) -> None:
    """Publish into the outbox where RabbitMQ cannot be reached: all of it is the relay's."""
    world.environ(TESTPROJECT_LEASE=RELAYED)
    with world.behind(NOWHERE):
        world.publisher(count, **options).wait(DEADLINE)


@row(PUBLISHERS, "Relays are killed between confirm and delete")
def relay_relayed(world: World) -> None:
    """Confirmed rows are published again when their lease expires, so `call` may run twice."""
    serve(world)
    leave(world)
    world.arm("relayed", times=max(2, min(5, world.events // 200)))
    world.keep(lambda: world.command(*RELAY))
    world.keep(lambda: world.command(*RELAY))
    relayed(world)
    assert world.ledger.kills, "no relay was killed"


@row(PUBLISHERS, "One of two relays is killed while it holds a batch")
def relay_of_two(world: World) -> None:
    """The other one goes on meanwhile, and takes that batch when its lease has ended.

    The broker had it: `call` may be called twice.
    """
    serve(world)
    leave(world)
    proxy = world.proxy()
    proxy.hold = {ACK, NACK}
    with world.behind(proxy.url):
        first = world.command(*RELAY)
    until(
        lambda: any(link.held for link in proxy.links), DEADLINE, "the first has published a batch"
    )
    before = world.rows("outboxevent")
    world.command(*RELAY)
    until(lambda: world.rows("outboxevent") < before, DEADLINE, "the second relays")
    world.hit("relay killed", first, signal.SIGKILL, in_flight=claimed(world))
    proxy.end()
    relayed(world)


def relayed(world: World, *, publishers: int | None = None) -> None:
    """Settle; nothing is left in the outbox, also of what was published long ago."""
    world.settle(publishers=publishers)
    left = world.rows("outboxevent")
    assert not left, f"{left} rows are left in the outbox"


def claimed(world: World) -> int:
    """Return the number of rows that relays have leased."""
    return world.rows("outboxevent", "claim <> 'publisher'")


# -- the mirror ---------------------------------------------------------------------------


@row(MIRROR, "Mirrors are killed between commit and ack")
def mirror_mirrored(world: World) -> None:
    """They read the same messages again, and make the same rows of them."""
    times = 3 if world.events < 1000 else 8
    world.arm("mirrored", times=times, of=round(world.events * lasting(world)))
    serve(world)
    mirrors = world.keep(world.mirror)
    world.publisher(lasting=lasting(world), pause=0.02)
    world.settle()
    mirrored(world)
    assert mirrors.deaths, "no mirror was killed"


def mirrored(world: World, *, exactly: bool = True) -> set[Unit]:
    """Wait until the database has exactly one row per archived unit.

    Args:
        exactly: no unit that was handled has one, as it may where nobody knows if it was.
    """
    left = unhandled(world)
    until(
        lambda: len(world.archive_rows()) >= len(left) and not world.eyes.totals(ARCHIVE)[ARCHIVE],
        DEADLINE,
        "the archive is mirrored",
    )
    found = world.archive_rows()
    assert len(found) == len(set(found)), f"{len(found)} rows of {len(set(found))} units"
    assert left <= set(found), f"{len(left.difference(found))} units have no row"
    assert set(found) == left or not exactly, f"{len(found)} rows of {len(left)} units"
    failures = world.rows("archivedfailure")
    assert failures == len(found), f"{failures} failures of {len(found)} rows"
    return left


def unhandled(world: World) -> set[Unit]:
    ledger = world.ledger.read()
    effects = {(event_id, "effect") for event_id in world.database.effects}
    return ledger.units - effects - {unit for unit in ledger.done if unit[1] == "call"}


# -- replay -------------------------------------------------------------------------------


def replayed(world: World, *, point: str, whom: str) -> None:
    """All that is archived is replayed after a fix, by a process that dies.

    A replay that was published and not noted is published again under the same id: `call` may be
    called twice in it, `once` joins it.
    """
    world.declare()
    worker = world.worker()
    mirror = world.mirror()
    world.publisher(lasting=lasting(world))
    world.settle()
    number = len(mirrored(world))
    (world.service.where / "fixed").touch()
    # So that all of it is still on its way when it is resumed.
    for process in (worker, mirror):
        process.signal(signal.SIGTERM)
        process.wait(DEADLINE)
    times = 2 if world.events < 1000 else 4
    world.environ(TESTPROJECT_LEASE=RESUMED)
    world.arm(point, times=times, of=number)
    kills = replay(world, number)
    assert kills, "no replay was killed"
    world.environ(TESTPROJECT_POINTS="{}")
    if whom == "mirror":
        world.arm(point, times=kills + times, of=number)
    mirrors = world.keep(world.mirror)
    until(lambda: not world.rows("archivedevent", "state = 'queued'"), DEADLINE, "all are resumed")
    assert bool(mirrors.deaths) == (whom == "mirror"), f"{mirrors.deaths} mirrors were killed"
    world.keep(world.worker)
    succeeded(world, number)


def succeeded(world: World, number: int) -> None:
    """Wait until all replays have succeeded; no event is archived twice, and each is handled."""
    until(
        lambda: world.rows("archivedevent", "state = 'succeeded'") == number,
        DEADLINE,
        "all replays succeeded",
    )
    world.settle()
    assert world.rows("archivedevent") == number
    assert not unhandled(world)


def replay(world: World, number: int) -> int:
    """Replay everything, again whenever that was killed; returns how often it was."""
    size = max(10, number // 8)
    kills = 0
    while _replay(world, size) == -signal.SIGKILL:
        kills += 1
    assert not world.rows("archivedevent", "state = 'archived'")
    return kills


def _replay(world: World, size: int) -> int:
    chunks = json.dumps({"archive.replay.CHUNK": size})
    process: Worker = world.command("events_replay", "--all", TESTPROJECT_CONSTANTS=chunks)
    return process.wait(DEADLINE)


for _point, _words in (
    ("claimed", "between claim and publish"),
    ("replayed", "between publish and note"),
):
    row(MIRROR, f"Replays are killed {_words}", name=f"replay-{_point}")(
        partial(replayed, point=_point, whom="replay")
    )
    row(
        MIRROR,
        f"Replays, and the mirrors that resume them, are killed {_words}",
        name=f"resume-{_point}",
    )(partial(replayed, point=_point, whom="mirror"))


# -- the companion ------------------------------------------------------------------------


@row(COMPANION, "Companions are killed while they relay, mirror and run a batch")
def companion_killed(world: World) -> None:
    """All their services die at once; the next companion resumes each of them.

    What was published and not noted is published again, so `call` may run twice.
    """
    times = 2 if world.events < 1000 else 4
    half = world.events // 2
    serve(world)
    world.publisher(half, lasting=lasting(world))
    world.settle()
    number = len(unhandled(world))
    # One that is published twice may fail twice, so none of these ends in the archive.
    leave(world, count=half, lasting=0.0)
    world.arm("relayed", times=times, of=half)
    for point in ("mirrored", "claimed", "replayed"):
        world.arm(point, times=times, of=number)
    world.keep(lambda: world.command("events_companion"))
    relayed(world)
    assert len(mirrored(world)) == number
    (world.service.where / "fixed").touch()
    batch = world.command("events_replay", "--all", "--background", "--comment", "fixed")
    assert not batch.wait(DEADLINE), batch.log
    succeeded(world, number)
    points = {line["point"] for line in world.ledger.read().kills}
    # Relay and mirror work at once: one may kill the companion before the other has said so.
    assert points >= {"claimed", "replayed"}, f"killed at {sorted(points)} only"
    assert points & {"relayed", "mirrored"}, f"killed at {sorted(points)} only"
