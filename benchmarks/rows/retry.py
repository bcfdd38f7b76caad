"""Retried events.

Every event fails once, requests a retry in a second (`self.retry(exc=…, countdown=1)`, the same
line for all participants) and then succeeds; the pool has two processes. A figure is events per
second from the first call to the last, so it includes two calls and one delay. Celery delays on the
broker with a quorum queue ("native delayed delivery"), and in the worker's memory with a classic
queue; celery-amqp-events delays on the broker, but only with classic queues.
"""

from __future__ import annotations

from typing import Any

from ..ground import Ground
from ..measured import OURS, PLAIN, Measured, Size, Table, Target, in_turn
from . import Tell
from .handling import draining


def run(ground: Ground, size: Size, tell: Tell) -> list[Measured]:
    total = size.number(3000, 400)
    words: dict[str, Any] = {"work": "fail_once", "calls": 2, "warm": 0.01}
    runs = {who: draining(ground, who, total, **words) for who in (OURS, PLAIN)}
    if not size.short:
        runs[f"{PLAIN}, classic queue"] = draining(
            ground, PLAIN, total, queue_type="classic", **words
        )
        runs["celery-amqp-events, classic queue"] = draining(
            ground, "celery-amqp-events", total, queue_type="classic", **words
        )
    return [
        Table(
            what="Retried events, prefork 2",
            unit="events/s",
            better="more",
            values=in_turn(runs, size.turns(3, 1), tell),
            targets=Target.pair(PLAIN, reach=2, stretch=4),
            counted="exactly two calls per event; the queue is empty",
        )
    ]
