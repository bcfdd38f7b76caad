"""``manage.py events_batches``: run batches of replays in the background, look at them."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any, Final
from uuid import UUID

from django.core.management.base import CommandError, no_translations
from django.db import DatabaseError, InterfaceError

from django_amqp_events import conf
from django_amqp_events.archive.batches import batch_states
from django_amqp_events.archive.batches.runner import Runner
from django_amqp_events.broker import connection
from django_amqp_events.exceptions import AmqpEventsError
from django_amqp_events.management import archive
from django_amqp_events.management.service_command import ServiceCommand
from django_amqp_events.models import ReplayBatch, ReplayBatchEvent

#: Batches that are listed at most.
LISTED: Final = 50
#: Version of what ``--format json`` prints.
FORMAT: Final = 1

_EPILOG = """
without an action it runs batches until it is stopped; any number may run at
once. With one it does that and ends:
  list            the batches of this service, the newest first
  show ID         one of them, and why events were not replayed
  pause ID        nothing more of it is published (a chunk may be on its way)
  resume ID       it goes on
  cancel ID       it ends; what waits stays in the archive
Of an id the first characters are enough that fit one batch alone.

exit codes:
  0  stopped (SIGTERM, SIGINT); with --until-done no batch runs any more; or the
     action is done
  1  AMQP_EVENTS is wrong, an argument is, or the batch is in another state

It retries while RabbitMQ or the database is unreachable, and reports that.
"""


class Command(ServiceCommand):
    """A shell on :class:`django_amqp_events.archive.batches.runner.Runner` and on `batches`."""

    help = (
        "Run batches of replays, which were made in the admin or with events_replay --background. "
        "Run by events_worker."
    )
    epilog = _EPILOG

    name = "events_batches"

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "action",
            nargs="?",
            default="run",
            choices=("run", "list", "show", "pause", "resume", "cancel"),
        )
        parser.add_argument("id", nargs="?", help="The batch that the action is about.")
        parser.add_argument("--until-done", action="store_true", help="End when no batch runs.")
        parser.add_argument(
            "--format", choices=("text", "json"), default="text", help="Of list and show."
        )

    @no_translations
    def handle(self, *args: Any, **options: Any) -> None:
        if options["action"] == "run":
            with self.running(options):
                self._run(until_done=options["until_done"])
            return
        try:
            self._act(options["action"], options["id"], as_json=options["format"] == "json")
        except AmqpEventsError as exc:
            raise CommandError(str(exc)) from exc

    def _run(self, *, until_done: bool) -> None:
        settings = conf.get_settings()
        runner = Runner(
            app=connection.celery_app(settings), settings=settings, tell=self.tell,
            stop=self.stopped,
        )  # fmt: skip
        self.tell(f"running the batches of {settings.service}")
        published = runner.run(until_done=until_done)
        self.tell(f"stopped; {archive.number(published, 'event')} published in all")

    # -- looking and deciding -----------------------------------------------------------------

    def _act(self, action: str, text: str | None, *, as_json: bool) -> None:
        service = conf.get_settings().service
        try:
            if action == "list":
                found = list(batch_states.rows().filter(service=service)[:LISTED])
                if as_json:
                    self._json([document(batch) for batch in found])
                elif not found:
                    self.stdout.write("no batches")
                for batch in () if as_json else found:
                    self.stdout.write(describe(batch))
                return
            batch = self._batch(service, text, action)
            if action == "show":
                self._show(batch, as_json=as_json)
                return
            act = {
                "pause": batch_states.pause,
                "resume": batch_states.resume,
                "cancel": batch_states.cancel,
            }
            done = act[action](batch.pk, by=archive.who("events_batches"))
            batch.refresh_from_db()
            if not done:
                raise CommandError(f"it is {batch.get_state_display()}: {describe(batch)}")
            self.stdout.write(describe(batch))
        except (DatabaseError, InterfaceError) as exc:
            text = str(exc).strip().partition("\n")[0]
            raise CommandError(f"the database cannot be used: {text}") from exc

    def _batch(self, service: str, text: str | None, action: str) -> ReplayBatch:
        if not text:
            raise CommandError(f"{action} needs the id of a batch; see `events_batches list`")
        digits = text.replace("-", "").lower()
        if set(digits) - set("0123456789abcdef") or len(digits) > 32:
            raise CommandError(f"{text!r:.80} is no id of a batch; see `events_batches list`")
        first, last = (UUID(digits.ljust(32, end)) for end in "0f")
        found = list(batch_states.rows().filter(service=service, pk__range=(first, last))[:2])
        if len(found) != 1:
            what = "more than one batch has an id" if found else "no batch has an id"
            raise CommandError(f"{what} that begins with {text!r}; see `events_batches list`")
        return found[0]

    def _show(self, batch: ReplayBatch, *, as_json: bool) -> None:
        left = batch_states.skipped_by_reason(batch.pk)
        new = batch_states.count_new_matches(batch)
        if as_json:
            reasons = [
                {"state": each.state, "why": each.why, "events": each.count, "first": each.first}
                for each in left
            ]
            self._json({**document(batch), "left": reasons, "new": new})
            return
        self.stdout.write(describe(batch))
        for each in left:
            state = ReplayBatchEvent.State(each.state).label
            self.stdout.write(f"  {each.count} {state}: {each.why} (such as {each.first})")
        if new:
            more = f"more than {batch_states.COUNTED}" if new > batch_states.COUNTED else str(new)
            self.stdout.write(f"  {more} new since it was made; they are not part of it")

    def _json(self, value: Any) -> None:
        self.stdout.write(json.dumps({"version": FORMAT, "batches": value}, indent=2))


def describe(batch: ReplayBatch) -> str:
    """Write a batch as one line for a console."""
    counts = ", ".join(
        f"{getattr(batch, state.value)} {state.label}"
        for state in ReplayBatchEvent.State
        if getattr(batch, state.value)
    )
    note = f"; {batch.note}" if batch.note else ""
    return f"{batch.pk} {batch.get_state_display()}: {batch.total} events ({counts}){note}"


def document(batch: ReplayBatch) -> dict[str, Any]:
    """Write a batch for another program."""
    return {
        "id": str(batch.pk),
        "title": batch.title,
        "state": batch.state,
        "note": batch.note,
        "reason": batch.reason,
        "made_by": batch.created_by,
        "started_by": batch.started_by,
        "rate": batch.rate,
        "canary": batch.canary,
        "threshold": batch.threshold,
        "total": batch.total,
        "counts": {state.value: getattr(batch, state.value) for state in ReplayBatchEvent.State},
        "counted_at": batch.counted_at.isoformat() if batch.counted_at else None,
    }
