"""Start a Celery worker for the event handlers of this service.

Beside the worker it runs events_reaper, events_mirror, events_relay and
events_batches, with --metrics-port also events_metrics. Arguments after -- are
passed to `celery worker`.

exit codes: those of the Celery worker; 1 if it cannot start
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from argparse import ArgumentParser
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Final

from django.db import connections

from django_amqp_events.broker.connection import celery_app
from django_amqp_events.conf import Settings, get_settings
from django_amqp_events.declare.registry import Registry, get_registry
from django_amqp_events.management import arguments
from django_amqp_events.management.base import EventsCommand
from django_amqp_events.management.processes import QUIET, Children, prepare, run_worker
from django_amqp_events.monitor import load_metrics
from django_amqp_events.worker.hang_detector import OPTION, add_options

#: Commands that run beside the worker, each unless its option ``--no-…`` is given.
_CHILDREN: Final = ("mirror", "relay", "batches", "reaper")


class Command(EventsCommand):
    # No system checks: two of them are errors about settings that this command sets itself, and
    # the worker reports the others when it starts.
    help = __doc__
    error_code: ClassVar[int] = 1
    _celery_arguments: tuple[str, ...] = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "handlers",
            nargs="*",
            help="Handler names or shell patterns such as 'billing.*' (default: all handlers).",
        )
        parser.add_argument("-P", "--pool", choices=("prefork", "threads", "solo"))
        parser.add_argument("-c", "--concurrency", type=int, help="Number of processes or threads.")
        parser.add_argument("-n", "--hostname", help="Worker name (default: <service>-<pid>@%%h).")
        parser.add_argument("-l", "--loglevel", default="INFO", help="Default: %(default)s.")
        parser.add_argument(
            "--hang-after",
            type=float,
            metavar="SECONDS",
            help="Report handlers that run longer; 0: never (default: their time limit, or 25 "
            "minutes).",
        )
        parser.add_argument(
            "--metrics-port",
            type=arguments.integer(1, 65_535),
            metavar="PORT",
            help="Serve Prometheus metrics of the worker and of what runs beside it.",
        )
        for name in _CHILDREN:
            parser.add_argument(
                f"--no-{name}",
                action="store_true",
                help=f"Do not run events_{name} beside the worker.",
            )

    def run_from_argv(self, argv: list[str]) -> None:
        """Keep the arguments after ``--`` for Celery; argparse would read them as handlers."""
        if "--" in argv:
            cut = argv.index("--")
            argv, self._celery_arguments = argv[:cut], tuple(argv[cut + 1 :])
        super().run_from_argv(argv)

    def run(self, options: dict[str, Any]) -> int:
        settings, registry = get_settings(), get_registry()
        if options["metrics_port"] is not None:
            self._share_metrics(settings)
        app = celery_app(settings)
        prepare(app)
        self.warn_of_migrations(settings, registry)
        # Pool processes would share the connections.
        connections.close_all()
        queues = self._queues(registry, options["handlers"])
        # Two workers with the same name on one vhost lock each other out of remote control (405).
        options["hostname"] = options["hostname"] or f"{settings.service}-{os.getpid()}@%h"
        argv = [*QUIET, "-Q", ",".join(sorted(queues)), "-l", options["loglevel"]]
        for name in ("pool", "concurrency", "hostname"):
            if options[name] is not None:
                argv += [f"--{name}", str(options[name])]
        add_options(app)
        if options["hang_after"] is not None:
            argv += [OPTION, str(options["hang_after"])]
        metrics = [["events_metrics", str(options["metrics_port"])]]
        children = Children(
            *(metrics if options["metrics_port"] is not None else ()),
            *(
                [f"events_{name}", "--loglevel", options["loglevel"]]
                if name == "reaper"
                else [f"events_{name}", "--verbosity", str(options["verbosity"])]
                for name in _CHILDREN
                if not options[f"no_{name}"]
            ),
        )
        children.start()
        try:
            return run_worker(app, [*argv, *self._celery_arguments])
        finally:
            children.stop()

    def _share_metrics(self, settings: Settings) -> None:
        """Give the processes of this worker a folder for their metrics.

        prometheus_client reads the variable when it is imported, which this process has done, so
        the command starts again. A folder that the user has chosen stays as it is.
        """
        if not settings.metrics:
            raise self.wrong("--metrics-port needs AMQP_EVENTS['METRICS'] = True")
        folder = load_metrics().FOLDER
        # A new one: a killed worker leaves its folder, and in a container the next one has its pid.
        prefix = f"amqp-events-metrics-{os.getpid()}-"
        if not (chosen := os.environ.get(folder)):
            os.environ[folder] = tempfile.mkdtemp(prefix=prefix)
            sys.stdout.flush()
            os.execv(sys.executable, sys.orig_argv)  # noqa: S606 - this command again
        elif Path(chosen).name.startswith(prefix):
            atexit.register(shutil.rmtree, chosen, ignore_errors=True)

    def _queues(self, registry: Registry, names: list[str]) -> set[str]:
        if not registry.handlers:
            raise self.wrong(
                "this service has no handlers; declare one in an app's handlers.py or in "
                'AMQP_EVENTS["HANDLERS"]'
            )
        if not names:
            return set(registry.by_queue())
        chosen: set[str] = set()
        for name in names:
            found = {key for key in registry.handlers if fnmatchcase(key, name)}
            if not found:
                known = ", ".join(sorted(registry.handlers))
                raise self.wrong(f"no handler is named {name!r}; the handlers are {known}")
            chosen |= found
        queues = {registry.handlers[name].queue for name in chosen}
        for queue, handlers in registry.by_queue().items():
            others = sorted(handler.name for handler in handlers if handler.name not in chosen)
            if queue in queues and others:
                self.stderr.write(
                    f"queue {queue} is shared, so this worker also handles {', '.join(others)}",
                    self.style.WARNING,
                )
        return queues
