"""Which fault comes when: a pure function of the seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

#: Mean seconds between the beginnings of two faults.
GAP: Final = 4.0
#: How often each fault comes, relative to the others, and how long it lasts at most (seconds).
FAULTS: Final[Mapping[str, tuple[int, float]]] = {
    "process killed": (6, 0),
    "process terminated": (4, 0),
    "process quit": (2, 0),
    "workers replaced": (1, 0),
    "process suspended": (3, 20),
    "pool process killed": (6, 0),
    "connections closed": (4, 0),
    "connections half-open": (2, 8),
    "broker killed": (1, 6),
    "broker suspended": (1, 8),
    "node cut off": (1, 10),
    "memory alarm": (1, 6),
    "disk alarm": (1, 6),
    "disk full": (1, 6),
    "database killed": (2, 5),
    "clock stepped": (3, 20),
    "topology declared": (1, 0),
    "all replayed": (3, 0),
    "batch replayed": (2, 0),
    "fix released": (2, 15),
    "archive pruned": (1, 0),
    "malformed message": (3, 0),
}


@dataclass(frozen=True, slots=True)
class Step:
    """One fault.

    Attributes:
        number: its place in the schedule; ``--steps`` takes these.
        at: seconds from the beginning.
        seconds: how long it lasts.
        who: between 0 and 1: which of those that it can hit.
    """

    number: int
    at: float
    fault: str
    seconds: float
    who: float

    def __str__(self) -> str:
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.number:4} {self.at:7.1f} s  {self.fault}{lasts} ({self.who:.2f})"


def schedule(seed: int, seconds: float) -> Sequence[Step]:
    """Return the faults of a run of that many seconds; a longer run begins with the same ones."""
    chance = random.Random(seed)
    names = list(FAULTS)
    weights = [weight for weight, _ in FAULTS.values()]
    steps: list[Step] = []
    at = chance.expovariate(1 / GAP)
    while at < seconds:
        (fault,) = chance.choices(names, weights)
        _, longest = FAULTS[fault]
        lasts = chance.uniform(0.2, 1) * longest
        steps.append(Step(len(steps), round(at, 2), fault, round(lasts, 2), chance.random()))
        at += chance.expovariate(1 / GAP)
    return steps
