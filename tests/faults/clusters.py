"""Rows: a cluster of three nodes that loses one of them."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from broker import Node
from tests.acceptance.harness import until

from .rows import row
from .world import QUEUES, World

CLUSTER = "A cluster of three nodes"


def loses_one(world: World, *, cut: bool) -> None:
    """The leader of the handlers' queues goes for some seconds while publisher and worker work."""
    _, leader, _ = nodes = world.grounds.cluster()
    with world.behind(leader.amqp_url(world.eyes.vhost)):
        world.declare()
    until(lambda: _leaders(world) == {leader.nodename}, 20, "the queues are led by one node")
    # Each connection finds another node when its own is down.
    until(lambda: all(_known(world, node) for node in nodes), 30, "all nodes know the vhost")
    world.keep(lambda: world.worker("prefork", 2))
    world.keep(world.relay)
    world.keep(world.reaper)
    world.publisher(pause=0.05, work=0.02)
    until(lambda: world.unacked(time.time()), 60, "deliveries are in hand")
    what, deadly = ("leader cut off", None) if cut else ("leader killed", signal.SIGKILL)
    world.hit(what, None, deadly, pid=leader.pid)
    with cut_off(leader, nodes) if cut else down(leader):
        until(lambda: leader.nodename not in _leaders(world), 60, "others lead")
        time.sleep(3)
    until(lambda: runs(world, leader), 60, "it is back")
    world.settle()


row(CLUSTER, "The queues' leader is killed under load, and started again", cluster=True,
    name="cluster-leader-killed")(partial(loses_one, cut=False))  # fmt: skip
row(CLUSTER, "The queues' leader is cut off from the two others and reconnected", cluster=True,
    name="cluster-leader-cut-off")(partial(loses_one, cut=True))  # fmt: skip


def _leaders(world: World) -> set[str]:
    return {world.eyes.queue(queue).get("leader", "") for queue in QUEUES}


def _known(world: World, node: Node) -> bool:
    found = node.http("GET", "/api/vhosts")
    return any(vhost["name"] == world.eyes.vhost for vhost in found)


def runs(world: World, node: Node) -> bool:
    found = world.node.http("GET", "/api/nodes")
    return any(each["name"] == node.nodename and each["running"] for each in found)


@contextmanager
def down(node: Node) -> Iterator[None]:
    """A node that is killed, and started again in the end."""
    node.kill()
    try:
        yield
    finally:
        node.start_again()


@contextmanager
def cut_off(node: Node, nodes: Sequence[Node]) -> Iterator[None]:
    """A node of a cluster without links to the other *nodes*: the nodes' cookies differ.

    The links end one after another. A node that has lost its link asks the others. If one of them
    still has a link to the node that is cut off, that is a partial partition, and the node that
    asked pauses too, until the whole cluster is back. So none asks before all links are gone.
    """
    others = [other for other in nodes if other is not node]
    names = ",".join(f"'{other.nodename}'" for other in others)
    try:
        with ExitStack() as stack:
            for other in others:
                stack.callback(other.ctl, "eval", "sys:resume(rabbit_node_monitor).")
                other.ctl("eval", "sys:suspend(rabbit_node_monitor).")
            node.ctl("eval", f"[begin erlang:set_cookie(N, other), erlang:disconnect_node(N) end "
                             f"|| N <- [{names}]].")  # fmt: skip
        yield
    finally:
        node.ctl("eval", f"[erlang:set_cookie(N, erlang:get_cookie()) || N <- [{names}]].")
