"""``manage.py events_relay``: publish what is left in the outbox."""

from __future__ import annotations

import threading
from argparse import ArgumentParser
from dataclasses import replace
from typing import Any

from django.core.management.base import CommandError
from django.db import connections

from django_amqp_events import conf
from django_amqp_events.broker import connection
from django_amqp_events.management.service_command import Progress, ServiceCommand
from django_amqp_events.publish import outbox_rows, relay
from django_amqp_events.publish.relay import Relay, RelayCounts

_EPILOG = """
exit codes:
  0  stopped (SIGTERM, SIGINT), or with --until-empty nothing is due
  1  AMQP_EVENTS is wrong, --database names no database, or --service is no
     name of a service

It retries while RabbitMQ or a database is unreachable, and reports that.
"""


class Command(ServiceCommand):
    """A shell on :class:`django_amqp_events.publish.relay.Relay`, one for each database."""

    help = (
        "Publish the events of this service that are left in the outbox, because their process "
        "ended or RabbitMQ was unreachable. Any number may run at once. Run by events_worker; a "
        "service that only publishes runs it by itself."
    )
    epilog = _EPILOG

    name = "events_relay"

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--until-empty", action="store_true", help="End when nothing is due.")
        parser.add_argument(
            "--database",
            action="append",
            metavar="ALIAS",
            help="Only the outbox in this database (repeatable); all that have one by default.",
        )
        parser.add_argument(
            "--batch-size",
            type=int,
            default=relay.BATCH,
            metavar="N",
            help=f"Events taken at a time at most (default: {relay.BATCH}).",
        )
        parser.add_argument(
            "--service",
            metavar="NAME",
            help="Publish what a service of another name has left: this one, before it was "
            "renamed. Its events go to this one's broker, as that service's.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if not 1 <= options["batch_size"] <= relay.BATCH:
            raise CommandError(f"--batch-size is a number from 1 to {relay.BATCH}")
        with self.running(options):
            self._relay(options)

    def _relay(self, options: dict[str, Any]) -> None:
        settings = conf.get_settings()
        app = connection.celery_app(settings)
        if options["service"] is not None:
            if not conf.SERVICE.fullmatch(options["service"]):
                raise CommandError(
                    f"--service is {options['service']!r:.80}; a service's name is letters, "
                    f"digits, - and _"
                )
            # Only the rows and reports are that service's; all else stays this one's.
            settings = replace(settings, service=options["service"])
        chosen: list[str] | None = options["database"]
        unknown = [alias for alias in chosen or () if alias not in connections]
        if unknown:
            raise CommandError(f"DATABASES has no {unknown[0]!r}")
        progress = Progress(self.tell, RelayCounts, describe)

        def stop() -> bool:
            progress.report()
            return self.stopped()

        relays = [
            Relay(
                app=app,
                settings=settings,
                alias=alias,
                size=options["batch_size"],
                # The others may, where something is published with using(using=…).
                needed=chosen is not None
                or (alias == settings.database and settings.publish == "outbox"),
                tell=self.tell,
                relayed=progress.add,
                stop=stop,
            )
            for alias in chosen or outbox_rows.aliases(settings)
        ]
        self.tell(f"relaying the outbox of {settings.service}")
        self._run(relays, until_empty=options["until_empty"])
        self.tell(f"stopped; {describe(progress.total)} in all")

    def _run(self, relays: list[Relay], *, until_empty: bool) -> None:
        """Run the first here and the others in threads: none waits for another's database."""
        raised: list[BaseException] = []

        def work(each: Relay) -> None:
            try:
                each.run(until_empty=until_empty)
            except BaseException as exc:  # noqa: BLE001 - it is raised below
                raised.append(exc)
                self.stop()
            finally:
                connections.close_all()

        threads = [threading.Thread(target=work, args=(each,)) for each in relays[1:]]
        for thread in threads:
            thread.start()
        try:
            relays[0].run(until_empty=until_empty)
        except BaseException:
            self.stop()
            raise
        finally:
            for thread in threads:
                thread.join()
        if raised:
            raise raised[0]


def describe(counts: RelayCounts) -> str:
    """Write counts for a console: ``3 events published, 1 failed``."""
    found = [
        (counts.published, "events published"),
        (counts.unrouted, "of them unrouted"),
        (counts.failed, "failed"),
    ]
    shown = [f"{number} {words}" for number, words in found if number]
    return ", ".join(shown) or "nothing"
