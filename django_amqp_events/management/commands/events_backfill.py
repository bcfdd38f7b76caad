"""Give past events from the history (HISTORY of AMQP_EVENTS) to one handler, as a batch.

The range is fixed when the command runs: later events are not in it. It leaves out
what the handler's queue has received since it was bound, what the inbox shows as
handled, and what is in the archive for this handler. With --again all of these run
again, those in progress or discarded excepted: for a handler that was wrong.

events_batches runs the batch, as each replay batch: pause, resume, cancel, progress
and report. The handler gets each event through its replay exchange, with a replay
id. With ONCE, events that are given without --again are skipped if they were
handled meanwhile.

exit codes:
  0  the batch has begun (--dry-run: the range can be given)
  1  nothing in the range can be given
  2  nothing was done: wrong arguments or settings, there is no history, RabbitMQ or
     the database is unreachable
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management import CommandError

from django_amqp_events.archive.batches import backfill, batch_states, preview
from django_amqp_events.archive.history import PastSelection
from django_amqp_events.management import arguments
from django_amqp_events.management.base import ReportCommand, requested_by
from django_amqp_events.models import clean
from django_amqp_events.reasons import Reason


class Command(ReportCommand):
    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("handler", type=clean, help="Handler of this service.")
        super().add_arguments(parser)
        arguments.add_past_filters(parser)
        parser.add_argument(
            "--again", action="store_true", help="Include what the handler has received."
        )
        parser.add_argument(
            "--dry-run",
            action="store_true",
            help=f"Print what the first {preview.EXAMINED} events to give are, and create nothing.",
        )
        parser.add_argument(
            "--comment", default="", metavar="TEXT", help="Reason, kept in each event's history."
        )
        arguments.add_batch_options(parser)

    def run(self, options: dict[str, Any]) -> int:
        by, chosen = requested_by("events_backfill"), arguments.batch_options(options)
        try:
            if not options["dry_run"]:
                batch_states.check(**chosen)
            selection = PastSelection(**arguments.past_filters(options))
            batch = backfill.freeze(options["handler"], selection, by=by, again=options["again"])
        except backfill.NothingToGiveError as exc:
            raise CommandError(str(exc), returncode=1) from exc
        except ValueError as exc:
            raise self.wrong(str(exc)) from exc
        try:
            plan = preview.preview_batch(batch)
        except BaseException:
            batch_states.cancel(batch.pk, by=by)
            raise
        begins = bool(plan["eligible"] or plan["undecided"]) and not options["dry_run"]
        if begins:
            batch_states.start(batch.pk, by=by, **chosen)
        else:
            batch_states.cancel(batch.pk, by=by)

        def show() -> None:
            self.tell(f"{plan['eligible']} events to give to {options['handler']}")
            if plan["undecided"]:
                self.tell(f"{plan['undecided']} further events of the history are not examined yet")
            for skipped in plan["skipped"]:
                why = Reason.from_json(skipped["why"])
                self.tell(f"  {skipped['count']} left out: {why}")
            if begins:
                self.tell(
                    f"batch {batch.pk}: events_batches runs it, and `events_batches show "
                    f"{batch.pk}` prints the progress"
                )

        document = {
            "result": "begun" if begins else "planned" if options["dry_run"] else "nothing",
            "batch": batch.pk if begins else None,
            **{name: plan[name] for name in ("eligible", "undecided")},
            "left_out": [
                {"count": skipped["count"], "why": str(Reason.from_json(skipped["why"]))}
                for skipped in plan["skipped"]
            ],
        }
        code = 0 if plan["eligible"] or plan["undecided"] else 1
        return self.finish(code, document, show)
