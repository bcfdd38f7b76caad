"""Publish the events of this service that are left in the outbox.

They are left if their process ended before RabbitMQ confirmed them, or while
RabbitMQ was unreachable. Any number of relays may run at once. events_worker
starts one; a service that only publishes needs at least one of its own.

exit codes:
  0  stopped (SIGTERM, SIGINT); --until-empty, --now: no event is due, except those
     that another session has locked
  1  wrong settings
  2  wrong arguments

While RabbitMQ or a database is unreachable, the command reports it and retries.
"""

from __future__ import annotations

from argparse import ArgumentParser
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from django.db import connections

from django_amqp_events import conf
from django_amqp_events.broker import connection
from django_amqp_events.management import arguments
from django_amqp_events.management.base import ServiceCommand
from django_amqp_events.publish import outbox_rows, relay
from django_amqp_events.publish.relay import Relay, RelayCounts


class Command(ServiceCommand):
    help = __doc__
    name = "events_relay"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--until-empty",
            action="store_true",
            help="End when no event is due; one that waits for a retry is not.",
        )
        parser.add_argument(
            "--now",
            action="store_true",
            help="The same, after events whose publish failed were made due, as after an outage.",
        )
        arguments.add_batch_size(parser, relay.BATCH, "events claimed at a time", relay.BATCH)
        arguments.add_service(parser, "Publish the events of")
        super().add_arguments(parser)

    def serve(self, options: dict[str, Any]) -> None:
        settings = conf.get_settings()
        app = connection.broker_app(settings)
        if options["service"] is not None:
            # Only the rows and reports are that service's; the rest stays this one's.
            settings = replace(settings, service=options["service"])
        aliases = outbox_rows.aliases(settings)
        until_empty: bool = options["until_empty"] or options["now"]
        relays = [
            Relay(
                app=app,
                settings=settings,
                alias=alias,
                size=options["batch_size"],
                # Other databases have an outbox only if something is published with
                # using(using=…).
                needed=alias == settings.database and settings.publish == "outbox",
                alone=until_empty or len(aliases) == 1,
                now=options["now"],
                tell=self.tell,
                stop=self.stopped,
            )
            for alias in aliases
        ]
        if not relays:
            raise self.wrong("there is no database for an outbox; set DATABASES")
        self.tell(f"relaying the outbox of {settings.service}")
        self._relay(relays, until_empty=until_empty)
        total = RelayCounts()
        for database_relay in relays:
            total.add(database_relay.total)
        self.tell(f"stopped; {total} in all")

    def _relay(self, relays: list[Relay], *, until_empty: bool) -> None:
        """Run the first relay here and the others in threads; no database delays another."""

        def work(database_relay: Relay, *, threaded: bool) -> None:
            try:
                database_relay.run(until_empty=until_empty)
            except BaseException:
                if not until_empty:
                    self.stop()
                raise
            finally:
                if threaded:
                    connections.close_all()

        with ThreadPoolExecutor(len(relays)) as pool:
            others = [pool.submit(work, other, threaded=True) for other in relays[1:]]
            work(relays[0], threaded=False)
        for other in others:
            other.result()
