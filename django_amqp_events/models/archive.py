"""Archived events, and their failures, revisions and actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from amqp.serialization import dumps, loads
from django.db import models
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from ..context import ReceivedEvent
from ..message import decoding
from ..message.formats import STRUCTURED, media_type
from ..message.headers import CONTENT_ENCODING, CONTENT_TYPE, EVENT_FORMAT
from ..message.text import visible
from ..message.types import Payload, Received, task_id
from .base import (
    LENGTH,
    AuditRow,
    ChoiceField,
    DocumentField,
    Moment,
    PartialIndex,
    ReasonField,
    read_document,
)
from .groups import FailureGroup


class State(models.TextChoices):
    """The state of an archived event; docs/archive.md has the diagram."""

    ARCHIVED = "archived", _("archived")
    QUEUED = "queued", _("queued")
    REPLAYING = "replaying", _("replaying")
    SUCCEEDED = "succeeded", _("succeeded")
    DISCARDED = "discarded", _("discarded")


class ArchivedEvent(models.Model):
    """An event that failed in one handler. One row per event, handler and body.

    Attributes:
        id: derived from the message, so that the same message always makes the same row
            (:meth:`django_amqp_events.message.archive_message.Archived.identity`).
        handler: ``""`` if none was found.
        event_id: as published; a message without an id gets one.
        version: counts changes of state; a decision names the version that it is about.
        reason, detail, exception, message, location: of the last failure; *location* is its
            innermost frame outside of installed packages.
        group: ``None`` until the event is assigned to one.
        attempts: runs of the handler, including replays.
        replays: the number of the current replay.
        unconfirmed: the current replay was not confirmed, but may have been published.
        error: why the current replay was not published.
        body: as published, byte for byte.
        headers_raw: the publisher's headers as an AMQP table.
    """

    #: Columns that are read only where they are shown or published.
    LARGE: ClassVar = ("body", "headers_raw", "detail")

    id = models.UUIDField(primary_key=True)
    service = models.CharField(max_length=LENGTH)
    handler = models.CharField(max_length=LENGTH)
    queue = models.CharField(max_length=LENGTH)
    name = models.CharField(max_length=LENGTH)
    event_id = models.CharField(max_length=LENGTH)
    source = models.CharField(max_length=LENGTH)
    correlation_id = models.CharField(max_length=LENGTH)
    causation_id = models.CharField(max_length=LENGTH)
    published_at = Moment(null=True)
    first_failed_at = Moment()
    last_failed_at = Moment()
    mirrored_at = Moment()
    state = ChoiceField(max_length=16, choices=State, default=State.ARCHIVED)
    state_since = Moment()
    version = models.PositiveIntegerField(default=0)
    reason = models.CharField(max_length=32)
    detail = models.TextField()
    exception = models.CharField(max_length=LENGTH)
    message = models.CharField(max_length=LENGTH)
    location = models.CharField(max_length=LENGTH)
    # A group with events is never deleted.
    group = models.ForeignKey(
        FailureGroup,
        models.DO_NOTHING,
        related_name="event_set",
        null=True,
        db_index=False,
    )
    attempts = models.PositiveIntegerField(default=1)
    replays = models.PositiveIntegerField(default=0)
    unconfirmed = models.BooleanField(default=False)
    error = ReasonField()
    body = models.BinaryField()
    body_size = models.PositiveIntegerField()
    headers_raw = models.BinaryField()
    content_type = models.CharField(max_length=LENGTH)
    content_encoding = models.CharField(max_length=LENGTH)

    class Meta:
        verbose_name = _("archived event")
        verbose_name_plural = _("archived events")
        ordering: ClassVar = ["-last_failed_at", "-pk"]
        default_permissions = ("view",)
        permissions: ClassVar = [
            ("view_payload_archivedevent", "Can view payload and headers of archived events"),
            ("replay_archivedevent", "Can replay archived events"),
            ("discard_archivedevent", "Can discard archived events"),
            ("restore_archivedevent", "Can restore discarded events"),
            ("force_archivedevent", "Can force replays of overdue events"),
            ("bulk_replay_archivedevent", "Can replay archived events in batches"),
            ("edit_archivedevent", "Can edit the payload of archived events and replay them"),
            ("view_raw_archivedevent", "Can view raw bodies where payloads are redacted"),
        ]
        # One for each filter of the list, in the order of the list.
        indexes: ClassVar = [
            models.Index(fields=["-last_failed_at", "-id"], name="amqp_events_failed"),
            models.Index(fields=["state", "-last_failed_at", "-id"], name="amqp_events_state"),
            models.Index(fields=["handler", "-last_failed_at", "-id"], name="amqp_events_handler"),
            models.Index(fields=["name", "-last_failed_at", "-id"], name="amqp_events_name"),
            models.Index(fields=["exception", "-last_failed_at", "-id"], name="amqp_events_exc"),
            models.Index(fields=["reason", "-last_failed_at", "-id"], name="amqp_events_reason"),
            models.Index(fields=["state", "state_since"], name="amqp_events_since"),
            # For equal ids, and in PostgreSQL for prefixes, in any collation.
            models.Index(
                fields=["event_id"], name="amqp_events_event_id", opclasses=["varchar_pattern_ops"]
            ),
            models.Index(
                fields=["correlation_id"],
                name="amqp_events_correlation",
                opclasses=["varchar_pattern_ops"],
            ),
            models.Index(fields=["group", "-last_failed_at", "-id"], name="amqp_events_group"),
            # For the number of a group's events in each state, and the oldest of them.
            models.Index(
                fields=["group", "state", "mirrored_at", "state_since"],
                name="amqp_events_group_state",
            ),
            # For open events, where nearly all others are settled.
            PartialIndex(
                fields=["group", "-last_failed_at", "-id"],
                name="amqp_events_group_open",
                where={"state": "archived"},
            ),
        ]

    def __str__(self) -> str:
        return str(_("%(name)s (%(id)s) for %(handler)s")) % {
            "name": visible(self.name),
            "id": visible(self.event_id),
            "handler": visible(self.handler) or pgettext_lazy("for", "no handler"),
        }

    @cached_property
    def headers(self) -> Mapping[str, Any]:
        """The publisher's headers, with their AMQP types."""
        raw = bytes(self.headers_raw)
        return dict(loads("F", raw, 0)[0][0]) if raw else {}

    @property
    def received(self) -> Received:
        """The parts of the original message that a copy needs."""
        properties = {
            "content_type": self.content_type,
            "content_encoding": self.content_encoding,
        }
        return Received(
            queue=self.queue,
            exchange="",
            routing_key=self.name,
            body=bytes(self.body),
            headers=self.headers,
            properties={key: value for key, value in properties.items() if value},
        )

    @property
    def event(self) -> ReceivedEvent:
        """The event's identity."""
        return ReceivedEvent(
            id=self.event_id,
            name=self.name,
            service=self.source,
            published_at=self.published_at,
            attempt=self.attempts,
            correlation_id=self.correlation_id or self.event_id,
            causation_id=self.causation_id or None,
            content_type=self.content_type,
        )

    @cached_property
    def decoded(self) -> Payload | None:
        """The decoded body; ``None`` if it is invalid."""
        try:
            return decoding.decode(self.received, self.body_size)
        except Exception:  # noqa: BLE001 - Malformed, or headers that were changed by hand
            return None

    @property
    def payload(self) -> Mapping[str, Any] | None:
        """The arguments by name; ``None`` if the body is invalid."""
        return None if self.decoded is None else self.decoded.kwargs

    @property
    def task_id(self) -> str:
        """The id of the TaskResult of the run before any replay."""
        return task_id(self.service, self.handler, self.event)

    @staticmethod
    def pack_headers(headers: Mapping[str, Any]) -> bytes:
        """Write headers as an AMQP table, which keeps all their types."""
        return bytes(dumps("F", [dict(headers)])) if headers else b""


