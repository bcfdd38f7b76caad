"""The end of the demo: what was published, refused, handled, archived, and how long it waited."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from django_amqp_events import RetryPolicy

from .accounting import Archived, Attempt, Ledger, Result
from .screen import BOLD, DIM, GREEN, RED, Screen


def report(
    screen: Screen,
    result: Result,
    *,
    refused: list[dict[str, Any]],
    ledgers: dict[str, Ledger],
    archives: dict[str, list[Archived]],
) -> None:
    """Write all tables."""
    screen.heading("Published, each one confirmed by the broker")
    _lines(screen, screen.table(("event", "count"), result.published.most_common()))
    if refused:
        screen.heading(f"Refused before anything was published: {len(refused)} lines")
        rows = [(entry["line"], entry["number"], entry["reason"]) for entry in refused]
        _lines(screen, screen.table(("line", "order", "why"), rows))
    screen.heading("Handled")
    _handled(screen, result)
    found = [(service, message) for service, all_ in archives.items() for message in all_]
    if found:
        unread = sum(not message.state for _, message in found)
        screen.heading(
            f"In the archive: {len(found) - unread} rows in the services' databases, "
            f"{unread} messages in the queues"
        )
        _archive(screen, found)
        stored = sum(ledger.failures_stored() for ledger in ledgers.values())
        screen.write(screen.paint(f"  {stored} failures in django-celery-results", DIM))
    _delays(screen, [attempt for ledger in ledgers.values() for attempt in ledger.attempts()])


def report_again(screen: Screen, result: Result, archives: dict[str, list[Archived]]) -> None:
    """Write what there is to say once the archive was replayed."""
    screen.heading("In the archive, after the replay")
    head = ("handler", "event", "order", "replays", "state")
    found = [(service, message) for service, all_ in archives.items() for message in all_]
    rows = [
        (
            f"{service} {message.handler}",
            f"{message.event} {message.event_id[:8]}",
            message.subject,
            message.replays,
            message.state or f"in the queue: {message.reason}",
        )
        for service, message in found
    ]
    _lines(screen, screen.table(head, rows))
    screen.heading("Handled, counted anew")
    _handled(screen, result, again=True)


def _handled(screen: Screen, result: Result, *, again: bool = False) -> None:
    head = ["service", "handler", "events", "handled", "retries", "archived", "waiting"]
    rows: list[list[object]] = [
        [r.service, r.handler, r.events, r.handled, r.retried, r.archived, r.waiting]
        for r in result.rows
    ]
    retried = sum(row.retried for row in result.rows)
    rows.append(
        ["all", "", result.expected, result.handled, retried, result.archived, result.waiting]
    )
    if again:
        head.insert(5, "replays")
        for row, found in zip(rows, result.rows, strict=False):
            row.insert(5, found.replayed)
        rows[-1].insert(5, sum(found.replayed for found in result.rows))
    _lines(screen, screen.table(head, rows, total=True))
    lost = screen.paint(f"lost {result.lost}", BOLD, RED if result.lost else GREEN)
    doubled = f"; {result.doubled} runs ended twice" if result.doubled else ""
    archived = f"{result.archived} archived{' and open' if again else ''}"
    discarded = f" - {result.settled} discarded" if result.settled else ""
    screen.write()
    screen.write(
        f"  {result.expected} accepted - {result.handled} handled - {archived}{discarded} "
        f"- {result.waiting} waiting = {lost}{doubled}"
    )


def _archive(screen: Screen, found: list[tuple[str, Archived]]) -> None:
    head = ("handler", "event", "order", "reason", "attempts", "exception")
    rows = [
        (
            f"{service} {message.handler}",
            f"{message.event} {message.event_id[:8]}",
            message.subject,
            message.reason,
            message.attempts,
            f"{message.exception}: {message.line}",
        )
        for service, message in found
    ]
    _lines(screen, screen.table(head, rows, wrap=True))


def _delays(screen: Screen, attempts: list[Attempt]) -> None:
    """Show the attempts of one event beside its schedule, and how late all retries were."""
    runs: dict[tuple[str, str], list[Attempt]] = {}
    for attempt in attempts:
        runs.setdefault((attempt.handler, attempt.event_id), []).append(attempt)
    # Of those with most attempts the last one published: it met the shortest queues.
    longest = max(runs.values(), key=lambda run: (len(run), run[0].began_at), default=[])
    late = [(one.began_at - one.due_at).total_seconds() for one in attempts if one.due_at]
    if len(longest) < 2 or not late:
        return
    schedule = RetryPolicy(max_retries=len(longest) - 1).schedule()
    delays = ", ".join(f"{delay:g} s" for delay in schedule)
    screen.heading(f"One event and its schedule: {longest[0].handler}, {delays}")
    rows = []
    before: Attempt | None = None
    for one, delay in zip(longest, (0.0, *schedule), strict=True):
        waited = (one.began_at - before.ended_at).total_seconds() if before else 0.0
        rows.append(
            (
                one.attempt,
                f"{one.began_at:%H:%M:%S.%f}"[:-3],
                f"{delay:g} s" if before else "",
                f"{waited:.2f} s" if before else "",
                {"SUCCESS": "handled", "RETRY": "failed", "FAILURE": "archived"}[one.state],
                one.exception,
            )
        )
        before = one
    _lines(screen, screen.table(("attempt", "began", "declared", "waited", "", ""), rows))
    early = sum(seconds < 0 for seconds in late)
    screen.write()
    screen.write(
        f"  all {len(late)} retries: {early or 'none'} early; begun {median(late):.2f} s after "
        f"they were due in the median, {max(late):.2f} s at most"
    )
    screen.write(
        screen.paint("  (a retry that is back waits behind what its queue holds already)", DIM)
    )


def _lines(screen: Screen, lines: Iterable[str]) -> None:
    for line in lines:
        screen.write(line)
