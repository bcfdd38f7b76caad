"""Counts from the ledgers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Each event has these handlers; a unit is an event and one of them.
HANDLERS = ("call", "effect")

Unit = tuple[str, str]


def unit(event_id: object, handler: str) -> Unit:
    """Return the unit of an event and a handler with its whole name."""
    return str(event_id), handler.rpartition(".")[2]


class Ledger:
    """The lines of all processes in a directory, read as they come."""

    def __init__(self, where: Path) -> None:
        self._where = where
        self._read: dict[Path, int] = {}
        self.intended: set[str] = set()
        self.accepted: set[str] = set()
        self.started: Counter[tuple[str, str, int, str | None]] = Counter()
        self.ended: Counter[tuple[str, str, int, str | None]] = Counter()
        self._open: Counter[int] = Counter()
        self.done: set[Unit] = set()
        self.kills: list[dict[str, Any]] = []
        self.through = 0

    def read(self) -> Ledger:
        """Take in what was written since."""
        for path in self._where.glob("ledger.*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            # A killed process may leave half a line.
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                self._take(json.loads(line))
        return self

    def _take(self, line: Mapping[str, Any]) -> None:
        what = line["what"]
        if what == "intent":
            self.intended.update(line["events"])
        elif what in ("accepted", "committed"):
            self.accepted.update(line["events"])
        elif what == "killed":
            self.kills.append(dict(line))
        elif what == "published everything":
            self.through += 1
        elif what in ("start", "done", "raised"):
            key = (line["event"], line["handler"], line["attempt"], line["replay"])
            (self.started if what == "start" else self.ended)[key] += 1
            self._open[line["pid"]] += 1 if what == "start" else -1
            if what == "done":
                self.done.add((line["event"], line["handler"]))

    @property
    def in_hand(self) -> int:
        """Runs that have begun and not ended, in processes that live."""
        return sum(number for pid, number in self._open.items() if Path(f"/proc/{pid}").exists())

    @property
    def cut(self) -> int:
        """Runs that have begun and not ended."""
        return sum((self.started - self.ended).values())

    @property
    def units(self) -> set[Unit]:
        """The units that must end as handled, archived or waiting."""
        return {(event_id, handler) for event_id in self.accepted for handler in HANDLERS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The figures of a row, in units but for the last three.

    Attributes:
        published: accepted.
        handled: ``call`` returned; the effect of ``effect`` is in the database.
        archived: has a message or a row in the archive, and was not handled.
        waiting: is in another queue or in the outbox at the end.
        lost: none of these.
        calls: runs of ``call`` that ended and had ended before, in the same attempt.
        effects: effects in the database beyond the first of their event.
        cut: runs that were begun and did not end.
    """

    published: int
    handled: int
    archived: int
    waiting: int
    lost: int
    calls: int
    effects: int
    cut: int


def count(
    ledger: Ledger,
    *,
    effects: Iterable[str],
    archived: set[Unit],
    waiting: set[Unit],
    stuck: int = 0,
) -> Counts:
    """Do the sum.

    Args:
        effects: the event ids in the table that ``effect`` writes to, as often as they are there.
        stuck: messages that are in queues, and whose ids nobody can see.
    """
    effect = Counter(effects)
    units = ledger.units
    handled = {unit for unit in ledger.done if unit[1] == "call"}
    handled |= {(event_id, "effect") for event_id in effect}
    left = units - handled
    unseen = len(left - archived - waiting)
    return Counts(
        published=len(units),
        handled=len(units & handled),
        archived=len(left & archived),
        waiting=len((left - archived) & waiting) + min(unseen, stuck),
        lost=unseen - min(unseen, stuck),
        calls=sum(
            number - 1
            for (_, handler, _, _), number in ledger.ended.items()
            if handler == "call" and number > 1
        ),
        effects=sum(number - 1 for number in effect.values() if number > 1),
        cut=ledger.cut,
    )
