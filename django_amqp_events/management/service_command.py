"""The base of the commands that run until they are stopped."""

from __future__ import annotations

import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass, field
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
        progress: reported from time to time, if it is set.
    """

    error_code: ClassVar[int] = 1
    name: ClassVar[str]
    progress: Progress | None = None

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

    def stopped(self) -> bool:
        if self.progress is not None:
            self.progress.report()
        return self.stopping

    def tell(self, text: str) -> None:
        if self.verbosity:
            self.stdout.write(f"{self.name}: {text}")
            self.stdout.flush()


@dataclass(slots=True)
class Progress:
    """Reports the counts of a service from time to time, and adds up their total.

    Args:
        counts: makes empty counts, which have the methods ``add`` and ``__str__``.
    """

    tell: Callable[[str], object]
    counts: Callable[[], Any]
    total: Any = field(init=False)
    _since: Any = field(init=False)
    _told: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.total, self._since = self.counts(), self.counts()

    def add(self, counts: Any) -> None:
        with self._lock:
            self.total.add(counts)
            self._since.add(counts)
        self.report()

    def report(self) -> None:
        """Report what was done since the last report, unless that is recent."""
        with self._lock:
            if time.monotonic() < self._told + PROGRESS_SECONDS or self._since == self.counts():
                return
            since, self._since, self._told = self._since, self.counts(), time.monotonic()
        self.tell(str(since))
