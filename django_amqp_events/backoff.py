"""Delays that grow with each failure in a row.

:mod:`django_amqp_events.declare.retry_policy` decides the delays of handlers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """A delay in seconds that grows by *factor* from *first* up to *last*."""

    first: float
    last: float
    factor: float = 2

    def delay(self, failures: int) -> float:
        """Return the seconds to wait after *failures* further failures; 0 after the first one."""
        # A factor to the power of 62 is beyond every maximum, and a float holds it.
        return float(min(self.first * self.factor ** min(failures, 62), self.last))
