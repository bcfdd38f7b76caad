"""Delete settled events that are older than AMQP_EVENTS["RETENTION"] allows.

ages: 90s, 45m, 12h, 30d, 8w, 1d12h; "never" keeps the rows forever.

The age of an event counts from its last change of state. Its failures, replays
and actions are deleted with it; task results are not. Queued and replaying
events are never deleted, archived ones only with --archived. In the outbox only
discarded events are deleted, after the age of --discarded. An inbox row is
deleted that long after its handler succeeded, but not while the event is in the
archive. A replay batch is deleted that long after it ended, and a draft after
one day. RETENTION also applies to dashboard statistics and ended alerts.

exit codes:
  0  everything due is deleted (--dry-run: counted)
  1  stopped early (SIGINT, SIGTERM); run it again
  2  wrong arguments or settings, or the database is unreachable
"""

from __future__ import annotations

import math
from argparse import ArgumentParser
from typing import Any

from django_amqp_events import conf
from django_amqp_events.archive import retention
from django_amqp_events.management import arguments
from django_amqp_events.management.base import ReportCommand, counted
from django_amqp_events.models import State
from django_amqp_events.worker import inbox


class Command(ReportCommand):
    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        for name, rows, default in (
            ("succeeded", "events that succeeded", "RETENTION or 30d"),
            ("discarded", "events that were discarded", "RETENTION or 90d"),
            ("archived", "unhandled events that were archived", "never"),
            ("inbox", "inbox rows of events that were handled", "RETENTION or 30d; at least 30d"),
            ("batches", "replay batches that ended", "RETENTION or 90d"),
        ):
            parser.add_argument(
                f"--{name}",
                type=arguments.age_or_never,
                metavar="AGE",
                help=f"Delete {rows} longer ago (default: {default}).",
            )
        arguments.add_service(parser, "Delete the rows of")
        arguments.add_batch_size(parser, retention.BATCH, "rows per transaction")
        parser.add_argument(
            "--dry-run", action="store_true", help="Count the rows, change nothing."
        )
        super().add_arguments(parser)

    def run(self, options: dict[str, Any]) -> int:
        settings = conf.get_settings()
        configured = settings.retention
        configured_ages = retention.ages(configured)
        ages = {
            state: age
            for state in retention.STATES
            if (age := _chosen(options[state.value], configured_ages.get(state))) is not None
        }
        others = {
            "outbox": ages.get(State.DISCARDED),
            "inbox": self._inbox_age(options["inbox"], configured.inbox),
            "snapshots": configured.snapshots,
            "alerts": configured.alerts,
            "batches": _chosen(options["batches"], configured.batches),
        }
        limits: dict[str, Any] = {
            "service": options["service"] or settings.service,
            "outbox_age": others["outbox"],
            "inbox_age": others["inbox"],
            "batch_age": others["batches"],
            "snapshots_age": others["snapshots"],
            "alerts_age": others["alerts"],
        }
        if options["dry_run"]:
            pruned = retention.due(ages, **limits)
        else:
            with self.interruptible():
                pruned = retention.prune(
                    ages,
                    **limits,
                    batch_size=options["batch_size"],
                    progress=lambda so_far: self.progress(f"{so_far.total} rows deleted"),
                    stop=self.stopped,
                )
        counts = [
            (s.value, ages.get(s), pruned.events.get(s, 0), "event") for s in retention.STATES
        ]
        rows = {
            "outbox": (pruned.outbox, "discarded event", "events"),
            "inbox": (pruned.inbox, "row", "rows"),
            "snapshots": (pruned.snapshots, "row", "rows"),
            "alerts": (pruned.alerts, "row", "rows"),
            "batches": (pruned.batches, "replay batch", "batches"),
        }
        counts += [(name, others[name], count, noun) for name, (count, noun, _) in rows.items()]
        deleted = "would be deleted" if options["dry_run"] else "deleted"

        def show() -> None:
            for name, age, count, noun in counts:
                if age is not None:
                    found = counted(count, noun, "es" if noun.endswith("ch") else "s")
                    self.tell(f"{name:<10} {found} {deleted}, kept {_written(age)}")
                elif name != State.ARCHIVED:
                    self.tell(f"{name:<10} kept forever")
            if pruned.groups:
                self.tell(f"groups     {counted(pruned.groups, 'group')} without events {deleted}")
            if pruned.stopped:
                self.tell(f"stopped early; {counted(pruned.total, 'row')} deleted")

        result = "counted" if options["dry_run"] else "pruned"
        document = {
            "result": "stopped" if pruned.stopped else result,
            "states": [
                {"state": name, "kept_seconds": age, "events": count}
                for name, age, count, _ in counts[: len(retention.STATES)]
            ],
            **{
                name: {"kept_seconds": others[name], key: count}
                for name, (count, _, key) in rows.items()
            },
            "groups": pruned.groups,
        }
        return self.finish(1 if pruned.stopped else 0, document, show)

    def _inbox_age(self, asked: float | None, configured: float | None) -> float | None:
        least = inbox.minimum_retention().total_seconds()
        if asked is not None and asked < least:
            raise self.wrong(
                f"--inbox must be at least {_written(least)}: 30 days, or twice the longest retry "
                f"schedule of a handler with once. An event delivered again after its row is "
                f"deleted is handled again."
            )
        age = _chosen(asked, configured)
        return None if age is None else max(age, least)


def _chosen(asked: float | None, configured: float | None) -> float | None:
    """Return the age in seconds, ``None`` to keep the rows forever."""
    age = configured if asked is None else asked
    return None if age == math.inf else age


def _written(age: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if age and age % length == 0:
            return f"{age / length:g}{unit}"
    return f"{age:g}s"
