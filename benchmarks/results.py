"""Results, stored as JSON, and the page RESULTS.md that shows them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .charts import chart
from .measured import Curve, Measured, Result, Spread, Table, Target, from_json, shown, to_json

HERE = Path(__file__).resolve().parent
JSON, PAGE, CHARTS = HERE / "results.json", HERE / "RESULTS.md", HERE / "charts"
#: A line of JSON for each figure that has a target, of each run.
HISTORY = HERE / "history.jsonl"
FORMAT = 1
PACKAGE = "django_amqp_events"

INTRODUCTION = """\
# Measured

Written by `make bench`; [what is compared, and how](README.md). Raw figures:
[results.json](results.json).
A ratio compares figures of the same round. Shown is the median of all rounds with the minimum and
the maximum, which differs from the ratio of the medians. For times, memory and latency, smaller is
better. Compare within one table only: others were measured at another time, in another way.
*Reach* is a target, *stretch* a harder one. Machine and date are below each benchmark's tables.
*Code* is the output of `git rev-parse HEAD:django_amqp_events` for the measured package.
"""
ELSEWHERE = """\
The latest ratios of `make bench ARGS="--elsewhere PLACE"` and of earlier runs. Code may be older
than that of the tables below."""


def versions(place: str | None = None) -> dict[str, str]:
    """Return the versions of the libraries, and the machine, with the name of another place."""
    found = {"Python": platform.python_version()}
    for name in ("django", "celery", "kombu", "amqp", "psycopg"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    found["machine"] = f"{place}: {machine()}" if place else machine()
    return found


def machine() -> str:
    """Return processor and number of cores."""
    model = platform.machine()
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {platform.system()}"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def code() -> str:
    """Return git's hash of the measured package, marked if it has uncommitted changes.

    The hash of the tree, not of a commit, so a rebase does not change it.
    """
    name = _git("rev-parse", "--short=10", f"HEAD:{PACKAGE}")
    changed = "-dirty" if _git("status", "--porcelain", "--", PACKAGE) else ""
    return f"{name}{changed}" if name else "unknown"


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=HERE.parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


# -- keeping -----------------------------------------------------------------------------------


def load() -> dict[str, Result]:
    """Return the stored results by name."""
    if not JSON.exists():
        return {}
    kept = json.loads(JSON.read_text())
    return {
        name: Result(
            **{key: value for key, value in entry.items() if key != "measured"},
            measured=[from_json(each) for each in entry["measured"]],
        )
        for name, entry in kept["benchmarks"].items()
    }


def keep(results: Mapping[str, Result], order: Iterable[str]) -> None:
    """Write the figures, the charts and the page of the benchmarks in *order*."""
    found = {name: results[name] for name in order if name in results}
    kept = {
        "format": FORMAT,
        "benchmarks": {
            name: {
                **{key: getattr(result, key) for key in Result.__dataclass_fields__},
                "measured": [to_json(each) for each in result.measured],
            }
            for name, result in found.items()
        },
    }
    JSON.write_text(json.dumps(kept, indent=1) + "\n")
    CHARTS.mkdir(exist_ok=True)
    wanted = set()
    for result in found.values():
        for number, each in enumerate(result.measured, 1):
            path = CHARTS / picture(result, number)
            path.write_text(chart(each))
            wanted.add(path)
    for path in set(CHARTS.glob("*.svg")) - wanted:
        path.unlink()
    PAGE.write_text(page(found))


def record(result: Result, history: Path = HISTORY) -> list[str]:
    """Append the figures that have targets to the history.

    Returns:
        what differs from the last run on the same machine and RabbitMQ: the spreads do not overlap.
    """
    lines = _lines(history)
    place = _place(result.versions)
    before = latest(history).get(place, {})
    changes = []
    for table in result.measured:
        if not isinstance(table, Table):
            continue
        for against, target in {target.against: target for target in table.targets}.items():
            spread = table.figure(target)
            lines.append(
                json.dumps(
                    {"at": result.at, "code": result.code, "machine": place[0],
                     "RabbitMQ": place[1], "what": table.what,
                     "against": against, **asdict(spread)}
                )
            )  # fmt: skip
            last = before.get((table.what, against))
            if last and not (spread.least <= last["most"] and last["least"] <= spread.most):
                rose = spread.median > last["median"]
                verdict = "better" if rose == (table.better == "more") else "WORSE"
                of = f" of {against}" if against else f" {table.unit}"
                changes.append(
                    f"{verdict}: {table.what}: {shown(last['median'])} ({last['code']}) → "
                    f"{shown(spread.median)}{of}"
                )
    history.write_text("".join(f"{line}\n" for line in lines))
    return changes


def latest(history: Path = HISTORY) -> dict[tuple[str, str], dict[tuple[str, str], Any]]:
    """Return the last entry of each figure, by machine and RabbitMQ, then by what and against."""
    found: dict[tuple[str, str], dict[tuple[str, str], Any]] = {}
    for entry in map(json.loads, _lines(history)):
        found.setdefault(_place(entry), {})[entry["what"], entry["against"]] = entry
    return found


def _place(versions: Mapping[str, str]) -> tuple[str, str]:
    return versions.get("machine", ""), versions.get("RabbitMQ", "")


def picture(result: Result, number: int) -> str:
    """Return the name of a chart's file."""
    return f"{result.name}-{number}.svg"


