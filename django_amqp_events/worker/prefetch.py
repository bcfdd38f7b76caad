"""How many events a worker takes from a queue in advance: a pure function, measured in time.

RabbitMQ's consumer timeout runs from the delivery, so what waits in a worker has a deadline
too. After it RabbitMQ closes the channel, and all events of the worker run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from celery.utils.time import rate as per_second

#: Part of the consumer timeout that an event may wait for its run after its delivery.
WAITING: Final = 1 / 6
#: Factor of it for an event with a rate limit, or beside ordinary tasks in the same pool: a requeue
#: would cost it its token or its turn.
PATIENCE: Final = 3
#: Part of the consumer timeout that a run may take after it.
RUNNING: Final = 2 / 3
#: Part of it in which a run should have ended; after it, a delivery whose message cannot be
#: published is requeued.
HOLDING: Final = 5 / 6
#: Seconds of work per process that it pays to hold in advance, and the most events of it; bytes of
#: their bodies in a worker.
WORK_SECONDS: Final = 0.25
MOST, MOST_BYTES = 32, 8 << 20
#: Seconds of a long run: events of other handlers must not wait for one in each process.
LONG_SECONDS: Final = 1.0

Why = Literal["default", "configured", "measured", "slow", "rate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a worker can do.

    Attributes:
        budget: events of all queues that it may hold, by its settings.
        configured: whether its prefetch multiplier differs from Celery's default.
        processes: events that it can run at once.
        free: processes that run no event.
        spare: processes for further long runs; all of them if no other events arrive.
        queues: queues that it consumes.
        wait: seconds that an event may wait for its run.
        calm: whether no event came that was delivered several times, as after several deaths.
        seconds: the average run by handler; only of those of which a run has ended or takes long.
    """

    budget: int
    configured: bool
    processes: int
    free: int
    spare: int
    queues: int
    wait: float
    calm: bool = True
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Window:
    """A prefetch count and its reason; with 0 the queue is not consumed now."""

    count: int
    why: Why


def run_limit(handler: Any, hard: Any, soft: Any) -> float | None:
    """Return the seconds after which a run is ended, ``None`` for no limit.

    Args:
        handler: has ``time_limit`` and ``soft_time_limit``, as a handler or its task.
        hard, soft: the worker's limits.
    """
    limit = handler.time_limit or hard or handler.soft_time_limit or soft
    return limit if isinstance(limit, (int, float)) else None


def longest_wait(timeout: float, limit: float | None, *, patient: bool) -> float:
    """Return the seconds that an event may wait for its run before it is requeued.

    A run that is ended within :data:`RUNNING` of the timeout has then ended within
    :data:`HOLDING` of it.

    Args:
        timeout: RabbitMQ's consumer timeout in seconds.
        limit: seconds after which the run is ended.
        patient: it has a rate limit, or ordinary tasks wait too.
    """
    wait = timeout * WAITING
    if not patient:
        return wait
    return max(wait, min(PATIENCE * wait, timeout * HOLDING - (limit or 0)))


def is_paced(limit: Any, timeout: float) -> bool:
    """Return True if a rate limit lets nothing begin for longer than an event may wait.

    Args:
        limit: as in Celery, such as ``"1/h"``; None for none.
        timeout: RabbitMQ's consumer timeout in seconds.
    """
    try:
        return bool(0 < per_second(limit) * timeout * WAITING < 1)
    except (TypeError, ValueError):  # Celery's task_default_rate_limit may be anything
        return False


def window(load: Load, *, seconds: float | None, rate: float | None, size: float = 0.0) -> Window:
    """Return the prefetch count of a queue.

    Args:
        seconds: the average run of its slowest handler, None if no run has ended yet.
        rate: events per second by its lowest rate limit, None without one.
        size: average bytes of a body.
    """
    processes, queues = load.processes, max(1, load.queues)
    share = max(1, load.budget // queues)
    if seconds is None and queues > 1 and not load.configured:
        share = 1  # its runs may be long
    decided = Window(share, "configured" if load.configured else "default")
    if seconds is not None:
        seconds = max(seconds, 1e-6)
        fits = int(processes * (1 + load.wait / 2 / seconds)) // queues
        if fits < min(share, processes):
            # The events of other queues may fill the pool, so each waits there for a free process.
            decided = Window(max(0, min(share, load.free, load.spare)), "slow")
        else:
            most = share
            if not load.configured:
                fits = min(fits, processes + int(WORK_SECONDS * processes / seconds))
                if load.calm:
                    held = min(MOST * processes, int(MOST_BYTES / max(1.0, size)))
                    most = max(share, held // queues)
            # A backlog in one of many queues can occupy all processes too.
            count = min(max(most, processes), fits)
            if count != share:
                decided = Window(count, "measured")
            if seconds > LONG_SECONDS and load.spare < processes and not load.configured:
                decided = Window(max(0, min(count, load.spare)), "slow")
    if rate is not None and rate * load.wait < decided.count:
        decided = Window(int(rate * load.wait), "rate")
    return decided
