"""Delete settled events that are older than AMQP_EVENTS["RETENTION"] allows.

The age of an event counts from its last change of state. Its failures, replays
and actions are deleted with it; task results are not. Queued and replaying
events are never deleted, archived ones only with --archived. In the outbox only
discarded events are deleted, after the same age. An inbox row is
deleted that long after its handler succeeded, but not while the event is in the
archive. A replay batch is deleted that long after it ended, and a draft after
one day. RETENTION also applies to dashboard statistics and ended alerts.

exit codes:
  0  everything due is deleted (--dry-run: counted)
  1  stopped early (SIGINT, SIGTERM); run it again
  2  wrong arguments or settings, or the database is unreachable
"""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import asdict
from typing import Any

from django_amqp_events import conf
from django_amqp_events.archive import inbox_retention, retention
from django_amqp_events.management import arguments
from django_amqp_events.management.base import ReportCommand
from django_amqp_events.message.text import counted
from django_amqp_events.models import State
from django_amqp_events.templatetags.amqp_events import duration


class Command(ReportCommand):
    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--archived",
            type=arguments.age,
            metavar="AGE",
            help="Delete unhandled events that were archived longer ago (default: never).",
        )
        arguments.add_service(parser, "Delete the rows of")
        parser.add_argument(
            "--dry-run", action="store_true", help="Count the rows, change nothing."
        )

    def run(self, options: dict[str, Any]) -> int:
        settings = conf.get_settings()
        ages: dict[str, float | None] = {"archived": options["archived"]}
        ages |= asdict(settings.retention)
        ages["outbox"] = ages["discarded"]
        if ages["inbox"] is not None:
            ages["inbox"] = max(ages["inbox"], inbox_retention.minimum_retention().total_seconds())
        service, dry_run = options["service"] or settings.service, options["dry_run"]
        if dry_run:
            pruned = retention.due(ages, service=service)
        else:
            with self.interruptible():
                pruned = retention.prune(
                    ages,
                    service=service,
                    progress=lambda so_far: self.progress(f"{so_far.total} rows deleted"),
                    stop=self.stopped,
                )
        deleted = "would be deleted" if dry_run else "deleted"

        for name in retention.NAMES:
            if (age := ages[name]) is not None:
                number = counted(pruned.counts[name], "row")
                self.tell(f"{name:<10} {number} {deleted}, kept {duration(age)}")
            elif name != State.ARCHIVED:
                self.tell(f"{name:<10} kept forever")
        if groups := pruned.counts["groups"]:
            self.tell(f"groups     {counted(groups, 'group')} without events {deleted}")
        if pruned.stopped:
            self.tell(f"stopped early; {counted(pruned.total, 'row')} deleted")
        return 1 if pruned.stopped else 0