# -- the page ----------------------------------------------------------------------------------


def page(results: Mapping[str, Result]) -> str:
    """Return the page."""
    lines = [INTRODUCTION, "## Targets", "", *_rows(SUMMARY, summary(results)), ""]
    lines += elsewhere(results, latest())
    for result in results.values():
        lines += [f"## {result.title}", "", result.about.strip(), ""]
        for number, each in enumerate(result.measured, 1):
            lines += [f"### {each.what}", ""]
            lines += curve_lines(each) if isinstance(each, Curve) else table_lines(each)
            if each.counted:
                lines += ["", f"Counted: {each.counted}."]
            lines += ["", *each.notes] if each.notes else []
            lines += ["", f"![{each.what}](charts/{picture(result, number)})", ""]
        used = ", ".join(f"{name} {value}" for name, value in result.versions.items())
        lines += [
            f"{result.at}, code {result.code}, {result.seconds:.0f} s; {used}.",
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


SUMMARY = ("what", "against", "measured", "reach", "stretch", "")


def summary(results: Mapping[str, Result]) -> list[list[str]]:
    """Return a row for each target, and for each curve that should be flat."""
    rows = []
    for result in results.values():
        for each in result.measured:
            rows += _summary_of(each)
    return rows


def elsewhere(
    results: Mapping[str, Result],
    entries: Mapping[tuple[str, str], Mapping[tuple[str, str], Any]],
) -> list[str]:
    """Return a table of the ratios that were measured on other machines and releases."""
    rows: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for result in results.values():
        for table in result.measured:
            for target in table.targets if isinstance(table, Table) else ():
                if target.against:
                    name = (table.what, target.against)
                    rows[name] = {
                        place: f"{_ratio_of(of[name])}, {of[name]['at'].split()[0]}"
                        for place, of in entries.items()
                        if place != _place(result.versions) and name in of
                    }
    places = [place for place in entries if any(place in row for row in rows.values())]
    if not places:
        return []
    head = ("what", "against", *(f"RabbitMQ {rabbit}; {machine}" for machine, rabbit in places))
    cells = [
        [*name, *(row.get(place, "") for place in places)] for name, row in rows.items() if row
    ]
    return ["## Other machines and releases", "", ELSEWHERE, "", *_rows(head, cells), ""]


def _ratio_of(entry: Mapping[str, Any]) -> str:
    return ratio(Spread(median=entry["median"], least=entry["least"], most=entry["most"]))


def _summary_of(measured: Measured) -> list[list[str]]:
    if isinstance(measured, Curve):
        if measured.met is None:
            return []
        figure = f"{measured.growth(measured.ours):.2f}x the cost from smallest to largest"
        verdict = "reached" if measured.met else "missed"
        return [[measured.what, "itself", figure, f"{measured.flat:g}x", "", verdict]]
    rows = []
    by: dict[str, list[tuple[Target, Spread, bool]]] = {}
    for found in measured.verdicts():
        by.setdefault(found[0].against, []).append(found)
    for against, verdicts in by.items():
        wanted = {target.level: _factor(target, measured.unit) for target, _, _ in verdicts}
        met = [target.level for target, _, met in verdicts if met]
        missed = [target.level for target, _, met in verdicts if not met]
        if not missed:
            verdict = "stretch reached" if "stretch" in met else "reached"
        elif met:
            verdict = "reached"
        else:
            verdict = "missed" if "reach" in wanted else "stretch missed"
        rows.append(
            [
                measured.what,
                against or "absolute",
                ratio(verdicts[0][1]) if against else f"{_spread(verdicts[0][1])} {measured.unit}",
                wanted.get("reach", ""),
                wanted.get("stretch", ""),
                verdict,
            ]
        )
    return rows


def table_lines(table: Table) -> list[str]:
    """Return a table: each participant's figures, and their ratio to those that a target names."""
    against = list(dict.fromkeys(each.against for each in table.targets if each.against))
    head = ("", f"{table.unit}, median", "least to most", *(f"of {name}" for name in against))
    rows = []
    for name in table.values:
        spread = table.spread(name)
        ratios = ["1" if name == other else ratio(table.ratio(name, other)) for other in against]
        bold = "**" if name == table.ours else ""
        rows.append([f"{bold}{name}{bold}", shown(spread.median), _least_most(spread), *ratios])
    lines = _rows(head, rows)
    for target, spread, met in table.verdicts():
        figure = ratio(spread) if target.against else f"{_spread(spread)} {table.unit}"
        of = f" of {target.against}" if target.against else ""
        verdict = "**reached**" if met else "**missed**"
        wanted = f"{target.level.capitalize()}: {_factor(target, table.unit)}{of}"
        lines += ["", f"{wanted}; measured {figure}: {verdict}."]
    return lines


def curve_lines(measured: Curve) -> list[str]:
    """Return a table of medians, and the growth or slope of each curve."""
    xs = sorted({x for points in measured.values.values() for x in points})
    rows = []
    for x in xs:
        cells = [
            f"{shown(Spread.of(points[x]).median)} ({_least_most(Spread.of(points[x]))})"
            if x in points
            else ""
            for points in measured.values.values()
        ]
        rows.append([f"{x:,.0f}", *cells])
    lines = _rows((measured.x, *(f"{name}, {measured.unit}" for name in measured.values)), rows)
    for name in () if measured.percentiles else measured.values:
        said = f"{name}: {measured.growth(name):.2f}x the cost from the smallest to the largest"
        if measured.line:
            slope, intercept, fit = measured.slope(name)
            said = (
                f"{name}: {shown(intercept)} + {shown(slope)} {measured.unit} for each of "
                f"{measured.x} (r² {fit:.2f})"
            )
        lines += ["", said + "."]
    if measured.met is not None:
        lines += [
            "",
            f"Flat within {measured.flat:g}x: {'**reached**' if measured.met else '**missed**'}.",
        ]
    return lines


def _rows(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    names = list(head)
    lines = ["| " + " | ".join(names) + " |", "| --- " * len(names) + "|"]
    return lines + ["| " + " | ".join(cells) + " |" for cells in rows]


def ratio(spread: Spread) -> str:
    """Write a ratio with its spread."""
    return f"{shown(spread.median)}x ({shown(spread.least)} to {shown(spread.most)})"


def _spread(spread: Spread) -> str:
    return f"{shown(spread.median)} ({_least_most(spread)})"


def _least_most(spread: Spread) -> str:
    return f"{shown(spread.least)} to {shown(spread.most)}"


def _factor(target: Target, unit: str) -> str:
    return f"{target.factor:g}x" if target.against else f"{target.factor:g} {unit}"


def told(measured: Measured) -> Iterable[str]:
    """Return the lines of a measurement for a terminal."""
    yield f"  {measured.what} ({measured.unit}, {measured.better} is better)"
    if isinstance(measured, Curve):
        for name in measured.values:
            points = ", ".join(f"{x:,.0f}: {shown(y)}" for x, y in measured.medians(name))
            grown = "" if measured.percentiles else f"   ({measured.growth(name):.2f}x)"
            yield f"    {name:34} {points}{grown}"
        return
    for name in measured.values:
        spread = measured.spread(name)
        yield f"    {name:34} {shown(spread.median):>10}   ({_least_most(spread)})"
    for target, spread, met in measured.verdicts():
        of = f" of {target.against}" if target.against else ""
        said = ratio(spread) if target.against else _spread(spread)
        verdict = "met" if met else "missed"
        yield f"    {target.level} {target.factor:g}{of}: {said}: {verdict}"


def entry(**words: Any) -> Result:
    """Build a result of the current code."""
    return Result(code=code(), **words)
