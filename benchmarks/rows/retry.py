"""Retried events.

Every event fails once, asks for a retry in a second (`self.retry(exc=…, countdown=1)`, the same
line in all of them) and is handled then; a pool of two processes. A figure is events per second
from the first call to the last, so each has two calls and one delay in it. Celery on a quorum
queue delays on the broker ("native delayed delivery"), on a classic queue in the worker's memory;
celery-amqp-events on the broker, which goes with classic queues only.
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
            targets=(
                Target(level="reach", factor=2, against=PLAIN),
                Target(level="stretch", factor=4, against=PLAIN),
            ),
            counted="calls of the handler, exactly two for each event; the queue is empty",
        )
    ]
