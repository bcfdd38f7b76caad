"""What each fault of the schedule does to a running soak; the end of each puts things right."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from broker import BrokerError, Node
from django_amqp_events.message.types import Message
from tests.acceptance.harness import Worker
from tests.faults.brokers import BLOCKED
from tests.faults.clusters import cut_off, down, runs
from tests.faults.databases import locked
from tests.waiting import stopped, until

from . import disks
from .schedule import Step

if TYPE_CHECKING:
    from .soaking import Soak

T = TypeVar("T")
Fault = Callable[["Soak", Step], None]
EVENT: Final = "faults.happened"
FAULTS: Final[dict[str, Fault]] = {}
#: Seconds within which a worker is replaced. In a thread pool, a run may hang for a minute.
REPLACED: Final = 120.0
#: Seconds by which a clock is stepped at most.
MOST: Final = 300


class Missed(Exception):
    """It could not be done now, for instance because the broker is down already."""


def fault(name: str) -> Callable[[Fault], Fault]:
    def declare(run: Fault) -> Fault:
        FAULTS[name] = run
        return run

    return declare


def chosen(things: Sequence[T], step: Step) -> T:
    if not things:
        raise Missed("nobody is there")
    return things[min(int(step.who * len(things)), len(things) - 1)]


def process(soak: Soak, step: Step) -> Worker:
    """One of the processes: workers, mirror, reaper, relay, batch runner, publishers, operators."""
    everything = [*soak.processes, *soak.publishers, *soak.operators]
    alive = [kept.workers[-1] for kept in everything if kept.workers[-1].alive]
    return chosen(alive, step)


@fault("process killed")
def killed(soak: Soak, step: Step) -> None:
    process(soak, step).kill()


@fault("process terminated")
def terminated(soak: Soak, step: Step) -> None:
    process(soak, step).signal(signal.SIGTERM)


@fault("process quit")
def quit_(soak: Soak, step: Step) -> None:
    """A cold shutdown, of workers."""
    process(soak, step).signal(signal.SIGQUIT)


@fault("workers replaced")
def replaced(soak: Soak, step: Step) -> None:
    """One after the other, as a deployment does."""
    with soak.alone("workers"):
        for kept in soak.workers:
            before = kept.workers[-1]
            before.signal(signal.SIGTERM)
            until(lambda: kept.workers[-1] is not before, f"{before.name} is replaced", REPLACED)  # noqa: B023


@fault("process suspended")
def suspended(soak: Soak, step: Step) -> None:
    pid = process(soak, step).pid
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGSTOP)
        try:
            time.sleep(step.seconds)
        finally:
            os.killpg(pid, signal.SIGCONT)


@fault("pool process killed")
def pool_process(soak: Soak, step: Step) -> None:
    pools = [kept.workers[-1] for kept in soak.processes if "prefork" in kept.workers[-1].name]
    children: list[int] = []
    for worker in pools:
        with suppress(OSError):
            children += worker.children()
    with suppress(ProcessLookupError):
        os.kill(chosen(children, step), signal.SIGKILL)


@fault("connections closed")
def closed(soak: Soak, step: Step) -> None:
    """Of about half of the processes, by the broker."""
    try:
        connections = soak.world.eyes.http("GET", "/api/vhosts/{vhost}/connections")
        for number, connection in enumerate(connections):
            if (number + int(step.who * 1000)) % 2:
                with suppress(BrokerError):
                    soak.world.eyes.cut(connection)
    except OSError as exc:
        raise Missed(str(exc)) from exc


@fault("connections half-open")
def half_open(soak: Soak, step: Step) -> None:
    """Of those behind the proxy: nothing comes through, and then only on new connections."""
    with soak.alone("proxy"):
        soak.proxy.flowing.clear()
        time.sleep(step.seconds)
        soak.proxy.forget()


def node_of(soak: Soak, step: Step) -> Node:
    """A node other than the first one, which the soak itself asks, if there are others."""
    return chosen(soak.nodes[1:] or soak.nodes, step)


@fault("broker killed")
def broker_killed(soak: Soak, step: Step) -> None:
    with soak.alone("broker"), down(node_of(soak, step)):
        time.sleep(step.seconds)


@fault("broker suspended")
def broker_suspended(soak: Soak, step: Step) -> None:
    with soak.alone("broker"):
        pid = node_of(soak, step).pid
        assert pid is not None
        with stopped(pid):
            time.sleep(step.seconds)


@fault("node cut off")
def node_cut_off(soak: Soak, step: Step) -> None:
    """From the other nodes of a cluster, which pauses it."""
    with soak.alone("broker"):
        if len(soak.nodes) == 1:
            raise Missed("there is one node")
        with cut_off(node_of(soak, step), soak.nodes):
            time.sleep(step.seconds)


@fault("memory alarm")
@fault("disk alarm")
def alarm(soak: Soak, step: Step) -> None:
    """RabbitMQ blocks publishers."""
    begin, end = BLOCKED[step.fault.removesuffix(" alarm")]
    with soak.alone("broker"):
        try:
            soak.node.ctl(*begin)
            time.sleep(step.seconds)
        finally:
            soak.node.ctl(*end)


@fault("database killed")
def database_killed(soak: Soak, step: Step) -> None:
    """Or, where it is a file, locked by somebody."""
    server = soak.world.database.server
    with soak.alone("database"):
        if server is None:
            with locked(soak.world.database):
                time.sleep(step.seconds)
            return
        server.kill()
        time.sleep(step.seconds)
        server.start_again()


@fault("disk full")
def disk_full(soak: Soak, step: Step) -> None:
    """Below the database, which is started again if need be.

    Not below RabbitMQ 3.10: its quorum queues stay down until it is started again, and may stay
    down then too, since it cannot read their logs.
    """
    grounds = soak.world.grounds
    if grounds.database_disk == grounds.directory:
        raise Missed("the database has no disk of its own")
    with soak.alone("database"):
        with disks.filled(grounds.database_disk):
            time.sleep(step.seconds)
        if grounds.server is not None:
            grounds.server.start_again()


@fault("clock stepped")
def clock_stepped(soak: Soak, step: Step) -> None:
    """Forwards or backwards, of one process and its children, and back."""
    seconds = random.Random(f"{soak.seed} {step.number}").uniform(-MOST, MOST)
    file = chosen(soak.clocks, step)
    step_clock(file, seconds)
    time.sleep(step.seconds)
    step_clock(file, 0)


def step_clock(file: Path, seconds: float) -> None:
    """Set the clock of the processes that read a file, relative to the real one."""
    new = file.with_suffix(".new")
    new.write_text(f"{seconds:.0f}")
    new.replace(file)


@fault("topology declared")
def declared(soak: Soak, step: Step) -> None:
    soak.command("events_declare")


@fault("all replayed")
def replayed(soak: Soak, step: Step) -> None:
    soak.command("events_replay", "--all")


@fault("batch replayed")
def batch(soak: Soak, step: Step) -> None:
    soak.command("events_replay", "--all", "--background", "--comment", "soak")


@fault("fix released")
def fix(soak: Soak, step: Step) -> None:
    """Events that fail for good succeed for a while."""
    soak.fixed.touch()
    time.sleep(step.seconds)
    if not soak.over.is_set():
        soak.fixed.unlink(missing_ok=True)


@fault("archive pruned")
def pruned(soak: Soak, step: Step) -> None:
    soak.command("events_prune")


@fault("malformed message")
def malformed(soak: Soak, step: Step) -> None:
    """It goes to each handler and is archived for each."""
    good = soak.world.eyes.message(EVENT, {})
    message = Message(
        exchange="events", routing_key=EVENT, body=b"{", name=EVENT, headers=good.headers,
        properties=good.properties, event_id=good.event_id,
    )  # fmt: skip
    with soak.sending:
        try:
            soak.world.eyes.send(message)
        except Exception as exc:  # the broker is away: nobody knows whether it has the message
            soak.world.eyes.close()
            raise Missed(str(exc)) from exc
        soak.malformed.add(message.event_id)


def repair(soak: Soak) -> None:
    """Undo what is left of the faults: everything runs, and nothing blocks.

    Raises:
        BrokerError, NotInTime: something does not.
    """
    soak.fixed.touch()
    for kept in [*soak.processes, *soak.publishers, *soak.operators]:
        with suppress(ProcessLookupError):
            os.killpg(kept.workers[-1].pid, signal.SIGCONT)
    soak.proxy.flowing.set()
    soak.world.grounds.ready()
    for node in soak.nodes:
        if not node.alive:
            node.start_again()
        until(partial(_runs, soak, node), f"{node.nodename} runs", 120)
    until(partial(_calm, soak.node), "no alarm is left", 240)


def _runs(soak: Soak, node: Node) -> bool:
    with suppress(BrokerError, OSError):  # the first node is paused too
        return runs(soak.world, node)
    return False


def _calm(node: Node) -> bool:
    with suppress(BrokerError, OSError):  # rabbitmqctl takes a minute if the machine is busy
        for _, end in BLOCKED.values():
            node.ctl(*end)
        return not node.alarm()
    return False
