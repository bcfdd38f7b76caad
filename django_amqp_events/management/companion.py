"""What runs beside a worker: one thread per service, and reapers while there is work for them."""

from __future__ import annotations

import random
import threading
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from typing import Any, Final

from celery import Celery

from ..broker.batch_reader import HEARTBEAT
from ..broker.provisioning.amqp_api import Amqp, session
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
MAX_REAPERS: Final = 4
#: Messages that wait for each running reaper, above which another one starts.
BACKLOG: Final = 50
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


class Reapers:
    """Runs ``events_reaper`` while the graveyard or ``dead`` has messages, and more than one while
    many wait. Each has one unacknowledged event, so one that kills its reaper costs no other
    event a delivery.

    Args:
        loglevel: that of the reapers.
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
        self.stop = stop
        self._ending = False
        self._loop = ServiceLoop(
            part="reaper",
            work="watching the graveyard",
            tell=tell,
            stop=stop,
            errors=(Exception,),  # such as a missing permission; the other services continue
        )
        self._reapers = [
            ChildCommand(
                line=("events_reaper", "--until-empty", "--loglevel", loglevel),
                tell=tell,
                stop=lambda: self._ending or stop(),
                grace=REAPER_GRACE,
            )
            for _ in range(MAX_REAPERS)
        ]
        self._threads: dict[int, threading.Thread] = {}

    def run(self) -> None:
        try:
            self._loop.run(self._watch)
        finally:
            self._ending = True
            for thread in self._threads.values():
                thread.join()

    def _watch(self) -> float:
        with session(self.app, self.settings, heartbeat=HEARTBEAT) as amqp:
            while not self._loop.stop():
                self._start_one(amqp)
                self._loop.recovered()
                sleep(CHECK_INTERVAL * random.uniform(0.5, 1.5), self._loop.stop)
        return 0.0

    def _start_one(self, amqp: Amqp) -> None:
        """Start a reaper, if the running ones are too few.

        A busy quorum queue may be reported as empty, but not at each check.
        """
        running = {number for number, thread in self._threads.items() if thread.is_alive()}
        if len(running) == MAX_REAPERS:
            return
        names = Names.of(self.settings)
        depths = [amqp.depth(name) for name in (names.graveyard, names.dead)]
        # A reaper consumes both queues. Those of other companions count too.
        if not any(
            depth and depth.ready > BACKLOG * max(depth.consumers, len(running)) for depth in depths
        ):
            return
        number = min(set(range(MAX_REAPERS)) - running)
        self.tell("isolated events wait; starting events_reaper")
        thread = self._threads[number] = threading.Thread(
            target=lambda: sleep(self._reapers[number].run(), self.stop), daemon=True
        )
        thread.start()
