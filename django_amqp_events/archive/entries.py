"""Read messages of the archive queue as entries: failures of events, and outcomes of replays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import UUID, uuid4

from ..conf import Settings
from ..databases import error_line
from ..logs import get_logger
from ..message import archive_message
from ..message.archive_message import Archived
from ..message.text import valid_moment
from ..message.types import Received, derived_id
from ..models import LENGTH, Replay, clean
from .selection import parse_uuid

logger = get_logger(__name__)


@dataclass(slots=True)
class Outcome:
    """The successful end of a replay.

    Attributes:
        superseded: its handler was not called, since it has handled a newer event.
    """

    replay_id: UUID
    at: datetime
    superseded: bool


@dataclass(slots=True)
class Entry:
    """An archived event, and the rows that it becomes.

    Attributes:
        own_id: of its row, unless it is the end of a replay.
        id, failure_id: of its rows.
        now: when it is stored, by the database's clock.
    """

    archived: Archived
    message: Received
    service: str
    now: datetime
    own_id: UUID
    first_failed_at: datetime = field(init=False)
    failed_at: datetime = field(init=False)
    id: UUID = field(init=False)
    failure_id: UUID = field(init=False)
    replay: Replay | None = None

    def __post_init__(self) -> None:
        self.failure_id = self.archived.occurrence(self.own_id)

    def begin(self, now: datetime) -> None:
        """Forget what a transaction that was rolled back has found."""
        self.id, self.replay, self.now = self.own_id, None, now
        # The clock of a worker may be ahead: its failures would be the newest for so long.
        self.failed_at = min(valid_moment(self.archived.last_failed_at) or now, now)
        first = valid_moment(self.archived.first_failed_at) or now
        self.first_failed_at = min(first, self.failed_at)


Item = Entry | Outcome


def read_entries(messages: Sequence[Received], settings: Settings) -> list[Item]:
    """Read messages of the archive queue."""
    now = datetime.now(UTC)
    items: list[Item] = []
    for message in messages:
        try:
            item = _item(message, settings.service, now)
        except Exception as exc:
            logger.exception("an archive message cannot be read; its bytes are kept")
            item = bare_entry(message, exc, settings.service, now, _new_id())
        items.append(item)
    return items


def _item(message: Received, service: str, now: datetime) -> Item:
    document = archive_message.read(message)
    if isinstance(document, Archived):
        own_id = document.identity(service) or _new_id()
        return Entry(document, message, service, now, own_id)
    replay_id = parse_uuid(document.event.replay_id or "")
    if document.outcome in ("succeeded", "superseded") and replay_id is not None:
        superseded = document.outcome == "superseded"
        return Outcome(replay_id, valid_moment(document.at) or now, superseded)
    return bare_entry(message, ValueError("it has an unknown outcome"), service, now, _new_id())


def _new_id() -> UUID:
    return derived_id(uuid4().hex)


def bare_entry(
    message: Received, exc: Exception, service: str, now: datetime, own_id: UUID
) -> Entry:
    """Return an entry with nothing but a message's bytes, for a database that refuses the rest."""
    raw = Received(
        queue=message.queue,
        exchange=message.exchange,
        routing_key=clean(message.routing_key, LENGTH),
        body=message.body,
        headers={},
        properties={},
        unreadable=f"it cannot be stored with its headers: {error_line(exc)}",
    )
    document = archive_message.read(raw)
    assert isinstance(document, Archived)  # noqa: S101 - what is unreadable is no outcome
    return Entry(document, raw, service, now, own_id)
