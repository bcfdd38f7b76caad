"""What other programs read of a worker is the same of a handler and of a plain task.

Both do the same; their task events, signals, result rows, log lines and answers of ``inspect`` are
compared field by field. :data:`ON_PURPOSE` has the differences, which docs/logs.md lists.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import uuid4

import pytest

from ..conftest import POOLS, Make
from ..harness import Eyes, Service, task_id, until

pytestmark = pytest.mark.timeout(300)

SIDES: Final = ("plain", "event")
#: What a task does, and the options that it does it with.
STEPS: Final = {
    "ok": "base",
    "fail": "base",
    "ignore": "base",
    "requeue": "base",
    "retry": "retried",
}
#: What other pools than prefork cannot do.
PREFORK: Final = {"soft": "limited", "hard": "limited", "kill": "base"}
TERMINAL: Final = {"task-succeeded", "task-failed"}
#: Of messages and processes, not of tasks.
NOISE: Final = {
    "hostname", "timestamp", "local_received", "clock", "pid", "utcoffset", "worker_pid",
    "time_start", "date_created", "date_done", "date_started", "id", "delivery_tag",
}  # fmt: skip
#: Differences, by place: why they are.
ON_PURPOSE = {
    r"\w+ event task-received root_id": "the correlation id",
    r"retry event task-received (parent_id|eta)": "a retry is the same message, and due on arrival",
    r"retry event task-retried (exception|traceback)": "the cause; Celery's depends on the pool",
    r"hard event task-failed exception": "Celery's is a wrapper",
    r"hard (row traceback|signal): ": "another process runs it as a failure, with its signals",
    r"active .*(acknowledged|type|delivery_info)\b.*": "of the message",
}
#: Lines of handlers, and Celery's instead.
LINES: Final = (
    (
        r"INFO Event \S+ \(EVENT\) for NAME\[ID\] received, attempt \d",
        "INFO Task NAME[ID] received",
    ),
    (
        r"WARNING (Soft|Hard) time limit (\S+) exceeded for event \S+ \(EVENT\) for NAME",
        r"LEVEL \1 time limit \2 exceeded for NAME[ID]",
    ),
    (r"ERROR archived event .* billiard\.exceptions\.TimeLimitExceeded: .*", ""),
    (r"ERROR archived event .* \(exhausted\): .*", "ERROR Task NAME[ID] raised unexpected"),
    (r"ERROR the pool process that handled event .*", ""),
)


@dataclass
class Case:
    """One message, and what was seen of it."""

    side: str
    step: str
    options: str
    event_id: str = field(default_factory=lambda: str(uuid4()))

    @property
    def name(self) -> str:
        return f"{self.side}.{self.options}"

    @property
    def id(self) -> str:
        if self.side == "plain":
            return self.event_id
        return task_id(self.event_id, f"seen.{self.options}", self.name, "seen")

    @property
    def payload(self) -> dict[str, str]:
        return {"step": self.step, "case": f"{self.side}-{self.step}"}

    def send(self, eyes: Eyes) -> None:
        if self.side == "event":
            eyes.event(f"seen.{self.options}", self.payload, event_id=self.event_id)
        else:
            eyes.app.send_task(
                self.name, kwargs=self.payload, queue="ordinary", task_id=self.event_id
            )

    def plainly(self, value: Any) -> Any:
        """Return a value without what tells this message and side from others."""
        if isinstance(value, dict):
            return {key: self.plainly(item) for key, item in value.items() if key not in NOISE}
        if isinstance(value, (list, tuple)):
            return [self.plainly(item) for item in value]
        if isinstance(value, float):
            return "a float"
        if not isinstance(value, str):
            return value
        if "Traceback (most recent" in value:
            return f"Traceback … {value.strip().splitlines()[-1]}"
        names = {self.event_id: "EVENT", self.id: "ID", self.name: "NAME"}
        for mine, general in {**names, self.payload["case"]: "CASE"}.items():
            value = value.replace(mine, general)
        value = re.sub(r'"pid": \d+', '"pid": N', value)
        value = re.sub(r"\bRetry (in \S+|at \S+ \S+):", "Retry:", value)
        value = re.sub(r"(raised unexpected): .*", r"\1", value)
        return re.sub(r"\d+\.\d+(e-\d+)?s\b", "Ns", value)


def listen(eyes: Eyes) -> None:
    """Keep the worker's task events in a queue."""
    channel = eyes.channel()
    channel.exchange_declare("celeryev", "topic", durable=True, auto_delete=False)
    channel.queue_declare("seen.by.others", durable=True, auto_delete=False)
    channel.queue_bind("seen.by.others", "celeryev", "#")


