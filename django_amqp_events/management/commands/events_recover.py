"""Move messages of the abyss, or of another queue, into the archive.

Each message is acked after RabbitMQ has confirmed its copy in the archive queue,
so nothing is lost if the command is interrupted; run it again to continue. A
message that was copied but not acked is delivered again and becomes the same row,
or a second one if it has no id.

exit codes:
  0  everything requested is in the archive
  1  messages remain: stopped, connection lost, or refused by RabbitMQ
  2  nothing was done: no such queue, the archive queue itself, a queue with
     consumers, RabbitMQ unreachable, wrong arguments or settings
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django_amqp_events import conf
from django_amqp_events.archive import recovery
from django_amqp_events.archive.recovery import Recovered
from django_amqp_events.broker import connection
from django_amqp_events.broker.topology import Names
from django_amqp_events.declare.registry import get_registry
from django_amqp_events.management import arguments
from django_amqp_events.management.base import SHOWN, ReportCommand
from django_amqp_events.message.text import counted
from django_amqp_events.models import clean


class Command(ReportCommand):
    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "queue",
            type=clean,
            nargs="?",
            default="",
            help="Full name of a queue, as events_status prints it (default: the abyss).",
        )
        arguments.add_limit(parser, "messages, the oldest first")

    def run(self, options: dict[str, Any]) -> int:
        settings = conf.get_settings()
        app = connection.broker_app(settings)
        queue = options["queue"] or Names.of(settings).abyss
        with self.interruptible():
            depth = recovery.inspect_queue(app, settings, queue)
            done = recovery.recover(
                app,
                settings,
                get_registry(),
                queue,
                limit=options["limit"],
                progress=lambda so_far: self.progress(
                    f"{so_far.total} of {max(depth.ready, so_far.total)} archived"
                ),
                stop=self.stopped,
            )
        self._show(queue, done)
        return 1 if done.refused or done.stopped else 0

    def _show(self, queue: str, done: Recovered) -> None:
        for why in done.refused[:SHOWN]:
            self.stderr.write(f"not recovered: {why}")
        if len(done.refused) > SHOWN:
            self.stderr.write(f"and {len(done.refused) - SHOWN} more")
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(done.reasons.items()))
        self.tell(
            f"{queue}: {counted(done.total, 'message')} archived"
            + (f" ({reasons}); events_mirror copies them into the database" if reasons else "")
        )
        if done.stopped:
            self.stderr.write(f"stopped: {done.stopped}; the rest remains in the queue")
