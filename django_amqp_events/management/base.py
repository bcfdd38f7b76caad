"""The base of the commands: help, output, exit codes, errors and signals."""

from __future__ import annotations

import getpass
import json
import os
import signal
import socket
import sys
import threading
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import (
    BaseCommand,
    CommandError,
    DjangoHelpFormatter,
    OutputWrapper,
    no_translations,
)
from django.db import DatabaseError, InterfaceError

from django_amqp_events.databases import error_line, table_missing
from django_amqp_events.exceptions import AmqpEventsError
from django_amqp_events.management.child_command import follow
from django_amqp_events.models import visible

#: Version of the document that ``--format json`` prints.
FORMAT: Final = 1
#: Seconds between lines of progress.
PROGRESS_SECONDS: Final = 5.0
#: Lines of one kind that are printed, unless --verbosity is 2.
SHOWN: Final = 10


class HelpFormatter(DjangoHelpFormatter, RawDescriptionHelpFormatter):
    """Print the options in Django's order, and the rest as it is written."""


class Output(OutputWrapper):
    """An output that shows control characters as escapes; a terminal would obey them.

    If it cannot be written, because its reader has closed it, as ``| head -1`` does, or the disk is
    full, what follows is discarded: the work continues, and ends with the exit code of its result.
    A process may have no stdout at all, as after ``>&-``.

    Attributes:
        broken: nothing that is written arrives any more.
    """

    _out: Any

    def __init__(self, out: Any) -> None:
        super().__init__(out)
        self.broken = out is None
        if hasattr(out, "reconfigure"):
            # A locale may lack a character.
            out.reconfigure(errors="backslashreplace")

    def write(  # type: ignore[override]  # of io.TextIOBase
        self, msg: str = "", style_func: Any = None, ending: str | None = None
    ) -> None:
        self._pass_on(super().write, visible(msg), style_func, ending)

    def flush(self) -> None:
        self._pass_on(super().flush)

    def _pass_on(self, call: Callable[..., object], *args: Any) -> None:
        if self._out is None:
            return
        try:
            call(*args)
        except OSError:
            self.broken = True
            # Python writes what is left in its buffer when it exits.
            with suppress(OSError), Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), self._out.fileno())


