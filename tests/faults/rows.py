"""What a row is, and the list of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .world import World


@dataclass(frozen=True, slots=True)
class Row:
    """A fault.

    Attributes:
        name: for the command line.
        group: the part of the table that it belongs to.
        title: what is done, in a few words for docs/faults.md.
        run: does it, and returns when everything has had its time to end.
        share: of the events that a row publishes by default.
        cluster: whether it needs three nodes.
        module: that declares it.
    """

    name: str
    group: str
    title: str
    run: Callable[[World], None]
    share: float = 1.0
    cluster: bool = False
    module: str = ""

    def published(self, events: int) -> int:
        """Return how many it publishes where rows do *events* by default."""
        return max(20, round(events * self.share))


ROWS: dict[str, Row] = {}


def row(
    group: str, title: str, *, name: str = "", share: float = 1.0, cluster: bool = False
) -> Callable[[Callable[[World], None]], Callable[[World], None]]:
    """Declare a row; its name is the function's."""

    def declare(run: Callable[[World], None]) -> Callable[[World], None]:
        key = name or run.__name__.replace("_", "-")
        assert key not in ROWS, key
        module = getattr(run, "func", run).__module__
        ROWS[key] = Row(key, group, title, run, share, cluster, module.rpartition(".")[2])
        return run

    return declare
