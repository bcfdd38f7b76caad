"""What the archive's mirror keeps: archived events, each failure, each replay, each decision; and
the groups of failures that are alike.

Rows change state only through :mod:`django_amqp_events.lifecycle`. Text columns hold nothing
that a database could refuse (:func:`clean`); what came from outside byte for byte is in binary
columns, or in text that is ASCII.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn, TypeVar
from uuid import uuid4

from amqp.serialization import dumps, loads
from django.db import models
from django.utils.timezone import get_default_timezone, is_naive, make_aware
from django.utils.translation import gettext_lazy as _
from django.utils.translation import gettext_noop, pgettext_lazy

from . import envelope
from .context import ReceivedEvent
from .envelope import Payload, Received
from .exceptions import AppendOnlyError
from .sentences import Sentence

if TYPE_CHECKING:
    _DateTimeField = models.DateTimeField[Any, Any]
else:
    _DateTimeField = models.DateTimeField

M = TypeVar("M", bound=models.Model)

#: Longest text of the columns that lists, filters and indexes use.
LENGTH: Final = 255


_HIDDEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\uffff\ud800-\udfff\U000e0000-\U000e007f]"
)


class State(models.TextChoices):
    """Where an archived event stands; docs/archive.md draws it."""

    ARCHIVED = "archived", _("archived")
    QUEUED = "queued", _("queued")
    REPLAYING = "replaying", _("replaying")
    SUCCEEDED = "succeeded", _("succeeded")
    DISCARDED = "discarded", _("discarded")


class Moment(_DateTimeField):
    """A time that has a time zone, also where ``USE_TZ`` is off and Django takes it away."""

    def from_db_value(self, value: datetime | None, *_: object) -> datetime | None:
        if value is not None and is_naive(value):
            # The connection's own, and so the one that the database has written it in.
            return make_aware(value, get_default_timezone()).astimezone(UTC)
        return value

    def deconstruct(self) -> Any:
        # It is the same column, and no migration need know of this class.
        name, _, args, kwargs = super().deconstruct()
        return name, "django.db.models.DateTimeField", args, kwargs


class FailureGroup(models.Model):
    """Failures that are alike: one handler, one exception, one place in the project's own code.

    What it counts is told by :mod:`django_amqp_events.tallies`: the columns here are behind by
    the rows of :class:`TallyChange` that nobody has added yet.

    Attributes:
        id: made of the next six (:func:`django_amqp_events.grouping.fingerprint`).
        algorithm: version of how it is made.
        service, handler, exception, frame, reason: what its failures have in common; ``reason``
            stands in where nothing was raised.
        first_seen, last_seen: when an event of it failed, first and last.
        open: events that are archived.
        again: of these, the ones that were replayed before.
        going: events that are queued or replaying.
        put_right_at: when its last open event was settled; ``None`` while it has never been, or
            somebody has restored one.
        came_back_at: when it failed again after that; ``None`` while it is put right.
        note, assignee, ticket: what people write; ``assignee`` is a user's name, ``ticket`` an
            address.
        edits: counts changes of these three: whoever writes names the one that he saw.
    """

    id = models.UUIDField(primary_key=True, editable=False)
    algorithm = models.PositiveIntegerField()
    service = models.CharField(max_length=LENGTH)
    handler = models.CharField(max_length=LENGTH, blank=True)
    exception = models.CharField(max_length=LENGTH, blank=True)
    frame = models.CharField(_("failing function"), max_length=LENGTH, blank=True)
    reason = models.CharField(max_length=32, blank=True)
    first_seen = Moment(_("first seen"))
    last_seen = Moment(_("last seen"))
    # Signed: what is added up out of order may be below nothing for a moment.
    open = models.IntegerField(default=0)
    again = models.IntegerField(default=0)
    going = models.IntegerField(default=0)
    put_right_at = Moment(_("put right"), null=True, blank=True)
    came_back_at = Moment(_("came back"), null=True, blank=True)
    note = models.TextField(blank=True)
    assignee = models.CharField(max_length=LENGTH, blank=True)
    ticket = models.CharField(max_length=LENGTH, blank=True)
    edits = models.PositiveIntegerField(default=0)

    class Meta:
        verbose_name = _("failure group")
        verbose_name_plural = _("failure groups")
        ordering: ClassVar = ["-last_seen", "-pk"]
        default_permissions = ("view",)
        permissions: ClassVar = [
            ("assign_failuregroup", "Can write note, assignee and ticket of failure groups"),
        ]
        indexes: ClassVar = [
            models.Index(fields=["-last_seen", "-id"], name="amqp_group_seen"),
            models.Index(fields=["handler", "-last_seen", "-id"], name="amqp_group_handler"),
            models.Index(fields=["exception", "-last_seen", "-id"], name="amqp_group_exc"),
            models.Index(fields=["assignee", "-last_seen", "-id"], name="amqp_group_assignee"),
        ]

    def __str__(self) -> str:
        what = (self.exception or self.reason).rpartition(".")[2]
        return Sentence(
            gettext_noop("%(what)s in %(handler)s"),
            what=visible(what),
            handler=visible(self.handler) or _("no handler"),
        )


class ArchivedEvent(models.Model):
    """An event that one handler could not handle. One row per event, handler and body.

    Attributes:
        id: made of source, event id, name, service, handler and body, so that the same message
            makes the same row however often it is read
            (:meth:`django_amqp_events.archive.Archived.identity`).
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
        return Sentence(
            gettext_noop("%(name)s (%(id)s) for %(handler)s"),
            name=visible(self.name),
            id=visible(self.event_id),
            handler=visible(self.handler) or pgettext_lazy("for", "nobody"),
        )

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
        """Who it is."""
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
            return envelope.decode(self.received, self.body_size)
        except Exception:  # noqa: BLE001 - Malformed, or headers that somebody has changed by hand
            return None

    @property
    def payload(self) -> Mapping[str, Any] | None:
        """The arguments by name, ``None`` where the body cannot be read."""
        return None if self.decoded is None else self.decoded.kwargs

    @property
    def task_id(self) -> str:
        """Id of its TaskResult: of its run before any replay."""
        return envelope.task_id(self.source, self.event_id, self.handler, None)

    @staticmethod
    def pack_headers(headers: Mapping[str, Any]) -> bytes:
        """Write headers as an AMQP table, the only form that keeps all their types."""
        return bytes(dumps("F", [dict(headers)])) if headers else b""


