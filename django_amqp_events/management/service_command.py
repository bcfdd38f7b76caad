"""The base of the commands that run until they are stopped."""

from __future__ import annotations

import os
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from django.core.management.base import CommandError

from django_amqp_events.exceptions import AmqpEventsError
from django_amqp_events.management.base import BrokerCommand
from django_amqp_events.management.processes import stop_signals

#: Seconds between lines of progress, at least.
PROGRESS: Final = 10.0


class ServiceCommand(BrokerCommand):
    """A command that runs until SIGTERM, SIGINT or the end of its parent process.

    Attributes:
        name: begins each line of output.
    """

    name: ClassVar[str]

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--parent", type=int, help="End when this process is gone.")

    @contextmanager
    def running(self, options: dict[str, Any]) -> Iterator[None]:
        """Make :meth:`stopped` return True after a signal, and our errors a CommandError."""
        self._stopping = False
        self._parent: int | None = options["parent"]
        self._quiet = options["verbosity"] < 1
        try:
            with stop_signals(self.stop):
                yield
        except AmqpEventsError as exc:
            raise CommandError(str(exc)) from exc

    def stop(self) -> None:
        self._stopping = True

    def stopped(self) -> bool:
        if self._parent is not None and os.getppid() != self._parent:
            self._stopping = True
        return self._stopping

    def tell(self, text: str) -> None:
        if not self._quiet:
            self.stdout.write(f"{self.name}: {text}")
            self.stdout.flush()


@dataclass(slots=True)
class Progress:
    """Reports the counts of a service from time to time, and adds up their total.

    Args:
        counts: makes empty counts, which have a method ``add``.
        describe: writes counts as text.
    """

    tell: Callable[[str], object]
    counts: Callable[[], Any]
    describe: Callable[[Any], str]
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
            if time.monotonic() < self._told + PROGRESS or self._since == self.counts():
                return
            since, self._since, self._told = self._since, self.counts(), time.monotonic()
        self.tell(self.describe(since))
