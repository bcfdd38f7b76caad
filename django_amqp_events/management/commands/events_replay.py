"""``manage.py events_replay``: archived events go to the handler that failed, again."""

from __future__ import annotations

import difflib
import json
import sys
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar
from uuid import UUID

from django.core.management.base import no_translations
from django.db import DatabaseError
from django.db.models import F, Q

from django_amqp_events import conf
from django_amqp_events.archive import editing, eligibility, replay, selection, states
from django_amqp_events.archive.batches import batch_states
from django_amqp_events.archive.eligibility import Skipped, Target
from django_amqp_events.archive.groups import failure_groups
from django_amqp_events.archive.selection import Selection
from django_amqp_events.declare.registry import get_registry
from django_amqp_events.exceptions import ConfigurationError
from django_amqp_events.management import archive
from django_amqp_events.management.archive import ArchiveCommand, number
from django_amqp_events.models import (
    ArchivedEvent,
    Replay,
    State,
    visible,
)
from django_amqp_events.reasons import Reason

#: Rows or ids that one statement of this command names at most.
CHUNK: Final = 500
#: Events that are named one by one on the console, unless --verbosity is 2.
SHOWN: Final = 10
#: Seconds between looks for outcomes: doubled from the first to the last.
LOOK: Final = (0.2, 5.0)

T = TypeVar("T")

_EPILOG = """
times: ISO 8601 (2026-11-20, 2026-11-20T13:30, …+01:00; without an offset in
the project's time zone), or ages: 45m, 2h, 3d.

Options of one kind that are repeated are alternatives; all kinds have to fit.
Names are whole: patterns such as library.* do not work. Of an id that is a UUID
its first 8 characters are enough, or as many more as fit one id alone.
What is replayed is what fits when the command starts, oldest failure first. An
event that changes before its turn is skipped.

--edit replays one archived event with another payload, where AMQP_EVENTS
["EDITING"] is True: a JSON object in a file, which is checked as in the admin.
The event's own body is kept. --dry-run checks it and shows what would change.

A replay goes to the handler that failed and to nobody else. How it ended comes
back through the archive queue, which events_mirror reads: --wait needs one that
runs. Delivery is at least once.

exit codes:
  0  everything that fits was published (--wait: and succeeded; --dry-run: could
     be), or nothing fits
  1  some of it was not: skipped, returned, stopped, no such id; --wait: failed
     again, or still without an outcome
  2  nothing could be done: wrong arguments or settings, broker or database away
"""


@dataclass(slots=True)
class Tally:
    """The result of the command.

    Attributes:
        fits: how many events it froze in the beginning.
        missing: ids that no event has.
        published: events that are on their way.
        returned, skipped: those that are not.
        replays: ids of replays whose outcome is waited for.
        stopped: why the rest was not tried.
    """

    fits: int = 0
    missing: list[str] = field(default_factory=list)
    published: int = 0
    returned: list[Skipped] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    replays: set[UUID] = field(default_factory=set)
    stopped: Reason | None = None
    waited: bool = False
    succeeded: int = 0
    failed: list[UUID] = field(default_factory=list)

    @property
    def code(self) -> int:
        if self.stopped and not self.published:
            return 2
        left = self.missing or self.returned or self.skipped or self.stopped
        return 1 if left or (self.waited and self.succeeded < self.published) else 0


