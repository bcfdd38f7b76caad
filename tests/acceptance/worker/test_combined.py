"""Every handler option, in pairs, with each pool and format: every event ends as declared.

testproject/combined.py makes the handlers from a table of all options. What must become of an event
follows from that table here, without the package's own rules.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from runpy import run_path
from typing import Any, get_args
from uuid import uuid4

import pytest

from django_amqp_events.message import encoding
from django_amqp_events.message.types import Message
from django_amqp_events.options import HANDLER_OPTIONS, Format
from tests.conftest import SLOW

from ..conftest import Make
from ..harness import PROJECT, Archive, Eyes, Service, by_event, task_id, until

pytestmark = pytest.mark.timeout(600)

_TABLE = run_path(str(PROJECT / "testproject" / "table.py"), run_name="table")
VALUES: Mapping[str, Sequence[Any]] = _TABLE["VALUES"]
ROWS: Sequence[Any] = _TABLE["ROWS"]
FORMATS: tuple[Format, ...] = get_args(Format)
#: The plan of an event, one step per attempt; the last one is repeated.
PLANS: dict[str, tuple[str, ...]] = {
    "succeeds": ("ok",),
    "fails once": ("fail", "ok"),
    "fails": ("fail",),
    "refuses": ("refuse",),
    "fails for good": ("never",),
    "late": ("late", "ok"),
    "twice": ("ok",),
    "surplus argument": ("ok",),
    "wrong type": ("ok",),
    "missing argument": ("ok",),
    "malformed": ("ok",),
}
#: Seconds in which no queue but the archive has a message, when all is settled.
QUIET = 3.0
#: Retries of a handler without a limit, until its event succeeds.
ENOUGH = 3


@dataclass(frozen=True)
class Case:
    """An event for the handler of a row."""

    row: Any
    what: str
    form: Format

    @property
    def plan(self) -> list[str]:
        plan = [*PLANS[self.what]]
        endless = self.row.options["max_retries"] is None
        return [*plan * ENOUGH, "ok"] if endless and plan[-1] != "ok" else plan

    @property
    def payload(self) -> dict[str, Any]:
        payload = {"number": 1, "plan": self.plan}
        match self.what:
            case "surplus argument":
                return {**payload, "more": 1}
            case "wrong type":
                return {**payload, "number": "one"}
            case "missing argument":
                return {"number": 1}
        return payload

    def expected(self) -> tuple[list[int], str]:
        """Return the attempts that run, and the reason in the archive, ``""`` if it succeeds."""
        options = self.row.options
        refused = {
            "malformed": "malformed",
            "missing argument": "arguments",
            "surplus argument": "arguments" if options["strict"] else "",
            "wrong type": "contract" if options["validate"] else "",
        }.get(self.what, "")
        if not options["enabled"]:
            return [], ""
        if refused:
            return [], refused
        if self.what == "twice":
            return [1] if options["once"] else [1, 1], ""
        limit, attempts = options["max_retries"], []
        for attempt in range(1, 10):
            attempts.append(attempt)
            step = self.plan[min(attempt, len(self.plan)) - 1]
            if step == "ok":
                return attempts, ""
            if not self._retried(step):
                return attempts, "failed"
            if limit is not None and attempt > limit:
                return attempts, "exhausted"
        raise AssertionError(self)

    def _retried(self, step: str) -> bool:
        options = self.row.options
        only_lookup_errors = options["autoretry_for"] != (Exception,)
        return {
            "fail": not only_lookup_errors,
            "refuse": True,
            "never": not options["dont_autoretry_for"],
            # A time limit is retried whatever the exceptions are.
            "late": True,
        }[step]

    def delay(self, attempt: int) -> float:
        """Return the least number of seconds between an attempt that fails and the next."""
        options = self.row.options
        if not options["retry_backoff"]:
            return float(options["default_retry_delay"])
        if options["retry_jitter"]:
            return 1.0
        return float(min(2 ** (attempt - 1), options["retry_backoff_max"]))

    def message(self, eyes: Eyes) -> Message:
        name, event_id = self.row.event, str(uuid4())
        attributes = {"specversion": "1.0", "id": event_id, "source": "tests", "type": name}
        body = encoding.encode_payload(name, self.payload, form=self.form, attributes=attributes)
        message = eyes.message(name, {}, event_id=event_id, form=self.form)
        return replace(message, body=b"\xff{" if self.what == "malformed" else body)


def cases(pool: str, formats: str) -> Iterator[Case]:
    """Yield the cases of a pool: each in all formats, or in one of them in turn."""
    for row, (index, what) in product(ROWS, enumerate(PLANS)):
        options = row.options
        limited = options["time_limit"] or options["soft_time_limit"]
        # SQLite has one lock, which a handler with `once` would hold until its limit.
        if what == "late" and not (limited and pool == "prefork" and not options["once"]):
            continue
        few = [FORMATS[(row.number + index) % len(FORMATS)]]
        for form in FORMATS if formats == "all" and what != "late" else few:
            yield Case(row, what, form)


def test_the_table_has_each_option_and_each_pair_of_values() -> None:
    # With newest, events of the table would supersede each other; test_once.py has it.
    assert VALUES.keys() == HANDLER_OPTIONS.keys() - {"newest"}
    for one, other in combinations(VALUES, 2):
        together = [(row.options[one], row.options[other]) for row in ROWS]
        for pair in product(VALUES[one], VALUES[other]):
            assert pair in together, (one, other, pair)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("pool", "formats"),
    [
        ("prefork", "one"),
        *(pytest.param(pool, "all", marks=SLOW) for pool in ("prefork", "threads", "solo")),
    ],
)
def test_every_event_ends_as_declared(
    fresh_eyes: Eyes, service: Make, pool: str, formats: str
) -> None:
    database = {
        "ENGINE": "django.db.backends.sqlite3",
        "OPTIONS": {"timeout": 30, "transaction_mode": "IMMEDIATE"},
    }
    combined = service(fresh_eyes, "combined", handlers="combined",
                       celery={"result_backend": "django-db"})  # fmt: skip
    database["NAME"] = str(combined.where / "db.sqlite3")
    combined.environ = {
        "TESTPROJECT_DATABASE": json.dumps(database),
        "TESTPROJECT_UNSYNCED": "1",
    }
    combined.migrate("table")
    combined.declare()
    sent = {message.event_id: (case, message)
            for case in cases(pool, formats) for message in [case.message(fresh_eyes)]}  # fmt: skip
    fresh_eyes.send(*(message for _, message in sent.values()), mandatory=False)
    again = [message for case, message in sent.values() if case.what == "twice"]
    fresh_eyes.send(*again, mandatory=False)
    worker = combined.worker(pool, {"prefork": 6, "threads": 8, "solo": 1}[pool])
    archive = Archive(fresh_eyes, "combined")
    quiet_since = time.monotonic()

    def settled() -> bool:
        nonlocal quiet_since
        assert worker.alive, worker.log[-5000:]
        totals = fresh_eyes.totals("combined")
        if any(number and not name.endswith(":archive") for name, number in totals.items()):
            quiet_since = time.monotonic()
        # The management API may be late.
        return time.monotonic() > quiet_since + QUIET

    until(settled, 120, "all events are settled")
    if found := differences(combined, archive, sent):
        pytest.fail("\n".join(found))
    assert worker.stop() == 0


def differences(
    combined: Service, archive: Archive, sent: Mapping[str, tuple[Case, Message]]
) -> list[str]:
    """Return what became of events that did not end as declared."""
    archived = defaultdict(list)
    for entry in archive.collect():
        archived[entry["event_id"] or entry["properties"]["message_id"]].append(entry)
    runs = by_event(combined.ledger(what="start"))
    effects, results = combined.value(
        "[cursor.fetchall(), dict(TaskResult.objects.values_list('task_id', 'status'))]",
        "from django.db import connection\n"
        "from django_celery_results.models import TaskResult\n"
        "cursor = connection.cursor()\n"
        "cursor.execute('SELECT event, handler FROM effects')",
    )
    effects = Counter(map(tuple, effects))
    found = []
    for event_id, (case, message) in sent.items():
        attempts, reason = case.expected()
        lines = runs.pop(event_id, [])
        entries = archived.pop(event_id, [])
        options, name = case.row.options, case.row.name
        succeeded = bool(attempts) and not reason
        # Those of a handler with `once` are undone when it fails.
        number = int(succeeded) if options["once"] else len(attempts)
        told = {
            "attempts": ([line["attempt"] for line in lines], attempts),
            "handlers": ({line["handler"] for line in lines}, {name} if attempts else set()),
            "archived": ([entry["reason"] for entry in entries], [reason] if reason else []),
            "effects": (effects.pop((event_id, name), 0), number),
            "early": ([gap for gap in early(case, lines) if gap], []),
            "result": (
                results.get(task_id(event_id, case.row.event, name, "combined")),
                None if not succeeded or options["ignore_result"] else "SUCCESS",
            ),
        }
        if reason and entries:
            (entry, *_) = entries
            told["attempt"] = entry["attempt"], max(len(attempts), 1)
            if case.what != "malformed":  # an unreadable CloudEvent has no identity
                told["handler"] = entry["handler"], name
            told["body"] = entry["message"].body == message.body, True
            told.pop("result")
        found += [
            f"row {case.row.number}, {case.what}, {case.form}: {what} {is_}, expected {expected}"
            for what, (is_, expected) in told.items()
            if is_ != expected
        ]
    return [*found, *(f"not sent: {event_id}" for event_id in {**runs, **archived, **effects})]


def early(case: Case, lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the retries that came before they were due, or were due sooner than declared."""
    for before, line in pairwise(lines):
        if line["attempt"] == before["attempt"]:
            continue
        if line["at"] < line["due"]:
            yield f"attempt {line['attempt']} was early by {line['due'] - line['at']:.3f} s"
        if (wait := line["due"] - before["at"]) < case.delay(before["attempt"]):
            yield f"attempt {line['attempt']} was due after {wait:.3f} s"
