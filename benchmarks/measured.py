"""Figures, ratios and verdicts. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

#: The participant that is this project.
OURS = "django_amqp_events"
PLAIN = "Celery"

Level = Literal["reach", "stretch"]
Better = Literal["more", "less"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Several measurements of one thing: the median, and the least and the most of them."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median=statistics.median(values), least=min(values), most=max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A target.

    Attributes:
        factor: of the figure of *against*; the figure itself if *against* is ``""``.
        against: a participant of the same table.
    """

    level: Level
    factor: float
    against: str

    @classmethod
    def pair(cls, against: str, *, reach: float, stretch: float) -> tuple[Target, Target]:
        """Return a target to reach, and a further one."""
        return (
            cls(level="reach", factor=reach, against=against),
            cls(level="stretch", factor=stretch, against=against),
        )

    def met(self, figure: float, better: Better) -> bool:
        """Return True if a ratio, or an absolute figure, meets the target."""
        return figure >= self.factor if better == "more" else figure <= self.factor


@dataclass(slots=True, kw_only=True)
class Table:
    """The figures of several participants.

    Attributes:
        values: by participant, one figure per round.
        counted: what was counted afterwards, so that no figure comes from lost messages.
    """

    what: str
    unit: str
    better: Better
    values: dict[str, list[float]]
    targets: tuple[Target, ...] = ()
    counted: str = ""
    notes: tuple[str, ...] = ()
    ours: str = OURS

    def spread(self, name: str) -> Spread:
        return Spread.of(self.values[name])

    def ratio(self, name: str, against: str) -> Spread:
        """Return the ratio of two participants, round by round, since both had the same load."""
        pairs = zip(self.values[name], self.values[against], strict=True)
        return Spread.of([one / other for one, other in pairs])

    def figure(self, target: Target) -> Spread:
        """Return the figure that is compared with a target."""
        return self.ratio(self.ours, target.against) if target.against else self.spread(self.ours)

    def verdicts(self) -> list[tuple[Target, Spread, bool]]:
        """Return each target with its figure, and True if the median meets it."""
        found = []
        for target in self.targets:
            spread = self.figure(target)
            found.append((target, spread, target.met(spread.median, self.better)))
        return found


@dataclass(slots=True, kw_only=True)
class Curve:
    """How something grows.

    Attributes:
        x: the name of what grows.
        values: by participant and size, one figure per round.
        flat: the highest allowed growth of the median cost; 0 for no limit.
        line: fit a straight line and state its slope.
        percentiles: the sizes are percentiles, so nothing grows.
    """

    what: str
    x: str
    unit: str
    better: Better
    values: dict[str, dict[float, list[float]]]
    flat: float = 0.0
    line: bool = False
    percentiles: bool = False
    counted: str = ""
    notes: tuple[str, ...] = ()
    ours: str = OURS

    def medians(self, name: str) -> list[tuple[float, float]]:
        return [(x, statistics.median(found)) for x, found in sorted(self.values[name].items())]

    def growth(self, name: str) -> float:
        """Return the cost of the largest size as a multiple of the smallest."""
        points = self.medians(name)
        first, last = points[0][1], points[-1][1]
        return first / last if self.better == "more" else last / first

    def slope(self, name: str) -> tuple[float, float, float]:
        """Return slope and intercept of the line through the medians, and how well it fits (r²)."""
        points = self.medians(name)
        xs, ys = [x for x, _ in points], [y for _, y in points]
        slope, intercept = statistics.linear_regression(xs, ys)
        fit = statistics.correlation(xs, ys) ** 2 if len(set(ys)) > 1 else 1.0
        return slope, intercept, fit

    @property
    def met(self) -> bool | None:
        return self.growth(self.ours) <= self.flat if self.flat else None


Measured = Table | Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured: in full or in short.

    Attributes:
        rounds: turns of each participant; ``None`` for the benchmark's own number.
        scale: factor of all numbers of messages, to try out a benchmark.
    """

    short: bool = False
    rounds: int | None = None
    scale: float = 1.0

    def number(self, full: int, short: int) -> int:
        """Choose a number of messages."""
        return max(10, int((short if self.short else full) * self.scale))

    def turns(self, full: int, short: int = 2) -> int:
        """Choose a number of rounds."""
        return self.rounds or (short if self.short else full)


def in_turn(
    runs: Mapping[str, Callable[[], float]],
    rounds: int,
    tell: Callable[[str], object] = lambda _: None,
) -> dict[str, list[float]]:
    """Give each participant a turn per round, each round starting with another one."""
    values: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            values[name].append(runs[name]())
        now = ", ".join(f"{name} {shown(values[name][-1])}" for name in names)
        tell(f"round {turn + 1} of {rounds}: {now}")
    return values


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(len(ranked) * percent / 100) - 1)]


def shown(value: float) -> str:
    """Format a figure with three significant digits."""
    if value == 0 or not abs(value) < 1e15:
        return f"{value:g}"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1:
        return f"{value:.2f}"
    return f"{value:.3g}"


# -- to JSON and back ------------------------------------------------------------------------


def to_json(measured: Measured) -> dict[str, Any]:
    """Return a measurement as JSON data."""
    return {"kind": type(measured).__name__.lower(), **asdict(measured)}


def from_json(kept: Mapping[str, Any]) -> Measured:
    """Return a measurement from JSON data."""
    words = {key: value for key, value in kept.items() if key != "kind"}
    words["notes"] = tuple(words["notes"])
    if kept["kind"] == "table":
        words["targets"] = tuple(Target(**each) for each in words["targets"])
        return Table(**words)
    words["values"] = {
        name: {float(x): found for x, found in points.items()}
        for name, points in words["values"].items()
    }
    return Curve(**words)


@dataclass(slots=True, kw_only=True)
class Result:
    """The results of a benchmark. *at* is in UTC; *code* is git's hash of the package."""

    name: str
    title: str
    about: str
    at: str
    code: str
    seconds: float
    versions: Mapping[str, str]
    measured: list[Measured] = field(default_factory=list)
