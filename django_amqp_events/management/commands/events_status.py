"""``manage.py events_status``: every queue of this service, its depth, and what it means."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from django_amqp_events import broker, conf, provisioning, registry, topology
from django_amqp_events.exceptions import AmqpEventsError
from django_amqp_events.management.base import BrokerCommand

#: Version of what ``--format json`` prints.
FORMAT = 1

_EPILOG = """
exit codes:
  0  nothing waits without somebody to take it
  1  messages wait and nobody consumes; or poison is in dead or abyss; or a
     queue is missing
  2  it could not be seen: broker or management API away, wrong settings,
     no permission
"""


class Command(BrokerCommand):
    """A shell on :func:`django_amqp_events.provisioning.status`."""

    help = (
        "Show every queue of this service: messages, consumers, and what that means. Delay queues "
        "that are empty are left out unless --verbosity is 2."
    )
    epilog = _EPILOG

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--format", choices=("text", "json"), default="text", help="Default: text."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            settings = conf.get_settings()
            wanted = topology.build(settings, registry.get_registry())
            app = broker.celery_app(settings)
            api = provisioning.management(app, settings)
            status = provisioning.status(app, settings, wanted, api=api)
        except AmqpEventsError as exc:
            raise CommandError(str(exc), returncode=2) from exc
        code = {"ok": 0, "error": 1, "unknown": 2}[status.result]
        if options["format"] == "json":
            self.stdout.write(json.dumps(_as_json(wanted.names, status, code), indent=2))
        else:
            self._print(status, options["verbosity"])
        if code:
            sys.exit(code)

    def _print(self, status: provisioning.Status, verbosity: int) -> None:
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

    def _style(self, line: str, severity: str) -> str:
        styles = {"error": self.style.ERROR, "warning": self.style.WARNING}
        styles["unknown"] = self.style.NOTICE
        return styles[severity](line) if severity in styles else line


def _dull(queue: provisioning.QueueStatus) -> bool:
    return queue.role == "delay" and queue.severity == "ok" and not (queue.total or queue.ready)


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)


def _as_json(names: topology.Names, status: provisioning.Status, code: int) -> dict[str, Any]:
    return {
        "version": FORMAT,
        "service": names.service,
        "prefix": names.prefix,
        "vhost": status.vhost,
        "broker": status.version,
        "source": "management" if status.exact else "amqp",
        "result": status.result,
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
            for queue in status.queues
        ],
    }
