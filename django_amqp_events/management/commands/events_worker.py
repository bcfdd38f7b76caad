"""Start a Celery worker for the event handlers of this service.

Beside the worker it runs events_companion: mirror, relay, batch runner and, when
there are isolated events, the reaper. Arguments after -- are passed to
`celery worker`.

exit codes: those of the Celery worker; 1 if it cannot start
"""

from __future__ import annotations

import os
import threading
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from django.db import connections

from django_amqp_events import liveness
from django_amqp_events.broker.connection import broker_app
from django_amqp_events.conf import Settings, get_settings
from django_amqp_events.declare.registry import get_registry
from django_amqp_events.logs import get_logger
from django_amqp_events.management import arguments, companion
from django_amqp_events.management.base import EventsCommand
from django_amqp_events.management.child_command import ChildCommand
from django_amqp_events.management.processes import QUIET, prepare, run_worker
from django_amqp_events.monitor import METRICS_FOLDER
from django_amqp_events.service_loop import ServiceLoop
from django_amqp_events.worker.hang_detector import Watch

logger = get_logger(__name__)


class Command(EventsCommand):
    # No system checks: two of them are errors about settings that this command sets itself, and
    # the worker reports the others when it starts.
    help = __doc__
    error_code = 1

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "-P",
            "--pool",
            choices=("prefork", "threads", "solo"),
            help="Pool of the worker (default: the setting worker_pool of Celery).",
        )
        parser.add_argument("-c", "--concurrency", type=int, help="Number of processes or threads.")
        parser.add_argument("-n", "--hostname", help="Worker name (default: <service>-<pid>@%%h).")
        parser.add_argument(
            "--hang-after",
            type=arguments.not_negative,
            metavar="SECONDS",
            help="Report handlers that run longer; 0: never (default: 5 s above their time "
            "limit, or five sixths of CONSUMER_TIMEOUT).",
        )
        companion.add_options(parser)
        parser.add_argument(
            "celery", nargs="*", metavar="-- ARGUMENT", help="Arguments of `celery worker`."
        )

    def run(self, options: dict[str, Any]) -> int:
        settings, registry = get_settings(), get_registry()
        if {"-D", "--detach"}.intersection(options["celery"]):
            # Celery would run `celery` with the arguments of this command, and exit with 0.
            raise self.wrong("--detach is not supported; use a supervisor, such as systemd")
        if options["metrics_port"] is not None:
            self._check_metrics(settings)
        app = broker_app(settings)
        prepare(app)
        # Pool processes would share the connections.
        connections.close_all()
        if not registry.handlers:
            raise self.wrong(
                "this service has no handlers; declare one in an installed app's handlers.py "
                'or in AMQP_EVENTS["HANDLERS"], or run events_relay if it only publishes'
            )
        # Two workers with the same name on one vhost lock each other out of remote control (405).
        options["hostname"] = options["hostname"] or f"{settings.service}-{os.getpid()}@%h"
        argv = [*QUIET, "-Q", ",".join(sorted(registry.by_queue())), "-l", options["loglevel"]]
        for name in ("pool", "concurrency", "hostname"):
            if options[name] is not None:
                argv += [f"--{name}", str(options[name])]
        Watch.hang_after = options["hang_after"]
        with beside(companion.command_line(options)):
            return run_worker(app, [*argv, *options["celery"]])

    def _check_metrics(self, settings: Settings) -> None:
        """Check the settings for metrics, and create the folder of this worker's counters."""
        if not settings.metrics:
            raise self.wrong("--metrics-port needs AMQP_EVENTS['METRICS'] = True")
        if not (folder := os.environ.get(METRICS_FOLDER)):
            raise self.wrong(
                f"--metrics-port needs {METRICS_FOLDER} in the environment: the path of a folder "
                f"for counters, which is created"
            )
        Path(folder).mkdir(parents=True, exist_ok=True)


@contextmanager
def beside(line: tuple[str, ...]) -> Iterator[None]:
    """Keep a command running in a child process for a block, if there is one."""
    if not line:
        yield
        return
    stopping = threading.Event()
    part = liveness.Part("companion", lambda: child.problem)

    def stop() -> bool:
        part.turn()
        return stopping.is_set()

    child = ChildCommand(line=line, tell=logger.error, stop=stop)
    loop = ServiceLoop(work=f"running {line[0]}", tell=logger.error, stop=stop, errors=(OSError,))
    thread = threading.Thread(
        target=loop.run, args=(child.run,), name="amqp-events-companion", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
        part.end()
