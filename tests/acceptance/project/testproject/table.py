"""A table of handlers that pairs the values of all options; :mod:`.combined` declares them.

Plain data, which a test can read too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from random import Random
from typing import Any, Final

TABLE: Final = "CREATE TABLE effects (event varchar(64), handler varchar(64), attempt integer)"


#: Values of each option of handlers; a test compares the names with the package's table.
VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "max_retries": (0, 1, 2, None),
    "retry_backoff": (0, 1, True),
    "retry_backoff_max": (1, 2),
    "retry_jitter": (False, True),
    "default_retry_delay": (1, 2),
    "autoretry_for": ((Exception,), LookupError, "LookupError"),
    "dont_autoretry_for": ((), "testproject.combined.Never"),
    "time_limit": (None, 6.0),
    "soft_time_limit": (None, 4),
    "rate_limit": (None, 50, "3000/m"),
    "ignore_result": (True, False),
    "queue": ("", "shared"),
    "strict": (False, True),
    "once": (False, True),
    "using": ("", "default"),
    "events": ("name", "pattern", "names"),
    "handler": ("function", "coroutine", "class"),
    "enabled": (True, True, False),
    "bind": (False, True),
    "validate": (False, True),
}


def rows(values: Mapping[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Yield rows until each two values of two options have been together in one."""
    random = Random(1)
    left = {
        frozenset(pair)
        for one, other in combinations(values, 2)
        for pair in product(_choices(one, values), _choices(other, values))
    }
    while left:
        row = dict(min(left, key=sorted))  # a pair that no row has yet

        def gain(choice: tuple[str, int]) -> int:
            return sum(frozenset((choice, other)) in left for other in row.items())  # noqa: B023

        for name in random.sample(list(values), len(values)):
            if name not in row:
                choices = _choices(name, values)
                row |= [max(random.sample(choices, len(choices)), key=gain)]
        left -= {frozenset(pair) for pair in combinations(row.items(), 2)}
        yield {name: values[name][row[name]] for name in values}


def _choices(name: str, values: Mapping[str, tuple[Any, ...]]) -> list[tuple[str, int]]:
    return [(name, at) for at in range(len(values[name]))]


@dataclass(frozen=True)
class Row:
    """A handler of the table, and the names of its events."""

    number: int
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"testproject.row{self.number}"

    @property
    def event(self) -> str:
        return f"combined.row{self.number}.happened"

    @property
    def events(self) -> tuple[str, ...]:
        return {
            "name": (self.event,),
            "pattern": (f"combined.row{self.number}.#",),
            "names": (f"combined.row{self.number}.other", f"*.row{self.number}.happened"),
        }[self.options["events"]]

    @property
    def queue(self) -> str:
        """Half of the handlers have one queue."""
        return self.options["queue"] or self.name


ROWS: Final = tuple(Row(number, options) for number, options in enumerate(rows(VALUES)))