class AppendOnlyRows(models.QuerySet[M]):
    """Rows that are added and never changed; ``events_prune`` deletes them with their event."""

    def update(self, **kwargs: Any) -> NoReturn:
        raise AppendOnlyError.of(self.model.__name__)


class AppendOnly(models.Model):
    """A row that is added and never changed, nor deleted by itself.

    What goes round Django is the database's business: docs/audit.md has the statements.
    """

    objects = AppendOnlyRows.as_manager()

    class Meta:
        abstract = True

    def save(self, *args: Any, **kwargs: Any) -> None:
        if not self._state.adding:
            raise AppendOnlyError.of(type(self).__name__)
        # Of a row that is there already the database says so.
        super().save(*args, **{**kwargs, "force_insert": True})

    def delete(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AppendOnlyError.of(type(self).__name__)


class Revision(AppendOnly):
    """A payload that somebody wrote in place of an event's own. Rows are added, never changed.

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
        """The arguments by name; ``{}`` where somebody has changed the body by hand."""
        try:
            return envelope.decode_body(bytes(self.body)).kwargs
        except Exception:  # noqa: BLE001 - Malformed
            return {}

    def received(self, original: Received) -> Received:
        """Return the event's message with this body."""
        properties = {
            "content_type": envelope.CONTENT_TYPE,
            "content_encoding": envelope.CONTENT_ENCODING,
        }
        return replace(original, body=bytes(self.body), properties=properties)


class Replay(models.Model):
    """One replay of an archived event; its id travels with the message and comes back.

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
        return envelope.task_id(event.source, event.event_id, self.handler, str(self.pk))


class ArchivedFailure(models.Model):
    """One message of the archive: the end of a first run with its retries, or of a replay's.

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
    """What somebody decided about an archived event. Rows are added, never changed.

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


class ReplayBatch(models.Model):
    """Archived events that are replayed together, in the background; see docs/batches.md.

    Rows change state only through :mod:`django_amqp_events.batches`, by conditional UPDATEs.

    Attributes:
        service: whose; runners of others leave it alone.
        title: what it is about, for people.
        criteria: the filter that found the events, as :func:`django_amqp_events.replay.select`
            takes it; ``None`` where there is none that could be asked again.
        plan: what the dry run said (:mod:`django_amqp_events.dryrun`), ``None`` before.
        reason: why, as somebody said; it stands in the history of each event.
        rate: events per second at most; ``None`` as fast as it goes.
        canary: so many first; the others when all of them have succeeded.
        trusted: the canary has succeeded, or somebody has resumed it.
        threshold: pauses when so many percent of the last outcomes are failures; ``None`` never.
        note: why it is paused, or what it waits for.
        created_at, resumed_at: by the database's clock; outcomes before *resumed_at* do not pause
            it.
        runner, leased_until: the process that works on it, and until when that is believed.
        total: events that were frozen.
        waiting, queued, published, succeeded, failed, unconfirmed, returned, skipped: how many
            stand there (:class:`ReplayBatchEvent.State`), as its runner counted last.
        counted_at: when that was.
    """

    class State(models.TextChoices):
        DRAFT = "draft", _("not started")
        RUNNING = "running", _("running")
        PAUSED = "paused", _("paused")
        DONE = "done", _("done")
        CANCELLED = "cancelled", _("cancelled")

    id = models.UUIDField(primary_key=True, default=uuid4, editable=False)
    service = models.CharField(max_length=LENGTH)
    state = models.CharField(_("state"), max_length=16, choices=State, default=State.DRAFT)
    title = models.CharField(_("events"), max_length=LENGTH, blank=True)
    criteria = models.JSONField(null=True, blank=True)
    plan = models.JSONField(null=True, blank=True)
    reason = models.TextField(_("reason"), blank=True)
    rate = models.FloatField(null=True, blank=True)
    canary = models.PositiveIntegerField(null=True, blank=True)
    trusted = models.BooleanField(default=False)
    threshold = models.PositiveSmallIntegerField(null=True, blank=True)
    note = models.TextField(blank=True)
    created_at = Moment(_("made"))
    created_by = models.CharField(_("by"), max_length=LENGTH, blank=True)
    started_at = Moment(null=True, blank=True)
    started_by = models.CharField(max_length=LENGTH, blank=True)
    resumed_at = Moment(null=True, blank=True)
    finished_at = Moment(null=True, blank=True)
    runner = models.UUIDField(null=True, blank=True, editable=False)
    leased_until = Moment(null=True, blank=True)
    total = models.PositiveIntegerField(default=0)
    waiting = models.PositiveIntegerField(default=0)
    queued = models.PositiveIntegerField(default=0)
    published = models.PositiveIntegerField(default=0)
    succeeded = models.PositiveIntegerField(default=0)
    failed = models.PositiveIntegerField(default=0)
    unconfirmed = models.PositiveIntegerField(default=0)
    returned = models.PositiveIntegerField(default=0)
    skipped = models.PositiveIntegerField(default=0)
    counted_at = Moment(null=True, blank=True)

    class Meta:
        verbose_name = _("replay batch")
        verbose_name_plural = _("replay batches")
        ordering: ClassVar = ["-created_at", "-pk"]
        default_permissions = ("view",)
        indexes: ClassVar = [
            models.Index(fields=["-created_at", "-id"], name="amqp_batch_created"),
            models.Index(fields=["state", "-created_at", "-id"], name="amqp_batch_state"),
        ]

    def __str__(self) -> str:
        return Sentence(
            gettext_noop("%(title)s (%(id)s)"),
            title=visible(self.title) or _("replay batch"),
            id=str(self.pk)[:8],
        )

    @property
    def open(self) -> bool:
        """Whether it may still publish something."""
        return self.state in (self.State.RUNNING, self.State.PAUSED)

    @property
    def through(self) -> int:
        """How many events there is nothing left to do for."""
        return self.succeeded + self.failed + self.unconfirmed + self.returned + self.skipped


class ReplayBatchEvent(models.Model):
    """One event of a batch, as it was when somebody froze it.

    Attributes:
        event: without a constraint: the report of a batch outlives the events in it.
        version: the event is replayed only while it has this one.
        state: changed in the transaction that changes the event's.
        why: it was skipped, or not published.
        replay: the one that came of it.
        settled_at: when its outcome was mirrored, by the database's clock.
    """

    class State(models.TextChoices):
        WAITING = "waiting", _("waiting")
        QUEUED = "queued", _("queued")
        PUBLISHED = "published", _("on its way")
        SUCCEEDED = "succeeded", _("succeeded")
        FAILED = "failed", _("failed again")
        UNCONFIRMED = "unconfirmed", _("not confirmed")
        RETURNED = "returned", _("not published")
        SKIPPED = "skipped", _("skipped")

    batch = models.ForeignKey(ReplayBatch, models.CASCADE, related_name="+", db_index=False)
    event = models.ForeignKey(
        ArchivedEvent, models.DO_NOTHING, related_name="+", db_constraint=False, db_index=False
    )
    version = models.PositiveIntegerField()
    state = models.CharField(max_length=16, choices=State, default=State.WAITING)
    why = models.TextField(blank=True)
    replay = models.ForeignKey(
        Replay,
        models.DO_NOTHING,
        related_name="+",
        null=True,
        blank=True,
        db_constraint=False,
        db_index=False,
    )
    settled_at = Moment(null=True, blank=True)

    class Meta:
        default_permissions = ()
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["batch", "event"], name="amqp_batch_event"),
        ]
        indexes: ClassVar = [
            models.Index(fields=["batch", "state", "id"], name="amqp_batch_event_state"),
            models.Index(
                fields=["replay"],
                name="amqp_batch_event_replay",
                condition=models.Q(replay__isnull=False),
            ),
            models.Index(
                fields=["batch", "-settled_at"],
                name="amqp_batch_event_settled",
                condition=models.Q(settled_at__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.event_id}: {self.state}"


class ReplayBatchAction(models.Model):
    """What somebody did with a batch, or what its runner did by itself. Rows are only added.

    Attributes:
        by: user name, or the command's; ``""`` where the runner did it by itself.
        note: why.
    """

    class Action(models.TextChoices):
        FREEZE = "freeze", _("made")
        START = "start", _("started")
        PAUSE = "pause", _("paused")
        RESUME = "resume", _("resumed")
        CANCEL = "cancel", _("cancelled")
        FINISH = "finish", _("finished")

    batch = models.ForeignKey(ReplayBatch, models.CASCADE, related_name="action_set")
    at = Moment()
    action = models.CharField(max_length=16, choices=Action)
    by = models.CharField(max_length=LENGTH, blank=True)
    note = models.TextField(blank=True)

    class Meta:
        ordering: ClassVar = ["at", "pk"]
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.get_action_display()} by {self.by or 'its runner'}"


class GroupAction(models.Model):
    """What somebody wrote or decided about a group. Rows are added, never changed.

    Attributes:
        action: ``note``, ``assign``, ``ticket``, ``replay``, ``discard``.
        by: user name, or the command's.
        text: what was written; of a decision, why.
        events: how many it was done to, of a decision.
    """

    class Action(models.TextChoices):
        NOTE = "note", _("note")
        ASSIGN = "assign", _("assigned")
        TICKET = "ticket", _("ticket")
        REPLAY = "replay", _("replayed")
        DISCARD = "discard", _("discarded")

    group = models.ForeignKey(FailureGroup, models.CASCADE, related_name="action_set")
    at = Moment()
    action = models.CharField(max_length=16, choices=Action)
    by = models.CharField(max_length=LENGTH, blank=True)
    text = models.TextField(blank=True)
    events = models.PositiveIntegerField(null=True, blank=True)

    class Meta:
        ordering: ClassVar = ["at", "pk"]
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.get_action_display()} by {self.by or 'nobody'}"


class ArchiveTally(models.Model):
    """What happened to the events of a group within an hour.

    Attributes:
        hour: its beginning, in UTC.
        archived: failures that brought an event into the archive or kept it there, by when they
            failed.
        succeeded, discarded: events that came into this state.
    """

    # No constraint, here and below: the rows are made in each transaction, and go with the group.
    group = models.ForeignKey(
        FailureGroup, models.CASCADE, related_name="tally_set", db_constraint=False, db_index=False
    )
    hour = Moment()
    archived = models.PositiveIntegerField(default=0)
    succeeded = models.PositiveIntegerField(default=0)
    discarded = models.PositiveIntegerField(default=0)

    class Meta:
        default_permissions = ()
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["group", "hour"], name="amqp_tally_hour"),
        ]
        indexes: ClassVar = [models.Index(fields=["hour"], name="amqp_tally_by_hour")]

    def __str__(self) -> str:
        return f"{self.archived} archived at {self.hour:%Y-%m-%d %H:00}"


class TallyChange(models.Model):
    """What one transaction changed in the tallies of a group; added up and deleted soon after.

    Rows are inserted only, so that nobody waits for anybody who counts for the same group.

    Attributes:
        at: when, of the change.
        hour, archived, succeeded, discarded: as in :class:`ArchiveTally`.
        open, again, going: what is to be added to those of the group.
        first_at, last_at: of the failures among them.
    """

    group = models.ForeignKey(
        FailureGroup, models.CASCADE, related_name="change_set", db_constraint=False, db_index=False
    )
    at = Moment()
    hour = Moment()
    open = models.IntegerField(default=0)
    again = models.IntegerField(default=0)
    going = models.IntegerField(default=0)
    archived = models.PositiveIntegerField(default=0)
    succeeded = models.PositiveIntegerField(default=0)
    discarded = models.PositiveIntegerField(default=0)
    first_at = Moment(null=True)
    last_at = Moment(null=True)

    class Meta:
        ordering: ClassVar = ["pk"]
        default_permissions = ()
        indexes: ClassVar = [models.Index(fields=["group"], name="amqp_change_group")]

    def __str__(self) -> str:
        return f"{self.open:+} open at {self.at:%Y-%m-%d %H:%M:%S}"


def clean(value: object, limit: int | None = None) -> str:
    """Write text so that any database takes it: no NUL, no lone surrogates, bounded.

    Characters that go are written as Python escapes, so that they can be seen.
    """
    text = "" if value is None else str(value)
    text = text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()
    if limit is not None and len(text) > limit:
        text = text[: limit - 1] + "…"
    return text


def visible(value: object, limit: int | None = None) -> str:
    """Write text so that all of it can be seen, and none of it makes the rest lie.

    Controls, bidirectional overrides, what has no width and lone surrogates become Python escapes.
    """
    text = "" if value is None else str(value)
    if limit is not None and len(text) > limit:
        text = text[: limit - 1] + "…"
    return _HIDDEN.sub(_escape, text.replace("\r\n", "\n"))


def _escape(found: re.Match[str]) -> str:
    number = ord(found[0])
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


class OutboxEvent(models.Model):
    """An event that is committed and whose confirm has not come; it goes when that has.

    Rows are made, taken and deleted by :mod:`django_amqp_events.outbox` alone.

    Attributes:
        id: begins with the time, so that its order is roughly that of publishing.
        service: who publishes it; its relays take no row of others.
        name, exchange, body, envelope: the message as it goes on the wire. ``envelope`` is JSON
            of headers and properties.
        size: bytes of the body.
        created_at: when it was published, by the database's clock.
        due_at: from when on a relay may take it, by the database's clock.
        claim: the relay that has it in hand; none while its own process has.
        attempts: publishes that failed. One that was not even begun does not count.
        error: why the last one failed.
        discarded_at: when somebody gave it up; no relay takes it, and it stays until
            ``events_prune`` finds it old.
        discarded_by, discard_reason: who, and why.
    """

    id = models.UUIDField(primary_key=True, editable=False)
    service = models.CharField(max_length=LENGTH)
    event_id = models.CharField(_("event id"), max_length=LENGTH)
    name = models.CharField(_("event"), max_length=LENGTH)
    exchange = models.CharField(max_length=LENGTH)
    envelope = models.TextField()
    body = models.BinaryField()
    size = models.PositiveIntegerField(_("bytes"))
    created_at = Moment(_("published"))
    due_at = Moment(_("due"))
    claim = models.UUIDField(null=True, blank=True, editable=False)
    attempts = models.PositiveIntegerField(default=0)
    error = models.TextField(blank=True)
    discarded_at = Moment(_("discarded"), null=True, blank=True)
    # The database's defaults: an INSERT of a process that is older than these columns goes on.
    discarded_by = models.CharField(max_length=LENGTH, blank=True, db_default="")
    discard_reason = models.TextField(blank=True, db_default="")

    class Meta:
        verbose_name = _("waiting event")
        verbose_name_plural = _("waiting events")
        ordering: ClassVar = ["pk"]
        default_permissions = ("view",)
        permissions: ClassVar = [
            ("view_payload_outboxevent", "Can view payload and headers of waiting events"),
            ("publish_outboxevent", "Can publish waiting events at once"),
            ("discard_outboxevent", "Can discard waiting events"),
            ("restore_outboxevent", "Can restore discarded events of the outbox"),
        ]
        indexes: ClassVar = [
            models.Index(fields=["service", "due_at", "id"], name="amqp_outbox_due"),
            # Partial: they cost an event that is published at once nothing.
            models.Index(
                fields=["id"], name="amqp_outbox_failed", condition=models.Q(attempts__gt=0)
            ),
            models.Index(
                fields=["service", "discarded_at"],
                name="amqp_outbox_discarded",
                condition=models.Q(discarded_at__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return visible(f"{self.name} ({self.event_id})")


class InboxEntry(models.Model):
    """A handler with ``once`` has handled an event; in the transaction of its effects.

    Attributes:
        id: made of service, handler, source, event id and name
            (:func:`django_amqp_events.inbox.key`); that there is one of each is what the inbox
            rests on.
        source, event_id, name: of the event, for people.
    """

    id = models.UUIDField(primary_key=True, editable=False)
    service = models.CharField(max_length=LENGTH)
    handler = models.CharField(max_length=LENGTH)
    source = models.CharField(_("published by"), max_length=LENGTH, blank=True)
    event_id = models.CharField(_("event id"), max_length=LENGTH)
    name = models.CharField(_("event"), max_length=LENGTH)
    handled_at = Moment(_("handled"))

    class Meta:
        verbose_name = _("handled event")
        verbose_name_plural = _("handled events")
        ordering: ClassVar = ["-handled_at", "pk"]
        default_permissions = ("view",)
        indexes: ClassVar = [
            models.Index(fields=["service", "handled_at"], name="amqp_inbox_handled"),
            # Of equal ids, and on PostgreSQL of those that begin alike, whatever its collation.
            models.Index(
                fields=["event_id"], name="amqp_inbox_event_id", opclasses=["varchar_pattern_ops"]
            ),
        ]

    def __str__(self) -> str:
        return visible(f"{self.name} ({self.event_id}) by {self.handler}")


class Snapshot(models.Model):
    """The figures of a service at one moment, taken by :mod:`django_amqp_events.snapshots`.

    Attributes:
        seen: the broker answered; without it *document* has no queues.
        open: archived events that nobody has dealt with, counted to a cap.
        document: everything else, JSON (:func:`django_amqp_events.snapshots.take`).
    """

    at = Moment()
    service = models.CharField(max_length=LENGTH)
    seen = models.BooleanField(default=False)
    open = models.PositiveIntegerField(default=0)
    document = models.TextField()

    class Meta:
        ordering: ClassVar = ["-at"]
        default_permissions = ()
        indexes: ClassVar = [
            models.Index(fields=["service", "-at"], name="amqp_snapshots_at"),
        ]

    def __str__(self) -> str:
        return f"{self.service} at {self.at:%Y-%m-%d %H:%M:%S}"

    @cached_property
    def about(self) -> dict[str, Any]:
        """The document, read; ``{}`` where somebody has changed it by hand."""
        try:
            found = json.loads(self.document)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


class Dashboard(Snapshot):
    """Gives the dashboard its place and its permission in the admin; it has no table."""

    class Meta:
        proxy = True
        verbose_name = _("dashboard")
        verbose_name_plural = _("dashboard")
        default_permissions = ()
        permissions: ClassVar = [("view_dashboard", "Can view the dashboard")]


class Alert(models.Model):
    """A trouble that lasts or lasted; one row from its beginning to its end.

    Rows are made and changed by :mod:`django_amqp_events.alerts` alone.

    Attributes:
        kind: what sort of trouble.
        key: which one of its sort, such as a queue; ``""`` where there is one only.
        since: when it was first seen.
        last: when it was last seen.
        ended: when it was over, ``None`` while it lasts.
        text: what it is and what to do, as last seen.
    """

    service = models.CharField(max_length=LENGTH)
    kind = models.CharField(max_length=32)
    key = models.CharField(max_length=LENGTH, blank=True)
    since = Moment()
    last = Moment()
    ended = Moment(null=True, blank=True)
    text = models.TextField()

    class Meta:
        ordering: ClassVar = ["-since", "-pk"]
        default_permissions = ()
        indexes: ClassVar = [
            models.Index(fields=["service", "ended"], name="amqp_alert_ended"),
        ]
        constraints: ClassVar = [
            # However many look at once: one of them tells.
            models.UniqueConstraint(
                fields=["service", "kind", "key"],
                condition=models.Q(ended__isnull=True),
                name="amqp_alert_open",
            ),
        ]

    def __str__(self) -> str:
        return visible(f"{self.kind} {self.key}".strip())
