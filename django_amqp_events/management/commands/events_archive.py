"""Export archived events as JSON lines, or store their search values again.

Each line is one JSON document: the row with its failures, replays, revisions and
decisions. If AMQP_EVENTS["REDACT"] is set, an export has redacted payloads and no
bodies; --raw exports everything.

index stores the values of SEARCH again, after SEARCH or REDACT changed and the mirror
was restarted. It can be repeated.

exit codes:
  0  done
  1  the command was stopped, or stdout was closed
  2  nothing was done: wrong arguments or settings, file or database unreachable
"""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from django_amqp_events import conf
from django_amqp_events.archive import export, redaction, search_index
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
        parser.add_argument("--output", metavar="FILE", help="export: the file; - is stdout.")
        parser.add_argument(
            "--raw", action="store_true", help="export: include bodies although REDACT is set."
        )
        arguments.add_filters(parser).add_argument(
            "--state", choices=State.values, help="State of the event."
        )

    def run(self, options: dict[str, Any]) -> int:
        what = options["what"]
        # The export itself is on stdout.
        self.piped = options["output"] == "-"
        if what == "export" and not options["output"]:
            raise self.wrong("export needs --output FILE; - is stdout")
        if what == "index" and (options["output"] or options["raw"]):
            raise self.wrong("index takes filters")
        with self.interruptible():
            try:
                return self._export(options) if what == "export" else self._index(options)
            except OSError as exc:
                raise self.wrong(f"{options['output']}: {exc}") from exc

    def _export(self, options: dict[str, Any]) -> int:
        count = 0
        redacted = redaction.has_hook() and not options["raw"]
        sight: redaction.Sight = "redacted" if redacted else "raw"
        with _output(options["output"], self.stdout, self.stopped) as out:
            for line in export.export(_selected(options).queryset(), sight=lambda _: sight):
                if out is self.stdout and self.pipe.closed_by_reader:
                    self.stopping = True
                if self.stopping:
                    break
                out.write(line)
                count += 1
                self.progress(f"{count} exported")
            out.flush()
        self.stopping |= out is self.stdout and self.pipe.closed_by_reader
        summary = f"{counted(count, 'event')} exported" + (", redacted" if redacted else "")
        if self.stopping:
            summary += "; stopped"
            if not self.piped:
                summary += f", the incomplete export is in {options['output']}.part"
        self.tell(summary)
        return 1 if self.stopping else 0

    def _index(self, options: dict[str, Any]) -> int:
        wanted = replace(_selected(options), service=conf.get_settings().service)
        done = search_index.rebuild(
            wanted.queryset(),
            progress=lambda so_far: self.progress(f"{so_far.events} events"),
            stop=self.stopped,
        )
        self.tell(f"{counted(done.events, 'event')} examined, {done.changed} changed")
        if done.stopped:
            self.tell("stopped; run it again for all events")
        return 1 if done.stopped else 0


def _selected(options: dict[str, Any]) -> Selection:
    state = State(options["state"]) if options["state"] else None
    return Selection(state=state, **arguments.filters(options))


@contextmanager
def _output(name: str, stdout: Any, stopped: Callable[[], bool]) -> Iterator[Any]:
    """Open the file of an export; it gets its name when it is complete."""
    if name == "-":
        yield stdout
        return
    path = Path(name)
    if path.is_dir():
        raise IsADirectoryError("it is a folder")
    part = path.with_name(f"{path.name}.part")
    # Only the user may read payloads.
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        yield out
    if not stopped():
        part.replace(path)
