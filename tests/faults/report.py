"""Write docs/faults.md and docs/faults/*.md from the results of runs on several brokers."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from signal import Signals
from typing import Any

from tests.conftest import SERVERS

from . import all_rows, peers
from .rows import Row
from .running import Result
from .world import Grounds, Hit

#: Of databases, as headings.
TITLES = {"sqlite": "SQLite"} | {kind: server.title for kind, server in SERVERS.items()}
COLUMNS = ("published", "handled", "archived", "waiting", "lost", "calls", "effects")
#: The pages in docs/faults/, and the groups of rows in each.
PAGES = {
    "workers": ("Workers are killed", ("Pool processes and workers",)),
    "shutdowns": ("Workers are stopped", ("Shutdowns",)),
    "brokers": (
        "Faults of RabbitMQ",
        (
            "The broker is killed and started again",
            "Alarms of the broker",
            "The broker's consumer timeout",
            "A cluster of three nodes",
        ),
    ),
    "network": ("Faults of the network", ("The network between a process and the broker",)),
    "publishers": (
        "Publishers, relays, mirrors and companions are killed",
        ("Publishers and relays", "Mirror and replay", "The companion"),
    ),
    "databases": ("Faults of the database", ("Databases",)),
    "topologies": (
        "Queues are deleted, handlers removed",
        ("Queues deleted manually", "Releases while events are delayed"),
    ),
}
#: Below the tables of a page.
NOTES = {
    "brokers": """
When a cluster loses a node, RabbitMQ sends a dead letter without a confirm again after three
minutes. Until then it is neither ready nor unacknowledged, and the table counts it as waiting.
"""
}
INTRODUCTION = """\
# The fault table

> Written by `make faults`. In each row, the named fault hits work in flight, and every accepted
> event is counted.

