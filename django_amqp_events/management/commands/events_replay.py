"""Replay or discard archived events: those with the given ids, or all that match the filters.

A replay goes only to the handler that failed. The matching events are determined
when the command starts and replayed oldest failure first; an event that changes
before its turn is skipped. Delivery is at least once.

ids: of an event (all handlers for which it is archived) or of a row.

times: ISO 8601 (2026-11-20, 2026-11-20T13:30, …+01:00; without an offset in the
project's time zone), or an age: 45m, 2h, 3d.

Values of a repeated option are alternatives; different options must all match.
Names are exact: patterns such as library.* are refused.

--discard and --restore change the state of the matching events, as in the admin;
nothing is published.

--background creates a batch, which events_batches replays. --rate, --canary and
--pause-at need --background. The batch's report has the outcomes, which a running events_mirror
reads from the archive queue.

exit codes:
  0  every matching event was published, discarded or restored (--dry-run: can be),
     or no event matches
  1  some were not: skipped, returned, stopped, no such id
  2  nothing was done: wrong arguments or settings, RabbitMQ or the database is
     unreachable
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Collection
from dataclasses import replace
from datetime import datetime
from itertools import islice
from typing import Any, Final
from uuid import UUID

from django.db import Error

from django_amqp_events import conf
from django_amqp_events.archive import eligibility, replay, selection, states
from django_amqp_events.archive.batches import batch_states
from django_amqp_events.archive.eligibility import Rule, Skipped
from django_amqp_events.archive.groups import failure_groups
from django_amqp_events.archive.selection import Selection
from django_amqp_events.databases import error_line, parts
from django_amqp_events.management import arguments
from django_amqp_events.management.base import ReportCommand, columns, requested_by
from django_amqp_events.management.replay_result import (
    DONE,
    RULES,
    Result,
    show_missing,
    show_reasons,
)
from django_amqp_events.message.text import counted
from django_amqp_events.models import ArchivedEvent, clean
from django_amqp_events.reasons import Reason

#: Most events that are examined together.
PART: Final = 2000


class Command(ReportCommand):
    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "ids", nargs="*", type=clean, metavar="id", help="Id of an event or of a row."
        )
        what = parser.add_mutually_exclusive_group()
        what.add_argument(
            "--all", action="store_true", help="Every archived event, instead of ids and filters."
        )
        what.add_argument(
            "--force",
            action="store_true",
            help="Replay ids whose replay is overdue (no outcome); they may be handled twice.",
        )
        parser.add_argument(
            "--comment",
            default="",
            metavar="TEXT",
            help="Reason, kept in each event's history with user and host.",
        )
        decisions = parser.add_mutually_exclusive_group()
        for decision, text in (
            ("discard", "Discard the events instead of replaying them; needs --comment."),
            ("restore", "Return matching discarded events to the archive."),
        ):
            decisions.add_argument(
                f"--{decision}",
                dest="decision",
                action="store_const",
                const=decision,
                default="replay",
                help=text,
            )
        arguments.add_limit(parser, "events, the oldest failure first")
        how = parser.add_mutually_exclusive_group()
        how.add_argument(
            "--dry-run", action="store_true", help="Print where each event would go and why not."
        )
        how.add_argument(
            "--background",
            action="store_true",
            help="Create a batch of the matching events for events_batches; needs --comment.",
        )
        arguments.add_batch_options(parser)
        super().add_arguments(parser)
        arguments.add_filters(parser).add_argument(
            "--group",
            action="append",
            default=[],
            type=UUID,
            metavar="ID",
            help="Failure group, as events_groups and the admin print it.",
        )

    def run(self, options: dict[str, Any]) -> int:
        filters = self._filters(options)
        with self.interruptible():
            service = conf.get_settings().service
            chosen = Selection(**filters, service=service)
            for pk in chosen.groups:
                if not failure_groups.groups().filter(pk=pk, service=service).exists():
                    raise self.wrong(
                        f"there is no failure group {pk}; see `manage.py events_groups`"
                    )
            if options["background"]:
                return self._start_batch(chosen, options)
            result = Result(decision=options["decision"])
            rule = eligibility.FORCE if options["force"] else RULES[result.decision]
            seen = self._find(replace(chosen, state=rule.state), options["limit"], result)
            if options["dry_run"]:
                self._examine(seen, rule, result)
            elif result.decision == "replay":
                self._replay(seen, options, result)
            else:
                self._decide(seen, rule, options["comment"], result)
            document = result.document(dry_run=options["dry_run"])
            return self.finish(
                result.code, document, lambda: result.show(self, dry_run=options["dry_run"])
            )

    # -- arguments

    def _filters(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of the selection; refuse options that exclude each other."""
        filters = arguments.filters(options)
        if options["group"]:
            filters["groups"] = options["group"]
        narrowed = bool(options["ids"] or filters)
        comment = options["comment"].strip()
        decides = options["decision"] != "replay"
        of_batches = [
            f"--{name}"
            for name in ("rate", "canary", "pause-at")
            if options[name.replace("-", "_")] is not None
        ]
        for refused, text in (
            (options["all"] and narrowed, "--all takes no ids and no filters"),
            (not (options["all"] or narrowed), "choose the events: ids, filters or --all"),
            (decides and (options["force"] or options["background"]),
             f"--{options['decision']} goes without --force and --background"),
            (options["decision"] == "discard" and not comment and not options["dry_run"],
             "--discard needs a reason: --comment TEXT"),
            (len(comment) > states.REASON_CHARACTERS,
             f"--comment has more than {states.REASON_CHARACTERS} characters"),
            (options["force"] and (filters or not options["ids"]),
             "--force takes ids and no filters: check each event first"),
            (options["force"] and options["background"], "--background goes without --force"),
            (not options["background"] and of_batches,
             f"{', '.join(of_batches)}: only with --background"),
        ):  # fmt: skip
            if refused:
                raise self.wrong(text)
        if options["background"]:
            try:
                batch_states.check(**arguments.batch_options(options))
            except ValueError as exc:
                raise self.wrong(f"{exc}{'' if comment else ' (--comment)'}") from exc
        if options["ids"]:
            filters["ids"] = list(dict.fromkeys(options["ids"]))
        return filters

    # -- which events

    def _find(self, chosen: Selection, limit: int | None, result: Result) -> dict[UUID, int]:
        """Return id and version of the matching events, the oldest failure first."""
        matches: list[tuple[datetime, UUID, int]] = []
        for part in chosen.parts():
            matched: set[str] = set()
            # Of ids, each has to match.
            events = part.queryset().order_by("last_failed_at", "pk")
            events = events if part.ids else events[:limit]
            rows = events.values_list("last_failed_at", "pk", "version", "event_id")
            for failed_at, pk, version, event_id in rows.iterator(chunk_size=2000):
                matches.append((failed_at, pk, version))
                if part.ids:
                    matched |= {str(pk), event_id}
            if unmatched := _without(part.ids, matched):
                self._explain(unmatched, part, result)
        # Each part has its own order, and may have an event of another part.
        seen = dict(islice({pk: version for _, pk, version in sorted(matches)}.items(), limit))
        result.matched = len(seen)
        return seen

    def _explain(self, ids: list[str], chosen: Selection, result: Result) -> None:
        """Record why the events with these ids do not match."""
        known: set[str] = set()
        events = Selection(ids=ids, state=None).queryset()
        for event in events.defer(*ArchivedEvent.LARGE):
            known |= {str(event.pk), event.event_id}
            if event.service != chosen.service:
                why = eligibility.other_service(event)
            elif event.state == chosen.state:
                why = Reason("filtered")
            elif eligibility.is_overdue(event):
                why = Reason("overdue")
            else:
                why = eligibility.state_reason(event)
            result.report.skipped.append(Skipped.of(event, why))
        result.missing += _without(ids, known)

    # -- replay

    def _start_batch(self, chosen: Selection, options: dict[str, Any]) -> int:
        by = requested_by("events_replay")
        left = Result()
        if chosen.ids:
            self._find(chosen, None, left)
        events = chosen.queryset()
        if options["limit"] is not None:
            events = events.order_by("last_failed_at", "pk")[: options["limit"]]
        # With ids or a limit, the filters do not say which events these are.
        fixed = chosen.ids or options["limit"] is not None
        title = None if fixed else chosen.title()
        batch = batch_states.freeze(events, by=by, title=title)
        if batch.total:
            batch_states.start(batch.pk, by=by, **arguments.batch_options(options))

        def show() -> None:
            show_reasons(self, "skipped", left.report.skipped)
            show_missing(self, left.missing)
            if batch.total:
                self.tell(
                    f"{counted(batch.total, 'event')} in batch {batch.pk}; events_batches replays "
                    f"them, and `events_batches show {batch.pk}` prints the progress"
                )
            else:
                self.tell("nothing to replay: no archived event matches")

        document = {
            "result": "begun" if batch.total else "nothing",
            "matched": batch.total,
            "batch": batch.pk if batch.total else None,
            "skipped": [columns(skip, "id", "title", "why") for skip in left.report.skipped],
            "missing": left.missing,
        }
        return self.finish(left.code, document, show)

    def _examine(self, seen: dict[UUID, int], rule: Rule, result: Result) -> None:
        report = result.report
        for part in parts(list(seen), PART):
            examined = eligibility.examine({pk: seen[pk] for pk in part}, rule)
            result.able += len(examined.events)
            result.targets.update(examined.handlers.values())
            report.skipped += examined.skipped
            self.progress(f"{result.able + len(report.skipped)} of {len(seen)} checked")
            if self.stopping:
                report.stopped = Reason("interrupted")
                return

    def _replay(self, seen: dict[UUID, int], options: dict[str, Any], result: Result) -> None:
        report = replay.replay(
            seen,
            by=requested_by("events_replay"),
            reason=options["comment"],
            force=options["force"],
            progress=lambda so_far: self.progress(
                f"{so_far.done} of {len(seen)}: {len(so_far.published)} published"
            ),
            stop=self.stopped,
        )
        report.skipped = result.report.skipped + report.skipped
        result.report = report

    def _decide(self, seen: dict[UUID, int], rule: Rule, comment: str, result: Result) -> None:
        report, by = result.report, requested_by("events_replay")
        # One transaction each, so that an error leaves nothing out of the report.
        for part in parts(list(seen), states.BATCH):
            if self.stopping:
                report.stopped = Reason("interrupted")
                return
            try:
                done = replay.decide({pk: seen[pk] for pk in part}, rule, by=by, reason=comment)
            except Error as exc:
                if not report.published:
                    raise
                report.stopped = Reason.of(error_line(exc))
                return
            report.published += done.published
            report.skipped += done.skipped
            self.progress(f"{len(report.published)} of {len(seen)} {DONE[result.decision]}")


def _without(ids: Collection[str], known: set[str]) -> list[str]:
    """Return the ids that are not *known*; a UUID may be written in several ways."""
    return [
        event_id
        for event_id in ids
        if not known & {event_id, str(selection.parse_uuid(event_id) or event_id)}
    ]
