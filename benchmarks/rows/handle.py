"""Handling a backlog.

A worker starts on a full queue, and its handler only counts: with a pool of two processes, with two
threads, and solo. Both Celery workers belong to a Django project, with late acks, default prefetch
counts (Celery's four per process; the project's as much as a quarter of a second's work, at most 32
per process) or 32 where stated, and no gossip, mingle or heartbeat events. With a prefetch of four,
a worker mostly waits: a quorum queue sends the next delivery only after an ack is on its disk. Each
participant published its messages itself, once; they were copied with other ids. dramatiq has two
processes with a thread each, FastStream two processes; py-amqp is a loop in one process that reads
and acknowledges. The first tenth of the calls is not measured, since processes start one after
another.
"""

from __future__ import annotations

from ..ground import Ground
from ..measured import OURS, PLAIN, Measured, Size, Table, Target, in_turn
from . import Tell
from .handling import draining, floor

COUNTED = "as many calls as events; the queue is empty after the worker has stopped"


def run(ground: Ground, size: Size, tell: Tell) -> list[Measured]:
    total = size.number(10_000, 2000)
    found: list[Measured] = []
    runs = {who: draining(ground, who, total) for who in (OURS, PLAIN)}
    if not size.short:
        runs["celery-amqp-events"] = draining(ground, "celery-amqp-events", total)
        runs["dramatiq"] = draining(ground, "dramatiq", total)
        runs["FastStream"] = draining(ground, "FastStream", total)
        runs["py-amqp loop"] = floor(ground, total, prefetch=8)
    ahead = {who: draining(ground, who, 2 * total, prefetch=32) for who in (OURS, PLAIN)}
    for what, participants in (
        ("Handlers, prefork 2, backlog, no-op", runs),
        ("Handlers, prefork 2, backlog, no-op, prefetch 32", ahead),
    ):
        found.append(
            Table(
                what=what,
                unit="events/s",
                better="more",
                values=in_turn(participants, size.turns(4, 1), tell),
                targets=Target.pair(PLAIN, reach=2.3, stretch=3),
                counted=COUNTED,
            )
        )
    for pool, number in (("solo", 1), ("threads", 2)):
        runs = {
            who: draining(ground, who, total, pool=pool, number=number) for who in (OURS, PLAIN)
        }
        found.append(
            Table(
                what=f"Handlers, {pool}, backlog, no-op",
                unit="events/s",
                better="more",
                values=in_turn(runs, size.turns(3, 1), tell),
                targets=Target.pair(PLAIN, reach=1.5, stretch=2),
                counted=COUNTED,
            )
        )
    return found
