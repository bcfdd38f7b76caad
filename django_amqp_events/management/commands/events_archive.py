"""Print archived events as JSON lines, or store their search values again.

Each line is one JSON document: the row with its failures, replays, revisions and
decisions. If AMQP_EVENTS["REDACT"] is set, an export has redacted payloads and no
bodies; --raw exports everything.

index stores the values of SEARCH again, after SEARCH or REDACT changed and the mirror
was restarted. It can be repeated.

exit codes:
  0  done
  1  the command was stopped, or stdout cannot be written
  2  nothing was done: wrong arguments or settings, or the database is unreachable
"""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import replace
from typing import Any

from django_amqp_events import conf
from django_amqp_events.archive import export, redaction, search_values, tables
from django_amqp_events.archive.selection import Selection
from django_amqp_events.management import arguments
from django_amqp_events.management.base import ReportCommand
from django_amqp_events.message.text import counted
from django_amqp_events.models import State


class Command(ReportCommand):
    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "what",
            choices=("export", "index"),
            help="Export events, or store search values again (index).",
        )
        parser.add_argument(
            "--raw", action="store_true", help="export: include bodies although REDACT is set."
        )
        arguments.add_filters(parser).add_argument(
            "--state", choices=State.values, help="State of the event."
        )

    def run(self, options: dict[str, Any]) -> int:
        exports = options["what"] == "export"
        if options["raw"] and not exports:
            raise self.wrong("--raw is an option of export; index takes only filters")
        # The events are on stdout.
        self.piped = exports
        with self.interruptible():
            return self._export(options) if exports else self._index(options)

    def _export(self, options: dict[str, Any]) -> int:
        count = 0
        redacted = redaction.has_hook() and not options["raw"]
        sight: redaction.Sight = "redacted" if redacted else "raw"
        for line in export.export(_selected(options).queryset(), sight=lambda _: sight):
            self.stopping |= self.stdout.broken
            if self.stopping:
                break
            self.stdout.write(line)
            count += 1
            self.progress(f"{count} exported")
        self.stdout.flush()
        self.stopping |= self.stdout.broken
        summary = f"{counted(count, 'event')} exported" + (", redacted" if redacted else "")
        self.tell(summary + ("; stopped" if self.stopping else ""))
        return 1 if self.stopping else 0

    def _index(self, options: dict[str, Any]) -> int:
        wanted = replace(_selected(options), service=conf.get_settings().service)
        done = tables.repair(
            wanted.queryset(),
            search_values.correct,
            progress=lambda so_far: self.progress(f"{so_far.seen} events"),
            stop=self.stopped,
        )
        self.tell(f"{counted(done.seen, 'event')} examined, {done.changed} changed")
        if done.stopped:
            self.tell("stopped; run it again for all events")
        return 1 if done.stopped else 0


def _selected(options: dict[str, Any]) -> Selection:
    state = State(options["state"]) if options["state"] else None
    return Selection(state=state, **arguments.filters(options))
