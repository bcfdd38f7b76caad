"""What happened, by ledgers, the archive's tables and the broker; nobody is believed twice."""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from amqp.exceptions import NotFound
from kombu import Connection

from django_amqp_events.declare.patterns import pattern_matches


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTopology:
    """What `events_declare --format json` says a service has on the broker."""

    service: str
    prefix: str
    queues: dict[str, str]  # name: role
    exchanges: list[str]
    bindings: list[tuple[str, str]]  # pattern, handler queue
    events: str

    @classmethod
    def of(cls, report: dict[str, Any]) -> ServiceTopology:
        items = report["items"]
        roles = {item["name"]: item["role"] for item in items if item["kind"] == "queue"}
        exchanges = {item["name"]: item["role"] for item in items if item["kind"] == "exchange"}
        events = next(name for name, role in exchanges.items() if role == "events")
        bindings = []
        for item in items:
            if item["kind"] == "binding":
                match = re.fullmatch(r"(.*) → (.*?)(?: \[(.*)\])?", item["name"])
                if match and match[1] == events:
                    bindings.append((match[3] or "", match[2]))
        return cls(
            service=report["service"],
            prefix=report["prefix"],
            queues=roles,
            exchanges=list(exchanges),
            bindings=bindings,
            events=events,
        )

    @property
    def handlers(self) -> dict[str, str]:
        """Handler names by queue."""
        start = len(f"{self.prefix}{self.service}.")
        return {name: name[start:] for name, role in self.queues.items() if role == "handler"}

    @property
    def archive(self) -> str:
        return next(name for name, role in self.queues.items() if role == "archive")

    @property
    def inboxes(self) -> list[str]:
        """What somebody has to consume: the handlers' queues and the archive."""
        return [*self.handlers, self.archive]

    @property
    def watched(self) -> list[str]:
        """Queues worth a look while things go on: long delays are not."""
        short = tuple(f":delay.{seconds}s" for seconds in (1, 2, 4, 8))
        return [
            name
            for name, role in self.queues.items()
            if role in ("handler", "archive") or name.endswith(short)
        ]

    def wants(self, event: str) -> set[str]:
        """Return the handlers that get an event of that name."""
        names = self.handlers
        return {names[queue] for key, queue in self.bindings if pattern_matches(key, event)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    handler: str
    event_id: str
    attempt: int
    state: str
    exception: str
    due_at: datetime | None
    began_at: datetime
    ended_at: datetime


class Ledger:
    """A service's ledger, read only."""

    def __init__(self, database: Path) -> None:
        self.database = database

    def _all(self, query: str) -> list[tuple[Any, ...]]:
        if not self.database.exists():
            return []
        with closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True, timeout=10)) as db:
            return db.execute(query).fetchall()

    def published(self) -> list[tuple[str, str]]:
        """Event id and name of all confirmed publishes."""
        return self._all("SELECT event_id, name FROM ledger_published")

    def counts(self) -> dict[str, tuple[int, int]]:
        """Events handled and attempts that failed and were retried, by handler."""
        rows = self._all(
            "SELECT handler, COUNT(DISTINCT CASE WHEN state = 'SUCCESS' THEN event_id END), "
            "SUM(state = 'RETRY') FROM ledger_attempt GROUP BY handler"
        )
        return {handler: (handled, retried) for handler, handled, retried in rows}

    def attempts(self) -> list[Attempt]:
        rows = self._all(
            "SELECT handler, event_id, attempt, state, exception, due_at, began_at, ended_at "
            "FROM ledger_attempt ORDER BY began_at"
        )
        return [
            Attempt(
                handler=row[0],
                event_id=row[1],
                attempt=row[2],
                state=row[3],
                exception=row[4],
                due_at=_moment(row[5]) if row[5] else None,
                began_at=_moment(row[6]),
                ended_at=_moment(row[7]),
            )
            for row in rows
        ]

    def archive(self) -> list[Archived]:
        """The archive's table."""
        rows = self._all(
            "SELECT name, event_id, handler, reason, exception, attempts, message, body, state, "
            "replays FROM django_amqp_events_archivedevent ORDER BY handler, published_at"
        )
        return [
            Archived(
                event=row[0],
                event_id=row[1],
                handler=row[2],
                reason=row[3],
                exception=str(row[4]).rpartition(".")[2],
                attempts=row[5],
                line=str(row[6]).partition("\n")[0],
                subject=_subject(row[7]),
                state=row[8],
                replays=row[9],
            )
            for row in rows
        ]

    def failures_stored(self) -> int:
        """FAILURE results in django-celery-results."""
        query = "SELECT COUNT(*) FROM django_celery_results_taskresult WHERE status = 'FAILURE'"
        return int(self._all(query)[0][0])


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Archived:
    """An archived event, as far as the tables show it.

    Attributes:
        state: what the archive's table says, ``""`` for a message that is in the queue still.
    """

    event: str
    event_id: str
    handler: str
    reason: str
    exception: str
    attempts: int
    line: str
    subject: str
    state: str = ""
    replays: int = 0

    @property
    def open(self) -> bool:
        """Whether somebody has to see to it."""
        return self.state not in ("succeeded", "discarded")


