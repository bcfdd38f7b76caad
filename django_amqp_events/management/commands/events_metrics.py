"""Serve Prometheus metrics over HTTP.

It serves the counters of all processes that share the folder named by
PROMETHEUS_MULTIPROC_DIR, and queue depths, outbox and mirror lag from the newest
snapshot in the database (events_mirror takes one every 30 s). `events_worker
--metrics-port` runs this command with a folder of its own.

exit codes:
  0  stopped (SIGTERM, SIGINT)
  1  wrong settings, prometheus_client is missing, or the port is in use
  2  wrong arguments
"""

from __future__ import annotations

import os
from argparse import ArgumentParser
from typing import Any

from django_amqp_events import conf, service_loop
from django_amqp_events.management import arguments
from django_amqp_events.management.service_command import ServiceCommand
from django_amqp_events.monitor import load_metrics


class Command(ServiceCommand):
    help = __doc__
    name = "events_metrics"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("port", type=arguments.integer(1, 65_535), help="TCP port.")
        parser.add_argument(
            "--address",
            default="0.0.0.0",  # noqa: S104 - Prometheus is another host
            help="Address to listen on (default: %(default)s).",
        )
        super().add_arguments(parser)

    def serve(self, options: dict[str, Any]) -> None:
        settings = conf.get_settings()
        metrics = load_metrics()
        if not os.environ.get(metrics.FOLDER):
            self.tell(
                f"{metrics.FOLDER} is not set, so only the snapshot is served. Set it to the "
                f"folder of the worker to serve its counters"
            )
        port, address = options["port"], options["address"]
        try:
            server, _ = metrics.serve(port, address, settings.service)
        except (OSError, UnicodeError) as exc:
            why = getattr(exc, "strerror", exc)
            raise self.wrong(f"cannot listen on {address}:{port}: {why}") from exc
        except ValueError as exc:
            folder = os.environ[metrics.FOLDER]
            raise self.wrong(f"{metrics.FOLDER} is {folder!r}, which is not a directory") from exc
        self.tell(f"serving metrics of {settings.service} on {address}:{port}")
        while not self.stopped():
            service_loop.sleep(1.0, self.stopped)
        server.shutdown()
        server.server_close()
