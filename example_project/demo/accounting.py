"""Count what became of every event, from the ledgers, the archive's tables and the queues."""

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
    """What a service has on the broker, as `events_declare --format json` reports it."""

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
    def consumed(self) -> list[str]:
        """The queues that need a consumer: those of the handlers, and the archive."""
        return [*self.handlers, self.archive]

    def wants(self, event: str) -> set[str]:
        """Return the handlers of an event."""
        names = self.handlers
        return {names[queue] for key, queue in self.bindings if pattern_matches(key, event)}


@dataclass(frozen=True, slots=True)
class Attempt:
    """A row of the ledger's attempts."""

    handler: str
    event_id: str
    attempt: int
    state: str
    exception: str
    due_at: datetime | None
    began_at: datetime
    ended_at: datetime


class Ledger:
    """A service's database, read only."""

    def __init__(self, database: Path) -> None:
        self.database = database

    def _all(self, query: str) -> list[tuple[Any, ...]]:
        if not self.database.exists():
            return []
        with closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True, timeout=10)) as db:
            return db.execute(query).fetchall()

    def published(self) -> list[tuple[str, str]]:
        """Return the id and name of all confirmed events."""
        return self._all("SELECT event_id, name FROM ledger_published")

    def attempts(self) -> list[Attempt]:
        rows = self._all(
            "SELECT handler, event_id, attempt, state, exception, due_at, began_at, ended_at "
            "FROM ledger_attempt ORDER BY began_at"
        )
        return [Attempt(*row[:5], *map(_moment, row[5:])) for row in rows]

    def archive(self) -> list[Archived]:
        """Return the archive's table."""
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
        """Count the failures in django-celery-results."""
        query = "SELECT COUNT(*) FROM django_celery_results_taskresult WHERE status = 'FAILURE'"
        return int(self._all(query)[0][0])


def _moment(text: str | None) -> Any:
    return datetime.fromisoformat(text).replace(tzinfo=UTC) if text else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Archived:
    """An archived event."""

    event: str
    event_id: str
    handler: str
    reason: str
    exception: str
    attempts: int
    line: str
    subject: str
    state: str
    replays: int

    @property
    def open(self) -> bool:
        """Return True without an outcome."""
        return self.state not in ("succeeded", "discarded")


class Queues:
    """The broker's queues, over plain AMQP: a passive declare counts the ready messages."""

    def __init__(self, url: str) -> None:
        self.connection = Connection(url, connect_timeout=5)
        self.connection.ensure_connection(
            max_retries=2, timeout=10, reraise_as_library_errors=False
        )
        self.channel = self.connection.channel()

    def close(self) -> None:
        self.connection.close()

    def depth(self, queue: str) -> tuple[int, int]:
        """Return the numbers of ready messages and of consumers, zeros for a missing queue."""
        try:
            answer = self.channel.queue_declare(queue, passive=True)
        except NotFound:
            self.channel = self.connection.channel()
            return 0, 0
        return answer.message_count, answer.consumer_count

    def depths(self, queues: Iterable[str]) -> dict[str, int]:
        return {queue: self.depth(queue)[0] for queue in queues}


def _subject(body: bytes | str) -> str:
    """Return the order number of an event."""
    try:
        return str(json.loads(body)[1].get("number", ""))
    except (ValueError, LookupError, AttributeError):
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The counts of one handler.

    Attributes:
        archived: open in the archive's table, and not handled.
        waiting: in the handler's queue.
        doubled: runs that ended well after the first one that did.
    """

    service: str
    handler: str
    events: int
    handled: int
    retried: int
    archived: int
    discarded: int
    replayed: int
    waiting: int
    doubled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What became of everything that was accepted.

    Attributes:
        missing: (handler, event id), neither handled nor archived. That the archive calls a replay
            succeeded is no proof: the handler's ledger must have the event.
        delayed: depths of all other queues that are not empty, such as delay queues and archives.
        open: archived events without an outcome.
    """

    published: Counter[str]
    rows: list[Row]
    missing: set[tuple[str, str]]
    delayed: dict[str, int]
    open: dict[str, int]

    def total(self, column: str) -> int:
        """Add up a column of the rows."""
        return sum(getattr(row, column) for row in self.rows)

    @property
    def waiting(self) -> int:
        return self.total("waiting") + sum(self.delayed.values())

    @property
    def lost(self) -> int:
        """Accepted events that are nowhere."""
        return max(0, len(self.missing) - self.waiting)


def account(
    topologies: Iterable[ServiceTopology],
    ledgers: dict[str, Ledger],
    depths: dict[str, int],
    archives: dict[str, list[Archived]],
) -> Account:
    """Compare the accepted events with what became of them, handler by handler.

    Args:
        archives: by service, the contents of the archive's table.
    """
    events = [pair for ledger in ledgers.values() for pair in ledger.published()]
    rows, missing = [], set()
    delayed = {}
    for topology in topologies:
        attempts = ledgers[topology.service].attempts()
        for queue, role in topology.queues.items():
            if depths.get(queue) and role != "handler":
                delayed[f"{topology.service} {queue.rpartition('.')[2]}"] = depths[queue]
        for queue, handler in topology.handlers.items():
            accepted = {key for key, name in events if handler in topology.wants(name)}
            done = [a for a in attempts if a.handler == handler and a.state == "SUCCESS"]
            handled = {attempt.event_id for attempt in done}
            kept = [a for a in archives[topology.service] if a.handler == handler]
            archived = {a.event_id for a in kept if a.open} - handled
            discarded = {a.event_id for a in kept if a.state == "discarded"} - handled - archived
            missing |= {(handler, key) for key in accepted - handled - archived - discarded}
            rows.append(
                Row(
                    service=topology.service,
                    handler=handler,
                    events=len(accepted),
                    handled=len(handled),
                    retried=sum(a.handler == handler and a.state == "RETRY" for a in attempts),
                    archived=len(archived),
                    discarded=len(discarded),
                    replayed=sum(a.replays for a in kept),
                    waiting=depths.get(queue, 0),
                    doubled=len(done) - len(handled),
                )
            )
    return Account(
        published=Counter(name for _, name in events),
        rows=rows,
        missing=missing,
        delayed=delayed,
        open={service: sum(a.open for a in found) for service, found in archives.items()},
    )
