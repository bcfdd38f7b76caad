"""Rows: queues that somebody deletes, handlers that a release does not have any more.

What a queue held when it was deleted by hand is gone, and no library can bring it back: these rows
delete queues that are empty, while there are events that need them.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any
from urllib.parse import quote

from tests.acceptance.harness import until

from .rows import row
from .world import (
    ARCHIVE,
    DEADLINE,
    NAME,
    QUEUES,
    World,
)

DELETED = "Queues deleted manually"
RELEASES = "Releases while events are delayed"


def _delete(world: World, *queues: str) -> None:
    for queue in queues:
        world.eyes.http("DELETE", f"/api/queues/{{vhost}}/{quote(queue, safe='')}")


def _delayed(world: World) -> None:
    """Publish events that all fail once; stop the worker when all of them are delayed."""
    # The first failure must not return before the last event has failed.
    delay = 32 + world.events // 20
    world.environ(TESTPROJECT_DELAY=str(delay))
    world.declare()
    world.publisher(passing=1.0, lasting=0.0, size=50)
    until(lambda: world.ledger.read().through, DEADLINE, "everything is published")
    worker = world.worker("prefork", 2)
    units = len(world.ledger.units)
    # One whose copy was made late has no whole delay left, and waits in a shorter one first.
    until(lambda: _waiting(world) == units, delay + 60, "all have failed and wait")
    worker.kill()  # it has no deliveries, and a shutdown is slow


def _waiting(world: World) -> int:
    return sum(world.eyes.totals(f"{NAME}:delay.").values())


@row(DELETED, "A handler's queue, while its events wait in a delay queue")
def handler_queue_deleted(world: World) -> None:
    """RabbitMQ brings them to the archive, as those of a handler that is gone; they are replayed.

    Without workers, and empty: what it held would be gone with it.
    """
    _delayed(world)
    assert not world.eyes.ready(QUEUES[0]), "what has come back would be deleted with the queue"
    world.hit("queue deleted", in_flight=_waiting(world))
    _delete(world, QUEUES[0])
    until(lambda: not _waiting(world), DEADLINE, "they come back")
    assert world.eyes.ready(ARCHIVE), "the archive has those that found no queue"
    world.declare()
    world.keep(lambda: world.worker("prefork", 2))
    _replay(world)
    world.settle()


@row(DELETED, "All handlers' queues, while events are published (UNROUTED: hold)")
def all_queues_deleted(world: World) -> None:
    world.settings(UNROUTED="hold")
    world.declare()
    _delete(world, *QUEUES)
    first = world.publisher()
    until(lambda: world.ledger.read().through, DEADLINE, "everything is committed")
    first.wait()
    world.hit("published to no queue", in_flight=len(world.ledger.accepted))
    world.declare()
    world.keep(lambda: world.worker("prefork", 2))
    world.keep(world.relay)
    world.settle()


@row(DELETED, "The delay queue, while handlers fail")
def delay_queue_deleted(world: World) -> None:
    """Deliveries are held until somebody declares it again."""
    _without(world, f"{NAME}:delay.1s", passing=1.0, lasting=0.0)


@row(DELETED, "The archive's queue, while events are archived")
def archive_queue_deleted(world: World) -> None:
    _without(world, ARCHIVE, passing=0.0, lasting=1.0)


def _without(world: World, queue: str, **shares: Any) -> None:
    world.declare()
    world.keep(lambda: world.worker("prefork", 2))
    until(lambda: all(map(world.eyes.consumers, QUEUES)), 60, "the worker is there")
    _delete(world, queue)
    world.publisher(**shares)
    until(lambda: world.unacked(time.time()) >= 4, 60, "deliveries are held")
    world.hit("queue missing")
    time.sleep(2)
    world.declare()
    world.settle()


def _release(world: World, *, what: str, **settings: object) -> None:
    """The next release, while the last one's events are delayed; what it archives is replayed."""
    _delayed(world)
    world.hit(f"handler {what}", in_flight=_waiting(world))
    world.environ(TESTPROJECT_RELEASE=what)
    world.settings(MANAGEMENT_URL=world.node.management_url, **settings)
    while (done := world.command("events_declare", "--delete-stale")).wait(90):
        # Some have returned: the command names the remedy.
        assert f"events_recover {QUEUES[1]}" in done.log, done.log
        done = world.command("events_recover", QUEUES[1])
        assert done.wait(90) == 0, done.log
    queues = [QUEUES[0]] if what == "removed" else [QUEUES[0], f"{NAME}.testproject.outcome"]
    world.keep(lambda: world.service.worker("prefork", 2, "-Q", ",".join(queues)))
    if what == "renamed":
        until(lambda: not _waiting(world), DEADLINE, "they come back")
        _replay(world)
    world.settle()
    # Only a mirror can identify messages that RabbitMQ dead-lettered to the archive.
    world.stop()
    done = world.command("events_mirror", "--until-empty")
    assert done.wait(90) == 0, done.log


row(RELEASES, "A handler is removed: its events end in the archive", name="handler-removed")(
    partial(_release, what="removed")
)
row(RELEASES, "A handler is renamed: its events are replayed under the new name",
    name="handler-renamed")(
    partial(
        _release, what="renamed",
        RENAMED_HANDLERS={"testproject.effect": "testproject.outcome"},
    )
)  # fmt: skip


def _replay(world: World) -> None:
    """Mirror the archive and replay all of it; what fails again is archived again."""
    done = world.command("events_mirror", "--until-empty")
    assert done.wait(90) == 0, done.log
    world.keep(world.mirror)
    done = world.command("events_replay", "--all")
    assert done.wait(90) == 0, done.log
