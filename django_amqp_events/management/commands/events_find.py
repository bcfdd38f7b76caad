"""Print where an event is now: its rows, the handlers that may still get it, and their queues.

Only handlers with once record that they handled an event.

value: the id of an event, a replay or an archived row; or a search value (SEARCH of
AMQP_EVENTS["EVENTS"]): 17, order_id=17, customer.email=ann@* for its start.

Search values find archived events, and rows of outbox and inbox with the same event
ids. Other rows are found by the event id only.

The contents of queues are not read, because RabbitMQ counts each delivery from a
quorum queue. Only their numbers of messages are printed.

exit codes:
  0  at least one row was found
  1  no row was found; the event may be in a queue, or it was handled or never
     published
  2  wrong arguments or settings, or a database is unreachable
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any, Final

from django_amqp_events import conf
from django_amqp_events.archive.search_values import check_paths
from django_amqp_events.broker import connection, topology
from django_amqp_events.broker.provisioning import inspection
from django_amqp_events.declare.registry import get_registry
from django_amqp_events.exceptions import AmqpEventsError, ConfigurationError
from django_amqp_events.management.base import ReportCommand, columns
from django_amqp_events.models import clean, visible
from django_amqp_events.monitor import event_locations, queue_status
from django_amqp_events.monitor.event_locations import LocatedEvent, Record

_COUNTS: Final = ("ready", "unacked", "consumers")


class Command(ReportCommand):
    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("value", type=clean, help="Id or search value.")
        super().add_arguments(parser)

    def run(self, options: dict[str, Any]) -> int:
        settings, registry = conf.get_settings(), get_registry()
        value = options["value"].strip()
        try:
            located = event_locations.locate(value, settings, registry)
        except ValueError as exc:
            raise self.wrong(str(exc)) from exc
        seen: dict[str, Any] = {}
        error = ""
        if located.queues:
            wanted, app = topology.build(settings, registry), connection.broker_app(settings)
            try:
                api = inspection.management(app, settings)
                status = queue_status.status(app, settings, wanted, api=api)
                seen = {queue.name: columns(queue, "total", *_COUNTS) for queue in status.queues}
            except AmqpEventsError as exc:
                error = str(exc)
        queues = event_locations.with_messages(located.queues, seen)

        def show() -> None:
            for event in located.events:
                self._show_event(event)
            if not located.events:
                self.tell(visible(f"no row of {value!r}{_unknown_path(value)}"))
            if located.more:
                self.tell(f"only {event_locations.ROWS} archived events are shown")
            if located.queues:
                self._show_queues([(queue.name, counts) for queue, counts in queues], error)

        document = {
            "value": value,
            "result": "found" if located.events else "missing",
            "events": [_document(event) for event in located.events],
            "more": located.more,
            "queues": [
                {"name": queue.name, "role": queue.role, **{key: seen.get(key) for key in _COUNTS}}
                for queue, seen in queues
            ],
            "error": error or None,
        }
        return self.finish(0 if located.events else 1, document, show)

    def _show_event(self, event: LocatedEvent) -> None:
        self.tell(visible(f"{event.name} {event.id}"))
        for record in event.records:
            where = f"{record.service} {record.handler}".strip()
            about = f": {record.about}" if record.about else ""
            self.tell(
                visible(
                    f"  {record.kind:<8} {where}, {record.label} "
                    f"{record.at:%Y-%m-%d %H:%M:%S %Z}{about} ({record.row.pk})"
                )
            )
        for handler in event.unsettled:
            self.tell(visible(f"  handler  {handler}: may still get it"))

    def _show_queues(self, queues: list[tuple[str, Any]], error: str) -> None:
        self.tell("queues that may contain it (contents are not read):")
        for name, counts in queues:
            numbers = (f"{key} {_number(counts.get(key))}" for key in _COUNTS)
            self.tell(f"  {name}: {', '.join(numbers)}")
        if error:
            self.stderr.write(f"the queues cannot be counted: {error}")
        elif not queues:
            self.tell("  none has a message")


def _unknown_path(value: str) -> str:
    """Return why a value with a path cannot be found; ``""`` if its path is declared."""
    path, equals, _value = value.partition("=")
    try:
        check_paths([path] if equals else [])
    except ConfigurationError as exc:
        return f": {exc}"
    return ""


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)


def _document(event: LocatedEvent) -> dict[str, Any]:
    def row(record: Record) -> dict[str, Any]:
        names = ("kind", "service", "handler", "state", "at", "about")
        return {"id": record.row.pk, **columns(record, *names)}

    return {
        **columns(event, "id", "name", "unsettled"),
        "rows": [row(record) for record in event.records],
    }
