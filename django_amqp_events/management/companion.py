"""What runs beside a worker: one thread per service, and a reaper while there is work for it."""

from __future__ import annotations

import random
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from typing import Any, Final

from celery import Celery

from ..broker.batch_reader import HEARTBEAT
from ..broker.provisioning.amqp_api import session
from ..broker.topology import Names
from ..conf import Settings
from ..service_loop import ServiceLoop, sleep
from . import arguments
from .child_command import ChildCommand

#: The services, each of which runs unless its option ``--no-…`` is given.
SERVICES: Final = ("mirror", "relay", "batches", "reaper")
#: Seconds between checks of graveyard and ``dead``, up to half as many more or less: of several
#: companions, one starts a reaper and the others see it.
CHECK_INTERVAL: Final = 5.0
#: Seconds after SIGTERM until the reaper is killed; less than the companion itself has.
REAPER_GRACE: Final = 10.0


def add_options(parser: ArgumentParser) -> None:
    """Add the options of ``events_companion``, which ``events_worker`` passes to it."""
    parser.add_argument(
        "-l", "--loglevel", default="INFO", help="Log level (default: %(default)s)."
    )
    parser.add_argument(
        "--metrics-port",
        type=arguments.integer(1, 65_535),
        metavar="PORT",
        help="Serve Prometheus metrics of this process and of those that share its folder.",
    )
    for name in SERVICES:
        parser.add_argument(f"--no-{name}", action="store_true", help=f"Do not run events_{name}.")


def command_line(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the companion's command line for these options, ``()`` if it would run nothing."""
    without = [f"--no-{name}" for name in SERVICES if options[f"no_{name}"]]
    port = options["metrics_port"]
    if len(without) == len(SERVICES) and port is None:
        return ()
    return (
        "events_companion",
        *without,
        *(("--metrics-port", str(port)) if port is not None else ()),
        "--loglevel",
        options["loglevel"],
        "--verbosity",
        str(options["verbosity"]),
    )


class Reaper:
    """Runs ``events_reaper`` while the graveyard or ``dead`` has messages and no consumer.

    Args:
        tell: receives reports, each a line of text.
        stop: polled often; returns True to end.
    """

    def __init__(
        self,
        app: Celery,
        settings: Settings,
        *,
        loglevel: str,
        tell: Callable[[str], object],
        stop: Callable[[], bool],
    ) -> None:
        self.app = app
        self.settings = settings
        self.tell = tell
        self._loop = ServiceLoop(
            part="reaper",
            work="watching the graveyard",
            tell=tell,
            stop=stop,
            errors=(Exception,),  # such as a missing permission; the other services continue
        )
        self._command = ChildCommand(
            line=("events_reaper", "--until-empty", "--loglevel", loglevel),
            tell=tell,
            stop=self._loop.stop,
            grace=REAPER_GRACE,
        )

    def run(self) -> None:
        self._loop.run(self._step)

    def _step(self) -> float:
        self._wait_for_messages()
        if self._loop.stop():
            return 0.0
        self.tell("isolated events wait; starting events_reaper")
        return self._command.run()

    def _wait_for_messages(self) -> None:
        names = Names.of(self.settings)
        with session(self.app, self.settings, heartbeat=HEARTBEAT) as amqp:
            while not self._loop.stop():
                # A busy quorum queue may be reported as empty, but not at each check. A reaper,
                # also that of another companion, consumes both queues.
                depths = [amqp.depth(name) for name in (names.graveyard, names.dead)]
                if any(depth and depth.ready and not depth.consumers for depth in depths):
                    return
                self._loop.recovered()
                sleep(CHECK_INTERVAL * random.uniform(0.5, 1.5), self._loop.stop)
