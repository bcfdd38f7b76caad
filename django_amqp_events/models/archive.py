"""Archived events, their failures, replays and decisions."""

from __future__ import annotations

import json
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
from ..message.headers import CONTENT_ENCODING, CONTENT_TYPE
from ..message.types import Payload, Received, task_id
from .base import LENGTH, AppendOnly, Moment
from .groups import FailureGroup
from .text import visible


class State(models.TextChoices):
    """The state of an archived event; docs/archive.md has the diagram."""

    ARCHIVED = "archived", _("archived")
    QUEUED = "queued", _("queued")
    REPLAYING = "replaying", _("replaying")
    SUCCEEDED = "succeeded", _("succeeded")
    DISCARDED = "discarded", _("discarded")


class ArchivedEvent(models.Model):
    """An event that one handler could not handle. One row per event, handler and body.

    Attributes:
        id: made of source, event id, name, service, handler and body, so that the same message
            makes the same row however often it is read
            (:meth:`django_amqp_events.message.archive_message.Archived.identity`).
        service: the service whose handler it is.
        handler: ``""`` where nobody was found; ``queue`` says where it was.
        name, event_id, source, correlation_id, causation_id, published_at: as published.
            A message without an id has one of its own here.
        first_failed_at, last_failed_at: of all failures.
        mirrored_at: when the row was made.
        state_since: when it came into its state.
        version: counts changes of state: whoever acts on what he saw names it.
        reason, detail, exception, message, location: of the last failure; ``location`` is its
            innermost frame outside of installed packages.
        group: of failures like the last one; ``None`` where nobody has looked yet.
        attempts: runs of the handler, replays included.
        replays: number of replays, and so the number of the current one.
        claim: the operation that queued it last.
        unconfirmed: no confirm came for the current replay, which may be on its way all the same.
        error: why the current replay could not be published.
        body: as published, byte for byte.
        headers_raw: the publisher's headers as an AMQP table.
    """

    id = models.UUIDField(primary_key=True, editable=False)
    service = models.CharField(max_length=LENGTH)
    handler = models.CharField(max_length=LENGTH, blank=True)
    queue = models.CharField(max_length=LENGTH, blank=True)
    name = models.CharField(_("event"), max_length=LENGTH)
    event_id = models.CharField(_("event id"), max_length=LENGTH)
    source = models.CharField(_("published by"), max_length=LENGTH, blank=True)
    correlation_id = models.CharField(_("correlation id"), max_length=LENGTH, blank=True)
    causation_id = models.CharField(_("causation id"), max_length=LENGTH, blank=True)
    published_at = Moment(_("published"), null=True, blank=True)
    first_failed_at = Moment(_("first failed"))
    last_failed_at = Moment(_("last failed"))
    mirrored_at = Moment(_("mirrored"))
    state = models.CharField(max_length=16, choices=State, default=State.ARCHIVED)
    state_since = Moment(_("in this state since"))
    version = models.PositiveIntegerField(default=0)
    reason = models.CharField(max_length=32)
    detail = models.TextField(blank=True)
    exception = models.CharField(max_length=LENGTH, blank=True)
    message = models.CharField(max_length=LENGTH, blank=True)
    location = models.CharField(_("failing line"), max_length=LENGTH, blank=True)
    # Nothing is done to events when a group goes: one that has any does not.
    group = models.ForeignKey(
        FailureGroup,
        models.DO_NOTHING,
        related_name="event_set",
        null=True,
        blank=True,
        editable=False,
        db_index=False,
    )
    attempts = models.PositiveIntegerField(default=1)
    replays = models.PositiveIntegerField(default=0)
    claim = models.UUIDField(null=True, blank=True, editable=False)
    unconfirmed = models.BooleanField(default=False)
    error = models.TextField(blank=True)
    body = models.BinaryField()
    body_size = models.PositiveIntegerField(_("bytes"))
    headers_raw = models.BinaryField()
    content_type = models.CharField(max_length=LENGTH, blank=True)
    content_encoding = models.CharField(max_length=LENGTH, blank=True)

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
            ("force_archivedevent", "Can replay events whose replay never reported back"),
            ("bulk_replay_archivedevent", "Can replay any number of archived events in a batch"),
            ("edit_archivedevent", "Can edit the payload of archived events and replay them"),
            ("view_raw_archivedevent", "Can view raw bodies where payloads are redacted"),
            ("export_archivedevent", "Can export archived events"),
        ]
        # Each filter of the list with its order; a page is read from one of them.
        indexes: ClassVar = [
            models.Index(fields=["-last_failed_at", "-id"], name="amqp_events_failed"),
            models.Index(fields=["state", "-last_failed_at", "-id"], name="amqp_events_state"),
            models.Index(fields=["handler", "-last_failed_at", "-id"], name="amqp_events_handler"),
            models.Index(fields=["name", "-last_failed_at", "-id"], name="amqp_events_name"),
            models.Index(fields=["exception", "-last_failed_at", "-id"], name="amqp_events_exc"),
            models.Index(fields=["reason", "-last_failed_at", "-id"], name="amqp_events_reason"),
            models.Index(fields=["state", "state_since"], name="amqp_events_since"),
            # Of equal ids, and on PostgreSQL of those that begin alike, whatever its collation.
            models.Index(
                fields=["event_id"], name="amqp_events_event_id", opclasses=["varchar_pattern_ops"]
            ),
            models.Index(
                fields=["correlation_id"],
                name="amqp_events_correlation",
                opclasses=["varchar_pattern_ops"],
            ),
            models.Index(fields=["claim"], name="amqp_events_claim"),
            # Partial: it costs nothing where every confirm comes.
            models.Index(
                fields=["id"],
                name="amqp_events_unconfirmed",
                condition=models.Q(unconfirmed=True),
            ),
            models.Index(fields=["group", "-last_failed_at", "-id"], name="amqp_events_group"),
            # What is open of a group, a handler, … where nearly all of it is settled.
            *(
                models.Index(
                    fields=[column, "-last_failed_at", "-id"],
                    name=f"amqp_events_{name}_open",
                    condition=models.Q(state="archived"),
                )
                for column, name in (
                    ("group", "group"),
                    ("handler", "handler"),
                    ("name", "name"),
                    ("exception", "exc"),
                    ("reason", "reason"),
                )
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
        """The publisher's headers, with the types that they had."""
        raw = bytes(self.headers_raw)
        return dict(loads("F", raw, 0)[0][0]) if raw else {}

    @property
    def received(self) -> Received:
        """The message as the handler's queue had it, as far as a copy needs it."""
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
        )

    @cached_property
    def decoded(self) -> Payload | None:
        """The body, read; ``None`` where it cannot be."""
        try:
            return decoding.decode(self.received, self.body_size)
        except Exception:  # noqa: BLE001 - Malformed, or headers that somebody has changed by hand
            return None

    @property
    def payload(self) -> Mapping[str, Any] | None:
        """The arguments by name, ``None`` where the body cannot be read."""
        return None if self.decoded is None else self.decoded.kwargs

    @property
    def task_id(self) -> str:
        """Id of its TaskResult: of its run before any replay."""
        return task_id(self.source, self.event_id, self.handler, None)

    @staticmethod
    def pack_headers(headers: Mapping[str, Any]) -> bytes:
        """Write headers as an AMQP table, the only form that keeps all their types."""
        return bytes(dumps("F", [dict(headers)])) if headers else b""


class Revision(AppendOnly):
    """A payload published in place of an event's own. Append-only.

    The event keeps its body byte for byte, and its headers go along as they are.

    Attributes:
        number: 1 for the first revision of the event.
        base: the revision that the edit began with, 0 for the event's own body.
        body: as it is published.
        by, at, reason: who, when, and why, as he said.
    """

    id = models.UUIDField(primary_key=True, editable=False)
    event = models.ForeignKey(ArchivedEvent, models.CASCADE, related_name="revision_set")
    number = models.PositiveIntegerField()
    base = models.PositiveIntegerField(default=0)
    body = models.BinaryField()
    by = models.CharField(max_length=LENGTH, blank=True)
    at = Moment()
    reason = models.TextField(blank=True)

    class Meta:
        ordering: ClassVar = ["number"]
        default_permissions = ()
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["event", "number"], name="amqp_revision_number"),
        ]

    def __str__(self) -> str:
        return f"revision {self.number} by {self.by or 'nobody'}"

    @cached_property
    def payload(self) -> Mapping[str, Any]:
        """The arguments by name; ``{}`` if the body was changed by hand."""
        try:
            return decoding.decode_body(bytes(self.body)).kwargs
        except Exception:  # noqa: BLE001 - Malformed
            return {}

    def received(self, original: Received) -> Received:
        """Return the event's message with this body."""
        properties = {
            "content_type": CONTENT_TYPE,
            "content_encoding": CONTENT_ENCODING,
        }
        return replace(original, body=bytes(self.body), properties=properties)