class Seen:
    """What was seen of all cases, by the side and step."""

    def __init__(self, eyes: Eyes, service: Service, cases: list[Case]) -> None:
        self.eyes, self.service, self.cases = eyes, service, cases
        self._events: list[dict[str, Any]] = []

    def task_events(self, case: Case) -> list[dict[str, Any]]:
        for message in self.eyes.take("seen.by.others"):
            body = json.loads(message.body)
            self._events += body if isinstance(body, list) else [body]
        found = [event for event in self._events if event.get("uuid") == case.id]
        if case.step == "hard" and case.side == "plain":
            found = list({event["type"]: event for event in found}.values())  # Celery sends two
        # The next message may arrive before the pool's answer to the last one.
        return sorted(found, key=lambda event: event["type"] != "task-received")

    def ended(self) -> bool:
        return all(
            any(event["type"] in TERMINAL for event in self.task_events(case))
            if case.step != "ignore"
            else any(line["signal"] == "task_postrun" for line in self.signals(case))
            for case in self.cases
        )

    def signals(self, case: Case) -> list[dict[str, Any]]:
        lines = self.service.ledger(what="signal", case=case.payload["case"])
        return [
            {"signal": line["signal"], **line["values"]}
            for line in lines
            if line["signal"] != "task_received"  # Celery's consumer sends it for its requests
        ]

    def rows(self, case: Case) -> list[dict[str, Any]]:
        if not hasattr(self, "_rows"):
            setup = "from django_celery_results.models import TaskResult"
            self._rows = self.service.value("list(TaskResult.objects.values())", setup)
        return [row for row in self._rows if row["task_id"] == case.id]

    def log(self, case: Case) -> list[str]:
        text = "".join(path.read_text() for path in self.service.where.glob("*.log"))
        records = re.findall(r"^\[[^\]]*: (\w+)/[^\]]*\] (.*)$", text, re.MULTILINE)
        about = [
            case.plainly(f"{level} {line}")
            for level, line in records
            if case.id in line or case.event_id in line
        ]
        if case.side == "event":
            for pattern, instead in LINES:
                about = [re.sub(f"^{pattern}", instead, line) for line in about]
        else:
            about = [re.sub(r"^\w+ (?=(Soft|Hard) time limit)", "LEVEL ", line) for line in about]
        return sorted(filter(None, about))

    def all(self, case: Case) -> dict[str, Any]:
        return {
            "event": case.plainly(self.task_events(case)),
            "signal": case.plainly(self.signals(case)),
            "row": case.plainly(self.rows(case)),
            "log": self.log(case),
        }


def differences(where: str, plain: Any, event: Any) -> Iterator[str]:
    """Yield each place at which two values differ, with both."""
    if isinstance(plain, dict) and isinstance(event, dict):
        kind = plain.get("type", plain.get("signal"))
        where = f"{where} {kind}" if isinstance(kind, str) else where
        for key in {**plain, **event}:
            here = f"{where} {key}"
            yield from differences(here, plain.get(key, "missing"), event.get(key, "missing"))
    elif isinstance(plain, list) and isinstance(event, list) and len(plain) == len(event):
        for first, second in zip(plain, event, strict=True):
            yield from differences(where, first, second)
    elif plain != event:
        yield f"{where}: {plain!r}, but {event!r}"


@pytest.mark.parametrize("pool", POOLS)
def test_a_handler_is_seen_as_a_task_is(fresh_eyes: Eyes, service: Make, pool: str) -> None:
    seen: Service = service(
        fresh_eyes,
        "seen",
        handlers="seen",
        celery={
            "result_backend": "django-db",
            "result_extended": True,
            "task_track_started": True,
            "imports": ["testproject.seen"],
        },
    ).declare()
    seen.migrate()
    listen(fresh_eyes)
    steps = STEPS | (PREFORK if pool == "prefork" else {})
    cases = [Case(side, step, options) for step, options in steps.items() for side in SIDES]
    worker = seen.worker(pool, 2, "--task-events").wait_ready()
    until(lambda: fresh_eyes.consumers("seen.event.base") == 1, 30, "the worker consumes")
    look = Seen(fresh_eyes, seen, cases)
    found = set[str]()
    if pool != "solo":  # which answers when nothing runs
        found |= set(_inspected(fresh_eyes, seen))
    for case in cases:
        case.send(fresh_eyes)
    until(look.ended, 90, "all have ended")
    worker.stop()
    for plain, event in zip(cases[::2], cases[1::2], strict=True):
        found |= set(differences(plain.step, look.all(plain), look.all(event)))
    wrong = {each for each in found if not any(re.match(place, each) for place in ON_PURPOSE)}
    assert not wrong, "\n".join(sorted(wrong))


def _inspected(eyes: Eyes, seen: Service) -> Iterator[str]:
    """Yield the differences of what remote control tells of a run and of commands."""
    plain, event = (Case(side, "hold", "base") for side in SIDES)
    for case in (plain, event):
        case.send(eyes)
        until((seen.where / case.payload["case"]).exists, 30)
    inspect = eyes.app.control.inspect(timeout=10, limit=1)
    (active,) = inspect.active().values()
    by_name = {run["name"]: run for run in active}
    runs = (case.plainly(by_name[case.name]) for case in (plain, event))
    yield from differences("active", *runs)
    (stats,) = inspect.stats().values()
    assert stats["amqp_events"]["queues"] == [
        f"seen.event.{name}" for name in ("base", "limited", "retried")
    ]
    (registered,) = inspect.registered().values()
    assert {plain.name, event.name} <= set(registered)
    control = eyes.app.control
    for command, argument in (("rate_limit", "1000/s"), ("time_limit", 60)):
        said = []
        for case in (plain, event):
            (answer,) = getattr(control, command)(
                case.name, argument, reply=True, timeout=10, limit=1
            )
            said.append(case.plainly(next(iter(answer.values()))))
        yield from differences(command, *said)
    for case in (plain, event):
        (seen.where / case.payload["case"]).with_suffix(".end").touch()
