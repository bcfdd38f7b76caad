"""``manage.py events_mirror``: copy the archive queue into the database, as it fills."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from celery import Celery
from django.core.management.base import CommandError

from django_amqp_events import conf
from django_amqp_events.archive import mirror
from django_amqp_events.archive.message_store import Counts
from django_amqp_events.archive.mirror import Mirror
from django_amqp_events.broker import connection, topology
from django_amqp_events.broker.topology import Names
from django_amqp_events.conf import Settings
from django_amqp_events.declare import registry
from django_amqp_events.exceptions import AmqpEventsError
from django_amqp_events.management.service_command import Progress, ServiceCommand
from django_amqp_events.monitor import snapshots
from django_amqp_events.monitor.snapshots import SnapshotLoop, SnapshotTaker

_EPILOG = """
exit codes:
  0  stopped (SIGTERM, SIGINT), or with --until-empty the archive is empty
  1  AMQP_EVENTS is wrong

It retries while RabbitMQ or the database is unreachable, and reports that.
Without --until-empty it also stores dashboard statistics every 30 s.
"""


class Command(ServiceCommand):
    """A shell on :class:`django_amqp_events.archive.mirror.Mirror`."""

    help = (
        "Copy the archived events of this service into the database, where the admin shows them, "
        "and apply the outcomes of replays. Any number may run at once."
    )
    epilog = _EPILOG

    name = "events_mirror"

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--until-empty", action="store_true", help="End when the archive queue is empty."
        )
        parser.add_argument(
            "--batch-size",
            type=int,
            default=mirror.BATCH,
            metavar="N",
            help=f"Messages in one transaction at most (default: {mirror.BATCH}).",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if not 1 <= options["batch_size"] <= 10_000:
            raise CommandError("--batch-size is a number from 1 to 10000")
        with self.running(options):
            self._mirror(options)

    def _mirror(self, options: dict[str, Any]) -> None:
        settings = conf.get_settings()
        app = connection.celery_app(settings)
        progress = Progress(self.tell, Counts, str)

        def stop() -> bool:
            progress.report()
            return self.stopped()

        mirroring = Mirror(
            app=app,
            settings=settings,
            size=options["batch_size"],
            tell=self.tell,
            mirrored=progress.add,
            stop=stop,
        )
        self.tell(f"mirroring {Names.of(settings).archive}")
        watcher = None if options["until_empty"] else self._watcher(app, settings)
        if watcher is not None:
            watcher.start()
        try:
            total = mirroring.run(until_empty=options["until_empty"])
        finally:
            if watcher is not None:
                watcher.stop()
        self.tell(f"stopped; {total} in all")

    def _watcher(self, app: Celery, settings: Settings) -> SnapshotLoop | None:
        try:
            declared = topology.build(settings, registry.get_registry())
        except AmqpEventsError as exc:
            # The archive is mirrored all the same.
            self.tell(f"the dashboard gets no statistics: {exc}")
            return None
        return SnapshotLoop(
            SnapshotTaker(app, settings, declared), every=snapshots.EVERY, tell=self.tell
        )
