"""The same rows for celery-amqp-events 0.1.0, where it can run at all.

Its service (tests/faults/peer/) has the event, the shares of failures, the policy, the ledger and
the points of ours, and one handler: `call`. It is set up as its README asks for, with the same
options of Celery as ours, and its queues are declared before the first event is published. Who is
killed is started again, as ours.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote
from uuid import uuid4

from tests.acceptance import peering
from tests.acceptance.harness import (
    Eyes,
    Service,
    Worker,
    until,
)
from tests.service_database import Database

from . import all_rows
from .brokers import (
    SPREAD,
    Scene,
    Scenes,
    under_faults,
)
from .counts import (
    Counts,
    Ledger,
    Unit,
    count,
)
from .publishers import publisher_immediate
from .rows import Row
from .workers import MOMENTS, POOLS, stopped
from .world import (
    DEADLINE,
    NAME,
    Grounds,
    World,
)

PACKAGE = "celery-amqp-events"
PEER = Path(__file__).resolve().parent / "peer"
QUEUE = f"{NAME}.faults.happened"
ARCHIVED = f"{NAME}:archived"
#: Holds a retry for a second.
DELAY = f"{NAME}:retry"
#: Seconds in which its queues are empty at each look: nothing comes any more.
QUIET = 3.0
#: Seconds in which its processes come to an end of their work, if they ever do.
PATIENCE = 75.0
#: As its README has it: seven days, and so many messages.
KEPT = {"x-message-ttl": 7 * 24 * 3600 * 1000, "x-max-length": 10000}


class PeerLedger(Ledger):
    @property
    def units(self) -> set[Unit]:
        return {(event_id, "call") for event_id in self.accepted}


class PeerService(Service):
    def env(self) -> dict[str, str]:
        return peering.environ(
            PEER,
            TESTPROJECT_DIR=str(self.where),
            TESTPROJECT_BROKER=self.url,
            TESTPROJECT_CELERY=json.dumps(dict(self.celery)),
            **self.environ,
        )

    def worker(self, pool: str = "prefork", concurrency: int = 2, *arguments: str) -> Worker:
        self._count += 1
        name = f"{self.name}-{pool}-{self._count}"
        command = peering.worker(
            "faulty", "--pool", pool, "--concurrency", str(concurrency), "--hostname",
            f"{name}@localhost", *arguments,
        )  # fmt: skip
        return Worker.start(command, env=self.env(), where=self.where, name=name)

    def declare(self) -> None:
        done = subprocess.run(
            [PeerWorld.interpreter, "-m", "faulty"],
            env=self.env(), cwd=self.where, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


class PeerWorld(World):
    """A world in which celery-amqp-events is in our place."""

    interpreter: ClassVar[str] = sys.executable
    publishing: ClassVar[str] = "publishing"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ledger = PeerLedger(self.service.where)

    def declare(self) -> None:
        """Its queues, and its archive as it would declare it, but for the lazy mode."""
        channel = self.eyes.channel()
        channel.exchange_declare(ARCHIVED, "fanout", durable=True, auto_delete=False)
        channel.queue_declare(ARCHIVED, durable=True, auto_delete=False, arguments=KEPT)
        channel.queue_bind(ARCHIVED, ARCHIVED)
        channel.close()
        super().declare()

    def worker(self, pool: str = "prefork", concurrency: int = 2, *arguments: str) -> Worker:
        worker = self.service.worker(pool, concurrency, *arguments)
        self.started.append(worker)
        return worker

    def archived_number(self) -> int:
        with suppress(Exception):
            return self.eyes.ready(ARCHIVED)
        return 0

    def waiting_number(self) -> int:
        try:
            totals = self.eyes.totals(NAME)
        except Exception:  # noqa: BLE001 - it may be away just now
            return 1
        return sum(number for queue, number in totals.items() if queue != ARCHIVED)

    def settle(self, seconds: float = PATIENCE, *, publishers: int | None = None) -> None:
        """Wait until the publishers are through and its queues are empty, and stay so."""
        wanted = self.publishers if publishers is None else publishers
        until(lambda: self.ledger.read().through >= wanted, seconds, "everything is published")
        deadline = time.monotonic() + seconds
        busy = time.monotonic()
        while time.monotonic() < deadline:
            if self.waiting_number():
                busy = time.monotonic()
            elif time.monotonic() > busy + QUIET:
                break
            time.sleep(0.2)

    def count(self) -> Counts:
        self.stop()
        with suppress(AssertionError):
            until(self._back, 30, "what the dead had in hand is back in its queues")
        waiting: set[Unit] = set()
        # First those that messages leave by themselves, at the end those that they go to.
        queues = sorted(self.eyes.totals(NAME), key=lambda queue: not queue.startswith(DELAY))
        for queue in queues:
            if queue != ARCHIVED:
                waiting |= self._events(queue)
        return count(
            self.ledger.read(),
            effects=(),
            archived=self._events(ARCHIVED),
            waiting=waiting,
        )

    def _events(self, queue: str) -> set[Unit]:
        if self.eyes.declared(queue) is None:
            return set()
        bodies = (json.loads(message.body) for message in self.eyes.take(queue))
        return {(kwargs["event"], "call") for _, kwargs, _ in bodies}


@contextmanager
def peer_world(
    grounds: Grounds, *, name: str, events: int, seed: str, **_: Any
) -> Iterator[PeerWorld]:
    """A world for one row."""
    PeerWorld.interpreter = str(peering.interpreter())
    grounds.ready()
    node = grounds.node
    vhost = f"peer-{name}-{uuid4().hex[:8]}"
    node.add_vhost(vhost)
    eyes = Eyes(node, vhost)
    here = PeerWorld(
        grounds=grounds,
        node=node,
        events=events,
        seed=seed,
        eyes=eyes,
        service=PeerService(
            url=eyes.url,
            where=Path(tempfile.mkdtemp(prefix=f"peer-{name}-", dir=grounds.directory)),
            name=NAME,
            # As ours.
            celery={
                "worker_lost_wait": 1,
                "worker_cancel_long_running_tasks_on_connection_loss": True,
            },
        ),
        database=Database({}),
    )
    try:
        yield here
    finally:
        here.close()
        with suppress(Exception):
            node.delete_vhost(vhost)


# -- rows -----------------------------------------------------------------------------------

PEERS: dict[str, Row] = {}


def same(name: str, run: Callable[[World], None], title: str = "", share: float = 1.0) -> None:
    """Run a row of ours for the peer."""
    ours = all_rows()[name]
    PEERS[name] = replace(
        ours, run=run, share=share, title=title or ours.title, module=__name__.rpartition(".")[2]
    )


#: Of the events of a row in which all are archived. Each that is gives the next one of the same
#: process another attempt: `Task.retry` sets `override_max_retries` and never resets it.
FEW = 0.2


def killed(
    world: World,
    *,
    point: str,
    whom: str,
    pool: str = "prefork",
    times: int = 0,
    of: int = 0,
    **plans: Any,
) -> None:
    world.arm(point, times=times or max(2, min(10, world.events // 20)), of=of, whom=whom)
    world.declare()
    world.keep(lambda: world.worker(pool, POOLS[pool]))
    # Slow enough for the broker's statistics to show unacknowledged events.
    world.publisher(work=0.05, **plans)
    world.settle()


for _moment in MOMENTS:
    same(f"child-{_moment}", partial(killed, point=_moment, whom="self"))
    for _pool in POOLS:
        same(
            f"worker-{_moment}-{_pool}",
            partial(killed, point=_moment, whom="worker", pool=_pool),
        )
for _copy, _point in (("delay", "retry"), ("archive", "archived")):
    # The first that have such a copy are hit.
    same(
        f"worker-{_copy}-confirmed",
        partial(killed, point=f"{_point}-confirmed", whom="worker", times=3, of=1, lasting=0.2),
    )
for _how in ("warm", "soft", "cold"):
    for _pool in POOLS:
        # Solo takes its time to stop, and has to have work left then.
        _pause = 0.1 if _pool == "solo" else 0.02
        same(f"{_how}-{_pool}", partial(stopped, pool=_pool, how=_how, pause=_pause))


def _keep(world: World, url: str) -> None:
    """Start a worker with the broker at *url*, and restart it whenever it exits."""

    def start() -> Worker:
        with world.behind(url):
            return world.service.worker()

    world.keep(start)


def _publisher(world: World, **options: Any) -> Worker:
    return world.publisher(pause=SPREAD / world.events, **options)


def publishing(world: World, url: str) -> Scene:
    """A publisher finds the broker at *url*."""
    _keep(world, world.eyes.url)
    with world.behind(url):
        publisher = _publisher(world, work=0.01)

    def flight() -> int:
        ledger = world.ledger.read()
        return len(ledger.intended - ledger.accepted)

    def moved() -> int:
        return len({event_id for event_id, *_ in world.ledger.read().started})

    return Scene(flight, moved, flight, publisher)


def handling(world: World, url: str, **plans: Any) -> Scene:
    """A worker finds the broker at *url*."""
    _keep(world, url)
    publisher = _publisher(world, work=min(0.05, 2 * SPREAD / world.events), **plans)
    return Scene(
        lambda: world.ledger.read().in_hand,
        world.runs,
        lambda: world.unacked_in(QUEUE),
        publisher,
    )


def delaying(world: World, url: str) -> Scene:
    """All events are in a delay queue at the same time, or on their way there and back."""
    publisher = world.publisher(passing=1.0, lasting=0.0)
    until(lambda: world.ledger.read().through, 60, "everything is published")
    _keep(world, url)
    delayed = min(world.events // 2, 50)
    return Scene(
        lambda: world.eyes.ready(DELAY) >= delayed,
        world.runs,
        lambda: world.eyes.ready(DELAY) + world.unacked_in(QUEUE),
        publisher,
    )


def archiving(world: World, url: str) -> Scene:
    """A worker that finds the broker at *url* archives everything."""
    scene = handling(world, url, passing=0.0, lasting=1.0)
    return replace(scene, ready=lambda: world.eyes.ready(ARCHIVED) and scene.ready())


SCENES: Scenes = {
    "immediate": ("publishing", publishing, 1.0),
    "handling": ("handling", handling, 1.0),
    "delay": ("everything is delayed", delaying, 1.0),
    "archive": ("archiving", archiving, FEW),
}
ALARMED: Scenes = {
    "immediate": SCENES["immediate"],
    "retry": ("handling with retries", partial(handling, passing=1.0), 1.0),
    "archive": SCENES["archive"],
}
for _, _title, _name, _share, _run in under_faults(SCENES, ALARMED, (publishing, handling)):
    same(_name, _run, _title, _share)
same(
    "publisher-immediate",
    publisher_immediate,
    "Publishers are killed while they wait for a confirm",
)


def _delayed(world: World) -> str:
    """Publish events that all fail once; stop the worker; return the delay queue they wait in."""
    # The first failure must not return before the last event has failed; delays are powers of two.
    exponent = 4 if world.events <= 50 else 5
    world.environ(TESTPROJECT_DELAY=str(2**exponent))
    world.declare()
    world.publisher(passing=1.0, lasting=0.0)
    until(lambda: world.ledger.read().through, DEADLINE, "everything is published")
    worker = world.worker()
    held = f"{DELAY}.{exponent}"
    units = len(world.ledger.units)
    until(lambda: world.eyes.ready(held) == units, 2**exponent + 60, "all have failed and wait")
    until(lambda: not world.eyes.totals(QUEUE)[QUEUE], 60, "and are acked")
    worker.kill()
    return held


def queue_deleted(world: World) -> None:
    held = _delayed(world)
    assert not world.eyes.ready(QUEUE), "what has come back would be deleted with the queue"
    world.hit("queue deleted", in_flight=world.eyes.ready(held))
    world.eyes.http("DELETE", f"/api/queues/{{vhost}}/{quote(QUEUE, safe='')}")
    until(lambda: not world.eyes.ready(held), DEADLINE, "they come back")
    world.declare()
    world.keep(world.worker)
    world.settle()


def copy_queue_deleted(world: World, *, queue: str, **shares: Any) -> None:
    """Delete a delay queue or the archive for two seconds and declare it again."""
    world.declare()
    world.keep(world.worker)
    until(lambda: world.eyes.consumers(QUEUE), 60, "the worker is there")
    # An app of the package declares these queues when it is first used, a publisher's too.
    world.publisher(work=0.02, hold=True, **shares)
    until((world.service.where / "holding").exists, 60, "the publisher is there")
    world.eyes.http("DELETE", f"/api/queues/{{vhost}}/{quote(queue, safe='')}")
    (world.service.where / "go").touch()
    until(lambda: world.unacked(time.time()), 60, "deliveries are in hand")
    world.hit("queue missing")
    time.sleep(2)
    world.declare()
    world.settle()


def handler_removed(world: World) -> None:
    held = _delayed(world)
    world.hit("handler removed", in_flight=world.eyes.ready(held))
    world.environ(TESTPROJECT_RELEASE="removed")
    world.keep(world.worker)
    until(lambda: not world.eyes.ready(held), DEADLINE, "they come back")


same("handler-queue-deleted", queue_deleted)
same(
    "delay-queue-deleted",
    partial(copy_queue_deleted, queue=DELAY, passing=1.0, lasting=0.0),
)
same(
    "archive-queue-deleted",
    partial(copy_queue_deleted, queue=ARCHIVED, passing=0.0, lasting=1.0),
    share=FEW,
)
same(
    "handler-removed",
    handler_removed,
    "A handler is removed: its events stay in a queue without a consumer",
)


# -- the page -------------------------------------------------------------------------

INTRODUCTION = """\
It runs in a virtual environment of its own (`make faults ARGS="--peer --events 200"`), configured
as its README asks, with the same Celery options as ours. Its queues are declared before the first
event, a worker that exits is restarted, and a failed publish is repeated. Each event has one
handler with two retries, one second apart. A row is held if nothing was lost and nothing waited 75
s after the last event was published.

