"""Rows: pool processes and workers that die, or are stopped, at every moment."""

from __future__ import annotations

import random
import signal
import time
from functools import partial

from tests.acceptance.harness import Worker, until

from .rows import row
from .world import World

PROCESSES = "Pool processes and workers"
STOPS = "Shutdowns"
POOLS = {"prefork": 2, "threads": 4, "solo": 1}
#: Seconds between two transactions, and of a run, while workers are replaced.
PAUSE = 0.02
MOMENTS = {
    "before": "before the handler",
    "within": "within it",
    "after": "after it, before the ack",
}


def killed(world: World, *, point: str, whom: str, pool: str = "prefork", of: float = 1) -> None:
    """Kill at a point; a share *of* the events comes by there."""
    times = max(2, min(10, world.events // 100))
    world.arm(point, times=times, whom=whom, of=round(world.events * of))
    world.declare()
    world.keep(lambda: world.worker(pool, POOLS[pool]))
    world.keep(world.reaper)
    world.publisher()
    world.settle()


for _moment, _words in MOMENTS.items():
    row(PROCESSES, f"A pool process is killed {_words}", name=f"child-{_moment}")(
        partial(killed, point=_moment, whom="self")
    )
    for _pool in POOLS:
        row(
            PROCESSES,
            f"A whole worker ({_pool}) is killed {_words}",
            name=f"worker-{_moment}-{_pool}",
        )(partial(killed, point=_moment, whom="worker", pool=_pool))
for _copy, _words, _share in (("delay", "a retry", 0.1), ("archive", "an archive message", 0.05)):
    row(
        PROCESSES,
        f"A worker is killed between the confirm of {_words} and the ack",
        name=f"worker-{_copy}-confirmed",
    )(partial(killed, point=f"{_copy}-confirmed", whom="worker", of=_share))


def stopped(world: World, *, pool: str, how: str) -> None:
    """Rolling restarts under load: another worker is there before one is stopped."""
    restarts = 10 if world.events >= 500 else 3 if world.events >= 100 else 2
    soft = 3 if how == "soft" else 0
    world.service.celery = {**world.service.celery, "worker_soft_shutdown_timeout": soft}
    world.declare()
    number = signal.SIGTERM if how == "warm" else signal.SIGQUIT
    chance = random.Random(world.seed)
    start = partial(world.worker, pool, POOLS[pool])
    worker: Worker = start().wait_ready(90)
    world.publisher(pause=PAUSE, work=PAUSE)
    for _ in range(restarts):
        following = start().wait_ready(90)
        until(lambda: _busy(world), 60, "something is in hand")
        time.sleep(chance.random() * 0.5)
        world.hit(f"{how} shutdown", worker, number)
        worker.wait(90)
        worker = following
    world.settle()


def _busy(world: World) -> bool:
    """Say whether handlers run; publish more where that is through before the restarts are."""
    ledger = world.ledger.read()
    if not ledger.in_hand and ledger.through == world.publishers:
        world.publisher(max(20, world.events // 4), pause=PAUSE, work=PAUSE)
    return bool(ledger.in_hand)


for _how, _words in (
    ("warm", "Warm shutdown (SIGTERM)"),
    ("soft", "Soft shutdown (SIGQUIT, 3 s)"),
    ("cold", "Cold shutdown (SIGQUIT)"),
):
    for _pool in POOLS:
        row(STOPS, f"{_words} of {_pool} workers, rolling", name=f"{_how}-{_pool}")(
            partial(stopped, pool=_pool, how=_how)
        )