class Replay(models.Model):
    """A replay of an archived event; its id travels with the message.

    Attributes:
        number: 1 for the first replay of the event.
        revision: what it publishes in place of the event's own body, if anything.
        handler: where it went; another than the event's where that was renamed.
        outcome: how far it has come.
        requested_by: user name, or the command's.
        reason: why, as somebody said.
        published_at: when the broker confirmed it, last.
        finished_at: when the handler was through, by the worker's clock.
        publishes: tries to publish it: one, unless a process died or a confirm did not come. It may
            have run as often.
        error: why it could not be published.
    """

    class Outcome(models.TextChoices):
        QUEUED = "queued", _("queued")
        PUBLISHED = "published", _("published")
        REFUSED = "refused", _("not published")
        UNCONFIRMED = "unconfirmed", _("not confirmed")
        SUCCEEDED = "succeeded", _("succeeded")
        FAILED = "failed", _("failed again")

    id = models.UUIDField(primary_key=True, editable=False)
    event = models.ForeignKey(ArchivedEvent, models.CASCADE, related_name="replay_set")
    number = models.PositiveIntegerField()
    # Not to null: the event's own body would go out in its place.
    revision = models.ForeignKey(
        Revision, models.RESTRICT, related_name="replay_set", null=True, blank=True
    )
    handler = models.CharField(max_length=LENGTH)
    outcome = models.CharField(max_length=16, choices=Outcome, default=Outcome.QUEUED)
    requested_at = Moment()
    requested_by = models.CharField(max_length=LENGTH, blank=True)
    reason = models.TextField(blank=True)
    published_at = Moment(null=True, blank=True)
    finished_at = Moment(null=True, blank=True)
    publishes = models.PositiveIntegerField(default=0)
    error = models.TextField(blank=True)

    class Meta:
        ordering: ClassVar = ["number"]
        default_permissions = ()
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["event", "number"], name="amqp_replay_number"),
        ]

    def __str__(self) -> str:
        return f"replay {self.number} of {self.event_id}"

    @property
    def received(self) -> Received:
        """The message that it publishes, as far as a copy needs it."""
        original = self.event.received
        return original if self.revision is None else self.revision.received(original)

    @property
    def task_id(self) -> str:
        """Id of its TaskResult."""
        event = self.event
        return task_id(event.source, event.event_id, self.handler, str(self.pk))