class SearchValue(models.Model):
    """A value of an event's payload, by which the event is found.

    Only :mod:`django_amqp_events.archive.search_values` writes rows. They are part of the payload:
    pages show them to users who may view payloads.

    Attributes:
        path: as ``SEARCH`` names it.
        value: as text; a long one is cut, see
            :func:`django_amqp_events.archive.search_values.as_text`.
    """

    id = models.BigAutoField(primary_key=True)
    event = models.ForeignKey(
        ArchivedEvent, models.CASCADE, related_name="search_values", db_index=False
    )
    path = models.CharField(max_length=LENGTH)
    value = models.CharField(max_length=LENGTH)

    class Meta:
        default_permissions = ()
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["event", "path", "value"], name="amqp_search_unique"),
        ]
        indexes: ClassVar = [
            # For a value at any path too; the search reads no row of the table.
            models.Index(
                fields=["value", "path", "event"],
                name="amqp_search_value",
                opclasses=["varchar_pattern_ops", "varchar_pattern_ops", "uuid_ops"],
            ),
        ]

    def __str__(self) -> str:
        return visible(f"{self.path}={self.value}")


class Revision(AuditRow):
    """A payload published in place of an event's own; the event keeps its body."""

    id = models.UUIDField(primary_key=True)
    event = models.ForeignKey(ArchivedEvent, models.CASCADE, related_name="revision_set")
    number = models.PositiveIntegerField()
    body = models.BinaryField()
    reason = models.TextField()

    class Meta(AuditRow.Meta):
        ordering: ClassVar = ["number"]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["event", "number"], name="amqp_revision_number"),
        ]

    @cached_property
    def payload(self) -> Mapping[str, Any]:
        """The arguments by name; ``{}`` if the body is invalid."""
        try:
            return decoding.decode(self.received(self.event.received), len(self.body)).kwargs
        except Exception:  # noqa: BLE001 - Malformed
            return {}

    def received(self, original: Received) -> Received:
        """Return the event's message with this body, which has its format if that is known."""
        body, headers, content_type = bytes(self.body), original.headers, CONTENT_TYPE
        # The event's own properties may be why it is malformed.
        if body.startswith(b"["):
            headers = {**headers, EVENT_FORMAT: "celery"}
        elif media_type(original) == STRUCTURED:
            content_type = STRUCTURED
        properties = {"content_type": content_type, "content_encoding": CONTENT_ENCODING}
        return replace(original, body=body, headers=headers, properties=properties)


