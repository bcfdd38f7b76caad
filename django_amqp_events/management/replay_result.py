"""What events_replay did, or would do, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from ..archive import eligibility
from ..archive.eligibility import Skipped
from ..archive.replay import Report
from ..declare.registry import Handler
from ..message.text import counted
from .base import SHOWN, ReportCommand, columns

RULES: Final = {
    "replay": eligibility.REPLAY,
    "discard": eligibility.DISCARD,
    "restore": eligibility.RESTORE,
}
DONE: Final = {"replay": "replayed", "discard": "discarded", "restore": "restored"}


@dataclass(slots=True)
class Result:
    """The result of the command.

    Attributes:
        matched: number of events when the command started.
        missing: ids of no event.
        decision: a key of :data:`RULES`.
        able: with ``--dry-run``, the number of events that it would change.
        targets: with ``--dry-run``, the number of events for each handler.
    """

    matched: int = 0
    missing: list[str] = field(default_factory=list)
    report: Report = field(default_factory=Report)
    decision: str = "replay"
    able: int = 0
    targets: Counter[Handler] = field(default_factory=Counter)

    @property
    def code(self) -> int:
        report = self.report
        if report.stopped and not (report.published or report.unconfirmed):
            return 2
        left = self.missing or report.returned or report.skipped or report.stopped
        return 1 if left else 0

    def document(self, *, dry_run: bool) -> dict[str, Any]:
        """Return it as JSON types."""
        report = self.report
        replayed = self.decision == "replay"
        done = "published" if replayed else DONE[self.decision]

        def left(skipped: list[Skipped]) -> list[dict[str, Any]]:
            return [columns(skip, "id", "title", "why") for skip in skipped]

        return {
            "result": "stopped" if report.stopped else "counted" if dry_run else done,
            "matched": self.matched,
            "published": len(report.published) if replayed else 0,
            "decided": 0 if replayed else len(report.published),
            "returned": left(report.returned),
            "skipped": left(report.skipped),
            "missing": self.missing,
            "stopped": report.stopped or "",
            "handlers": [
                {**eligibility.destination(handler), "events": count}
                for handler, count in self.targets.most_common()
            ],
        }

    def show(self, command: ReportCommand, *, dry_run: bool) -> None:
        """Print it."""
        report, done = self.report, DONE[self.decision]
        if not (self.matched or report.skipped or self.missing):
            state = RULES[self.decision].state.value
            command.tell(f"nothing to {self.decision}: no {state} event matches")
            return
        if dry_run:
            command.tell(f"{counted(self.able, 'event')} would be {done}")
            for handler, count in self.targets.most_common():
                to = eligibility.destination(handler)
                command.tell(f"  {count} to {handler.name}: {to['exchange']} → {handler.queue}")
        elif self.matched:
            events = counted(self.matched, "event")
            verb = "published" if self.decision == "replay" else done
            command.tell(f"{len(report.published)} of {events} {verb}")
            show_reasons(command, "returned to the archive", report.returned)
        show_reasons(command, "would be skipped" if dry_run else "skipped", report.skipped)
        show_missing(command, self.missing)
        if report.stopped and dry_run:
            command.stderr.write(f"stopped: {report.stopped}; the list is incomplete")
        elif report.stopped:
            left = self.matched - len(report.published) - len(report.returned)
            rest = f"; {left} not {done}" if left else ""
            command.stderr.write(f"stopped: {report.stopped}{rest}")


def show_missing(command: ReportCommand, ids: Iterable[str]) -> None:
    """Print the ids that no archived event has."""
    for event_id in ids:
        command.stderr.write(f"no archived event has the id {event_id!r}; give the full id")


def show_reasons(command: ReportCommand, what: str, left: list[Skipped]) -> None:
    """Print why events were left out, the most frequent reasons first."""
    if not left:
        return
    command.tell(f"{len(left)} {what}")
    reasons = Counter(skip.why for skip in left).most_common(
        None if command.verbosity > 1 else SHOWN
    )
    for why, count in reasons:
        first = next(skip for skip in left if skip.why == why)
        more = f", and {count - 1} more" if count > 1 else ""
        command.tell(f"  {first.title or first.id}{more}: {why}")
    if others := len(left) - sum(count for _, count in reasons):
        command.tell(f"  and {counted(others, 'more event')} for other reasons")
