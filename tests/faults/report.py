"""Write docs/faults.md from the results of runs on several brokers."""

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
from tests.conftest import SERVERS

from . import all_rows, peers
from .rows import Row
from .running import Result
from .world import Grounds, Hit

#: Of databases, as headings.
TITLES = {"sqlite": "SQLite"} | {kind: server.title for kind, server in SERVERS.items()}
COLUMNS = ("published", "handled", "archived", "waiting", "lost", "calls", "effects")
INTRODUCTION = """\
# The fault table

> Written by `make faults`. Each line is a run in which the named fault hit work in flight.

Every event has two handlers, one of them with [`once`](handling.md#once). Unless a row needs it
otherwise, most events succeed, one in ten fails in its first attempt, and one in twenty fails in
every attempt. The table counts (event, handler) pairs:

- **published**: accepted by RabbitMQ; with the outbox, committed;
- **handled**; **archived** after the last attempt or because of the fault;
- **waiting** in a queue or in the outbox at the end; **lost**: none of these;
- **calls**: repeated runs of the plain handler within one attempt, since delivery is at least once;
- **effects**: database rows that the handler with `once` wrote beyond the first one for an event;
- **hit**: how often the fault occurred and how many deliveries were unacknowledged at that moment;
  for a publisher, events without a confirm; for a deleted queue, the messages in it.

The counts come from ledgers outside the package. Publishers and handlers append a line to a file
of their process, and sync it to disk, before and after each step. A worker or publisher that is
killed writes so to its ledger first.

A row is **held** if the fault hit its target, nothing was lost, no effect was doubled, and all
events were settled in time.

All [fast paths](settings.md) are on, as by default. The test suite runs each row with fewer events:
about a third of the rows with all fast paths, a third without `"chunks"`, and a third with none.

Some times are shorter than by default, so that a run ends soon: retries follow after one second,
and leases on outbox rows and replays expire after 6 s instead of 60 s and 30 s.
"""

FOUND = """\
## Bugs that the rows found

These were found by a row, by a test of the same fault, or by the benchmark, and are fixed:

- A worker on a half-open network hung forever when it reconnected. Celery closes the connection of
  its task events with an AMQP `close` and waits for the reply without a timeout
  (half-open-handling).
- In the solo and threads pools, the ack of a finished event waited for the next event. If that one
  killed the worker, the first ran again (23 of 24 rounds in solo, 12 of 24 in threads; now none).
- A pool process kept the objects of each failure until Python's next full garbage collection, about
  80 MB.

One delay is RabbitMQ's own. When a cluster loses a node, a dead letter without a confirm is sent
again after three minutes. Until then it is neither ready nor unacknowledged, and the table counts
it as waiting (cluster-leader-cut-off).
"""


def line(result: Result) -> str:
    """Return a row for the console."""
    mark = "held    " if result.held else "NOT HELD"
    counts = result.counts
    figures = " ".join(f"{name} {getattr(counts, name)}" for name in COLUMNS) if counts else ""
    why = (result.error or ("" if result.hit else "the fault hit nothing")).partition("\n")[0]
    return f"{mark} {result.row:32} {result.seconds:5.0f} s  {figures}  {why}"


def held(docs: Path, grounds: Grounds, *, events: int, peer: bool = False) -> set[str]:
    """Return the names of the rows that held here, with as many events, with today's code."""
    path = _path(docs, grounds, peer=peer)
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    known = peers.PEERS if peer else all_rows()
    return {
        name
        for name, row in rows.items()
        if name in known
        and row["held"]
        and row["events"] >= known[name].published(events)
        and (peer or _every_fast_path(row))
    }


def _every_fast_path(row: Mapping[str, Any]) -> bool:
    """Return True if a stored row was run with every fast path of today."""
    return set(FAST_PATHS).issubset(row.get("fast_paths") or ())


def _path(docs: Path, grounds: Grounds, *, peer: bool) -> Path:
    release = ".".join((grounds.node.version or "0.0").split(".")[:2])
    # That of PostgreSQL, the default, has no database in its name.
    database = "" if grounds.kind == "postgresql" else f"-{grounds.kind}"
    name = peers.PACKAGE if peer else f"rabbitmq-{release}{database}"
    return docs / "faults" / f"{name}.json"


def keep(
    docs: Path,
    grounds: Grounds,
    result: Result,
    *,
    seed: str,
    peer: bool = False,
) -> None:
    """Store a result with those of earlier runs on the same broker and database, or of the peer."""
    path = _path(docs, grounds, peer=peer)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Any] = json.loads(path.read_text())["rows"] if path.exists() else {}
    assert result.counts is not None
    rows[result.row] = {
        **result.counts.as_dict(),
        "held": result.held,
        "hit": describe(result.hits),
        "events": result.events,
        **({} if peer else {"fast_paths": list(FAST_PATHS)}),
        "seed": seed,
        "day": datetime.now(UTC).date().isoformat(),
        "seconds": result.seconds,
        "error": result.error.splitlines()[0] if result.error else "",
    }
    about = {
        "rabbitmq": grounds.node.version,
        "python": platform.python_version(),
        **(peers.versions() if peer else {"database": grounds.kind}),
        **({} if peer else {name: version(name) for name in ("django", "celery", "kombu", "amqp")}),
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
    """Write the page from all stored results."""
    page = docs / "faults.md"
    parts = [INTRODUCTION]
    found = [json.loads(path.read_text()) for path in (docs / "faults").glob("rabbitmq-*.json")]
    parts.extend(map(_section, sorted(found, key=_place)))
    if (path := docs / "faults" / f"{peers.PACKAGE}.json").exists():
        parts.append(_peer_section(json.loads(path.read_text())))
    page.write_text("\n".join([*parts, FOUND]))
    return page


def _place(found: Mapping[str, Any]) -> tuple[bool, str, list[int]]:
    """Return the key that sorts a broker's results: PostgreSQL, then the other databases."""
    about = found["about"]
    release = [int(part) for part in about["rabbitmq"].split(".")]
    return about["database"] != "postgresql", about["database"], release


def _section(found: Mapping[str, Any]) -> str:
    about, rows = found["about"], found["rows"]
    ours = [row for row in all_rows().values() if row.name in rows]
    held = sum(rows[row.name]["held"] for row in ours)
    missing = len(all_rows()) - len(ours)
    today = sum(_every_fast_path(rows[row.name]) for row in ours)
    lines = [
        f"## RabbitMQ {about['rabbitmq']}, {TITLES[about['database']]}\n",
        (
            f"Python {about['python']}, Django {about['django']}, Celery {about['celery']}, kombu "
            f"{about['kombu']}, py-amqp {about['amqp']}; {_days(rows)}. "
            f"{held} of {len(ours)} rows held, {today} of them with every fast path on"
            f"{f'; rows not run here: {missing}' if missing else ''}.\n"
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
            f"kombu {about['kombu']}, py-amqp {about['amqp']}; {_days(rows)}.\n"
        ),
        peers.INTRODUCTION,
        *_table(run, rows, [column for column in COLUMNS if column != "effects"]),
        "\nOur rows that do not apply to it:\n",
    ]
    for what, names in peers.CANNOT.items():
        rest = [all_rows()[name] for name in names]
        titles = ". ".join(
            f"{group}: {'; '.join(row.title for row in members)}"
            for group, members in groupby(rest, key=lambda row: row.group)
        )
        lines.append(f"- It has no {what}. {titles}.")
    return "\n".join([*lines, ""])


def _days(rows: Mapping[str, Any]) -> str:
    """Return the day of the rows, or the first and the last one."""
    days = sorted({row["day"] for row in rows.values()})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


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
