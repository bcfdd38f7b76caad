"""Print where an event is now: its rows, and the handlers of this service that may still get it.

Only handlers with once record that they handled an event.

value: the id of an event, a replay or an archived row; or a search value (SEARCH of
AMQP_EVENTS["EVENTS"]): 17, order_id=17, customer.email=ann@* for its start.

Search values find archived events, and rows of outbox and inbox with the same event
ids. Other rows are found by the event id only.

With --since, past events of the history are found too (HISTORY of AMQP_EVENTS).

Queues are not read, because RabbitMQ counts each delivery from a quorum queue;
events_status prints how many messages they have.

exit codes:
  0  at least one row, or past event, was found
  1  none was found; the event may be in a queue, or it was handled or never
     published
  2  wrong arguments or settings, or a database, or RabbitMQ with --since, is
     unreachable
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django_amqp_events import conf
from django_amqp_events.archive.search_values import check_paths
from django_amqp_events.declare.registry import get_registry
from django_amqp_events.exceptions import ConfigurationError
from django_amqp_events.management.arguments import past
from django_amqp_events.management.base import ReportCommand, columns
from django_amqp_events.message.text import counted, printable
from django_amqp_events.models import clean
from django_amqp_events.monitor import event_locations
from django_amqp_events.monitor.event_locations import LocatedEvent, Record


class Command(ReportCommand):
    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("value", type=clean, help="Id or search value.")
        parser.add_argument(
            "--since", type=past, metavar="TIME", help="Search the history too, from then on."
        )
        super().add_arguments(parser)

    def run(self, options: dict[str, Any]) -> int:
        settings, registry = conf.get_settings(), get_registry()
        value = options["value"].strip()
        located = event_locations.locate(value, settings, registry, since=options["since"])

        def show() -> None:
            for event in located.events:
                self._show_event(event)
            if not located.events:
                self.tell(f"no row of {value!r}{_unknown_path(value)}")
            if located.more:
                self.tell(f"only {event_locations.ROWS} archived events are shown")
            if located.scanned is not None:
                self.tell(f"{counted(located.scanned, 'event')} of the history read")

        document = {
            "value": value,
            "result": "found" if located.events else "missing",
            "events": [_document(event) for event in located.events],
            "more": located.more,
            "scanned": located.scanned,
        }
        return self.finish(0 if located.events else 1, document, show)

    def _show_event(self, event: LocatedEvent) -> None:
        self.tell(f"{printable(event.name)} {printable(event.id)}")
        if event.past is not None:
            self.tell(f"  history  published {event.past:%Y-%m-%d %H:%M:%S %Z}")
        elif event.in_history:
            self.tell("  history  published at an unknown time")
        for record in event.records:
            where = f"{record.service} {record.handler}".strip()
            about = f": {record.about}" if record.about else ""
            self.tell(
                f"  {record.kind:<8} {where}, {record.label} "
                f"{record.at:%Y-%m-%d %H:%M:%S %Z}{about} ({record.id})"
            )
        for to in event.destinations:
            told = f"may still get it from queue {to.queue}" if to.waiting else "see its row"
            self.tell(f"  handler  {to.handler}: {told}")


def _unknown_path(value: str) -> str:
    """Return why a value with a path cannot be found; ``""`` if its path is declared."""
    path, equals, _value = value.partition("=")
    try:
        check_paths([path] if equals else [])
    except ConfigurationError as exc:
        return f": {exc}"
    return ""


def _document(event: LocatedEvent) -> dict[str, Any]:
    def row(record: Record) -> dict[str, Any]:
        return columns(record, "id", "kind", "service", "handler", "state", "at", "about")

    return {
        **columns(event, "id", "name", "past"),
        "rows": [row(record) for record in event.records],
        "handlers": [
            columns(destination, "handler", "queue", "waiting")
            for destination in event.destinations
        ],
    }
