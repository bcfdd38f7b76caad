"""Rows: a broker that dies, a network that is cut or silent, alarms, and the consumer timeout."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from broker import BrokerError
from tests.acceptance.harness import Worker, until
from tests.integration.wire import Proxy
from tests.waiting import NotInTime, stopped

from .rows import row
from .world import (
    ARCHIVE,
    NAME,
    QUEUES,
    World,
)

KILLS = "The broker is killed and started again"
NETWORK = "The network between a process and the broker"
ALARMS = "Alarms of the broker"
TIMEOUT = "The broker's consumer timeout"
DELAY = f"{NAME}:delay.1s"
#: The command that raises each alarm, and the one that ends it.
BLOCKED = {
    "memory": (("set_vm_memory_high_watermark", "absolute", "1"),
               ("set_vm_memory_high_watermark", "0.8")),
    "disk": (("set_disk_free_limit", "1000000GB"), ("set_disk_free_limit", "64MB")),
}  # fmt: skip
#: Seconds between heartbeats, and for a confirm, where a connection goes half-open.
HEARTBEAT, CONFIRM = 2, 3
#: As much is in a worker's hands: what is beyond came after a fault.
HAND = 10
#: Seconds that publishing takes at least: the faults come in between.
SPREAD = 6.0
#: From so many events on, a fault comes twice, and when something is in flight.
MANY = 1_000


@dataclass(frozen=True, slots=True)
class Scene:
    """What goes on when a fault comes.

    Attributes:
        ready: whether something can be hit.
        moved: how far it has come.
        flight: what is begun and not settled at this moment.
        subject: the process that a fault is about.
        quick: it settles what it has in hand in no time, so it is stopped while the broker dies.
    """

    ready: Callable[[], object]
    moved: Callable[[], int]
    flight: Callable[[], int]
    subject: Worker
    quick: bool = False


# -- scenes ---------------------------------------------------------------------------------


def publishing(world: World, url: str, *, mode: str = "outbox") -> Scene:
    """A publisher and a relay find the broker at *url*."""
    # It must not be ready after the publisher is through.
    world.worker().wait_ready(90)
    world.reaper()
    with world.behind(url):
        if mode == "outbox":
            world.relay()
        publisher = _publisher(world, mode=mode, work=0.01)

    def flight() -> int:
        ledger = world.ledger.read()
        pending = len(ledger.intended - ledger.accepted)
        found = pending + (world.rows("outboxevent") if mode == "outbox" else 0)
        if not found and not world.hits and ledger.through:
            raise NotInTime("everything was published before the fault came")
        # Few are seldom caught between COMMIT and confirm; the fault meets those that follow.
        return found or (world.events - len(ledger.accepted) if world.events < MANY else 0)

    def moved() -> int:
        return len({event_id for event_id, *_ in world.ledger.read().started})

    # Started events settle quickly; it is enough that more will follow.
    return Scene(lambda: not world.ledger.read().through, moved, flight, publisher)


def handling(world: World, url: str, **plans: float) -> Scene:
    """A worker finds the broker at *url*."""
    with world.behind(url):
        worker = world.worker()
    world.relay()
    world.reaper()
    _publisher(world, work=min(0.05, 2 * SPREAD / world.events), **plans)
    return Scene(
        lambda: world.ledger.read().in_hand,
        world.runs,
        lambda: world.unacked_in(*QUEUES),
        worker,
    )


def delaying(world: World, url: str) -> Scene:
    """All events are in a delay queue at the same time, or on their way there and back."""
    world.relay()
    world.reaper()
    world.publisher(passing=1.0, lasting=0.0)
    until(lambda: world.ledger.read().through, 60, "everything is published")
    with world.behind(url):
        worker = world.worker()
    delayed = min(world.events // 2, 3)
    return Scene(
        lambda: world.eyes.ready(DELAY) >= delayed,
        world.runs,
        lambda: world.eyes.ready(DELAY) + world.unacked_in(*QUEUES),
        worker,
    )


def archiving(world: World, url: str) -> Scene:
    """A worker that finds the broker at *url* archives everything."""
    scene = handling(world, url, passing=0.0, lasting=1.0)
    return replace(scene, ready=lambda: world.eyes.ready(ARCHIVE) and scene.ready())


def mirroring(world: World, url: str) -> Scene:
    """A mirror finds the broker at *url*."""
    world.worker()
    world.relay()
    world.reaper()
    with world.behind(url):
        mirror = world.mirror()
    _publisher(world, passing=0.0, lasting=1.0)

    def mirrored() -> int:
        return world.rows("archivedevent")

    return Scene(mirrored, mirrored, lambda: world.unacked_in(ARCHIVE), mirror, quick=True)


def _looks(world: World, scene: Scene, beyond: int, *, first: bool) -> str:
    """Say whether a scene ``goes on``, or is ``through`` and was hit before; empty if neither."""
    if scene.moved() > beyond and scene.ready():
        return "goes on"
    return "through" if not first and world.ledger.read().through else ""


def _flight(world: World, scene: Scene, number: int) -> int:
    """Return what is in flight; -1 if a later fault comes behind everything."""
    return scene.flight() or (-1 if number > 1 and world.ledger.read().through else 0)


def _publisher(world: World, **options: Any) -> Worker:
    """Publish so slowly that the faults come in between, whatever the machine is busy with."""
    size = 1 if options.get("mode") == "immediate" else max(2, world.events // 200)
    return world.publisher(size=size, pause=SPREAD * size / world.events, **options)


# -- what comes -----------------------------------------------------------------------------

Fault = Callable[[World, Scene, Proxy], AbstractContextManager[None]]


@contextmanager
def killed(world: World, scene: Scene, proxy: Proxy) -> Iterator[None]:
    node = world.grounds.node
    with stopped(scene.subject.pid) if scene.quick else nullcontext():
        yield
        node.kill()
    time.sleep(1)
    node.start_again()


@contextmanager
def cut(world: World, scene: Scene, proxy: Proxy) -> Iterator[None]:
    """By the network the first time, by the broker the next."""
    links = [link for link in proxy.links if not link.closed]
    ports = {link.server.getsockname()[1] for link in links}
    proxy.flowing.clear()
    yield
    by_broker = len(world.hits) % 2 == 0
    for connection in world.eyes.connections() if by_broker else ():
        if connection.get("peer_port") in ports:
            # The management API shows some that have just ended.
            with suppress(BrokerError):
                world.eyes.cut(connection)
                ports.discard(connection["peer_port"])
    for link in links:
        if link.server.getsockname()[1] in ports:
            link.close()
    proxy.flowing.set()


@contextmanager
def half_open(world: World, scene: Scene, proxy: Proxy) -> Iterator[None]:
    """Nothing comes through for a while, and then only on new connections."""
    proxy.flowing.clear()
    yield
    time.sleep(2)
    proxy.forget()


@contextmanager
def alarm(world: World, scene: Scene, proxy: Proxy, *, kind: str) -> Iterator[None]:
    """The broker blocks publishers for some seconds."""
    begin, end = BLOCKED[kind]
    try:
        # It would be through before a command line has done its work.
        with stopped(scene.subject.pid):
            world.grounds.node.ctl(*begin)
        yield
        time.sleep(3)
    finally:
        world.grounds.node.ctl(*end)


def struck(
    world: World,
    *,
    scene: Callable[[World, str], Scene],
    fault: Fault,
    what: str,
    times: int = 1,
    direct: bool = False,
) -> None:
    """Let a fault come while something goes on; where that is publishing or handling, twice as
    often among many events.

    Nobody starts a process again that ends because of it. Calls are doubled where one had come to
    its end and the ack did not reach the broker any more, or an event was published again whose
    confirm did not come.

    Args:
        direct: the processes find the broker where it is, not behind a proxy.
    """
    if fault is half_open:
        world.settings(CONFIRM_TIMEOUT=CONFIRM)
        world.service.celery = {**world.service.celery, "broker_heartbeat": HEARTBEAT}
        world.environ(TESTPROJECT_HEARTBEAT=str(HEARTBEAT))
    world.declare()
    proxy = world.proxy()
    here = scene(world, world.eyes.url if direct else proxy.url)
    times *= 2 if world.events >= MANY and scene in ONGOING else 1
    moved = -HAND
    for number in range(1, times + 1):
        accepted = world.events * number // (times + 1)
        until(lambda: len(world.ledger.read().accepted) >= accepted, 120, f"{accepted} accepted")  # noqa: B023
        found = until(
            partial(_looks, world, here, moved + HAND, first=number == 1), 60, "it goes on"
        )
        if found == "through":
            break  # few events, and a slow machine: it has been hit before
        node = world.grounds.node
        pid = node.pid if fault is killed else None
        with fault(world, here, proxy):
            flight = until(partial(_flight, world, here, number), 60, "something is in flight")
            deadly = signal.SIGKILL if fault is killed else None
            if flight > 0:
                world.hit(what, None, deadly, in_flight=flight, pid=pid)
        moved = here.moved()
        if fault is killed:
            # Its connection is closed too.
            world.eyes.close()
    world.settle()
    if scene is mirroring:
        until(lambda: not world.eyes.totals(ARCHIVE)[ARCHIVE], 60, "everything is mirrored")
    ended = [each.name for each in world.started if not each.alive and each.name != "publisher"]
    assert not ended, f"ended by themselves: {ended}"


immediately = partial(publishing, mode="immediate")
#: These last long enough to be hit twice; events in delay queues exist once.
ONGOING = (publishing, immediately, handling)
#: What is done while a fault occurs: its title, how to begin it, and the share of the events: half
#: of them where each is handled several times, or mirrored too.
Scenes = dict[str, tuple[str, Callable[[World, str], Scene], float]]
SCENES: Scenes = {
    "publish": ("publishing, with the outbox", publishing, 1.0),
    "immediate": ("publishing, with immediate", immediately, 1.0),
    "handling": ("handling", handling, 1.0),
    "delay": ("everything is delayed", delaying, 0.5),
    "archive": ("archiving", archiving, 0.5),
    "mirror": ("mirroring", mirroring, 0.5),
}
ALARMED: Scenes = {
    **{name: SCENES[name] for name in ("publish", "immediate")},
    "retry": ("handling with retries", partial(handling, passing=1.0), 0.5),
    "archive": SCENES["archive"],
}
for _name, (_words, _scene, _share) in SCENES.items():
    _run = partial(struck, scene=_scene)
    row(KILLS, f"While {_words}", name=f"broker-killed-{_name}", share=_share)(
        partial(_run, fault=killed, what="broker killed", direct=True)
    )
    row(NETWORK, f"Connections are cut while {_words}", name=f"cut-{_name}", share=_share)(
        partial(_run, fault=cut, what="connections cut", times=2 if _scene in ONGOING else 1)
    )
    row(NETWORK, f"Connections go half-open while {_words}", name=f"half-open-{_name}",
        share=_share)(partial(_run, fault=half_open, what="packets dropped"))  # fmt: skip
for _kind in ("memory", "disk"):
    for _name, (_words, _scene, _share) in ALARMED.items():
        row(ALARMS, f"{_kind.capitalize()} alarm while {_words}", name=f"{_kind}-{_name}",
            share=_share)(
            partial(struck, scene=_scene, fault=partial(alarm, kind=_kind), what=f"{_kind} alarm",
                    direct=True)
        )  # fmt: skip


# -- the consumer timeout -------------------------------------------------------------------

#: Who looks at the timeout is the channel up to RabbitMQ 4.2, and then the queue.
LIMITS = {"consumer_timeout": 2000, "channel_tick_interval": 500, "quorum_tick_interval": 500}


@contextmanager
def limits(world: World) -> Iterator[None]:
    """Let the broker take a delivery back that has no answer after two seconds."""
    ctl = world.grounds.node.ctl
    before = {}
    for key in LIMITS:
        found = re.fullmatch(
            r"{ok,\s*(.*)}", ctl("eval", f"application:get_env(rabbit, {key}).").strip()
        )
        before[key] = found.group(1) if found else ""
    settings = [f"application:set_env(rabbit, {key}, {value})" for key, value in LIMITS.items()]
    try:
        ctl("eval", ", ".join(settings) + ".")
        yield
    finally:
        back = [
            f"application:set_env(rabbit, {key}, {value})"
            if value
            else f"application:unset_env(rabbit, {key})"
            for key, value in before.items()
        ]
        ctl("eval", ", ".join(back) + ".")


@row(TIMEOUT, "Handlers outlast it, among healthy neighbours", name="consumer-timeout")
def outlasted(world: World) -> None:
    """Slow events are isolated with a time limit and archived; the rest is handled."""
    with limits(world):
        world.declare()
        worker = world.worker("prefork", 4)
        world.command("events_reaper", "--time-limit", "2")
        world.relay()
        # Each has two handlers; all of them must fit into the worker's processes.
        slow = max(1, min(2, world.events // 500))
        world.publisher(slow, passing=0.0, lasting=0.0, work=60.0)
        until(lambda: world.ledger.read().in_hand >= 2 * slow, 60, "the slow ones have begun")
        _publisher(world, work=0.01)
        flight = until(lambda: world.unacked_in(*QUEUES), 20, "something is in flight")
        world.hit("consumer timeout", worker, in_flight=flight)
        until(lambda: re.search(r"delivery acknowledgement.*timed out|cancelled the consumer",
                                worker.log), 30, "the broker takes deliveries back")  # fmt: skip
        world.settle()
