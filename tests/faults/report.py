"""Write docs/faults.md from the results of runs on several brokers, docs/faults/*.json."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from signal import Signals
from typing import Any

from tests.conftest import SERVERS

from . import all_rows
from .rows import Row
from .running import Result
from .world import Grounds, Hit

#: Of databases, as headings.
TITLES = {"sqlite": "SQLite"} | {kind: server.title for kind, server in SERVERS.items()}
COLUMNS = ("published", "handled", "archived", "waiting", "lost", "calls", "effects")
#: The groups of rows, in the order of the table.
GROUPS = (
    "Pool processes and workers",
    "Shutdowns",
    "The broker is killed and started again",
    "Alarms of the broker",
    "The broker's consumer timeout",
    "A cluster of three nodes",
    "The network between a process and the broker",
    "Publishers and relays",
    "Mirror and replay",
    "The companion",
    "Databases",
    "Queues deleted manually",
    "Releases while events are delayed",
)
INTRODUCTION = """\
# The fault table

> Written by `make faults`. In each row, the named fault hits work in flight, and every accepted
> event is counted.

Every event has two handlers, one of them with [`once`](retries.md#once). Unless a row needs it
otherwise, one event in ten fails in its first attempt, and one in twenty in every attempt.
Publishers and handlers write each step to files of their own, which count (event, handler) pairs:

- **published**: accepted by RabbitMQ; with the outbox, committed;
- **lost**: neither handled, nor archived, nor waiting in a queue or in the outbox at the end;
- **calls**: repeated runs of the plain handler within one attempt, since delivery is at least once.

A row is **held** if the fault hit its target, nothing was lost, no `once` handler wrote to the
database twice for an event, and all events were settled in time.

```console
$ make faults                                      # all rows, a few minutes for every ten
$ make faults ARGS="--events 200 child-within"     # one row; --list names them
```
"""


def line(result: Result) -> str:
    """Return a row for the console."""
    mark = "held    " if result.held else "NOT HELD"
    counts = result.counts
    figures = " ".join(f"{name} {getattr(counts, name)}" for name in COLUMNS) if counts else ""
    why = (result.error or ("" if result.hit else "the fault hit nothing")).partition("\n")[0]
    return f"{mark} {result.row:32} {result.seconds:5.0f} s  {figures}  {why}"


def _path(docs: Path, grounds: Grounds) -> Path:
    release = ".".join((grounds.node.version or "0.0").split(".")[:2])
    # That of PostgreSQL, the default, has no database in its name.
    database = "" if grounds.kind == "postgresql" else f"-{grounds.kind}"
    return docs / "faults" / f"rabbitmq-{release}{database}.json"


def keep(docs: Path, grounds: Grounds, result: Result, *, seed: str) -> None:
    """Store a result with those of earlier runs on the same broker and database."""
    path = _path(docs, grounds)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Any] = json.loads(path.read_text())["rows"] if path.exists() else {}
    assert result.counts is not None
    rows[result.row] = {
        **asdict(result.counts),
        "held": result.held,
        "hit": describe(result.hits),
        "events": result.events,
        "seed": seed,
        "day": datetime.now(UTC).date().isoformat(),
        "seconds": result.seconds,
        "error": result.error.splitlines()[0] if result.error else "",
    }
    about = {
        "rabbitmq": grounds.node.version,
        "python": platform.python_version(),
        "database": grounds.kind,
        **{name: version(name) for name in ("django", "celery", "kombu", "amqp")},
    }
    text = json.dumps({"about": about, "rows": rows}, indent=1, sort_keys=True)
    path.write_text(text + "\n")


def describe(hits: Iterable[Hit]) -> str:
    """Return how often each fault occurred and how many deliveries were in flight."""
    hits = list(hits)
    parts = []
    for what, number in Counter((hit.what, hit.signal) for hit in hits).items():
        flights = [hit.in_flight for hit in hits if (hit.what, hit.signal) == what]
        least, most = min(flights), max(flights)
        signal = f" ({Signals(what[1]).name})" if what[1] else ""
        flight = f"{least}" if least == most else f"{least} to {most}"
        times = f"{number} times " if number > 1 else ""
        parts.append(f"{times}{what[0]}{signal}, {flight} in flight")
    return "; ".join(parts)


def write(docs: Path) -> Path:
    """Write docs/faults.md from the stored results."""
    folder = docs / "faults"
    stored = [json.loads(path.read_text()) for path in folder.glob("rabbitmq-*.json")]
    lines = [INTRODUCTION, *_summary(sorted(stored, key=_place))]
    page = docs / "faults.md"
    page.write_text("\n".join([*lines, ""]))
    return page


def _place(found: Mapping[str, Any]) -> tuple[bool, str, list[int]]:
    """Return the key that sorts a broker's results: PostgreSQL, then the other databases."""
    about = found["about"]
    release = [int(part) for part in about["rabbitmq"].split(".")]
    return about["database"] != "postgresql", about["database"], release


def _summary(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each run, and one for each row with the sums of all runs."""
    columns = ("published", "lost", "calls")
    lines = [
        "| RabbitMQ | database | Python | Django | Celery | kombu | py-amqp | run | held | lost |",
        f"|{' --- |' * 8}{' ---: |' * 2}",
    ]
    for found in runs:
        about, rows = found["about"], found["rows"]
        ours = [rows[name] for name in all_rows() if name in rows]
        held = sum(row["held"] for row in ours)
        versions = (about[name] for name in ("python", "django", "celery", "kombu", "amqp"))
        cells = (
            about["rabbitmq"],
            TITLES[about["database"]],
            *versions,
            _days(rows),
            f"{held} of {len(all_rows())}",
            f"{sum(row['lost'] for row in ours):,}",
        )
        lines.append(_line(*cells))
    lines += [
        "\nBelow are the sums of these runs; `docs/faults/` has them one by one.\n",
        f"| fault | {' | '.join(columns)} |",
        f"| --- |{' ---: |' * len(columns)}",
    ]
    for group, members in _groups():
        lines.append(f"| **{group}** |{' |' * len(columns)}")
        for row in members:
            done = [found["rows"][row.name] for found in runs if row.name in found["rows"]]
            if not done:
                continue
            mark = "" if all(each["held"] for each in done) else " **not held**"
            sums = (f"{sum(each[name] for each in done):,}" for name in columns)
            lines.append(_line(row.title + mark, *sums))
    return lines


def _groups() -> Iterator[tuple[str, list[Row]]]:
    """Yield each group with its rows."""
    rows = all_rows().values()
    assert {row.group for row in rows} == {*GROUPS}
    for group in GROUPS:
        yield group, [row for row in rows if row.group == group]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _days(rows: Mapping[str, Any]) -> str:
    """Return the day of the rows, or the first and the last one."""
    days = sorted({row["day"] for row in rows.values()})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
