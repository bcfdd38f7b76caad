"""How many events a worker takes from a queue in advance: a pure function, measured in time.

RabbitMQ's consumer timeout runs from the delivery, so what waits in a worker has a deadline too.
After it RabbitMQ closes the channel, and all events of the worker run again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from celery.utils.time import rate as per_second

#: Part of the consumer timeout that an event may wait in a worker before it is given back.
WAITING: Final = 1 / 6
#: Part of the consumer timeout that a run may take after it.
RUNNING: Final = 2 / 3
#: Part of it in which a run should have ended; after it, a delivery whose message cannot be
#: published is requeued.
HOLDING: Final = 5 / 6
#: Part of the time that an event may wait; handlers whose average run is longer are given an event
#: only when a process is free for it.
SLOW: Final = 1 / 4
#: Most events of a job.
JOB_EVENTS: Final = 16
#: Longest average run in seconds of a quick handler; one that was quick is so up to twice that.
QUICK_SECONDS: Final = 0.01
#: Celery's default prefetch count for each process.
DEFAULT_MULTIPLIER: Final = 4
#: Weight of the last run in a handler's average.
WEIGHT: Final = 0.1
#: The largest prefetch count that AMQP can express.
MAX_PREFETCH: Final = 65535

Why = Literal["default", "configured", "measured", "slow", "rate"]


@dataclass(frozen=True, slots=True)
class Window:
    """A prefetch count and its reason."""

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


def events_per_second(limit: Any) -> float:
    """Return a rate limit of Celery, such as ``"1/h"``, as a number; 0 for none."""
    try:
        return max(0.0, float(per_second(limit)))
    except (KeyError, TypeError, ValueError):  # Celery's task_default_rate_limit may be anything
        return 0.0


def lowest_rate(timeout: float) -> float:
    """Return the lowest rate limit in events per second that a worker can keep.

    With a lower one, an event would wait for it longer than it may, and be given back.

    Args:
        timeout: RabbitMQ's consumer timeout in seconds.
    """
    return 2 / (WAITING * timeout)


@dataclass(slots=True, kw_only=True)
class Durations:
    """The average run of each handler, in seconds."""

    average: dict[str, float] = field(default_factory=dict)
    _quick: set[str] = field(default_factory=set)

    def ended(self, handler: str, seconds: float) -> bool:
        """Record a run; return True if the handler is quick now and was not, or the reverse."""
        known = self.average.get(handler, seconds)
        average = self.average[handler] = known + WEIGHT * (seconds - known)
        was_quick = handler in self._quick
        if average > QUICK_SECONDS * (2 if was_quick else 1):
            self._quick.discard(handler)
        else:
            self._quick.add(handler)
        return was_quick is not (handler in self._quick)

    def is_quick(self, handler: str) -> bool:
        return handler in self._quick


def window(
    *,
    processes: int,
    multiplier: int,
    quick: bool,
    seconds: float,
    rate: float,
    wait: float,
    stuck: bool = False,
) -> Window:
    """Return the prefetch count of a queue.

    A queue of quick handlers holds two jobs for each process, a slow one an event at a time, any
    other the event that runs and one that waits, for each process.

    Args:
        multiplier: Celery's ``worker_prefetch_multiplier``; neither 0 nor its default replaces the
            measure.
        quick: all handlers of the queue are.
        seconds: longest average run of its handlers; 0 before any run has ended.
        rate: events per second by its lowest rate limit, 0 without one.
        wait: seconds that an event may wait.
        stuck: events of the queue have waited for longer.
    """
    if stuck or seconds > SLOW * wait:
        return Window(1, "slow")
    if multiplier not in (0, DEFAULT_MULTIPLIER):
        decided = Window(multiplier * processes, "configured")
    elif quick:
        decided = Window(2 * JOB_EVENTS * processes, "measured")
    else:
        decided = Window(2 * processes, "default")
    # Half of what the limit lets begin in time, for a limit that is used up when events arrive.
    if rate and rate * wait / 2 < decided.count:
        decided = Window(max(1, int(rate * wait / 2)), "rate")
    return Window(min(decided.count, MAX_PREFETCH), decided.why)
