"""What runs beside a worker: one thread per service, and a reaper while there is work for it."""

from __future__ import annotations

import random
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from typing import Any, Final

from celery import Celery

from ..broker.batch_reader import HEARTBEAT
from ..broker.provisioning.amqp_api import session
from ..broker.queue_depth import Depth
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


def run_reaper(
    app: Celery,
    settings: Settings,
    loglevel: str,
    tell: Callable[[str], object],
    stop: Callable[[], bool],
) -> None:
    """Run ``events_reaper`` while the graveyard or ``dead`` has messages and no consumer.

    Args:
        tell: receives reports, each a line of text.
        stop: polled often; returns True to end.
    """
    names = Names.of(settings)
    # Such as a missing permission; the other services continue.
    errors = (Exception,)
    work = "watching the graveyard"
    loop = ServiceLoop(part="reaper", work=work, tell=tell, stop=stop, errors=errors)
    line = ("events_reaper", "--until-empty", "--loglevel", loglevel)
    command = ChildCommand(line=line, tell=tell, stop=loop.stop, grace=REAPER_GRACE)

    def step() -> float:
        with session(app, settings, heartbeat=HEARTBEAT) as amqp:
            # A busy quorum queue may be reported as empty, but not at each check. A reaper, also
            # that of another companion, consumes both queues.
            while not any(
                _needs_consumer(amqp.depth(name)) for name in (names.graveyard, names.dead)
            ):
                loop.recovered()
                sleep(CHECK_INTERVAL * random.uniform(0.5, 1.5), loop.stop)
                if loop.stop():
                    return 0.0
        tell("isolated events wait; starting events_reaper")
        return command.run()

    loop.run(step)


def _needs_consumer(depth: Depth | None) -> bool:
    return bool(depth and depth.ready and not depth.consumers)
