"""Print past events from the history (HISTORY of AMQP_EVENTS), the oldest first.

Different options must all match. The history is read from --since on, up to
--scan events; how many were read is printed at the end. Payloads are redacted
(REDACT), and --match searches what is shown.

--format json prints one JSON object per line and event.

exit codes:
  0  everything that can match was read
  1  the scan budget was used up, or the command was stopped
  2  wrong arguments or settings, there is no history, or RabbitMQ is unreachable
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from datetime import UTC
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder

from django_amqp_events import conf
from django_amqp_events.archive.history import BUDGET, PastSelection, Scan, shown_payload
from django_amqp_events.broker.history import Record
from django_amqp_events.management import arguments
from django_amqp_events.management.base import ReportCommand
from django_amqp_events.message.text import counted, printable
from django_amqp_events.reasons import Reason


class Command(ReportCommand):
    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        arguments.add_past_filters(parser)
        for name, text in (("id", "Id of the event."), ("correlation-id", "Correlation id.")):
            parser.add_argument(f"--{name}", action="append", default=[], help=text)
        parser.add_argument(
            "--scan",
            type=arguments.integer(1),
            default=BUDGET,
            metavar="N",
            help="Maximum number of events to read (default: %(default)s).",
        )
        parser.add_argument(
            "--follow",
            action="store_true",
            help="Print events as they are published, with --since also those before.",
        )

    def run(self, options: dict[str, Any]) -> int:
        try:
            selection = PastSelection(
                **arguments.past_filters(options),
                ids=tuple(options["id"]),
                correlation_ids=tuple(options["correlation_id"]),
            )
        except ValueError as exc:
            raise self.wrong(str(exc)) from exc
        scan = Scan(settings=conf.get_settings(), selection=selection, budget=options["scan"])
        found = 0
        with self.interruptible():
            for record in scan.records(follow=options["follow"], stop=self._ended):
                found += 1
                self.stdout.write(self._line(record))
                if options["follow"]:
                    self.stdout.flush()
            self.stdout.flush()
        if self.verbosity:
            left = "" if scan.complete else "; the rest was not read"
            self.stderr.write(f"{counted(scan.read, 'event')} read, {found} found{left}")
        return 1 if self.stdout.broken or not scan.complete else 0

    def _ended(self) -> bool:
        return self.stopping or self.stdout.broken

    def _line(self, record: Record) -> str:
        assert record.event is not None  # noqa: S101 - it has matched
        event, payload = record.event, shown_payload(record)
        shown = str(payload) if isinstance(payload, Reason) else payload
        if self.piped:
            names = ("id", "name", "service", "published_at", "correlation_id", "causation_id")
            document = {name: getattr(event, name) for name in names}
            return json.dumps(
                {"offset": record.offset, **document, "payload": shown}, cls=DjangoJSONEncoder
            )
        at = (
            f"{event.published_at.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"
            if event.published_at
            else "?"
        )
        body = shown if isinstance(shown, str) else json.dumps(shown, cls=DjangoJSONEncoder)
        name, event_id, service = map(printable, (event.name, event.id, event.service or "?"))
        return f"{at} {name} {event_id} from {service}: {body}"