class EventsCommand(BaseCommand):
    """A command whose help is its module's docstring: a summary, and what follows the options.

    Subclasses implement :meth:`run`.

    Attributes:
        piped: stdout is for another program.
    """

    requires_system_checks = ()
    #: Exit code for wrong arguments or settings, and for an unreachable broker or database.
    error_code = 2
    piped = False
    verbosity = 1
    stopping = False

    def __init__(self, stdout: Any = None, stderr: Any = None, **options: Any) -> None:
        super().__init__(stdout, stderr, **options)
        self.stdout: Output = Output(stdout or sys.stdout)
        self.stderr: Output = Output(stderr or sys.stderr)
        self.stderr.style_func = self.style.ERROR

    def execute(self, *args: Any, **options: Any) -> Any:
        if options.get("stdout"):
            self.stdout = Output(options.pop("stdout"))
        if options.get("stderr"):
            self.stderr = Output(options.pop("stderr"))
        return super().execute(*args, **options)

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        summary, _, details = (self.help or "").partition("\n\n")
        # Other packages replace Django's method by one without further parameters.
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        parser.formatter_class = HelpFormatter
        parser.description, parser.epilog = summary, details
        return parser

    def add_format(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--format",
            choices=("text", "json"),
            default="text",
            help="Output format (default: text).",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        self.piped = options.get("format") == "json"
        self.verbosity = options["verbosity"]
        self.stopping = False
        try:
            code = self.run(options)
        except (AmqpEventsError, ImproperlyConfigured) as exc:
            raise self.wrong(str(exc)) from exc
        except (DatabaseError, InterfaceError) as exc:
            remedy = (
                "A table or column is missing: run `manage.py migrate`."
                if table_missing(exc)
                else "Completed work is committed; run the command again."
            )
            raise self.wrong(f"database error ({error_line(exc)}). {remedy}") from exc
        finally:
            self.stdout.flush()
            self.stderr.flush()
        if code:
            sys.exit(code)

    def run(self, options: dict[str, Any]) -> int:
        """Do the work; return the exit code."""
        raise NotImplementedError

    def finish(self, code: int, document: Mapping[str, Any], show: Callable[[], object]) -> int:
        """Print the result: *document*, or whatever *show* prints. Return the exit code."""
        if self.piped:
            whole = {"version": FORMAT, "exit_code": code, **document}
            self.stdout.write(json.dumps(whole, indent=2, default=_json))
        else:
            show()
        return code

    def stopped(self) -> bool:
        """Return True if the command was asked to stop."""
        return self.stopping

    def style_of(self, state: str) -> Any:
        """Return the style of a state or severity."""
        return {
            "ok": self.style.SUCCESS,
            "unknown": self.style.NOTICE,
            "warning": self.style.WARNING,
            "missing": self.style.WARNING,
            "stale": self.style.WARNING,
            "different": self.style.ERROR,
            "error": self.style.ERROR,
        }[state]

    def wrong(self, text: str) -> CommandError:
        """Return an error that ends the command with :attr:`error_code`."""
        return CommandError(text, returncode=self.error_code)


class ReportCommand(EventsCommand):
    """A command that ends with a result, as text or as one JSON document.

    With ``--format json`` only the document goes to stdout, and messages go to stderr.
    """

    _printed = 0.0

    def add_arguments(self, parser: ArgumentParser) -> None:
        self.add_format(parser)

    @no_translations
    def handle(self, *args: Any, **options: Any) -> None:
        self._printed = time.monotonic()
        super().handle(*args, **options)

    def tell(self, text: str, level: int = 1) -> None:
        """Print a line at this verbosity or a higher one."""
        if self.verbosity >= level:
            out = self.stderr if self.piped else self.stdout
            out.write(text, self.style.NOTICE if self.piped else None)
            out.flush()

    def progress(self, text: str) -> None:
        """Print a line of progress every few seconds."""
        if time.monotonic() >= self._printed + PROGRESS_SECONDS:
            self._printed = time.monotonic()
            self.tell(text)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let the first Ctrl-C or SIGTERM set :attr:`stopping`, and the second end the command."""

        def stop() -> None:
            if self.stopping:
                raise KeyboardInterrupt
            self.stopping = True
            self.tell("stopping after the current step; press Ctrl-C again to stop at once", 0)

        with stop_signals(stop):
            yield


class ServiceCommand(EventsCommand):
    """A command that runs until SIGTERM, SIGINT or the end of its parent process.

    Subclasses implement :meth:`serve`.

    Attributes:
        name: begins each line of output.
    """

    error_code = 1
    name: ClassVar[str]

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--parent", type=int, metavar="PID", help="End when this process ends.")

    def run(self, options: dict[str, Any]) -> int:
        with stop_signals(self.stop):
            follow(options["parent"])
            self.serve(options)
        return 0

    def serve(self, options: dict[str, Any]) -> None:
        """Work until :meth:`stopped` returns True."""
        raise NotImplementedError

    def stop(self) -> None:
        self.stopping = True

    def tell(self, text: str) -> None:
        if self.verbosity:
            self.stdout.write(f"{self.name}: {text}")
            self.stdout.flush()


@contextmanager
def stop_signals(stop: Callable[[], object]) -> Iterator[None]:
    """Call *stop* at SIGTERM and SIGINT; never outside the main thread, which alone gets them."""
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGINT) if main else ()
    before = {number: signal.signal(number, lambda *_: stop()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _json(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def columns(row: object, *names: str) -> dict[str, Any]:
    """Return attributes of a row for a JSON document."""
    return {name: getattr(row, name) for name in names}


def requested_by(command: str) -> str:
    """Return command, user and host for the audit."""
    try:
        user = getpass.getuser()
    except (ImportError, KeyError, OSError):
        # A container's user may have no name.
        user = str(os.getuid())
    return f"{command} ({user}@{socket.gethostname()})"