Its publishes have no timeout, so on a half-open connection a publisher waits, and so does a pool
process that publishes a retry. Messages for a delay queue or the archive, and messages that return
from a delay queue, are lost without an error if their queue is missing. A removed handler leaves a
queue that is still bound and has no consumer. These rows do not hold:
"""

#: Rows that do not apply to the peer, by the feature it lacks.
CANNOT = {
    "outbox": (
        "broker-killed-publish", "cut-publish", "half-open-publish", "memory-publish",
        "disk-publish", "publisher-committed", "relay-relayed", "relay-of-two",
        "database-outbox", "database-relay", "database-failover",
    ),
    "mirror": (
        "broker-killed-mirror", "cut-mirror", "half-open-mirror", "mirror-mirrored",
        "database-mirror",
    ),
    "replay": (
        "replay-claimed", "resume-claimed", "replay-replayed", "resume-replayed",
        "handler-renamed",
    ),
    "`once`": ("database-once",),
    "result backend (its README asks to leave it empty)": ("database-results",),
    "check that an event reached a queue": ("all-queues-deleted",),
    "isolation of events that kill or outlast their worker": ("consumer-timeout",),
    "companion": ("companion-killed",),
    "replicated queues": ("cluster-leader-killed", "cluster-leader-cut-off"),
}  # fmt: skip


def versions() -> dict[str, str]:
    """Return the versions that the peer ran with."""
    names = (PACKAGE, "celery", "kombu", "amqp")
    return {name: peering.version(name) for name in names}
