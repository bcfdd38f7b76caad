"""Export archived events as JSON lines, import them, or store their search values again.

Each line is one JSON document: the row with its failures, replays, revisions and
decisions. An import adds the rows with their ids. It publishes nothing, changes
no existing row, and refuses a row that exists with other content.

If AMQP_EVENTS["REDACT"] is set, an export has redacted payloads and no bodies,
and cannot be imported; --raw exports everything.

index stores the values of SEARCH again, after SEARCH or REDACT changed and the mirror
was restarted. It can be repeated, and --after continues a stopped run.

exit codes:
  0  done; an existing row with the same content is not an error
  1  lines were refused, or the command was stopped
  2  nothing was done: wrong arguments or settings, file or database unreachable
"""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO
from uuid import UUID

from django_amqp_events import conf
from django_amqp_events.archive import export, redaction, search_index
from django_amqp_events.archive.selection import Selection
from django_amqp_events.management import arguments
from django_amqp_events.management.base import SHOWN, ReportCommand, columns
from django_amqp_events.message.text import counted
from django_amqp_events.models import State


class Command(ReportCommand):
    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "what",
            choices=("export", "import", "index"),
            help="Export events, import them, or store search values again (index).",
        )
        parser.add_argument("file", nargs="?", help="import: the file; - is stdin.")
        parser.add_argument("--output", metavar="FILE", help="export: the file; - is stdout.")
        parser.add_argument(
            "--raw", action="store_true", help="export: include bodies although REDACT is set."
        )
        parser.add_argument(
            "--dry-run", action="store_true", help="import: report the result, change nothing."
        )
        parser.add_argument(
            "--after", type=UUID, metavar="ID", help="index: continue after this row."
        )
        super().add_arguments(parser)
        arguments.add_filters(parser, "filters of export and index").add_argument(
            "--state", choices=State.values, help="State of the event."
        )

    def run(self, options: dict[str, Any]) -> int:
        what = options["what"]
        # The export itself is on stdout.
        self.piped = self.piped or options["output"] == "-"
        from_file = options["file"] or options["dry_run"]
        if what == "export" and (from_file or options["after"]):
            raise self.wrong("export takes --output FILE and filters")
        if what == "export" and not options["output"]:
            raise self.wrong("export needs --output FILE; - is stdout")
        if what == "import" and (not options["file"] or options["output"] or options["after"]):
            raise self.wrong("import needs the file: `events_archive import FILE`; - is stdin")
        narrowed = options["state"] or arguments.filters(options)
        if what == "import" and (narrowed or options["raw"]):
            raise self.wrong("import takes --dry-run and no filters")
        if what == "index" and (from_file or options["output"]):
            raise self.wrong("index takes --after and filters")
        run = {"export": self._export, "import": self._import, "index": self._index}[what]
        with self.interruptible():
            try:
                return run(options)
            except OSError as exc:
                raise self.wrong(f"{options['output'] or options['file']}: {exc}") from exc

    def _export(self, options: dict[str, Any]) -> int:
        count = 0
        redacted = redaction.has_hook() and not options["raw"]
        sight: redaction.Sight = "redacted" if redacted else "raw"
        with _output(options["output"], self.stdout, self.stopped) as out:
            for line in export.export(_selected(options).queryset(), sight=lambda _: sight):
                if self.stopping:
                    break
                out.write(line)
                count += 1
                self.progress(f"{count} exported")
        summary = f"{counted(count, 'event')} exported" + (", redacted" if redacted else "")
        if self.stopping:
            summary += f"; stopped, the incomplete export is in {options['output']}.part"
        code = 1 if self.stopping else 0
        if options["output"] == "-":
            if not self.as_json:
                self.tell(summary)
            return code
        result = "stopped" if self.stopping else "exported"
        document = {"result": result, "events": count, "redacted": redacted}
        return self.finish(code, document, lambda: self.tell(summary))

    def _import(self, options: dict[str, Any]) -> int:
        dry_run = options["dry_run"]
        name = options["file"]
        with _open(name) as lines:
            done = export.import_events(
                lines,
                dry_run=dry_run,
                progress=lambda so_far: self.progress(f"{so_far.done} lines read"),
                stop=self.stopped,
            )

        def show() -> None:
            imported = "would be imported" if dry_run else "imported"
            self.tell(f"{counted(done.events, 'event')} {imported}, {done.known} already exist")
            if done.refused:
                self.tell(f"{counted(len(done.refused), 'line')} refused")
            shown = done.refused if self.verbosity > 1 else done.refused[:SHOWN]
            for refused in shown:
                self.tell(f"  line {refused.line} ({refused.event or 'no event'}): {refused.why}")
            if more := len(done.refused) - len(shown):
                self.tell(f"  and {more} more")
            if done.stopped:
                self.tell("stopped; run the same command again to import the rest")

        document = {
            "result": "stopped" if done.stopped else "counted" if dry_run else "imported",
            "events": done.events,
            "known": done.known,
            "refused": [columns(refused, "line", "event", "why") for refused in done.refused],
        }
        return self.finish(1 if done.refused or done.stopped else 0, document, show)

    def _index(self, options: dict[str, Any]) -> int:
        wanted = replace(_selected(options), service=conf.get_settings().service)
        done = search_index.rebuild(
            wanted.queryset(),
            after=options["after"],
            progress=lambda so_far: self.progress(f"{so_far.events} events, last {so_far.last}"),
            stop=self.stopped,
        )

        def show() -> None:
            self.tell(f"{counted(done.events, 'event')} examined, {done.changed} changed")
            if done.stopped:
                after = f" --after {done.last}" if done.last else ""
                self.tell(f"stopped; continue with `events_archive index{after}`")

        document = {
            "result": "stopped" if done.stopped else "indexed",
            **columns(done, "events", "changed", "last"),
        }
        return self.finish(1 if done.stopped else 0, document, show)


def _selected(options: dict[str, Any]) -> Selection:
    state = State(options["state"]) if options["state"] else None
    return Selection(state=state, **arguments.filters(options))


def _open(name: str) -> TextIO:
    """Open the file of an import; a line that is not UTF-8 has surrogates, and is refused alone."""
    if name == "-":
        return os.fdopen(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    return Path(name).open(encoding="utf-8", errors="surrogateescape")


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
