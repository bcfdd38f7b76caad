"""``manage.py events_recover``: move messages of a queue without a consumer into the archive."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from typing import Any

from django_amqp_events import conf
from django_amqp_events.archive import recovery
from django_amqp_events.archive.recovery import QueueContents, Recovered
from django_amqp_events.broker import connection
from django_amqp_events.broker.topology import Names
from django_amqp_events.declare.registry import get_registry
from django_amqp_events.management import archive
from django_amqp_events.management.archive import ArchiveCommand, number

_EPILOG = """
Each message is acked after the broker has confirmed its copy in the archive:
whatever stops the command, nothing is lost, and running it again goes on. What
was copied and not yet acked then comes again, and is the same row.

exit codes:
  0  everything that was asked for is in the archive (--dry-run: counted)
  1  messages stay: stopped, connection lost, refused by the broker
  2  nothing was done: no such queue, the archive itself, consumers without
     --force, broker away, wrong arguments or settings
"""


class Command(ArchiveCommand):
    """A shell on :func:`django_amqp_events.archive.recovery.recover`."""

    help = (
        "Take the messages of the abyss, or of another queue, into the archive as they are, so "
        "that they can be seen, replayed or discarded like any archived event."
    )
    epilog = _EPILOG

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "queue",
            nargs="?",
            default="",
            help="Whole name of a queue, as events_status shows it (default: the abyss).",
        )
        parser.add_argument("--limit", type=int, metavar="N", help="Messages at most.")
        parser.add_argument("--dry-run", action="store_true", help="Count, change nothing.")
        parser.add_argument(
            "--force",
            action="store_true",
            help="Take a queue that somebody consumes; who gets which message is chance.",
        )
        parser.add_argument(
            "--format", choices=("text", "json"), default="text", help="Default: text."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        self.prepare(options)
        limit: int | None = options["limit"]
        if limit is not None and limit < 1:
            raise archive.wrong("--limit is a number above 0")
        with self.interruptible():
            settings = conf.get_settings()
            app = connection.celery_app(settings)
            queue = options["queue"] or Names.of(settings).abyss
            waiting = recovery.inspect_queue(
                app, settings, queue, force=options["force"] or options["dry_run"]
            )
            done = Recovered()
            if not options["dry_run"]:
                done = recovery.recover(
                    app,
                    settings,
                    get_registry(),
                    queue,
                    limit=limit,
                    force=options["force"],
                    progress=lambda so_far: self.progress(
                        f"{so_far.total} of {max(waiting.ready, so_far.total)} archived so far"
                    ),
                    stop=self.stopped,
                )
        code = 1 if done.refused or done.stopped else 0
        if self.json:
            document = _document(waiting, done, code, dry_run=options["dry_run"])
            self.stdout.write(json.dumps(document, indent=2))
        else:
            self._print(waiting, done, dry_run=options["dry_run"])
        if code:
            sys.exit(code)

    def _print(self, waiting: QueueContents, done: Recovered, *, dry_run: bool) -> None:
        if dry_run:
            consumers = (
                f"; {number(waiting.consumers, 'consumer')}, so it needs --force"
                if waiting.consumers
                else ""
            )
            self.tell(f"{waiting.queue}: {number(waiting.ready, 'message')} to take{consumers}")
            return
        for why in done.refused[:10]:
            self.stderr.write(f"stays: {why}")
        if len(done.refused) > 10:
            self.stderr.write(f"and {len(done.refused) - 10} more")
        what = ", ".join(f"{count} {reason}" for reason, count in sorted(done.reasons.items()))
        self.tell(
            f"{waiting.queue}: {number(done.total, 'message')} archived"
            + (f" ({what}); events_mirror makes rows of them" if what else "")
        )
        if done.stopped:
            self.stderr.write(f"stopped: {done.stopped}; what is left is still in its queue")


def _document(
    waiting: QueueContents, done: Recovered, code: int, *, dry_run: bool
) -> dict[str, Any]:
    result = "counted" if dry_run else "stopped" if done.stopped else "recovered"
    return {
        "version": archive.FORMAT,
        "queue": waiting.queue,
        "result": result,
        "exit_code": code,
        "ready": waiting.ready,
        "consumers": waiting.consumers,
        "archived": done.total,
        "reasons": dict(sorted(done.reasons.items())),
        "refused": done.refused,
        "stopped": done.stopped,
    }
