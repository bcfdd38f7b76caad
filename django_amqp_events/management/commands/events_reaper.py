"""``manage.py events_reaper``: runs alone what ended its worker, and archives what is poison."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from django_amqp_events.broker.connection import celery_app
from django_amqp_events.broker.topology import Names
from django_amqp_events.conf import get_settings
from django_amqp_events.exceptions import AmqpEventsError
from django_amqp_events.management.processes import (
    QUIET,
    follow,
    prepare,
    run_worker,
)
from django_amqp_events.worker import bootstrap
from django_amqp_events.worker.reaper import ReaperStep
from django_amqp_events.worker.settlement import HOLD


class Command(BaseCommand):
    """Start a Celery worker with one process, for the graveyard."""

    help = (
        "Run alone the events whose worker ended without an answer, one at a time, and archive "
        "what ends its process again. Run by events_worker; one for each service is enough. Exit "
        "code: that of the Celery worker; 1 where it cannot start."
    )
    requires_system_checks: tuple[str, ...] = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("-n", "--hostname", help="name; <service>-reaper-<pid>@%%h by default")
        parser.add_argument("-l", "--loglevel", default="INFO")
        parser.add_argument(
            "--time-limit",
            type=float,
            default=HOLD,
            metavar="SECONDS",
            help="for handlers without a time limit, below the broker's consumer timeout; "
            "%(default)g by default. What has not ended by then is archived",
        )
        parser.add_argument("--parent", type=int, help="End when this process is gone.")

    def handle(self, **options: Any) -> None:
        try:
            settings = get_settings()
            app = celery_app(settings)
            prepare(app)
        except AmqpEventsError as exc:
            raise CommandError(str(exc)) from exc
        if options["time_limit"] <= 0:
            raise CommandError("--time-limit is a number of seconds above 0")
        bootstrap.become(type("ReaperStep", (ReaperStep,), {"time_limit": options["time_limit"]}))
        follow(options["parent"])
        names = Names.of(settings)
        hostname = options["hostname"] or f"{settings.service}-reaper-{os.getpid()}@%h"
        code = run_worker(
            app,
            [*QUIET, "-Q", f"{names.graveyard},{names.dead}", "-P", "prefork", "-c", "1",
             "-l", options["loglevel"], "--hostname", hostname],
        )  # fmt: skip
        if code:
            sys.exit(code)
