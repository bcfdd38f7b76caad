"""``manage.py events_prune``: delete what is settled and old from archive, outbox and inbox."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from typing import Any

from django_amqp_events import conf
from django_amqp_events.archive import retention
from django_amqp_events.archive.retention import Pruned
from django_amqp_events.management import archive
from django_amqp_events.management.archive import ArchiveCommand, number
from django_amqp_events.models import State
from django_amqp_events.worker import once

_EPILOG = """
ages: 90s, 45m, 12h, 30d, 8w, 1d12h; "never" keeps that state for ever.

Age counts from when an event came into its state. Its failures, replays and
actions go with it; task results stay. What is queued or replaying is never
deleted, and what is archived only with --archived. Of the outbox goes what was
discarded; what waits there is never deleted. A row of the inbox goes when its
handler has handled the event so long ago, but not while the event is in the
archive. A replay batch goes when it ended so long ago, or was made a day ago and
never started. Figures of the dashboard, and alerts that are over, go as RETENTION
says.

exit codes:
  0  everything that was due is deleted (--dry-run: counted)
  1  stopped before the end (SIGINT, SIGTERM)
  2  wrong arguments or settings; the database is away
"""


class Command(ArchiveCommand):
    """A shell on :func:`django_amqp_events.archive.retention.prune`."""

    help = (
        "Delete events that have succeeded or were discarded long ago, and what handlers with "
        'once need no longer know, as AMQP_EVENTS["RETENTION"] says.'
    )
    epilog = _EPILOG

    def add_arguments(self, parser: ArgumentParser) -> None:
        for state, default in (
            (State.SUCCEEDED, "30d, or RETENTION"),
            (State.DISCARDED, "90d, or RETENTION"),
            (State.ARCHIVED, "never; they were not handled"),
        ):
            parser.add_argument(
                f"--{state.value}",
                metavar="AGE",
                help=f"Delete events that have been {state.value} for longer (default: {default}).",
            )
        parser.add_argument(
            "--inbox",
            metavar="AGE",
            help="Delete rows of the inbox whose event was handled longer ago: 30d at the least "
            "(default: 30d, or RETENTION, or twice the longest retry schedule).",
        )
        parser.add_argument(
            "--batches",
            metavar="AGE",
            help="Delete replay batches that ended longer ago (default: 90d, or RETENTION).",
        )
        parser.add_argument(
            "--service",
            metavar="NAME",
            help="Delete what a service of another name has left in these tables: this one, "
            "before it was renamed (default: this one).",
        )
        parser.add_argument(
            "--batch-size",
            type=int,
            default=retention.BATCH,
            metavar="N",
            help=f"Rows in one transaction at most (default: {retention.BATCH}).",
        )
        parser.add_argument(
            "--dry-run", action="store_true", help="Count what is due, change nothing."
        )
        parser.add_argument(
            "--format", choices=("text", "json"), default="text", help="Default: text."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        self.prepare(options)
        if not 1 <= options["batch_size"] <= 10_000:
            raise archive.wrong("--batch-size is a number from 1 to 10000")
        with self.interruptible():
            settings = conf.get_settings()
            kept = retention.ages(settings.retention)
            for state in retention.STATES:
                if (text := options[state.value]) == "never":
                    kept.pop(state, None)
                elif text is not None:
                    kept[state] = archive.age(f"--{state.value}", text)
            inbox_age = self._inbox_age(settings.retention.inbox, options["inbox"])
            service = archive.service("--service", options["service"] or settings.service)
            outbox_age = kept.get(State.DISCARDED)
            batch_age = settings.retention.batches
            if options["batches"] is not None:
                never = options["batches"] == "never"
                batch_age = None if never else archive.age("--batches", options["batches"])
            if options["dry_run"]:
                pruned = retention.due(
                    kept,
                    service=service,
                    outbox_age=outbox_age,
                    inbox_age=inbox_age,
                    batch_age=batch_age,
                    snapshots_age=settings.retention.snapshots,
                    alerts_age=settings.retention.alerts,
                )
            else:
                pruned = retention.prune(
                    kept,
                    service=service,
                    outbox_age=outbox_age,
                    inbox_age=inbox_age,
                    batch_age=batch_age,
                    snapshots_age=settings.retention.snapshots,
                    alerts_age=settings.retention.alerts,
                    batch_size=options["batch_size"],
                    progress=lambda so_far: self.progress(f"{so_far.total} deleted so far"),
                    stop=self.stopped,
                )
        code = 1 if pruned.stopped else 0
        others = {
            "inbox": (inbox_age, pruned.inbox),
            "snapshots": (settings.retention.snapshots, pruned.snapshots),
            "alerts": (settings.retention.alerts, pruned.alerts),
        }
        self._print(pruned, kept, others, batch_age, code, dry_run=options["dry_run"])
        if code:
            sys.exit(code)

    def _inbox_age(self, kept: float | None, text: str | None) -> float | None:
        if text == "never":
            return None
        least = once.minimum_retention().total_seconds()
        if text is None:
            return None if kept is None else max(kept, least)
        age = archive.age("--inbox", text)
        if age < least:
            raise archive.wrong(
                f"--inbox is {text!r}; it is {_age(least)} at the least: 30 days, or twice the "
                f"longest retry schedule of a handler with once. An event that comes again after "
                f"its row is gone is handled again"
            )
        return age

    def _print(
        self,
        pruned: Pruned,
        kept: dict[State, float],
        others: dict[str, tuple[float | None, int]],
        batch_age: float | None,
        code: int,
        *,
        dry_run: bool,
    ) -> None:
        outbox_age = kept.get(State.DISCARDED)
        if self.json:
            document = {
                "version": archive.FORMAT,
                "result": "stopped" if pruned.stopped else "counted" if dry_run else "pruned",
                "exit_code": code,
                "states": [
                    {
                        "state": state.value,
                        "kept_seconds": kept.get(state),
                        "events": pruned.events.get(state, 0),
                    }
                    for state in retention.STATES
                ],
                "outbox": {"kept_seconds": outbox_age, "events": pruned.outbox},
                **{
                    name: {"kept_seconds": age, "rows": rows}
                    for name, (age, rows) in others.items()
                },
                "batches": {"kept_seconds": batch_age, "batches": pruned.batches},
                "groups": pruned.groups,
            }
            self.stdout.write(json.dumps(document, indent=2))
            return
        done = "would be deleted" if dry_run else "deleted"
        for state in retention.STATES:
            if state in kept:
                count = pruned.events.get(state, 0)
                self.tell(
                    f"{state.value:<10} {number(count, 'event')} {done}, kept {_age(kept[state])}"
                )
            elif state != State.ARCHIVED:
                self.tell(f"{state.value:<10} kept for ever")
        for name, age, what in (
            ("outbox", outbox_age, number(pruned.outbox, "discarded event")),
            *((name, age, number(rows, "row")) for name, (age, rows) in others.items()),
            ("batches", batch_age, f"{pruned.batches} replay batch" + "es" * (pruned.batches != 1)),
        ):
            told = "kept for ever" if age is None else f"{what} {done}, kept {_age(age)}"
            self.tell(f"{name:<10} {told}")
        if pruned.groups:
            self.tell(f"groups     {number(pruned.groups, 'group')} without events {done}")
        if pruned.stopped:
            self.tell(f"stopped; {pruned.total} are deleted, the rest stays for the next run")


def _age(kept: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if kept and kept % length == 0:
            return f"{kept / length:g}{unit}"
    return f"{kept:g}s"
