"""``manage.py events_status``: every queue of this service, its depth, and what it means."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from django_amqp_events import conf
from django_amqp_events.broker import connection, topology
from django_amqp_events.broker.provisioning import inspection
from django_amqp_events.declare import registry
from django_amqp_events.exceptions import AmqpEventsError
from django_amqp_events.management.base import BrokerCommand
from django_amqp_events.monitor import queue_status
from django_amqp_events.publish import outbox
from django_amqp_events.worker import hang_detector

#: Version of what ``--format json`` prints.
FORMAT = 1

_EPILOG = """
exit codes:
  0  nothing waits without somebody to take it
  1  messages wait and nobody consumes; or poison is in dead or abyss; or a
     queue is missing; or events in the outbox are due and no relay takes
     them, or cannot be published however often they are tried
  2  it could not be seen: broker, management API or the outbox's database
     away, wrong settings, no permission
"""


class Command(BrokerCommand):
    """A shell on :func:`django_amqp_events.monitor.queue_status.status`."""

    help = (
        "Show every queue of this service: messages, consumers, and what that means. Delay queues "
        "that are empty are left out unless --verbosity is 2."
    )
    epilog = _EPILOG

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--format", choices=("text", "json"), default="text", help="Default: text."
        )
        parser.add_argument(
            "--workers",
            type=float,
            nargs="?",
            const=2.0,
            metavar="SECONDS",
            help="Ask the workers which handlers hang, and wait %(const)g seconds for answers.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        status, away = None, ""
        try:
            settings = conf.get_settings()
            wanted = topology.build(settings, registry.get_registry())
            app = connection.celery_app(settings)
        except AmqpEventsError as exc:
            raise CommandError(str(exc), returncode=2) from exc
        try:
            api = inspection.management(app, settings)
            status = queue_status.status(app, settings, wanted, api=api)
        except AmqpEventsError as exc:
            # The outbox is looked at all the same: it fills while the broker is away.
            away = str(exc)
        code = {"ok": 0, "error": 1, "unknown": 2}[status.result] if status is not None else 2
        outboxes = outbox.read_status(settings) if settings.backend == "amqp" else []
        severities = {each.severity for each in outboxes}
        if "error" in severities and not away:
            code = 1
        elif "unknown" in severities:
            code = code or 2
        hanging: list[dict[str, Any]] | None = None
        if options["workers"] is not None and not away:
            hanging = hang_detector.ask(app, settings.service, options["workers"])
            code = 1 if hanging else code
        if options["format"] == "json":
            told = _as_json(wanted.names, status, away, outboxes, code)
            if hanging is not None:
                told["hanging"] = hanging
            self.stdout.write(json.dumps(told, indent=2))
        else:
            if status is not None:
                self._print(status, options["verbosity"])
            self._print_outboxes(outboxes, options["verbosity"])
            for each in hanging or ():
                self.stdout.write(
                    self.style.ERROR(
                        f"{each['handler']} has not ended after {each['seconds']} s: event "
                        f"{each['name']!r} ({each['event']}), process {each['process']} of "
                        f"{each['worker']}"
                    )
                )
        if away:
            raise CommandError(away, returncode=2)
        if code:
            sys.exit(code)

    def _print(self, status: queue_status.Status, verbosity: int) -> None:
        shown = [
            queue
            for queue in status.queues
            if (verbosity > 0 or queue.severity != "ok") and (verbosity > 1 or not _dull(queue))
        ]
        rows = [("QUEUE", "READY", "UNACKED", "TOTAL", "CONSUMERS", "MEANING")] if shown else []
        rows += [
            (
                queue.name,
                _number(queue.ready),
                _number(queue.unacked),
                _number(queue.total),
                _number(queue.consumers),
                queue.meaning,
            )
            for queue in shown
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(5)] if rows else []
        for index, row in enumerate(rows):
            cells = [row[0].ljust(widths[0])]
            cells += [row[column].rjust(widths[column]) for column in range(1, 5)]
            line = "  ".join([*cells, row[5]])
            self.stdout.write(self._style(line, shown[index - 1].severity) if index else line)
        hidden = len(status.queues) - len(shown)
        if verbosity == 1 and hidden:
            self.stdout.write(f"and {hidden} empty delay queues")
        if not status.exact and verbosity > 0:
            self.stdout.write(
                "Without MANAGEMENT_URL neither unacked messages, nor dead letters that are "
                "stuck, nor queues that are left over can be seen."
            )

    def _print_outboxes(
        self, outboxes: list[outbox.OutboxStatus | outbox.UnreachableOutbox], verbosity: int
    ) -> None:
        for each in outboxes:
            if verbosity < 1 and each.severity == "ok":
                continue
            counted = ""
            if isinstance(each, outbox.OutboxStatus) and each.total:
                events = "event" if each.total == 1 else "events"
                counted = f"{each.total} {events} since {each.oldest:%Y-%m-%d %H:%M:%S}: "
            line = f"outbox in database {each.alias!r}: {counted}{each.meaning}"
            self.stdout.write(self._style(line, each.severity))

    def _style(self, line: str, severity: str) -> str:
        styles = {"error": self.style.ERROR, "warning": self.style.WARNING}
        styles["unknown"] = self.style.NOTICE
        return styles[severity](line) if severity in styles else line


def _dull(queue: queue_status.QueueStatus) -> bool:
    return queue.role == "delay" and queue.severity == "ok" and not (queue.total or queue.ready)


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)


def _as_json(
    names: topology.Names,
    status: queue_status.Status | None,
    away: str,
    outboxes: list[outbox.OutboxStatus | outbox.UnreachableOutbox],
    code: int,
) -> dict[str, Any]:
    return {
        "version": FORMAT,
        "service": names.service,
        "prefix": names.prefix,
        "vhost": status.vhost if status is not None else None,
        "broker": status.version if status is not None else None,
        "source": None if status is None else "management" if status.exact else "amqp",
        "error": away or None,
        "result": {0: "ok", 1: "error", 2: "unknown"}[code],
        "exit_code": code,
        "queues": [
            {
                "name": queue.name,
                "role": queue.role,
                "state": queue.state,
                "severity": queue.severity,
                "ready": queue.ready,
                "unacked": queue.unacked,
                "total": queue.total,
                "consumers": queue.consumers,
                "meaning": queue.meaning,
            }
            for queue in (status.queues if status is not None else ())
        ],
        "outbox": [
            {
                "database": each.alias,
                "severity": each.severity,
                "total": getattr(each, "total", None),
                "held": getattr(each, "held", None),
                "failing": getattr(each, "failing", None),
                "overdue": getattr(each, "overdue", None),
                "oldest": each.oldest.isoformat()
                if isinstance(each, outbox.OutboxStatus) and each.oldest
                else None,
                "meaning": each.meaning,
            }
            for each in outboxes
        ],
    }
