"""``manage.py events_archive``: archived events into a file, and back into the database."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from django_amqp_events.archive import export, redaction
from django_amqp_events.archive.export import Imported
from django_amqp_events.archive.selection import Selection
from django_amqp_events.management import archive
from django_amqp_events.management.archive import ArchiveCommand, number
from django_amqp_events.models import State

#: Lines that are named one by one on the console, unless --verbosity is 2.
SHOWN = 10

_EPILOG = """
The file has a JSON document a line: the row with its failures, replays, revisions
and decisions. An import adds rows as they were, with their ids. It publishes
nothing, changes no row, and refuses one that is there with other content.

Where AMQP_EVENTS["REDACT"] is set, an export has redacted payloads and no bodies,
and cannot be imported; --raw has everything.

exit codes:
  0  done; a row that is there with the very same content is no error
  1  some lines were refused, or somebody stopped it
  2  nothing could be done: wrong arguments or settings, file or database away
"""


class Command(ArchiveCommand):
    """A shell on :mod:`django_amqp_events.archive.export`."""

    help = "Export archived events as JSON lines, or import them back."
    epilog = _EPILOG

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("what", choices=("export", "import"), help="Into a file, or back.")
        parser.add_argument("file", nargs="?", help="import: the file; - is stdin.")
        parser.add_argument("--output", metavar="FILE", help="export: the file; - is stdout.")
        parser.add_argument("--raw", action="store_true", help="export: bodies although redacted.")
        for name, what in (
            ("handler", "export: of this handler."),
            ("event", "export: of this event, whole name."),
            ("exception", "export: whole dotted name, or its last word."),
            ("reason", "export: archived for this reason."),
        ):
            parser.add_argument(
                f"--{name}", action="append", default=[], metavar=name.upper(), help=what
            )
        parser.add_argument("--state", choices=State.values, help="export: in this state.")
        parser.add_argument("--since", metavar="TIME", help="export: last failed then or later.")
        parser.add_argument("--until", metavar="TIME", help="export: last failed before.")
        parser.add_argument(
            "--dry-run", action="store_true", help="import: say what would come, change nothing."
        )
        parser.add_argument(
            "--format", choices=("text", "json"), default="text", help="Default: text."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        self.prepare(options)
        exports = options["what"] == "export"
        if exports and (options["file"] or options["dry_run"]):
            raise archive.wrong("export takes --output FILE and filters")
        if exports and not options["output"]:
            raise archive.wrong("export needs --output FILE; - is stdout")
        if not exports and (not options["file"] or options["output"]):
            raise archive.wrong("import needs the file: `events_archive import FILE`; - is stdin")
        with self.interruptible():
            code = self._export(options) if exports else self._import(options)
        if code:
            sys.exit(code)

    # -- out

    def _export(self, options: Mapping[str, Any]) -> int:
        now = datetime.now(UTC)
        times = {
            name: None if options[name] is None else archive.moment(f"--{name}", options[name], now)
            for name in ("since", "until")
        }
        wanted = Selection(
            handlers=options["handler"],
            events=options["event"],
            exceptions=options["exception"],
            reasons=options["reason"],
            state=State(options["state"]) if options["state"] else None,
            since=times["since"],
            until=times["until"],
        )
        count = 0
        with _output(options["output"], self.stdout, self.stopped) as out:
            for line in export.export(wanted.queryset(), raw=options["raw"]):
                if self.stopping:
                    break
                out.write(line)
                count += 1
                self.progress(f"{count} exported so far")
        redacted = redaction.has_hook() and not options["raw"]
        told = f"{number(count, 'event')} exported" + (", redacted" if redacted else "")
        if self.stopping:
            told += f"; stopped, and what there is is in {options['output']}.part"
        ended = "stopped" if self.stopping else "exported"
        result = {"result": ended, "events": count, "redacted": redacted}
        return self._end(result, [told], 1 if self.stopping else 0, options)

    # -- in

    def _import(self, options: Mapping[str, Any]) -> int:
        dry_run = options["dry_run"]
        try:
            with _input(options["file"]) as lines:
                done = export.import_events(
                    lines,
                    dry_run=dry_run,
                    progress=lambda so_far: self.progress(f"{so_far.done} lines so far"),
                    stop=self.stopped,
                )
        except (OSError, UnicodeDecodeError) as exc:
            raise archive.wrong(f"{options['file']}: {exc}") from exc
        code = 1 if done.refused or done.stopped else 0
        words = "would be imported" if dry_run else "imported"
        told = [f"{number(done.events, 'event')} {words}, {done.known} known already"]
        if done.refused:
            told.append(f"{number(len(done.refused), 'line')} refused")
            shown = len(done.refused) if self.verbosity > 1 else SHOWN
            told += [
                f"  line {each.line} ({each.event or 'no event'}): {each.why}"
                for each in done.refused[:shown]
            ]
            if len(done.refused) > shown:
                told.append(f"  and {len(done.refused) - shown} more")
        if done.stopped:
            told.append("stopped; the rest is not imported, and can be by the same command")
        return self._end(_document(done, dry_run=dry_run), told, code, options)

    def _end(
        self, document: dict[str, Any], told: list[str], code: int, options: Mapping[str, Any]
    ) -> int:
        # On stdout is the export then.
        quiet = options["output"] == "-"
        if self.json and not quiet:
            document = {"version": archive.FORMAT, **document, "exit_code": code}
            self.stdout.write(json.dumps(document, indent=2))
        for line in [] if self.json else told:
            if quiet:
                self.stderr.write(line)
            else:
                self.tell(line)
        return code


def _document(done: Imported, *, dry_run: bool) -> dict[str, Any]:
    return {
        "result": "stopped" if done.stopped else "counted" if dry_run else "imported",
        "events": done.events,
        "known": done.known,
        "refused": [
            {"line": each.line, "event": each.event, "why": each.why} for each in done.refused
        ],
    }


@contextmanager
def _output(name: str, stdout: Any, stopped: Callable[[], bool]) -> Iterator[Any]:
    """Open the file of an export; it is there under its name when it is whole."""
    if name == "-":
        yield _Lines(stdout)
        return
    path = Path(name)
    part = path.with_name(f"{path.name}.part")
    try:
        # Payloads are nobody else's.
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError as exc:
        raise archive.wrong(f"--output {name}: {exc}") from exc
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        yield out
    if not stopped():
        part.replace(path)


class _Lines:
    """Django's stdout, which adds an end of line of its own."""

    def __init__(self, stdout: Any) -> None:
        self._stdout = stdout

    def write(self, line: str) -> None:
        self._stdout.write(line, ending="")


@contextmanager
def _input(name: str) -> Iterator[IO[str]]:
    if name == "-":
        yield sys.stdin
        return
    with Path(name).open(encoding="utf-8") as lines:
        yield lines
