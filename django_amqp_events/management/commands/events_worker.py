"""``manage.py events_worker``: a Celery worker for this service's handlers and nothing else."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from fnmatch import fnmatchcase
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from django_amqp_events.broker.connection import celery_app
from django_amqp_events.conf import Settings, get_settings
from django_amqp_events.declare.registry import Registry, get_registry
from django_amqp_events.exceptions import AmqpEventsError
from django_amqp_events.management.processes import (
    QUIET,
    Children,
    prepare,
    run_worker,
)
from django_amqp_events.worker.hang_detector import OPTION, add_options


class Command(BaseCommand):
    """Start a worker that consumes the queues of some or all handlers."""

    help = (
        "Start a Celery worker for the event handlers of this service, and beside it its reaper, "
        "the mirror of its archive, the relay of its outbox and the runner of its batches. What "
        "stands behind -- is handed to `celery worker` as it is. Exit code: that of the "
        "Celery worker; 1 where it cannot start."
    )
    # The worker's own start says what is wrong, and two of the errors are about settings that
    # this command sets for its own process.
    requires_system_checks: tuple[str, ...] = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "handlers",
            nargs="*",
            help="handler names or shell patterns such as 'billing.*'; all handlers by default",
        )
        parser.add_argument("-P", "--pool", choices=("prefork", "threads", "solo"))
        parser.add_argument("-c", "--concurrency", type=int, help="processes or threads")
        parser.add_argument("-n", "--hostname", help="name; <service>-<pid>@%%h by default")
        parser.add_argument("-l", "--loglevel", default="INFO")
        parser.add_argument(
            "--hang-after",
            type=float,
            metavar="SECONDS",
            help="report handlers that run for longer; 0: none. Their time limit by default, or "
            "25 minutes",
        )
        parser.add_argument(
            "--no-reaper",
            action="store_true",
            help="do not run events_reaper beside the worker",
        )
        parser.add_argument(
            "--no-relay",
            action="store_true",
            help="do not run events_relay beside the worker",
        )
        parser.add_argument(
            "--no-mirror",
            action="store_true",
            help="do not run events_mirror beside the worker",
        )
        parser.add_argument(
            "--no-batches",
            action="store_true",
            help="do not run events_batches beside the worker",
        )

    def run_from_argv(self, argv: list[str]) -> None:
        """Pass the arguments after ``--`` to Celery; argparse would read them as handlers."""
        self._extra: list[str] = []
        if "--" in argv:
            cut = argv.index("--")
            argv, self._extra = argv[:cut], argv[cut + 1 :]
        super().run_from_argv(argv)

    def handle(self, **options: Any) -> None:
        try:
            settings, registry = get_settings(), get_registry()
            app = celery_app(settings)
            prepare(app)
        except AmqpEventsError as exc:
            raise CommandError(str(exc)) from exc
        queues = self._queues(registry, options["handlers"])
        # Two workers of one name on one vhost lock each other out of remote control (405), so
        # the name says service and process.
        options["hostname"] = options["hostname"] or f"{settings.service}-{os.getpid()}@%h"
        argv = [*QUIET, "-Q", ",".join(sorted(queues)), "-l", options["loglevel"]]
        for name in ("pool", "concurrency", "hostname"):
            if options[name] is not None:
                argv += [f"--{name}", str(options[name])]
        add_options(app)
        if options["hang_after"] is not None:
            argv += [OPTION, str(options["hang_after"])]
        try:
            children = self._children(settings, options)
        except AmqpEventsError as exc:
            raise CommandError(str(exc)) from exc
        children.start()
        try:
            code = run_worker(app, [*argv, *getattr(self, "_extra", [])])
        finally:
            children.stop()
        if code:
            sys.exit(code)

    def _children(self, settings: Settings, options: dict[str, Any]) -> Children:
        commands = []
        if not options["no_mirror"]:
            commands.append(["events_mirror", "--verbosity", str(options["verbosity"])])
        if not options["no_relay"]:
            commands.append(["events_relay", "--verbosity", str(options["verbosity"])])
        if not options["no_batches"]:
            commands.append(["events_batches", "--verbosity", str(options["verbosity"])])
        if not options["no_reaper"]:
            commands.append(["events_reaper", "--loglevel", options["loglevel"]])
        return Children(*commands)

    def _queues(self, registry: Registry, names: list[str]) -> set[str]:
        if not registry.handlers:
            raise CommandError(
                "this service has no handlers; declare one in an app's handlers.py or in "
                'AMQP_EVENTS["HANDLERS"]'
            )
        if not names:
            return set(registry.by_queue())
        chosen = set()
        for name in names:
            found = {key for key in registry.handlers if fnmatchcase(key, name)}
            if not found:
                raise CommandError(
                    f"no handler is named {name!r}; there are "
                    f"{', '.join(sorted(registry.handlers))}"
                )
            chosen |= found
        queues = {registry.handlers[name].queue for name in chosen}
        for queue, handlers in registry.by_queue().items():
            others = sorted(handler.name for handler in handlers if handler.name not in chosen)
            if queue in queues and others:
                self.stderr.write(
                    self.style.WARNING(
                        f"queue {queue} is shared, so {', '.join(others)} is handled here too"
                    )
                )
        return queues