class Queues:
    """The queues, over plain AMQP: passive declares count what is ready."""

    def __init__(self, url: str) -> None:
        self.connection = Connection(url, connect_timeout=5)
        self.connection.ensure_connection(
            max_retries=2, timeout=10, reraise_as_library_errors=False
        )
        self.channel = self.connection.channel()

    def close(self) -> None:
        self.connection.close()

    def depth(self, queue: str) -> tuple[int, int]:
        """Messages that are ready, and consumers; zeros where there is no such queue."""
        try:
            answer = self.channel.queue_declare(queue, passive=True)
        except NotFound:
            self.channel = self.connection.channel()
            return 0, 0
        return answer.message_count, answer.consumer_count

    def depths(self, queues: Iterable[str]) -> dict[str, int]:
        return {queue: self.depth(queue)[0] for queue in queues}

    def peek(self, queue: str) -> list[Archived]:
        """Read all messages of a queue and leave them there.

        They are taken on a channel of their own, unacked, until there is none left; when the
        channel closes RabbitMQ puts them back. The archive's delivery limit is out of reach.
        """
        channel = self.connection.channel()
        found = []
        try:
            while (message := channel.basic_get(queue, no_ack=False)) is not None:
                found.append(_archived(message))
        finally:
            channel.close()
        return found

    def delete(self, queues: Iterable[str], exchanges: Iterable[str]) -> None:
        for queue in queues:
            self.channel.queue_delete(queue)
        for exchange in exchanges:
            self.channel.exchange_delete(exchange)


def _archived(message: Any) -> Archived:
    headers = message.headers or message.properties.get("application_headers") or {}
    # The same queue carries the news that a replay has ended well.
    about = json.loads(headers.get("event-archive") or headers["event-outcome"])
    exception = about.get("exception") or {}
    text = str(exception.get("message") or about.get("detail") or "")
    return Archived(
        event=about.get("event_name") or "",
        event_id=about.get("event_id") or "",
        handler=about.get("handler") or "",
        reason=about.get("reason") or about["outcome"],
        exception=str(exception.get("type", "")).rpartition(".")[2],
        attempts=about["attempt"],
        line=text.splitlines()[0] if text else "",
        subject=_subject(message.body),
    )


def _subject(body: bytes | str) -> str:
    """Return the number of the order that an event is about."""
    try:
        return str(json.loads(body)[1].get("number", ""))
    except (ValueError, LookupError, AttributeError):
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the result's table.

    Attributes:
        archived: open in the archive, its queue or its table, and not handled.
        settled: given up by somebody, in the archive's table.
        replayed: replays, of whatever became of them.
    """

    service: str
    handler: str
    events: int
    handled: int
    retried: int
    archived: int
    settled: int
    replayed: int
    waiting: int
    doubled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The account of everything that was accepted.

    Attributes:
        missing: (handler, event id) neither handled nor archived. The archive's word that a replay
            succeeded is not enough: the handler's service has to know of it.
        open: whatever is in the archive's queue, or in its table with something to be done.
        delayed: messages in delay queues, graveyards and the like.
    """

    published: Counter[str]
    rows: list[Row]
    missing: set[tuple[str, str]]
    delayed: int
    open: int

    @property
    def expected(self) -> int:
        return sum(row.events for row in self.rows)

    @property
    def handled(self) -> int:
        return sum(row.handled for row in self.rows)

    @property
    def archived(self) -> int:
        return sum(row.archived for row in self.rows)

    @property
    def settled(self) -> int:
        return sum(row.settled for row in self.rows)

    @property
    def waiting(self) -> int:
        return sum(row.waiting for row in self.rows) + self.delayed

    @property
    def doubled(self) -> int:
        return sum(row.doubled for row in self.rows)

    @property
    def lost(self) -> int:
        """What was accepted and is nowhere."""
        return max(0, len(self.missing) - self.waiting)


def account(
    shapes: list[ServiceTopology],
    ledgers: dict[str, Ledger],
    depths: dict[str, int],
    archives: dict[str, list[Archived]],
) -> Result:
    """Put the accepted events against what became of them, handler by handler.

    Args:
        archives: by service, what is in the archive's queue and in its table.
    """
    events = [pair for ledger in ledgers.values() for pair in ledger.published()]
    rows, missing = [], set()
    for shape in shapes:
        attempts = ledgers[shape.service].attempts()
        for queue, handler in shape.handlers.items():
            accepted = {key for key, name in events if handler in shape.wants(name)}
            done = [a for a in attempts if a.handler == handler and a.state == "SUCCESS"]
            handled = {attempt.event_id for attempt in done}
            kept = [a for a in archives[shape.service] if a.handler == handler]
            archived = {a.event_id for a in kept if a.open} - handled
            settled = {a.event_id for a in kept if a.state == "discarded"} - handled - archived
            missing |= {(handler, key) for key in accepted - handled - archived - settled}
            rows.append(
                Row(
                    service=shape.service,
                    handler=handler,
                    events=len(accepted),
                    handled=len(handled),
                    retried=sum(a.handler == handler and a.state == "RETRY" for a in attempts),
                    archived=len(archived),
                    settled=len(settled),
                    replayed=sum(a.replays for a in kept),
                    waiting=depths.get(queue, 0),
                    doubled=len(done) - len(handled),
                )
            )
    elsewhere = {
        queue
        for shape in shapes
        for queue, role in shape.queues.items()
        if role not in ("handler", "archive")
    }
    return Result(
        published=Counter(name for _, name in events),
        rows=rows,
        missing=missing,
        delayed=sum(depths.get(queue, 0) for queue in elsewhere),
        open=sum(a.open for all_ in archives.values() for a in all_),
    )
