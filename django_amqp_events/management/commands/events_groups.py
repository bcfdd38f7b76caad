"""Print the failure groups of this service that have open events, the last failure first.

A group has one service, handler, exception and innermost function of the
project's own code. `events_replay --group` takes its id.

--rebuild moves every event to its group. Use it after an upgrade that groups
differently, and after rows were changed by hand. Other processes may run
meanwhile.

exit codes:
  0  done
  1  --rebuild stopped early (SIGINT, SIGTERM); run it again
  2  wrong arguments or settings, or the database is unreachable
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any, Final

from django_amqp_events import conf
from django_amqp_events.archive.groups import failure_groups, group_counts
from django_amqp_events.management import arguments
from django_amqp_events.management.base import ReportCommand
from django_amqp_events.message.text import counted

#: Groups that are printed, unless --limit is given.
LIMIT: Final = 20


class Command(ReportCommand):
    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        arguments.add_limit(parser, "groups", LIMIT)
        parser.add_argument("--rebuild", action="store_true", help="Regroup all events.")

    def run(self, options: dict[str, Any]) -> int:
        if options["rebuild"]:
            return self._rebuild()
        return self._show(options["limit"])

    def _rebuild(self) -> int:
        with self.interruptible():
            rebuilt = failure_groups.rebuild(
                progress=lambda so_far: self.progress(f"{so_far.seen} events checked"),
                stop=self.stopped,
            )
        self.tell(
            f"{counted(rebuilt.seen, 'event')} checked, {rebuilt.changed} moved to another group"
        )
        if rebuilt.stopped:
            self.tell("stopped early; run it again")
        return 1 if rebuilt.stopped else 0

    def _show(self, limit: int) -> int:
        service = conf.get_settings().service
        opened = failure_groups.groups().filter(group_counts.has_open(), service=service)
        newest = group_counts.with_counts(opened).order_by("-last_seen", "-pk")
        groups = list(newest[: limit + 1])
        more, groups = len(groups) > limit, groups[:limit]
        if not groups:
            self.tell("no group has open events")
        for group in groups:
            reopened = " (reopened)" if group.reopened_at else ""
            where = f" at {group.frame}" if group.frame else ""
            self.tell(
                f"{group.pk}  {group.open:>7} open  {group.handler or 'no handler'}: "
                f"{group.exception or group.reason}{where}{reopened}"
            )
        if more:
            self.tell(f"only the first {limit}; --limit shows more")
        return 0
