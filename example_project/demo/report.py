"""The tables of the demo: published, refused, handled and archived events, and retry delays."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from django_amqp_events import RetryPolicy

from .accounting import Account, Archived, Attempt, Ledger
from .screen import BOLD, DIM, GREEN, RED, Screen


def report(
    screen: Screen,
    result: Account,
    refused: list[dict[str, Any]],
    ledgers: dict[str, Ledger],
    archives: dict[str, list[Archived]],
) -> None:
    """Print all tables."""
    screen.heading("Published and confirmed")
    _lines(screen, screen.table(("event", "count"), result.published.most_common()))
    if refused:
        screen.heading(f"Refused, nothing was published: {len(refused)} lines")
        rows = [(entry["line"], entry["number"], entry["reason"]) for entry in refused]
        _lines(screen, screen.table(("line", "order", "reason"), rows))
    screen.heading("Handled")
    _handled(screen, result)
    found = [(service, message) for service, all_ in archives.items() for message in all_]
    if found:
        screen.heading(f"Archived: {len(found)} events in the services' databases")
        _archive(screen, found)
        stored = sum(ledger.failures_stored() for ledger in ledgers.values())
        screen.write(screen.paint(f"  {stored} failures stored by django-celery-results", DIM))
    _delays(screen, [attempt for ledger in ledgers.values() for attempt in ledger.attempts()])


def report_again(screen: Screen, result: Account, archives: dict[str, list[Archived]]) -> None:
    """Print the tables after the replay."""
    screen.heading("Archived, after the replay")
    head = ("handler", "event", "order", "replays", "state")
    found = [(service, message) for service, all_ in archives.items() for message in all_]
    rows = [
        (
            f"{service} {message.handler}",
            f"{message.event} {message.event_id[:8]}",
            message.subject,
            message.replays,
            message.state,
        )
        for service, message in found
    ]
    _lines(screen, screen.table(head, rows))
    screen.heading("Handled, counted again")
    _handled(screen, result, again=True)


def _handled(screen: Screen, result: Account, *, again: bool = False) -> None:
    columns = ["events", "handled", "retried", "replayed", "archived", "waiting"]
    if not again:
        columns.remove("replayed")
    rows: list[list[object]] = [
        [row.service, row.handler, *(getattr(row, column) for column in columns)]
        for row in result.rows
    ]
    rows.append(["all", "", *map(result.total, columns)])
    _lines(screen, screen.table(["service", "handler", *columns], rows, total=True))
    lost = screen.paint(f"{result.lost} lost", BOLD, RED if result.lost else GREEN)
    doubled = result.total("doubled")
    parts = [f"{result.total('events')} accepted", f"{result.total('handled')} handled"]
    parts.append(f"{result.total('archived')} {'still ' if again else ''}archived")
    if discarded := result.total("discarded"):
        parts.append(f"{discarded} discarded")
    parts.append(f"{result.waiting} waiting")
    screen.write()
    screen.write(
        f"  {' - '.join(parts)} = {lost}" + (f"; {doubled} handled twice" if doubled else "")
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
    """Print the attempts of one event beside its schedule, and how late all retries were."""
    runs: dict[tuple[str, str], list[Attempt]] = {}
    for attempt in attempts:
        runs.setdefault((attempt.handler, attempt.event_id), []).append(attempt)
    # The last published of those with the most attempts: it met the shortest queues.
    longest = max(runs.values(), key=lambda run: (len(run), run[0].began_at), default=[])
    late = [(one.began_at - one.due_at).total_seconds() for one in attempts if one.due_at]
    if len(longest) < 2 or not late:
        return
    schedule = RetryPolicy(max_retries=len(longest) - 1).schedule()
    delays = ", ".join(f"{delay:g} s" for delay in schedule)
    screen.heading(f"The retries of one event: {longest[0].handler}, declared delays {delays}")
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
    _lines(screen, screen.table(("attempt", "began", "declared", "waited", "result", ""), rows))
    early = sum(seconds < 0 for seconds in late)
    screen.write()
    screen.write(
        f"  all {len(late)} retries: {early or 'none'} early, {median(late):.2f} s late in the "
        f"median, {max(late):.2f} s at most"
    )
    screen.write(screen.paint("  (a returning retry waits behind the events in its queue)", DIM))


def _lines(screen: Screen, lines: Iterable[str]) -> None:
    for line in lines:
        screen.write(line)
