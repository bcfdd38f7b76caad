"""Running a row, and what it says."""

from __future__ import annotations

import subprocess
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.waiting import NotInTime

from .counts import Counts
from .rows import Row
from .world import Grounds, Hit, world

#: Runs of a row whose fault misses.
TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A row of the table.

    Attributes:
        error: why the row says nothing, if so.
        late: a deadline passed, perhaps because of the machine.
    """

    row: str
    events: int
    seconds: float
    counts: Counts | None = None
    hits: Sequence[Hit] = field(default_factory=tuple)
    error: str = ""
    late: bool = False

    @property
    def held(self) -> bool:
        """Whether the promises held under a fault that did hit something."""
        counts = self.counts
        return (
            counts is not None
            and not self.error
            and counts.published > 0
            and counts.lost == 0
            and counts.waiting == 0
            and counts.effects == 0
            and self.hit
        )

    @property
    def hit(self) -> bool:
        """Whether the fault came while work was in flight."""
        return any(hit.in_flight for hit in self.hits)

    @property
    def missed(self) -> bool:
        """Whether it says nothing: nothing was in flight when the fault came, or it never came."""
        counts = self.counts
        return not self.hit and counts is not None and not counts.lost and not counts.effects


def run(row: Row, grounds: Grounds, *, events: int, seed: str) -> Result:
    """Run one row; what goes wrong with it is said in the result.

    Faults come by the clock where processes do their work: one that missed it proves nothing, and
    the row is run again.
    """
    result = _run(row, grounds, events=events, seed=seed)
    for again in range(2, TRIES + 1):
        if not result.missed:
            break
        print(f"{row.name} missed: {result.error or 'nothing was in flight'}", flush=True)
        result = _run(row, grounds, events=events, seed=f"{seed}-{again}")
    return result


def _run(row: Row, grounds: Grounds, *, events: int, seed: str) -> Result:
    number = row.published(events)
    nodes = grounds.cluster() if row.cluster else []
    began = time.monotonic()
    seed = f"{seed}-{row.name}"
    with world(grounds, name=row.name, events=number, seed=seed, nodes=nodes) as here:
        error, late = "", False
        try:
            row.run(here)
        except (AssertionError, subprocess.TimeoutExpired) as exc:
            late = isinstance(exc, (NotInTime, subprocess.TimeoutExpired))
            # An assertion without a message has its line.
            error = str(exc) or f"not true: {traceback.extract_tb(exc.__traceback__)[-1].line}"
        hits = here.proof()
        counts = here.count()
    return Result(
        row=row.name,
        events=number,
        seconds=round(time.monotonic() - began, 1),
        counts=counts,
        hits=tuple(hits),
        error=error,
        late=late and not counts.lost and not counts.effects,
    )
