"""Compute when a failed attempt is retried, and through which delay queues. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..backoff import Backoff
from ..options import LONGEST_TTL

#: Seconds of the shortest delay queue.
MINIMUM_DELAY: Final = 1
#: Seconds that may pass between a failure and its hop. Of a delay of 4 s, 3.99 s remain then, which
#: must take the 4 s queue and not those of 2, 1 and 1 s.
SLACK: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Retry options of a handler, named as in Celery; :mod:`~..options` reads them.

    Attributes:
        max_retries: retries after the first attempt; ``None`` for no limit.
        retry_backoff: seconds before the first retry, doubled with each; ``0`` waits
            ``default_retry_delay`` each time.
        retry_jitter: wait a random share of the delay, so that events that failed together are
            not retried together.
        default_retry_delay: seconds before each retry without a backoff.
        dont_autoretry_for: wins over ``autoretry_for``.
    """

    max_retries: int | None = 10
    retry_backoff: int = 1
    retry_backoff_max: int = 512
    retry_jitter: bool = False
    default_retry_delay: int = 180
    autoretry_for: tuple[type[BaseException], ...] = (Exception,)
    dont_autoretry_for: tuple[type[BaseException], ...] = ()

    def retries(self, exc: BaseException) -> bool:
        """Return True if *exc* is retried.

        ``SystemExit`` and others that do not derive from :class:`Exception` concern the process,
        not the event: they are retried unless ``dont_autoretry_for`` names them.
        """
        if isinstance(exc, self.dont_autoretry_for):
            return False
        return isinstance(exc, self.autoretry_for) or not isinstance(exc, Exception)

    def exhausted(self, attempt: int, max_retries: int | None = None) -> bool:
        """Return True if *attempt* (1 is the first run) was the last one allowed."""
        limit = self.max_retries if max_retries is None else max_retries
        return limit is not None and attempt > limit

    def delay(self, attempt: int, random: float = 1.0) -> float:
        """Return the seconds to wait after *attempt* (1 is the first run) has failed.

        Args:
            attempt: the attempt that failed.
            random: a number in [0, 1], used with ``retry_jitter`` only.
        """
        delay = float(self.default_retry_delay)
        if self.retry_backoff:
            delay = Backoff(self.retry_backoff, self.retry_backoff_max).delay(attempt - 1)
        return max(float(MINIMUM_DELAY), delay * random) if self.retry_jitter else delay

    def schedule(self, limit: int = 64) -> tuple[float, ...]:
        """Return the delays of the retries without jitter, at most *limit* of them."""
        count = limit if self.max_retries is None else min(self.max_retries, limit)
        return tuple(self.delay(attempt) for attempt in range(1, count + 1))

    def total(self) -> float:
        """Return the seconds that all retries wait without jitter, ten years at most.

        If there is no limit, these are the seconds of the first 64.
        """
        delays = self.schedule()
        total = sum(delays)
        if self.max_retries is not None and delays:
            # The delays after the 64th all have the maximum.
            total += (self.max_retries - len(delays)) * delays[-1]
        return min(total, float(LONGEST_TTL))

    def distinct_delays(self) -> frozenset[int]:
        """Return the delays, in whole seconds, that each need a delay queue."""
        return frozenset(map(int, self.schedule()))


def hop(remaining: float, delays: tuple[int, ...]) -> int:
    """Choose the delay queue for an event that is due in *remaining* seconds.

    It is the longest delay that is not above *remaining*, give or take :data:`SLACK`, or else the
    shortest one. The event passes through further queues until it is due, so it is never early
    and less than a second late, as far as the clocks of the workers agree.

    Args:
        remaining: seconds until due, above 0.
        delays: the declared delays in seconds, not empty.
    """
    return max((delay for delay in delays if delay <= remaining + SLACK), default=min(delays))
