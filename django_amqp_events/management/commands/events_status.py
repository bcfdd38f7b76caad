"""Print every queue of this service with its messages, its consumers and their meaning.

Empty delay queues are left out unless --verbosity is 2. The outbox of each
database and the number of open archived events follow.

exit codes:
  0  nothing waits without a process to handle it
  1  messages wait in the archive, the graveyard or a handler's queue without a
     consumer, unless a worker has paused it; dead or abyss holds a message; dead
     letters cannot move because their exchange is missing; a queue is missing;
     events in the outbox are overdue or failed three times
  2  unknown: RabbitMQ, the management API or the database of an outbox is
     unreachable, wrong settings, no permission
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any, Final

from django_amqp_events import conf
from django_amqp_events.broker import connection, topology
from django_amqp_events.broker.provisioning import inspection
from django_amqp_events.declare import registry
from django_amqp_events.exceptions import AmqpEventsError
from django_amqp_events.management import arguments
from django_amqp_events.management.base import ReportCommand, columns
from django_amqp_events.message.text import counted
from django_amqp_events.monitor import queue_status, statistics
from django_amqp_events.publish import outbox

_COLUMNS: Final = ("ready", "unacked", "total", "consumers")
_QUEUE: Final = ("name", "role", "state", "severity", *_COLUMNS, "paused", "prefetch", "meaning")
#: Attributes of an outbox; an unreachable one has not all of them.
_OUTBOX: Final = ("severity", "total", "held", "failing", "overdue", "oldest", "meaning")
_CODES: Final = {"ok": 0, "error": 1, "unknown": 2}


class Command(ReportCommand):
    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--workers",
            type=arguments.positive,
            nargs="?",
            const=2.0,
            metavar="SECONDS",
            help="Ask the workers for their prefetch counts; wait this long for each answer "
            "(default: %(const)g).",
        )
        super().add_arguments(parser)

    def run(self, options: dict[str, Any]) -> int:
        settings = conf.get_settings()
        expected = topology.build(settings, registry.get_registry())
        app = connection.broker_app(settings)
        status, error = None, ""
        try:
            api = inspection.management(app, settings)
            status = queue_status.status(app, settings, expected, api=api, ask=options["workers"])
        except AmqpEventsError as exc:
            # The outbox fills while RabbitMQ is unreachable, so it is printed all the same.
            error = str(exc)
        code = 2 if status is None else _CODES[status.result]
        outboxes = outbox.read_status(settings) if settings.backend == "amqp" else []
        severities = {outbox_status.severity for outbox_status in outboxes}
        if "error" in severities and not error:
            code = 1
        elif "unknown" in severities:
            code = code or 2
        archived = self._archived()

        def show() -> None:
            if status is not None:
                self._show_queues(status)
            if archived is not None and self.verbosity:
                self._show_archive(archived)
            for outbox_status in outboxes:
                self._show_outbox(outbox_status)

        document: dict[str, Any] = {
            "service": expected.names.service,
            "prefix": expected.names.prefix,
            "vhost": status.vhost if status else None,
            "broker": status.version if status else None,
            "source": _source(status) if status else None,
            "error": error or None,
            "result": next(result for result, number in _CODES.items() if number == code),
            "queues": [columns(queue, *_QUEUE) for queue in (status.queues if status else ())],
            "outbox": [
                {
                    "database": outbox_status.alias,
                    **{name: getattr(outbox_status, name, None) for name in _OUTBOX},
                }
                for outbox_status in outboxes
            ],
            "archive": columns(archived, "open", "capped", "oldest") if archived else None,
        }
        self.finish(code, document, show)
        if error:
            raise self.wrong(error)
        return code

    def _show_archive(self, archived: statistics.OpenEvents) -> None:
        more = " at least" if archived.capped else ""
        since = archived.oldest
        oldest = f", the oldest failed {since:%Y-%m-%d %H:%M:%S} UTC" if since else ""
        self.stdout.write(f"archive: {counted(archived.open, 'open event')}{more}{oldest}")

    @staticmethod
    def _archived() -> statistics.OpenEvents | None:
        """Return the open archived events, ``None`` if the archive cannot be read."""
        try:
            return statistics.open_events()
        except Exception:  # noqa: BLE001 - drivers raise errors of their own
            return None

    def _show_queues(self, status: queue_status.Status) -> None:
        shown = [
            queue
            for queue in status.queues
            if (self.verbosity > 0 or queue.severity != "ok")
            and (self.verbosity > 1 or not _is_idle_delay(queue))
        ]
        asked = any(queue.prefetch is not None for queue in shown)
        further = ("PREFETCH",) if asked else ()
        rows = [("QUEUE", *map(str.upper, _COLUMNS), *further, "MEANING")] if shown else []
        for queue in shown:
            numbers = [getattr(queue, column) for column in _COLUMNS]
            cells = ["?" if number is None else str(number) for number in numbers]
            if asked:
                counts = (queue.prefetch or {}).items()
                cells.append(", ".join(f"{count} {why}" for why, count in counts))
            rows.append((queue.name, *cells, str(queue.meaning)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for index, (name, *figures, meaning) in enumerate(rows):
            columns = [
                figure.rjust(width) for figure, width in zip(figures, widths[1:], strict=False)
            ]
            line = "  ".join([name.ljust(widths[0]), *columns, meaning])
            severity = shown[index - 1].severity if index else "ok"
            self.stdout.write(line, self._style(severity))
        hidden = len(status.queues) - len(shown)
        if self.verbosity == 1 and hidden:
            self.stdout.write(f"and {hidden} empty delay queues")
        if not status.exact and self.verbosity > 0:
            self.stdout.write(
                "Without MANAGEMENT_URL, unacked messages, stuck dead letters and stale queues "
                "cannot be seen."
            )

    def _show_outbox(self, status: outbox.OutboxStatus | outbox.UnreachableOutbox) -> None:
        if self.verbosity < 1 and status.severity == "ok":
            return
        pending = ""
        if isinstance(status, outbox.OutboxStatus) and status.total:
            pending = (
                f"{counted(status.total, 'event')} since {status.oldest:%Y-%m-%d %H:%M:%S} UTC: "
            )
        line = f"outbox in database {status.alias!r}: {pending}{status.meaning}"
        self.stdout.write(line, self._style(status.severity))

    def _style(self, severity: str) -> Any:
        return None if severity == "ok" else self.style_of(severity)


def _source(status: queue_status.Status) -> str:
    return "management" if status.exact else "amqp"


def _is_idle_delay(queue: queue_status.QueueStatus) -> bool:
    return queue.role == "delay" and queue.severity == "ok" and not (queue.total or queue.ready)
