"""``manage.py events_groups``: failures that are alike, and the repair of what counts them."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from typing import Any, Final

from django_amqp_events import conf
from django_amqp_events.archive import states
from django_amqp_events.archive.groups import failure_groups, group_counts
from django_amqp_events.management import archive
from django_amqp_events.management.archive import ArchiveCommand, number
from django_amqp_events.models import FailureGroup, visible

#: Groups that are shown, unless --limit says otherwise.
SHOWN: Final = 20

_EPILOG = """
A group is made of service, handler, exception and the innermost function of the
project's own code. Its id goes into `events_replay --group`.

--rebuild puts every event into the group where it belongs, and counts anew what
is open. It is for events that an older version has stored, after an upgrade
that makes groups in another way, and where rows were changed by hand. Anything
else may run meanwhile. An idle events_mirror groups what is in no group by
itself.

exit codes:
  0  done
  1  --rebuild: stopped before the end (SIGINT, SIGTERM); run it again
  2  wrong arguments or settings; the database is away
"""


class Command(ArchiveCommand):
    """A shell on :mod:`django_amqp_events.archive.groups.failure_groups`."""

    help = "Show the groups of failures that have open events, the last failure first."
    epilog = _EPILOG

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--all", action="store_true", help="Also groups of which nothing is open."
        )
        parser.add_argument(
            "--limit",
            type=int,
            default=SHOWN,
            metavar="N",
            help=f"Groups at most (default: {SHOWN}).",
        )
        parser.add_argument(
            "--rebuild", action="store_true", help="Group all events anew, and count them."
        )
        parser.add_argument(
            "--batch-size",
            type=int,
            default=failure_groups.BATCH,
            metavar="N",
            help=f"--rebuild: events in one transaction at most (default: {failure_groups.BATCH}).",
        )
        parser.add_argument(
            "--format", choices=("text", "json"), default="text", help="Default: text."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        self.prepare(options)
        if not 1 <= options["batch_size"] <= 10_000:
            raise archive.wrong("--batch-size is a number from 1 to 10000")
        if not 1 <= options["limit"] <= 10_000:
            raise archive.wrong("--limit is a number from 1 to 10000")
        with self.interruptible():
            if options["rebuild"]:
                self._rebuild(options["batch_size"])
            else:
                self._show(every=options["all"], limit=options["limit"])

    def _rebuild(self, batch_size: int) -> None:
        rebuilt = failure_groups.rebuild(
            batch_size=batch_size,
            progress=lambda so_far: self.progress(f"{so_far.seen} events looked at"),
            stop=self.stopped,
        )
        code = 1 if rebuilt.stopped else 0
        if self.json:
            document = {
                "version": archive.FORMAT,
                "result": "stopped" if rebuilt.stopped else "rebuilt",
                "exit_code": code,
                "events": rebuilt.seen,
                "moved": rebuilt.moved,
                "corrected": rebuilt.corrected,
                "deleted": rebuilt.gone,
            }
            self.stdout.write(json.dumps(document, indent=2))
        else:
            self.tell(
                f"{number(rebuilt.seen, 'event')} looked at, {rebuilt.moved} put into another "
                f"group; {number(rebuilt.corrected, 'group')} counted wrongly before, "
                f"{rebuilt.gone} of an older version deleted"
            )
            if rebuilt.stopped:
                self.tell("stopped; run it again")
        if code:
            sys.exit(code)

    def _show(self, *, every: bool, limit: int) -> None:
        service = conf.get_settings().service
        found = group_counts.with_exact_counts(failure_groups.groups().filter(service=service))
        if not every:
            found = found.filter(open_now__gt=0)
        shown = list(found.order_by("-last_seen", "-pk")[: limit + 1])
        more, shown = len(shown) > limit, shown[:limit]
        loose = states.rows().filter(group__isnull=True).exists()
        if self.json:
            document = {
                "version": archive.FORMAT,
                "groups": [_as_json(group) for group in shown],
                "more": more,
                "ungrouped": loose,
            }
            self.stdout.write(json.dumps(document, indent=2))
            return
        if not shown:
            self.tell("no group" if every else "no group has open events")
        for group in shown:
            back = " (came back)" if group.reopened_at else ""
            where = f" at {group.frame}" if group.frame else ""
            self.tell(
                visible(
                    f"{group.pk}  {group.open_now:>7} open  {group.handler or 'no handler'}: "
                    f"{group.exception or group.reason}{where}{back}"
                )
            )
        if more:
            self.tell(f"and more; --limit shows more than {limit}")
        if loose:
            self.tell("some events are in no group yet: events_groups --rebuild, or an idle mirror")


def _as_json(group: FailureGroup) -> dict[str, Any]:
    counts: Any = group
    return {
        "id": str(group.pk),
        "service": group.service,
        "handler": group.handler,
        "exception": group.exception,
        "frame": group.frame,
        "reason": group.reason,
        "open": counts.open_now,
        "open_replayed_before": counts.again_now,
        "on_their_way": counts.going_now,
        "first_seen": group.first_seen.isoformat(),
        "last_seen": group.last_seen.isoformat(),
        "resolved_at": group.resolved_at.isoformat() if group.resolved_at else None,
        "reopened_at": group.reopened_at.isoformat() if group.reopened_at else None,
        "note": group.note,
        "assignee": group.assignee,
        "ticket": group.ticket,
    }
