"""Messages between a call to publish and the broker, and the interface of a broker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from django.db.backends.base.base import BaseDatabaseWrapper

from ..conf import PublishMode, get_settings
from ..exceptions import PublishError
from ..logs import get_logger, message_fields
from ..message.types import Message
from . import outbox_rows
from .outbox_rows import Answer, Row
from .relay import report_answers, report_published

logger = get_logger(__name__)


class Backend:
    """What messages are published to: RabbitMQ, or a double in this process.

    Attributes:
        has_relay: a relay publishes rows that this process does not publish.
    """

    has_relay = False

    def publish(
        self, messages: Sequence[Message], *, mandatory: bool
    ) -> Sequence[PublishError | None]:
        """Publish messages; return one entry per message, ``None`` if it was accepted."""
        raise NotImplementedError

    def now(self) -> datetime:
        """Return the time, aware; events are stamped with it."""
        return datetime.now(UTC)

    def watch(self, pending: Pending, messages: Sequence[Message]) -> None:
        """Note the messages of a call, and what will publish them."""

    def prepare(self) -> None:
        """Raise ConfigurationError if rows cannot be published."""

    def publish_rows(self, rows: list[Row], *, alias: str, began: float) -> None:
        """Publish committed rows of the outbox, and record the answers.

        Args:
            alias: their database.
            began: monotonic time before the first was written, from which leases are measured.
        """
        settings = get_settings()
        errors = self.publish(
            [row.message for row in rows], mandatory=settings.unrouted != "ignore"
        )
        answers = list(map(Answer, rows, errors))
        outbox_rows.record_answers(alias, answers, settings)
        report_answers(answers, settings)


@dataclass(slots=True, kw_only=True, eq=False)
class Pending:
    """Messages that are published together, once: when called, after a commit if there is one.

    Attributes:
        connection: the database connection whose commit they wait for; ``None`` in mode
            ``immediate``.
        rows: in mode ``outbox``, instead of messages.
        size: bytes of the bodies of the rows.
        began: monotonic time before the first row was written.
    """

    backend: Backend
    mode: PublishMode
    connection: BaseDatabaseWrapper | None = None
    messages: list[Message] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    size: int = 0
    began: float = 0.0
    called: bool = False

    @property
    def waiting(self) -> bool:
        """Return True if the transaction has neither been committed nor rolled back."""
        if self.called or self.connection is None:
            return False
        return any(entry[1] is self for entry in self.connection.run_on_commit)

    def __call__(self) -> None:
        if self.called:
            return
        self.called = True
        if self.connection is not None and self.rows:
            self.backend.publish_rows(self.rows, alias=self.connection.alias, began=self.began)
            return
        settings = get_settings()
        errors = self.backend.publish(self.messages, mandatory=settings.unrouted != "ignore")
        failed = report_published(zip(self.messages, errors, strict=True), settings)
        if not failed:
            return
        message, first = failed[0]
        first.errors = {message.event_id: error for message, error in failed}
        # One line: while RabbitMQ is unreachable, all fail alike.
        of_all = f"{len(failed)} of {len(self.messages)} events"
        logger.error("%s were not confirmed: %s", of_all, first, extra=message_fields(message))
        if len(failed) > 1:
            first.add_note(f"{of_all} failed; see .errors")
        raise first