class ArchivedFailure(models.Model):
    """One archive message: the end of a first run with its retries, or of a replay.

    Attributes:
        id: made of the message, so that reading it twice makes one row.
        replay: the replay that failed, ``None`` for the first run.
        attempts: of this run.
        failed_at: the last of them.
        late: it came after the event was settled, or for an older replay, and changed nothing.
        document: the header ``event-archive``, JSON: traceback, frames, attempts, deaths.
    """

    id = models.UUIDField(primary_key=True, editable=False)
    event = models.ForeignKey(ArchivedEvent, models.CASCADE, related_name="failure_set")
    replay = models.ForeignKey(
        Replay, models.SET_NULL, related_name="failure_set", null=True, blank=True
    )
    reason = models.CharField(max_length=32)
    exception = models.CharField(max_length=LENGTH, blank=True)
    message = models.CharField(max_length=LENGTH, blank=True)
    attempts = models.PositiveIntegerField(default=1)
    failed_at = Moment()
    mirrored_at = Moment()
    late = models.BooleanField(default=False)
    document = models.TextField(blank=True)

    class Meta:
        ordering: ClassVar = ["failed_at"]
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.exception or self.reason} at {self.failed_at:%Y-%m-%d %H:%M:%S}"

    @cached_property
    def about(self) -> Mapping[str, Any]:
        """The document, read; ``{}`` where the message had none."""
        try:
            found = json.loads(self.document)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


class ArchiveAction(AppendOnly):
    """An action on an archived event. Append-only.

    Attributes:
        action: ``replay``, ``edit``, ``force``, ``discard``, ``restore``.
        by: user name, or the command's.
        reason: why, as somebody said.
        replay: the replay that came of it.
        batch: the batch that it was done in; its id stays when the batch is deleted.
    """

    class Action(models.TextChoices):
        REPLAY = "replay", _("replayed")
        EDIT = "edit", _("edited and replayed")
        FORCE = "force", _("replayed by force")
        DISCARD = "discard", _("discarded")
        RESTORE = "restore", _("restored")

    event = models.ForeignKey(ArchivedEvent, models.CASCADE, related_name="action_set")
    at = Moment()
    action = models.CharField(max_length=16, choices=Action)
    by = models.CharField(max_length=LENGTH, blank=True)
    reason = models.TextField(blank=True)
    replay = models.ForeignKey(Replay, models.SET_NULL, null=True, blank=True, related_name="+")
    # Without a constraint: a row of the audit is not changed because a batch is old.
    batch = models.ForeignKey(
        "ReplayBatch",
        models.DO_NOTHING,
        null=True,
        blank=True,
        related_name="+",
        db_constraint=False,
        db_index=False,
    )

    class Meta:
        ordering: ClassVar = ["at", "pk"]
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.get_action_display()} by {self.by or 'nobody'}"