class ArchivedFailure(models.Model):
    """One archive message: the end of a run with its retries.

    Attributes:
        id: derived from the message, so that storing it twice makes one row.
        replay: the replay that failed, ``None`` for the first run.
        failed_at: of the last attempt of this run.
        late: it arrived after the event was settled, or belongs to an older replay.
        document: the header ``event-archive``: traceback, frames, attempts, deaths.
    """

    id = models.UUIDField(primary_key=True)
    event = models.ForeignKey(ArchivedEvent, models.CASCADE, related_name="failure_set")
    replay = models.ForeignKey("Replay", models.SET_NULL, related_name="failure_set", null=True)
    reason = models.CharField(max_length=32)
    exception = models.CharField(max_length=LENGTH)
    message = models.CharField(max_length=LENGTH)
    failed_at = Moment()
    mirrored_at = Moment()
    late = models.BooleanField(default=False)
    document = DocumentField()

    class Meta:
        ordering: ClassVar = ["failed_at"]
        default_permissions = ()
        # For the failures of an hour; no row is read.
        indexes: ClassVar = [models.Index(fields=["failed_at", "late"], name="amqp_failure_at")]

    def __str__(self) -> str:
        return f"{self.exception or self.reason} at {self.failed_at:%Y-%m-%d %H:%M:%S}"

    @cached_property
    def about(self) -> Mapping[str, Any]:
        """The decoded document; ``{}`` if the message had none."""
        return read_document(self.document)


class ArchiveAction(AuditRow):
    """An action on an archived event.

    Attributes:
        replay_id: of the replay that the action started.
        batch_id: of the replay's batch; it stays when the batch is deleted.
        group_id: of the event's failure group at that time.
    """

    class Action(models.TextChoices):
        REPLAY = "replay", _("replayed")
        EDIT = "edit", _("edited and replayed")
        FORCE = "force", _("replayed by force")
        DISCARD = "discard", _("discarded")
        RESOLVE = "resolve", _("marked as resolved")
        RESTORE = "restore", _("restored")

    id = models.BigAutoField(primary_key=True)
    event = models.ForeignKey(ArchivedEvent, models.CASCADE, related_name="action_set")
    action = ChoiceField(max_length=16, choices=Action)
    reason = models.TextField()
    # Not foreign keys, so that deleting a row changes no action.
    replay_id = models.UUIDField(null=True)
    batch_id = models.UUIDField(null=True)
    group_id = models.UUIDField(null=True)

    class Meta(AuditRow.Meta):
        indexes: ClassVar = [
            models.Index(fields=["group_id", "-at", "-id"], name="amqp_action_group"),
        ]
