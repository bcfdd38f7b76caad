"""docs/faults.md, from what runs on several brokers found."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from signal import Signals
from typing import Any

from django_amqp_events.conf import FAST_PATHS

from . import all_rows, peers
from .rows import Row
from .running import Result
from .world import Grounds, Hit

COLUMNS = ("published", "handled", "archived", "waiting", "lost", "calls", "effects")
INTRODUCTION = """\
# The fault table

> Written by `make faults`. Each line is a run in which the named fault hit work in flight.

Every event has two handlers, one of them with [`once`](handling.md#once); most succeed, one in
ten fails in its first attempt, one in twenty for ever, unless a row needs it otherwise. The
figures are (event, handler) pairs: **published** = accepted (with the outbox: committed),
**handled**, **archived** after their attempts or by the fault, **waiting** in a queue or the
outbox in the end, and **lost**: none of these. **Calls**: runs of the plain handler that had
ended before in the same attempt, and did again: delivery is at least once. **Effects**: rows
that the handler with `once` wrote to its database beyond the first of an event.

They come from ledgers outside of the package: publishers and handlers append a line to a file
of their process and wait until the disk has it, before and after each step. A worker or
publisher that is killed says so in its ledger first. **Hit** says how often the fault came, and
how much was in flight when it did: deliveries that were unacked, as the broker's management API had
it within a second or as handlers were running, at least the one at which a process killed itself;
of a publisher, events without an answer; for a deleted queue, what waited for it.

A row is **held** if the fault hit what it says, nothing was lost, no effect was doubled, and all
had come to its end in time.

In runs of today's code every fast path is on ([`FAST_PATHS`](settings.md)), as by default. The
suite runs each row with fewer events: about a third of the rows each with all, with all but
`"chunks"`, and with none.

So that a run ends soon, some times are shorter than by default: retries after a second, what a
dead process has taken from the outbox or for a replay is free after 6 s, not 60 or 30.
"""

FOUND = """\
## What it found

Found by a row, by a test of the same fault, or by the benchmark beside them, and mended:

- A worker whose network went half-open hung for ever when it connected again: Celery says goodbye
  on the connection of its task events and waits for the answer without a limit
  (half-open-handling).
- In solo and threads the ack of a run that had ended waited for the next run; where that one
  killed the worker, the first ran again (23 of 24 rounds in solo, 12 of 24 in threads; now none).
- A pool process kept what each failure had left until Python's next full collection, some 80 MB.

And this is RabbitMQ's own: when a cluster loses a node, a dead letter that had no confirm yet is
sent again after three minutes. Until then it is neither ready nor unacked, and is counted as
waiting (cluster-leader-cut-off).
"""


def line(result: Result) -> str:
    """A row for the console."""
    mark = "held    " if result.held else "NOT HELD"
    counts = result.counts
    figures = " ".join(f"{name} {getattr(counts, name)}" for name in COLUMNS) if counts else ""
    why = (result.error or ("" if result.hit else "the fault hit nothing")).partition("\n")[0]
    return f"{mark} {result.row:32} {result.seconds:5.0f} s  {figures}  {why}"


def held(docs: Path, grounds: Grounds, *, events: int, peer: bool = False) -> set[str]:
    """Return the names of the rows that held on the same broker, with as many events, as today."""
    path = _path(docs, grounds, peer=peer)
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    known = peers.PEERS if peer else all_rows()
    return {
        name
        for name, row in rows.items()
        if name in known
        and row["held"]
        and row["events"] >= known[name].published(events)
        and row.get("fast_paths") == (None if peer else list(FAST_PATHS))
    }


def _path(docs: Path, grounds: Grounds, *, peer: bool) -> Path:
    release = ".".join((grounds.node.version or "0.0").split(".")[:2])
    return docs / "faults" / f"{peers.PACKAGE if peer else f'rabbitmq-{release}'}.json"


def keep(
    docs: Path,
    grounds: Grounds,
    results: Sequence[Result],
    *,
    events: int,
    seed: str,
    peer: bool = False,
) -> None:
    """Put results beside those of earlier runs on the same broker, or of the peer."""
    path = _path(docs, grounds, peer=peer)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Any] = json.loads(path.read_text())["rows"] if path.exists() else {}
    for result in results:
        assert result.counts is not None
        rows[result.row] = {
            **result.counts.as_dict(),
            "held": result.held,
            "hit": describe(result.hits),
            "events": result.events,
            **({} if peer else {"fast_paths": list(FAST_PATHS)}),
            "seed": seed,
            "seconds": result.seconds,
            "error": result.error.splitlines()[0] if result.error else "",
        }
    about = {
        "rabbitmq": grounds.node.version,
        "python": platform.python_version(),
        **(peers.versions() if peer else {"database": grounds.kind}),
        **({} if peer else {name: version(name) for name in ("django", "celery", "kombu", "amqp")}),
        "day": datetime.now(UTC).date().isoformat(),
    }
    text = json.dumps({"about": about, "rows": rows}, indent=1, sort_keys=True)
    path.write_text(text + "\n")


def describe(hits: Iterable[Hit]) -> str:
    """Say what hit how often, and what was in flight."""
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
    """Write the page from all that was found."""
    page = docs / "faults.md"
    parts = [INTRODUCTION]
    found = sorted(
        (docs / "faults").glob("rabbitmq-*.json"),
        key=lambda path: [int(part) for part in path.stem.partition("-")[2].split(".")],
    )
    for path in found:
        parts.append(_section(json.loads(path.read_text())))
    if (path := docs / "faults" / f"{peers.PACKAGE}.json").exists():
        parts.append(_peer_section(json.loads(path.read_text())))
    page.write_text("\n".join([*parts, FOUND]))
    return page


def _section(found: Mapping[str, Any]) -> str:
    about, rows = found["about"], found["rows"]
    ours = [row for row in all_rows().values() if row.name in rows]
    held = sum(rows[row.name]["held"] for row in ours)
    missing = len(all_rows()) - len(ours)
    today = sum(rows[row.name].get("fast_paths") == list(FAST_PATHS) for row in ours)
    lines = [
        f"## RabbitMQ {about['rabbitmq']}\n",
        (
            f"Python {about['python']}, Django {about['django']}, Celery {about['celery']}, kombu "
            f"{about['kombu']}, py-amqp {about['amqp']}, {about['database']}; {about['day']}. "
            f"{held} of {len(ours)} rows held, {today} of them with every fast path on"
            f"{f'; {missing} more were not run here yet' if missing else ''}.\n"
        ),
        *_table(ours, rows, COLUMNS),
    ]
    return "\n".join([*lines, ""])


def _peer_section(found: Mapping[str, Any]) -> str:
    about, rows = found["about"], found["rows"]
    # In the order of ours.
    run = [peers.PEERS[name] for name in all_rows() if name in peers.PEERS and name in rows]
    lines = [
        f"## The same faults, {peers.PACKAGE} {about[peers.PACKAGE]}\n",
        (
            f"RabbitMQ {about['rabbitmq']}, Python {about['python']}, Celery {about['celery']}, "
            f"kombu {about['kombu']}, py-amqp {about['amqp']}; {about['day']}.\n"
        ),
        peers.INTRODUCTION,
        *_table(run, rows, [column for column in COLUMNS if column != "effects"]),
        "\nRows of ours that cannot be:\n",
    ]
    for what, names in peers.CANNOT.items():
        rest = [all_rows()[name] for name in names]
        titles = ". ".join(
            f"{group}: {'; '.join(row.title for row in members)}"
            for group, members in groupby(rest, key=lambda row: row.group)
        )
        lines.append(f"- cannot: it has no {what}. {titles}.")
    return "\n".join([*lines, ""])


def _table(ours: Sequence[Row], rows: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    total: Counter[str] = Counter()
    for row in ours:
        total.update({name: rows[row.name][name] for name in COLUMNS})
    lines = [
        f"| fault | {' | '.join(columns)} | hit |",
        f"| --- |{' ---: |' * len(columns)} --- |",
    ]
    groups = list(dict.fromkeys(row.group for row in ours))
    together = sorted(ours, key=lambda row: groups.index(row.group))
    for group, members in groupby(together, key=lambda row: row.group):
        lines.append(f"| **{group}** |" + " |" * (len(columns) + 1))
        for row in members:
            each = rows[row.name]
            lines.append(
                f"| {row.title} | "
                + " | ".join(f"{each[name]:,}" for name in columns)
                + f" | {each['hit']}{'' if each['held'] else ' **not held** ' + each['error']} |"
            )
    lines.append("| all | " + " | ".join(f"{total[name]:,}" for name in columns) + " | |")
    return lines
