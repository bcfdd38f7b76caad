"""The base of the commands that run until they are stopped."""

from __future__ import annotations

import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable
from typing import Any, ClassVar, Final

from django_amqp_events.management.base import EventsCommand, stop_signals
from django_amqp_events.management.child_command import follow

#: Seconds between lines of progress, at least.
PROGRESS_SECONDS: Final = 10.0


class ServiceCommand(EventsCommand):
    """A command that runs until SIGTERM, SIGINT or the end of its parent process.

    Subclasses implement :meth:`serve`.

    Attributes:
        name: begins each line of output.
    """

    error_code: ClassVar[int] = 1
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


class Progress:
    """Adds up the counts of a service, and reports the total from time to time.

    Args:
        total: empty counts, which have the methods ``add`` and ``__str__``.
    """

    def __init__(self, tell: Callable[[str], object], total: Any) -> None:
        self.tell = tell
        self.total = total
        self._next = time.monotonic() + PROGRESS_SECONDS
        self._lock = threading.Lock()

    def add(self, counts: Any) -> None:
        with self._lock:
            self.total.add(counts)
            if time.monotonic() >= self._next:
                self._next = time.monotonic() + PROGRESS_SECONDS
                self.tell(f"{self.total} so far")
