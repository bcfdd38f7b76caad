"""Copy the archived events of this service from the archive queue into the database.

The mirror also applies the outcomes of replays, and unless --until-empty is given
it stores the dashboard's statistics every 30 s. Any number of mirrors may run at
once; events_worker starts one.

exit codes:
  0  stopped (SIGTERM, SIGINT); --until-empty: the archive queue is empty
  1  wrong settings; --until-empty: messages that cannot be stored are left
  2  wrong arguments

While RabbitMQ or the database is unreachable, the command reports it and retries.
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django_amqp_events import conf
from django_amqp_events.archive import mirror
from django_amqp_events.archive.mirror import Mirror
from django_amqp_events.broker import connection, topology
from django_amqp_events.broker.topology import Names
from django_amqp_events.declare import registry
from django_amqp_events.management import arguments
from django_amqp_events.management.base import ServiceCommand
from django_amqp_events.message.text import counted
from django_amqp_events.monitor.snapshots import SnapshotLoop


class Command(ServiceCommand):
    help = __doc__
    name = "events_mirror"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--until-empty", action="store_true", help="End when the archive queue is empty."
        )
        arguments.add_batch_size(parser, mirror.BATCH, "messages per transaction")
        super().add_arguments(parser)

    def serve(self, options: dict[str, Any]) -> None:
        settings = conf.get_settings()
        app = connection.broker_app(settings)
        mirroring = Mirror(
            app=app,
            settings=settings,
            size=options["batch_size"],
            tell=self.tell,
            stop=self.stopped,
        )
        self.tell(f"mirroring {Names.of(settings).archive}")
        watcher = None
        if not options["until_empty"]:
            declared = topology.build(settings, registry.get_registry())
            watcher = SnapshotLoop(app, settings, declared, tell=self.tell)
            watcher.start()
        try:
            total = mirroring.run(until_empty=options["until_empty"])
        finally:
            if watcher is not None:
                watcher.stop()
        self.tell(f"stopped; {total} in all")
        if options["until_empty"] and mirroring.aside and not self.stopping:
            count = counted(mirroring.aside, "message")
            raise self.wrong(f"{count} in the archive queue cannot be stored")
