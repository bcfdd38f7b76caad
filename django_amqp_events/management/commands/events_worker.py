"""``manage.py events_worker``: a Celery worker for this service's handlers and nothing else."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from fnmatch import fnmatchcase
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from django_amqp_events.broker import celery_app
from django_amqp_events.conf import get_settings
from django_amqp_events.exceptions import AmqpEventsError
from django_amqp_events.registry import Registry, get_registry

#: Broadcasts between workers: N workers exchange N² messages with no use for events.
QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat")


class Command(BaseCommand):
    """Start a worker that consumes the queues of some or all handlers."""

    help = (
        "Start a Celery worker for the event handlers of this service. What stands behind -- is "
        "handed to `celery worker` as it is. Exit code: that of the Celery worker; 1 where it "
        "cannot start."
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

    def run_from_argv(self, argv: list[str]) -> None:
        """Keep what stands behind ``--`` for Celery, which argparse would take for handlers."""
        self._extra: list[str] = []
        if "--" in argv:
            cut = argv.index("--")
            argv, self._extra = argv[:cut], argv[cut + 1 :]
        super().run_from_argv(argv)

    def handle(self, **options: Any) -> None:
        try:
            settings, registry = get_settings(), get_registry()
            app = celery_app(settings)
        except AmqpEventsError as exc:
            raise CommandError(str(exc)) from exc
        queues = self._queues(registry, options["handlers"])
        # Without the first, a consumer timeout ends the worker (celery#6760); without the
        # second, a run whose connection was lost goes on beside its redelivery.
        app.conf.broker_channel_error_retry = True
        app.conf.worker_cancel_long_running_tasks_on_connection_loss = True
        # Two workers of one name on one vhost lock each other out of remote control (405), so
        # the name says service and process.
        options["hostname"] = options["hostname"] or f"{settings.service}-{os.getpid()}@%h"
        argv = ["worker", *QUIET, "-Q", ",".join(sorted(queues)), "-l", options["loglevel"]]
        for name in ("pool", "concurrency", "hostname"):
            if options[name] is not None:
                argv += [f"--{name}", str(options[name])]
        code = app.worker_main([*argv, *getattr(self, "_extra", [])])
        if code:
            sys.exit(code)

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