Every event has two handlers, one of them with [`once`](retries.md#once). Unless a row needs it
otherwise, one event in ten fails in its first attempt, and one in twenty in every attempt. The
counts come from ledgers outside the package: publishers and handlers append a line to a file, and
sync it to disk, before and after each step. They count (event, handler) pairs:

- **published**: accepted by RabbitMQ; with the outbox, committed;
- **lost**: neither handled, nor archived, nor waiting in a queue or in the outbox at the end;
- **calls**: repeated runs of the plain handler within one attempt, since delivery is at least once.

A row is **held** if the fault hit its target, nothing was lost, no `once` handler wrote to the
database twice for an event, and all events were settled in time.

Retries follow after one second, and leases on outbox rows and replays expire after 6 s instead of
60 s, so that a run ends soon. The test suite runs each row with fewer events.

```console
$ make faults                                      # all rows, a few minutes for every ten
$ make faults ARGS="--events 200 child-within"     # one row; --list names them
```
"""
DETAILS = """\
The columns are those of [the fault table](../faults.md), and

- **handled**; **archived** after the last attempt or because of the fault;
- **waiting** in a queue or in the outbox at the end;
- **effects**: database rows that the handler with `once` wrote beyond the first one for an event;
- **hit**: how often the fault occurred and how many deliveries were unacknowledged at that moment;
  for a publisher, events without a confirm; for a deleted queue, the messages in it.
"""


def line(result: Result) -> str:
    """Return a row for the console."""
    mark = "held    " if result.held else "NOT HELD"
    counts = result.counts
    figures = " ".join(f"{name} {getattr(counts, name)}" for name in COLUMNS) if counts else ""
    why = (result.error or ("" if result.hit else "the fault hit nothing")).partition("\n")[0]
    return f"{mark} {result.row:32} {result.seconds:5.0f} s  {figures}  {why}"


def held(docs: Path, grounds: Grounds, *, events: int, peer: bool = False) -> set[str]:
    """Return the names of the rows that held here, with as many events."""
    path = _path(docs, grounds, peer=peer)
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    known = peers.PEERS if peer else all_rows()
    return {
        name
        for name, row in rows.items()
        if name in known and row["held"] and row["events"] >= known[name].published(events)
    }


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
    """Write the summary, docs/faults.md, and its details, docs/faults/*.md, from stored results."""
    folder = docs / "faults"
    folder.mkdir(parents=True, exist_ok=True)
    stored = [json.loads(path.read_text()) for path in folder.glob("rabbitmq-*.json")]
    runs = sorted(stored, key=_place)
    names = list(PAGES)
    for name in PAGES:
        (folder / f"{name}.md").write_text(_details(name, runs))
    if (path := folder / f"{peers.PACKAGE}.json").exists():
        names.append(peers.PACKAGE)
        (folder / f"{peers.PACKAGE}.md").write_text(_peer_page(json.loads(path.read_text())))
    page = docs / "faults.md"
    page.write_text("\n".join([INTRODUCTION, *_summary(runs), *_contents(names)]))
    return page


def _contents(names: Sequence[str]) -> list[str]:
    return ["", "```{toctree}", ":hidden:", "", *(f"faults/{name}" for name in names), "```", ""]


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
        "\nBelow are the sums of these runs; each link leads to the runs one by one.",
        f"{peers.PACKAGE} has [a table of its own](faults/{peers.PACKAGE}.md).\n",
        f"| fault | {' | '.join(columns)} |",
        f"| --- |{' ---: |' * len(columns)}",
    ]
    for page, group, members in _places():
        lines.append(f"| **[{group}](faults/{page}.md)** |{' |' * len(columns)}")
        for row in members:
            done = [found["rows"][row.name] for found in runs if row.name in found["rows"]]
            if not done:
                continue
            mark = "" if all(each["held"] for each in done) else " **not held**"
            sums = (f"{sum(each[name] for each in done):,}" for name in columns)
            lines.append(_line(row.title + mark, *sums))
    return lines


def _places() -> Iterator[tuple[str, str, list[Row]]]:
    """Yield each group of rows with its page, in the order of the pages."""
    rows = all_rows().values()
    places = [(page, group) for page, (_, groups) in PAGES.items() for group in groups]
    assert {row.group for row in rows} == {group for _, group in places}
    for page, group in places:
        yield page, group, [row for row in rows if row.group == group]


def _details(page: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a page with a line for each row and run."""
    lines = [f"# {PAGES[page][0]}\n", DETAILS]
    groups = [(group, members) for name, group, members in _places() if name == page]
    for group, members in groups:
        if len(groups) > 1:
            lines.append(f"## {group}\n")
        lines += [
            f"| fault | RabbitMQ | {' | '.join(COLUMNS)} | hit |",
            f"| --- | --- |{' ---: |' * len(COLUMNS)} --- |",
        ]
        for row in members:
            title = row.title
            for found in runs:
                if row.name in found["rows"]:
                    each = found["rows"][row.name]
                    lines.append(_line(title, _broker(found["about"]), *_cells(each, COLUMNS)))
                    title = ""
        lines.append("")
    return "\n".join(lines) + NOTES.get(page, "").lstrip("\n")


def _broker(about: Mapping[str, Any]) -> str:
    """Return the release of RabbitMQ, and the database unless it is the default."""
    kind = about["database"]
    database = "" if kind == "postgresql" else f", {TITLES[kind]}"
    return f"{about['rabbitmq']}{database}"


def _cells(result: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    mark = "" if result["held"] else f" **not held** {result['error']}".rstrip()
    return [*(f"{result[name]:,}" for name in columns), f"{result['hit']}{mark}"]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _peer_page(found: Mapping[str, Any]) -> str:
    about, rows = found["about"], found["rows"]
    columns = [column for column in COLUMNS if column != "effects"]
    total: Counter[str] = Counter()
    lines = [
        f"# The same faults, {peers.PACKAGE} {about[peers.PACKAGE]}\n",
        (
            f"RabbitMQ {about['rabbitmq']}, Python {about['python']}, Celery {about['celery']}, "
            f"kombu {about['kombu']}, py-amqp {about['amqp']}; {_days(rows)}.\n"
        ),
        peers.INTRODUCTION,
        f"| fault | {' | '.join(columns)} | hit |",
        f"| --- |{' ---: |' * len(columns)} --- |",
    ]
    for _, group, members in _places():
        run = [peers.PEERS[row.name] for row in members if row.name in {*peers.PEERS} & {*rows}]
        if run:
            lines.append(f"| **{group}** |" + " |" * (len(columns) + 1))
        for row in run:
            total.update({name: rows[row.name][name] for name in columns})
            lines.append(_line(row.title, *_cells(rows[row.name], columns)))
    lines.append(_line("all", *(f"{total[name]:,}" for name in columns), ""))
    lines.append("\nOur other rows need what it does not have:\n")
    for what, names in peers.CANNOT.items():
        lines.append(f"- {what}: {len(names)} row{'s' if len(names) > 1 else ''}")
    return "\n".join([*lines, ""])


def _days(rows: Mapping[str, Any]) -> str:
    """Return the day of the rows, or the first and the last one."""
    days = sorted({row["day"] for row in rows.values()})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