class Command(ArchiveCommand):
    """A shell on :func:`django_amqp_events.archive.replay.replay`."""

    help = (
        "Replay archived events: by id (of the event or of its row), or all that fit the filters."
    )
    epilog = _EPILOG

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("ids", nargs="*", metavar="id", help="Event id, or id of the row.")
        for name, what in (
            ("handler", "Handler that failed."),
            ("event", "Whole name of the event, no pattern."),
            ("exception", "Exception: whole dotted name, or its last word; no pattern."),
            ("reason", f"Reason that it is archived: {', '.join(sorted(replay.REASONS))}."),
        ):
            parser.add_argument(
                f"--{name}", action="append", default=[], metavar=name.upper(), help=what
            )
        parser.add_argument(
            "--group",
            action="append",
            default=[],
            metavar="ID",
            help="Failure group, as `events_groups` and the admin show it.",
        )
        parser.add_argument("--since", metavar="TIME", help="Last failed then or later.")
        parser.add_argument("--until", metavar="TIME", help="Last failed before.")
        parser.add_argument(
            "--all", action="store_true", help="All that is archived; needed without a filter."
        )
        parser.add_argument("--limit", type=int, metavar="N", help="Events at most.")
        parser.add_argument("--rate", type=float, metavar="N", help="Events per second at most.")
        parser.add_argument(
            "--comment", default="", metavar="TEXT", help="Why; kept in the history of each event."
        )
        parser.add_argument(
            "--force",
            action="store_true",
            help="Replay ids whose replay is overdue (no outcome); they may be handled twice.",
        )
        parser.add_argument(
            "--edit",
            metavar="ID",
            help="Replay this one event with another payload (--payload, --comment).",
        )
        parser.add_argument(
            "--payload", metavar="FILE", help="With --edit: the payload, a JSON object; - is stdin."
        )
        parser.add_argument(
            "--wait",
            type=float,
            metavar="SECONDS",
            help="Wait so long for the outcomes; a mirror has to run.",
        )
        parser.add_argument(
            "--background",
            action="store_true",
            help="Make a batch of what fits and leave it to events_batches; needs --comment.",
        )
        parser.add_argument(
            "--canary",
            type=int,
            metavar="N",
            help="With --background: N first, the others when all of these have succeeded.",
        )
        parser.add_argument(
            "--pause-at",
            type=int,
            metavar="PERCENT",
            help="With --background: pause when so many of the last "
            f"{batch_states.WINDOW} outcomes are failures "
            f"(default: {batch_states.THRESHOLD}; 0: never).",
        )
        parser.add_argument(
            "--dry-run", action="store_true", help="Say what would go where, change nothing."
        )
        parser.add_argument(
            "--format", choices=("text", "json"), default="text", help="Default: text."
        )

    @no_translations
    def handle(self, *args: Any, **options: Any) -> None:
        self.prepare(options)
        filters = self._filters(options)
        tally = Tally()
        handlers: Counter[tuple[str, str, str]] = Counter()
        with self.interruptible():
            self._check_handlers(filters["handlers"])
            self._check_reasons(filters["reasons"])
            self._check_groups(filters["groups"])
            options["ids"] = [self._whole(each) for each in options["ids"]]
            if options["background"]:
                self._begin(options, filters)
                return
            if options["edit"] is not None:
                handlers = self._edit(options, tally)
            else:
                seen = self._freeze(options, filters, tally)
                if options["dry_run"]:
                    handlers = self._examine(seen, tally, force=options["force"])
                else:
                    self._replay(seen, options, tally)
                    self._note(options, filters, tally)
            if tally.waited:
                self._wait(options["wait"], tally)
            if self.json:
                self.stdout.write(
                    json.dumps(_document(tally, handlers, dry_run=options["dry_run"]), indent=2)
                )
            elif options["dry_run"]:
                self._print_plan(tally, handlers)
            else:
                self._print(tally)
        if tally.code:
            sys.exit(tally.code)

    # -- what ---------------------------------------------------------------------------------

    def _filters(self, options: Mapping[str, Any]) -> dict[str, Any]:
        now = datetime.now(UTC)
        filters: dict[str, Any] = {
            "handlers": options["handler"],
            "events": options["event"],
            "exceptions": options["exception"],
            "reasons": options["reason"],
            "groups": [_group(text) for text in options["group"]],
        }
        for name in ("since", "until"):
            if options[name] is not None:
                filters[name] = archive.moment(f"--{name}", options[name], now)
        for name in [*options["event"], *options["exception"]]:
            if "*" in name or "#" in name:
                raise archive.wrong(f"{name!r} is a pattern; give whole names, one option for each")
        narrowed = bool(options["ids"]) or any(filters.values())
        if options["edit"] is not None:
            others = narrowed or any(options[name] for name in ("all", "force", "limit", "rate"))
            if others or "since" in filters or "until" in filters:
                raise archive.wrong("--edit takes one id, and no other ids, filters or limits")
            if options["payload"] is None:
                raise archive.wrong("--edit needs the payload: --payload FILE, or - for stdin")
            if not options["comment"].strip() and not options["dry_run"]:
                raise archive.wrong("--edit needs a reason: --comment TEXT")
            narrowed = True
        elif options["payload"] is not None:
            raise archive.wrong("--payload needs --edit ID, the one event that it is for")
        if options["all"] and narrowed:
            raise archive.wrong("--all takes everything; leave it out, or the ids and filters")
        if not options["all"] and not narrowed:
            raise archive.wrong("say what to replay: ids, filters, or --all")
        if options["force"] and (not options["ids"] or any(filters.values())):
            raise archive.wrong("--force takes ids and no filters: look at each event first")
        if "since" in filters and "until" in filters and filters["since"] >= filters["until"]:
            raise archive.wrong("--since is not before --until")
        if options["limit"] is not None and options["limit"] < 1:
            raise archive.wrong("--limit is a number above 0")
        for name in ("rate", "wait"):
            value = options[name]
            if value is not None and not 0 < value <= 1_000_000:
                raise archive.wrong(f"--{name} is a number above 0, and at most 1000000")
        self._check_background(options)
        if options["dry_run"] and options["wait"] is not None:
            raise archive.wrong("--dry-run publishes nothing that --wait could wait for")
        return filters

    def _check_background(self, options: Mapping[str, Any]) -> None:
        if not options["background"]:
            for name in ("canary", "pause_at"):
                if options[name] is not None:
                    raise archive.wrong(f"--{name.replace('_', '-')} is for --background")
            return
        for name in ("edit", "force", "dry_run", "wait"):
            if options[name]:
                raise archive.wrong(f"--background goes without --{name.replace('_', '-')}")
        try:
            batch_states.check(
                reason=options["comment"],
                rate=options["rate"],
                canary=options["canary"],
                threshold=_threshold(options),
            )
        except ValueError as exc:
            hint = "" if options["comment"].strip() else "; say it with --comment"
            raise archive.wrong(f"{exc}{hint}") from exc

    def _check_handlers(self, names: Iterable[str]) -> None:
        """Refuse a handler that neither the project nor the archive knows."""
        known = {*get_registry().handlers, *conf.get_settings().renamed_handlers}
        for name in names:
            if name not in known and not states.rows().filter(handler=name).exists():
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else "see `manage.py events_declare`"
                raise archive.wrong(f"there is no handler {name!r}, nor an event of it; {hint}")

    def _check_reasons(self, names: Iterable[str]) -> None:
        """Refuse a reason that is none, unless an event has it all the same."""
        for name in names:
            if name not in replay.REASONS and not states.rows().filter(reason=name).exists():
                near = difflib.get_close_matches(name, replay.REASONS, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else "."
                every = ", ".join(sorted(replay.REASONS))
                raise archive.wrong(f"there is no reason {name!r}{hint} Reasons: {every}")

    def _check_groups(self, ids: Iterable[UUID]) -> None:
        """Refuse a group that does not exist."""
        for pk in ids:
            if not failure_groups.groups().filter(pk=pk).exists():
                raise archive.wrong(
                    f"there is no failure group {pk}; see `manage.py events_groups`"
                )

    def _note(self, options: Mapping[str, Any], filters: Mapping[str, Any], tally: Tally) -> None:
        """Write what was done to a whole group into its history."""
        if len(filters["groups"]) == 1 and tally.published:
            failure_groups.record_decision(
                filters["groups"][0],
                action="replay",
                events=tally.published,
                by=archive.who("events_replay"),
                reason=options["comment"],
                now=datetime.now(UTC),
            )

    def _whole(self, text: str) -> str:
        """Return the id that starts with the text, or the text."""
        found = selection.expand_id(text)
        if len(found) > 1:
            raise archive.wrong(f"{text!r} begins more than one id: {', '.join(found)}")
        return found[0] if found else text

    def _hint(self, filters: Mapping[str, Any]) -> None:
        """Name filter values that no archived event has."""
        for kind, column in (("events", "name"), ("exceptions", "exception")):
            for name in filters[kind]:
                wanted: dict[str, Any] = {kind: [name], "state": None}
                if Selection(**wanted).queryset().exists():
                    continue
                values = states.rows().order_by().values_list(column, flat=True)
                known = {each: each for each in values.distinct()[:1000]}
                if column == "exception":
                    known.update({each.rpartition(".")[2]: each for each in list(known)})
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {known[near[0]]!r}?" if near else ""
                self.stderr.write(f"no archived event has the {column} {name!r}{hint}")

    def _freeze(
        self, options: Mapping[str, Any], filters: Mapping[str, Any], tally: Tally
    ) -> dict[UUID, int]:
        """Return id and version of all matching events of this service, oldest failure first."""
        state = State.REPLAYING if options["force"] else State.ARCHIVED
        service = conf.get_settings().service
        seen: dict[UUID, int] = {}
        ids = list(dict.fromkeys(options["ids"]))
        for chunk in _parts(ids, CHUNK) if ids else [[]]:
            # Those of another service in the same tables can only be replayed by it.
            found = Selection(ids=chunk, state=state, service=service, **filters).queryset()
            matched: set[str] = set()
            rows = found.order_by("last_failed_at", "pk").values_list("pk", "version", "event_id")
            limit = options["limit"]
            for pk, version, event_id in rows[:limit].iterator(chunk_size=2000):
                seen[pk] = version
                if chunk:
                    matched |= {str(pk), event_id}
            if chunk and limit is None:
                # With a limit it is asked for that not all of them are taken.
                self._explain(
                    [each for each in chunk if not matched & {each, _plain(each)}], state, tally
                )
        if options["limit"] is not None:
            seen = dict(list(seen.items())[: options["limit"]])
        tally.fits = len(seen)
        if not seen:
            self._hint(filters)
        return seen

    def _explain(self, ids: list[str], state: State, tally: Tally) -> None:
        """Record why requested ids are skipped."""
        if not ids:
            return
        wanted = Q(event_id__in=ids) | Q(pk__in=[pk for pk in map(_uuid, ids) if pk])
        known: set[str] = set()
        for event in states.rows().filter(wanted).defer("body", "headers_raw", "detail"):
            known |= {str(event.pk), event.event_id}
            if event.service != conf.get_settings().service:
                why = eligibility.other_service(event)
            elif event.state == state:
                why = Reason("filtered")
            elif _overdue(event):
                why = Reason("overdue")
            else:
                why = Reason("state", state=event.get_state_display())
            tally.skipped.append(Skipped(id=event.pk, title=str(event), why=why))
        tally.missing += [each for each in ids if not known & {each, _plain(each)}]

    def _begin(self, options: Mapping[str, Any], filters: Mapping[str, Any]) -> None:
        """Start a batch with the matching events."""
        wanted = Selection(**filters)
        service = conf.get_settings().service
        found = replace(wanted, ids=options["ids"], service=service).queryset()
        if options["limit"] is not None:
            found = found.order_by("last_failed_at", "pk")[: options["limit"]]
        words = [
            *options["ids"][:3],
            *(f"{name} {value}" for name, value in filters.items() if value),
        ]
        by = archive.who("events_replay")
        batch = batch_states.freeze(
            found,
            by=by,
            title=", ".join(words) or "all that is archived",
            # Ids and a limit are no filter that could find new ones.
            criteria=None if options["ids"] or options["limit"] is not None else wanted,
        )
        if batch.total:
            batch_states.start(
                batch.pk,
                by=by,
                reason=options["comment"],
                rate=options["rate"],
                canary=options["canary"],
                threshold=_threshold(options),
            )
        else:
            batch_states.cancel(batch.pk, by=by)
        if self.json:
            self.stdout.write(
                json.dumps(
                    {
                        "version": archive.FORMAT,
                        "result": "begun" if batch.total else "nothing",
                        "exit_code": 0,
                        "fits": batch.total,
                        "batch": str(batch.pk),
                    },
                    indent=2,
                )
            )
        elif not batch.total:
            self.tell("nothing to replay: no archived event fits")
        else:
            self.tell(
                f"{number(batch.total, 'event')} in batch {batch.pk}; events_batches replays them, "
                f"and `events_batches show {str(batch.pk)[:8]}` says how far it is"
            )

    # -- doing --------------------------------------------------------------------------------

    def _examine(
        self, seen: Mapping[UUID, int], tally: Tally, *, force: bool
    ) -> Counter[tuple[str, str, str]]:
        handlers: Counter[tuple[str, str, str]] = Counter()
        for part in _parts(list(seen), 2000):
            eligible, skipped = eligibility.examine({pk: seen[pk] for pk in part}, force=force)
            handlers.update(_place(target) for _, target in eligible)
            tally.skipped += skipped
            self.progress(f"{handlers.total() + len(tally.skipped)} of {len(seen)} looked at")
            if self.stopping:
                tally.stopped = Reason("interrupted")
                break
        return handlers

    def _replay(self, seen: Mapping[UUID, int], options: Mapping[str, Any], tally: Tally) -> None:
        rate: float | None = options["rate"]
        tally.waited = options["wait"] is not None
        by, began, done = archive.who("events_replay"), time.monotonic(), 0
        # Short chunks where it is slow, so that the rate is even and Ctrl-C waits for few.
        size = eligibility.CHUNK if rate is None else max(1, min(eligibility.CHUNK, int(rate)))
        for part in _parts(list(seen), size):
            if rate is not None:
                self._sleep(began + done / rate)
            if self.stopping:
                tally.stopped = Reason("interrupted")
                return
            chunk = {pk: seen[pk] for pk in part}
            try:
                report = replay.replay(
                    chunk, by=by, reason=options["comment"], force=options["force"]
                )
                if tally.waited:
                    tally.replays |= _replays(report.published)
            except DatabaseError as exc:
                if not done:
                    raise
                tally.stopped = Reason.of(f"the database: {type(exc).__name__}: {exc}")
                return
            done += len(chunk)
            tally.published += len(report.published)
            tally.returned += report.returned
            tally.skipped += report.skipped
            self.progress(f"{done} of {len(seen)}: {tally.published} published")
            if report.stopped:
                tally.stopped = report.stopped
                return

    def _edit(self, options: Mapping[str, Any], tally: Tally) -> Counter[tuple[str, str, str]]:
        """Replay one event with another payload, or say what that would change."""
        if not conf.get_settings().editing:
            raise ConfigurationError(replay.EDITING_OFF)
        payload = editing.parse(_read(options["payload"]))
        handlers: Counter[tuple[str, str, str]] = Counter()
        wanted = self._whole(options["edit"])
        found = Selection(ids=[wanted], state=None).queryset()
        rows = list(found.filter(service=conf.get_settings().service)[:20])
        archived = [row for row in rows if row.state == State.ARCHIVED]
        if len(archived) > 1:
            each = ", ".join(f"{row.pk} ({row.handler})" for row in archived)
            raise archive.wrong(
                f"{wanted!r} is archived for more than one handler; name a row: {each}"
            )
        if not archived:
            self._explain([wanted], State.ARCHIVED, tally)
            return handlers
        [row] = archived
        tally.fits = 1
        where = eligibility.edit_target(row, row.version)
        if isinstance(where, Reason):
            tally.skipped.append(Skipped(id=row.pk, title=str(row), why=where))
            return handlers
        settings, registry = conf.get_settings(), get_registry()
        draft = editing.draft(row, where.handler, payload, settings, registry)
        for note in draft.notes:
            self.stderr.write(str(note))
        if options["dry_run"]:
            handlers[_place(where)] += 1
            before = "" if row.payload is None else editing.written(row.payload)
            for line in editing.diff(before, editing.written(payload)):
                self.tell(f"{line.kind} {visible(line.text)}")
            return handlers
        report = replay.edit(
            row.pk, row.version, payload, by=archive.who("events_replay"), reason=options["comment"]
        )
        tally.waited = options["wait"] is not None
        if tally.waited:
            tally.replays |= _replays(report.published)
        tally.published = len(report.published)
        tally.returned, tally.skipped = report.returned, report.skipped
        tally.stopped = report.stopped
        return handlers

    def _wait(self, seconds: float, tally: Tally) -> None:
        """Wait for the outcomes of what was published."""
        end = time.monotonic() + seconds
        pending, pause = set(tally.replays), LOOK[0]
        if pending and not self.stopping:
            self.tell(f"{len(pending)} published; waiting for the outcomes")
        while pending:
            for part in _parts(list(pending), CHUNK):
                ended = Replay.objects.using(states.database()).filter(
                    pk__in=part, outcome__in=(Replay.Outcome.SUCCEEDED, Replay.Outcome.FAILED)
                )
                for pk, event_id, outcome in ended.values_list("pk", "event_id", "outcome"):
                    pending.discard(pk)
                    if outcome == Replay.Outcome.SUCCEEDED:
                        tally.succeeded += 1
                    else:
                        tally.failed.append(event_id)
            if self.stopping or time.monotonic() >= end:
                return
            self.progress(
                f"{tally.succeeded} succeeded, {len(tally.failed)} failed again, "
                f"{len(pending)} without an outcome"
            )
            if pending:
                self._sleep(min(end, time.monotonic() + pause))
                pause = min(2 * pause, LOOK[1])

    def _sleep(self, until: float) -> None:
        while not self.stopping and (left := until - time.monotonic()) > 0:
            time.sleep(min(0.2, left))

    # -- telling ------------------------------------------------------------------------------

    def _print_plan(self, tally: Tally, handlers: Counter[tuple[str, str, str]]) -> None:
        if not tally.fits and not tally.skipped and not tally.missing:
            self.tell("nothing to replay: no archived event fits")
            return
        self.tell(f"{number(handlers.total(), 'event')} would be replayed")
        for (name, exchange, queue), count in handlers.most_common():
            self.tell(f"  {count} to {name}: {exchange} → {queue}")
        self._print_left("would be skipped", tally.skipped)
        self._print_missing(tally)

    def _print(self, tally: Tally) -> None:
        if not tally.fits and not tally.skipped and not tally.missing:
            self.tell("nothing to replay: no archived event fits")
            return
        if tally.fits:
            self.tell(f"{tally.published} of {number(tally.fits, 'event')} published")
        self._print_left("came back", tally.returned)
        self._print_left("skipped", tally.skipped)
        self._print_missing(tally)
        if tally.stopped:
            left = tally.fits - tally.published - len(tally.returned)
            told = any(each.why == tally.stopped for each in tally.returned)
            why = "for the same reason" if told and self.verbosity else tally.stopped
            self.stderr.write(f"stopped: {why}; {left} not replayed")
        if tally.waited:
            running = tally.published - tally.succeeded - len(tally.failed)
            self.tell(
                f"{tally.succeeded} succeeded, {len(tally.failed)} failed again, "
                f"{running} without an outcome yet"
            )
            for event in (
                states.rows()
                .filter(pk__in=tally.failed[: self._shown])
                .defer("body", "headers_raw", "detail")
            ):
                self.tell(f"  {event}: {event.exception or event.reason}: {event.message}")
            if running and not tally.succeeded and not tally.failed:
                self.tell("no outcome at all: does events_mirror run, and a worker?")

    def _print_left(self, what: str, left: list[Skipped]) -> None:
        if not left:
            return
        self.tell(f"{len(left)} {what}")
        reasons = Counter(each.why for each in left)
        told = 0
        for why, count in reasons.most_common(self._shown):
            told += count
            first = next(each for each in left if each.why == why)
            more = f", and {count - 1} more" if count > 1 else ""
            self.tell(f"  {first.title or first.id}{more}: {why}")
        if told < len(left):
            self.tell(f"  and {number(len(left) - told, 'more event')} for other reasons")

    def _print_missing(self, tally: Tally) -> None:
        for each in tally.missing:
            hint = (
                f"; give the whole id, or its first {selection.SHORT} characters at least"
                if len(each) < selection.SHORT
                else ""
            )
            self.stderr.write(f"no archived event has the id {each!r}{hint}")

    @property
    def _shown(self) -> int:
        return SHOWN if self.verbosity < 2 else 10_000


def _document(
    tally: Tally, handlers: Counter[tuple[str, str, str]], *, dry_run: bool
) -> dict[str, Any]:
    result = "stopped" if tally.stopped else "counted" if dry_run else "published"
    document: dict[str, Any] = {
        "version": archive.FORMAT,
        "result": result,
        "exit_code": tally.code,
        "fits": tally.fits,
        "published": tally.published,
        "returned": [_left(each) for each in tally.returned],
        "skipped": [_left(each) for each in tally.skipped],
        "missing": tally.missing,
        "stopped": str(tally.stopped or ""),
        "handlers": [
            {"handler": name, "exchange": exchange, "queue": queue, "events": count}
            for (name, exchange, queue), count in handlers.most_common()
        ],
        "outcomes": None,
    }
    if tally.waited:
        document["outcomes"] = {
            "succeeded": tally.succeeded,
            "failed": len(tally.failed),
            "none": tally.published - tally.succeeded - len(tally.failed),
            "failed_ids": [str(pk) for pk in tally.failed],
        }
    return document


def _threshold(options: Mapping[str, Any]) -> int | None:
    percent = options["pause_at"]
    return batch_states.THRESHOLD if percent is None else percent or None


def _left(each: Skipped) -> dict[str, str]:
    return {"id": str(each.id), "title": each.title, "why": str(each.why)}


def _overdue(event: ArchivedEvent) -> bool:
    """Return True if ``--force`` would replay the event."""
    if event.state != State.REPLAYING:
        return False
    where = eligibility.target(event)
    return isinstance(where, Target) and eligibility.is_overdue(event, where.handler)


def _place(target: Target) -> tuple[str, str, str]:
    return target.handler.name, target.exchange, target.queue


def _replays(published: list[UUID]) -> set[UUID]:
    """Return the current replays of events."""
    found: set[UUID] = set()
    for part in _parts(published, CHUNK):
        current = Replay.objects.using(states.database()).filter(
            event_id__in=part, number=F("event__replays")
        )
        found |= set(current.values_list("pk", flat=True))
    return found


def _parts(items: list[T], size: int) -> Iterator[list[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _plain(text: str) -> str:
    """Return a row's id in its canonical form."""
    found = _uuid(text)
    return text if found is None else str(found)


def _group(text: str) -> UUID:
    found = _uuid(text)
    if found is None:
        raise archive.wrong(f"--group is {text!r:.80}; it is an id: see `manage.py events_groups`")
    return found


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def _read(name: str) -> str:
    """Read the payload's file, or stdin."""
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        raise archive.wrong(f"--payload {name}: {exc}") from exc
