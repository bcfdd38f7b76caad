"""Delays that grow with each failure in a row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """A delay in seconds that doubles from *first* up to *last*."""

    first: float
    last: float

    def delay(self, failures: int) -> float:
        """Return the seconds to wait after *failures* further failures; 0 after the first one."""
        # 2 ** 62 is beyond every maximum, and a float holds it.
        return float(min(self.first * 2 ** min(failures, 62), self.last))
