"""Run the services that a worker needs: mirror, relay, batch runner and reaper.

One process runs events_mirror, events_relay and events_batches in threads. It
starts events_reaper while isolated events wait. With --metrics-port it serves
Prometheus metrics: those of the processes that share PROMETHEUS_MULTIPROC_DIR,
and those of the newest snapshot. events_worker starts a companion; beside an
ordinary `celery worker`, or to run the services on another host, start one
yourself. Any number may run at once.

exit codes:
  0  stopped (SIGTERM, SIGINT)
  1  wrong settings
  2  wrong arguments

While RabbitMQ or the database is unreachable, the command reports it and retries.
A service that ends with an error is started again; the others continue.
"""

from __future__ import annotations

import os
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from django.core.management import CommandError, call_command, load_command_class

from django_amqp_events import conf
from django_amqp_events.broker import connection
from django_amqp_events.declare.registry import get_registry
from django_amqp_events.management.base import ServiceCommand
from django_amqp_events.management.companion import (
    REAPER_GRACE,
    SERVICES,
    add_options,
    run_reaper,
)
from django_amqp_events.monitor import METRICS_FOLDER
from django_amqp_events.service_loop import POLL_INTERVAL, ServiceLoop, sleep

#: Seconds after SIGTERM until threads that have not ended end with the process.
GRACE: Final = REAPER_GRACE + 2
#: Seconds that a service has to work before its next error counts as the first.
SETTLED_SECONDS: Final = 10.0


class Command(ServiceCommand):
    help = __doc__
    name = "events_companion"

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_options(parser)
        super().add_arguments(parser)

    def serve(self, options: dict[str, Any]) -> None:
        settings = conf.get_settings()
        # Before the threads, which would do the same at once.
        app = connection.broker_app(settings)
        get_registry()
        commands: list[ServiceCommand] = []
        services: dict[str, Callable[[], object]] = {}

        for name in SERVICES:
            if options[f"no_{name}"]:
                continue
            if name == "reaper":
                arguments = (app, settings, options["loglevel"], self.tell, self.stopped)
                services[name] = partial(run_reaper, *arguments)
            else:
                command = load_command_class("django_amqp_events", f"events_{name}")
                assert isinstance(command, ServiceCommand)  # noqa: S101 - for mypy
                commands.append(command)
                services[name] = partial(call_command, command, verbosity=options["verbosity"])
        if options["metrics_port"] is not None:
            services["metrics"] = partial(
                self._serve_metrics, settings.service, options["metrics_port"]
            )
        if not services:
            raise CommandError("there is nothing to run; give fewer --no-… options", returncode=2)
        threads = [
            threading.Thread(
                target=self._run, args=service, name=f"amqp-events-{service[0]}", daemon=True
            )
            for service in services.items()
        ]
        self.tell(f"running {', '.join(services)}")
        for thread in threads:
            thread.start()
        while not self.stopped():
            time.sleep(POLL_INTERVAL)
        deadline = time.monotonic() + GRACE
        while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
            for command in commands:
                command.stop()
            time.sleep(POLL_INTERVAL / 2)
        self.tell("stopped")

    def _serve_metrics(self, service: str, port: int) -> None:
        from django_amqp_events.monitor import metrics

        if not os.environ.get(METRICS_FOLDER):
            self.tell(
                f"{METRICS_FOLDER} is not set, so only the metrics of the snapshot are served; to "
                f"serve a worker's counters too, set it to that worker's folder"
            )
        try:
            server, _ = metrics.serve(port, service)
        except OSError as exc:
            raise self.wrong(f"cannot listen on port {port}: {exc.strerror}") from exc
        while not self.stopped():
            sleep(1.0, self.stopped)
        server.shutdown()
        server.server_close()

    def _run(self, name: str, service: Callable[[], object]) -> None:
        """Run a service in a thread, again after an error, which probes see until then."""
        loop = ServiceLoop(
            part=name,
            work=f"running {name}",
            tell=self.tell,
            stop=self.stopped,
            errors=(Exception,),
            fatal=(),
        )

        def step() -> None:
            began = time.monotonic()
            loop.leave()
            try:
                service()
                if not self.stopped():
                    raise RuntimeError("it ended unexpectedly")
            except Exception:
                if time.monotonic() > began + SETTLED_SECONDS:
                    loop.recovered()
                raise

        loop.run(step)
