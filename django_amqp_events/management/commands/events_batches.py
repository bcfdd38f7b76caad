"""Run the replay batches of this service, or print and change them.

Batches are created in the admin or with `events_replay --background`. Without an
action the command runs them until it is stopped; any number of runners may run
at once, and events_worker starts one. With an action it does that and ends:

  list            the batches of this service, the newest first
  show ID         one batch, and why events were not replayed
  pause ID        publish nothing more (up to one chunk may be in progress)
  resume ID       continue
  cancel ID       end, or delete a draft; events not published yet stay in the archive

exit codes:
  0  stopped (SIGTERM, SIGINT); --until-done: no batch is running; or the action
     is done
  1  wrong settings; an action: no such batch, or it is in another state
  2  wrong arguments; an action: wrong settings, or the database is unreachable

While RabbitMQ or the database is unreachable, the command logs it and waits.
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any, Final

from django.core.management.base import CommandError, no_translations

from django_amqp_events import conf
from django_amqp_events.archive.batches import batch_states
from django_amqp_events.archive.batches.runner import Runner
from django_amqp_events.archive.selection import parse_uuid
from django_amqp_events.broker import connection
from django_amqp_events.management.base import (
    EventsCommand,
    ServiceCommand,
    columns,
    requested_by,
)
from django_amqp_events.message.text import counted
from django_amqp_events.models import Replay, ReplayBatch

LISTED_BATCHES: Final = 50
_CHANGES: Final = {
    "pause": batch_states.pause,
    "resume": batch_states.resume,
    "cancel": batch_states.cancel,
}


class Command(ServiceCommand):
    help = __doc__
    name = "events_batches"

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "action",
            nargs="?",
            default="run",
            choices=("run", "list", "show", *_CHANGES),
            help="What to do (default: run).",
        )
        parser.add_argument("id", nargs="?", help="The batch to show or change.")
        parser.add_argument(
            "--until-done", action="store_true", help="End when no batch is running."
        )
        super().add_arguments(parser)
        self.add_format(parser)

    @no_translations
    def handle(self, *args: Any, **options: Any) -> None:
        super().handle(*args, **options)

    def run(self, options: dict[str, Any]) -> int:
        action = options["action"]
        if options["id"] and action in ("run", "list"):
            raise CommandError(
                f"{action} is about all batches; show, pause, resume and cancel take an id",
                returncode=2,
            )
        if action == "run":
            return super().run(options)
        self.error_code = EventsCommand.error_code
        service = conf.get_settings().service
        if action == "list":
            return self._list(service)
        batch = self._batch(service, options["id"], action)
        if action == "show":
            return self._show(batch)
        done = _CHANGES[action](batch.pk, by=requested_by(self.name), seen=batch.version)
        # refresh_from_db() would ask a router, which may name a replica.
        now = batch_states.rows().filter(pk=batch.pk).first()
        if now is None:
            return self._finish(document(batch), [f"deleted {describe(batch)}"])
        if not done:
            raise CommandError(f"it is {now.get_state_display()}: {describe(now)}")
        return self._finish(document(now), [describe(now)])

    def serve(self, options: dict[str, Any]) -> None:
        settings = conf.get_settings()
        connection.broker_app(settings)  # raises its errors before the start
        runner = Runner(settings=settings, tell=self.tell, stop=self.stopped)
        self.tell(f"running the batches of {settings.service}")
        published = runner.run(until_done=options["until_done"])
        self.tell(f"stopped; {counted(published, 'event')} published in all")

    def _finish(self, batches: object, lines: list[str]) -> int:
        return self.finish(0, {"batches": batches}, lambda: self.stdout.write("\n".join(lines)))

    def _list(self, service: str) -> int:
        batches = list(batch_states.rows().filter(service=service)[:LISTED_BATCHES])
        lines = [describe(batch) for batch in batches] or ["no batches"]
        return self._finish([document(batch) for batch in batches], lines)

    def _batch(self, service: str, text: str | None, action: str) -> ReplayBatch:
        if not text:
            raise CommandError(
                f"{action} needs the id of a batch; see `events_batches list`", returncode=2
            )
        pk, batches = parse_uuid(text), batch_states.rows().filter(service=service)
        batch = None if pk is None else batches.filter(pk=pk).first()
        if batch is None:
            raise CommandError(f"there is no batch {text!r}; see `events_batches list`")
        return batch

    def _show(self, batch: ReplayBatch) -> int:
        skipped = batch_states.skipped_by_reason(batch.pk)
        lines = [describe(batch)]
        for reason in skipped:
            state = Replay.State(reason.state).label
            lines.append(f"  {reason.count} {state}: {reason.why}")
        lines += [f"  {count} left out: {why}" for count, why in batch.left_out]
        reasons = [
            {"events": reason.count, "why": str(reason.why), "state": reason.state}
            for reason in skipped
        ]
        return self._finish({**document(batch), "left": reasons}, lines)


def describe(batch: ReplayBatch) -> str:
    """Write a batch as one line for a console."""
    counts = ", ".join(
        f"{count} {label}"
        for name, label in (*Replay.State.choices, ("deleted", "deleted"))
        if (count := getattr(batch, name))
    )
    note = f"; {batch.note}" if batch.note else ""
    return f"{batch.pk} {batch.get_state_display()}: {batch.total} events ({counts}){note}"


def document(batch: ReplayBatch) -> dict[str, Any]:
    """Write a batch for another program."""
    names = ("state", "reason", "started_by", "total", "counted_at")
    return {
        "id": batch.pk,
        "title": str(batch.name),
        "note": str(batch.note or ""),
        "created_by": batch.created_by,
        **columns(batch, *names, "rate", "canary", "threshold"),
        "counts": columns(batch, *Replay.State.values, "deleted"),
    }
