"""Compute when a failed attempt is retried. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..exceptions import ConfigurationError

#: Delays are whole seconds from here on: a delay queue is declared per distinct delay.
MINIMUM_DELAY = 1
#: Seconds that pass between a failure and the hop that it asks for: on its way from the pool,
#: what remains of 4 s is 3.99, and must find the 4 s queue instead of going 2 + 1 + 1.
SLACK: Final = 0.25
#: No option is above this many seconds (68 years): dates and AMQP's integers end somewhere.
MAXIMUM_DELAY = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Retry options of a handler, in Celery's words.

    Attributes:
        max_retries: retries after the first attempt; ``None`` is without end.
        retry_backoff: seconds before the first retry, doubled with each; ``0`` or ``False``
            waits ``default_retry_delay`` each time; ``True`` is 1.
        retry_backoff_max: the longest backoff in seconds.
        retry_jitter: take a uniform random share of the delay, so that failures that
            happened together do not come back together.
        default_retry_delay: seconds before each retry when there is no backoff.
        autoretry_for: exceptions that are retried.
        dont_autoretry_for: exceptions that never are; wins over ``autoretry_for``.
    """

    max_retries: int | None = 10
    retry_backoff: int = 1
    retry_backoff_max: int = 512
    retry_jitter: bool = False
    default_retry_delay: int = 180
    autoretry_for: tuple[type[BaseException], ...] = (Exception,)
    dont_autoretry_for: tuple[type[BaseException], ...] = ()

    def __post_init__(self) -> None:
        for name in ("retry_backoff", "retry_backoff_max", "default_retry_delay"):
            value = getattr(self, name)
            if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
                object.__setattr__(self, name, int(value))
            elif not isinstance(value, int):
                raise ConfigurationError(
                    f"{name} is {value!r}; it is a whole number of seconds: each distinct delay "
                    f"is a queue on the broker"
                )
            if getattr(self, name) > MAXIMUM_DELAY:
                raise ConfigurationError(f"{name} is {value!r}; it is at most {MAXIMUM_DELAY}")
        if self.max_retries is not None and (
            isinstance(self.max_retries, bool)
            or not isinstance(self.max_retries, int)
            or self.max_retries < 0
        ):
            raise ConfigurationError(
                f"max_retries is {self.max_retries!r}; it is a number from 0 up, or None for ever"
            )
        if self.retry_backoff < 0:
            raise ConfigurationError(
                f"retry_backoff is {self.retry_backoff!r}; it is 0 (off) or at least 1 second"
            )
        if self.retry_backoff_max < MINIMUM_DELAY:
            raise ConfigurationError(
                f"retry_backoff_max is {self.retry_backoff_max!r}; it is at least 1 second"
            )
        if self.retry_backoff > self.retry_backoff_max:
            raise ConfigurationError(
                f"retry_backoff ({self.retry_backoff} s) is above retry_backoff_max "
                f"({self.retry_backoff_max} s): every delay would be cut to the maximum"
            )
        if self.default_retry_delay < MINIMUM_DELAY:
            raise ConfigurationError(
                f"default_retry_delay is {self.default_retry_delay!r}; it is at least 1 second"
            )
        if not isinstance(self.retry_jitter, bool):
            raise ConfigurationError(f"retry_jitter is {self.retry_jitter!r}; it is a boolean")
        for name in ("autoretry_for", "dont_autoretry_for"):
            for item in getattr(self, name):
                if not (isinstance(item, type) and issubclass(item, BaseException)):
                    raise ConfigurationError(f"{name} has {item!r}, which is no exception class")

    def retries(self, exc: BaseException) -> bool:
        """Return True if *exc* is retried.

        What is no :class:`Exception` (``SystemExit``, ``KeyboardInterrupt``) says something
        about the process, not about the event, and is retried unless it is named in
        ``dont_autoretry_for``.
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
        if not self.retry_backoff:
            return float(self.default_retry_delay)
        # 2 ** 62 overflows nothing and is beyond every cap; attempts may go on without end.
        backoff: int = min(self.retry_backoff * 2 ** min(attempt - 1, 62), self.retry_backoff_max)
        if self.retry_jitter:
            return max(float(MINIMUM_DELAY), backoff * random)
        return float(backoff)

    def schedule(self, limit: int = 64) -> tuple[float, ...]:
        """Return the delays of all retries without jitter, at most *limit* of them."""
        count = limit if self.max_retries is None else min(self.max_retries, limit)
        return tuple(self.delay(attempt) for attempt in range(1, count + 1))

    def total(self) -> float:
        """Return the seconds that all retries wait without jitter; of 64 where there is no last."""
        delays = self.schedule()
        if self.max_retries is None or not delays:
            return sum(delays)
        # After so many doublings there is nothing but the longest.
        return sum(delays) + (self.max_retries - len(delays)) * delays[-1]

    def distinct_delays(self) -> frozenset[int]:
        """Return the exact delays, in seconds, that a delay queue should exist for."""
        if self.max_retries == 0:
            return frozenset()
        return frozenset(int(delay) for delay in self.schedule())


def hop(remaining: float, delays: tuple[int, ...]) -> int:
    """Choose the delay queue for an event that is due in *remaining* seconds.

    The largest one not above what remains, give or take :data:`SLACK`; on return the event
    goes round again until it is due. What remains below the shortest delay waits in the
    shortest, so an event is never early and less than a second late.

    Args:
        remaining: seconds until due, above 0.
        delays: the declared delays in seconds, not empty.
    """
    fitting = [delay for delay in delays if delay <= remaining + SLACK]
    return max(fitting) if fitting else min(delays)
