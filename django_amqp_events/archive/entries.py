"""Read messages of the archive queue as entries: failures of events, and outcomes of replays."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from ..conf import Settings
from ..databases import error_line
from ..message import archive_message
from ..message.archive_message import Archived
from ..message.content_digest import content_digest
from ..message.types import Received, derived_id
from ..models import LENGTH, Replay, clean
from .selection import parse_uuid

logger = logging.getLogger(__name__)

#: Years of valid times; pages could not show others in every time zone.
YEARS: Final = range(1970, 3000)


@dataclass(slots=True)
class Outcome:
    """The outcome of a replay."""

    replay_id: UUID
    at: datetime


@dataclass(slots=True)
class Entry:
    """An archived event, and the rows that it becomes.

    Attributes:
        first_id: of its row, if it is the first of equal messages.
        number: how many equal messages without an id are before it, see :meth:`Archived.identity`.
        id, failure_id: of its rows.
    """

    archived: Archived
    message: Received
    service: str
    now: datetime
    first_id: UUID
    number: int = 0
    failed_at: datetime = field(init=False)
    id: UUID = field(init=False)
    failure_id: UUID = field(init=False)
    replay: Replay | None = None

    def __post_init__(self) -> None:
        self.failed_at = valid_moment(self.archived.last_failed_at) or self.now
        if (copy := self.archived.copy) is not None and not copy.run:
            self.number = copy.number

    def begin(self) -> None:
        """Forget what a transaction that was rolled back has found."""
        self.replay = None
        self.id = self.row_id(self.number)
        self.failure_id = self.archived.occurrence(self.id)

    def row_id(self, number: int) -> UUID:
        return self.archived.identity(self.service, number) if number else self.first_id

    @property
    def first_copy(self) -> bool:
        """Return True if ``events_recover`` has copied no other message into this one's row."""
        return bool(self.replay is None and self.archived.copy and self.archived.copy.run)

    @property
    def copied_again(self) -> bool:
        """Return True if an earlier run of ``events_recover`` may have copied the message."""
        return bool(self.replay is None and self.archived.copy and not self.archived.copy.run)


Item = Entry | Outcome


def read_entries(
    messages: Sequence[Received], settings: Settings, alike: Counter[UUID]
) -> list[Item]:
    """Read messages of the archive queue, in the order in which a connection delivers them.

    Args:
        alike: how many equal messages the connection has delivered before; it is counted on.
    """
    now = datetime.now(UTC)
    items: list[Item] = []
    for message in messages:
        try:
            item = _item(message, settings.service, now)
        except Exception as exc:
            logger.exception("an archive message cannot be read; its bytes are kept")
            first_id = derived_id(settings.service, content_digest(message))
            item = bare_entry(message, exc, settings.service, now, first_id)
        # What was archived has a time, so two are equal only if it was published twice.
        if isinstance(item, Entry) and item.archived.content and not item.archived.text:
            item.number = alike[item.first_id]
            alike[item.first_id] += 1
        items.append(item)
    return items


def _item(message: Received, service: str, now: datetime) -> Item:
    document = archive_message.read(message)
    if isinstance(document, Archived):
        return Entry(document, message, service, now, document.identity(service))
    replay_id = parse_uuid(document.event.replay_id or "")
    if document.outcome == "succeeded" and replay_id is not None:
        return Outcome(replay_id, valid_moment(document.at) or now)
    first_id = derived_id(service, content_digest(message))
    return bare_entry(message, ValueError("it has an unknown outcome"), service, now, first_id)


def bare_entry(
    message: Received, exc: Exception, service: str, now: datetime, first_id: UUID
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
    return Entry(replace(document, content=first_id.hex), raw, service, now, first_id)


def valid_moment(value: datetime | None) -> datetime | None:
    return value if value is not None and value.year in YEARS else None
