"""The base of the commands that run until they are stopped."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any, ClassVar

from django_amqp_events.management.base import EventsCommand, stop_signals
from django_amqp_events.management.child_command import follow


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
