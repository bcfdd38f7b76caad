"""Run events whose worker died, one at a time, and archive those that kill their process again.

events_companion, which events_worker starts, runs a reaper while isolated events
wait.

exit codes: those of the Celery worker; 1 if it cannot start
"""

from __future__ import annotations

import os
from argparse import ArgumentParser
from typing import Any

from django_amqp_events.broker.connection import broker_app
from django_amqp_events.broker.topology import Names
from django_amqp_events.conf import get_settings
from django_amqp_events.management import arguments
from django_amqp_events.management.base import EventsCommand
from django_amqp_events.management.child_command import follow
from django_amqp_events.management.processes import QUIET, prepare, run_worker
from django_amqp_events.worker import bootstrap
from django_amqp_events.worker.reaper import IDLE_SECONDS, ReaperStep


class Command(EventsCommand):
    help = __doc__
    error_code = 1

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "-l", "--loglevel", default="INFO", help="Log level (default: %(default)s)."
        )
        parser.add_argument(
            "--time-limit",
            type=arguments.positive,
            metavar="SECONDS",
            help="Time limit of handlers that have none, below RabbitMQ's consumer timeout "
            "(default: five sixths of CONSUMER_TIMEOUT, 25 minutes). An event that exceeds it is "
            "archived.",
        )
        parser.add_argument(
            "--until-empty",
            action="store_true",
            help=f"End when no event has arrived for {IDLE_SECONDS:g} s.",
        )
        parser.add_argument("--parent", type=int, metavar="PID", help="End when this process ends.")

    def run(self, options: dict[str, Any]) -> int:
        settings = get_settings()
        app = broker_app(settings)
        prepare(app)
        chosen = {name: options[name] for name in ("time_limit", "until_empty")}
        bootstrap.become(type("ReaperStep", (ReaperStep,), chosen))
        follow(options["parent"])
        names = Names.of(settings)
        return run_worker(
            app,
            [*QUIET, "-Q", f"{names.graveyard},{names.dead}", "-P", "prefork", "-c", "1",
             "-l", options["loglevel"], "-n", f"{settings.service}-reaper-{os.getpid()}@%h"],
        )  # fmt: skip
