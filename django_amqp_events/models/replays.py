"""Replays of archived events, alone or in a batch."""

from __future__ import annotations

from typing import ClassVar
from uuid import uuid4

from django.db import models
from django.utils.translation import gettext_lazy as _

from ..message.text import visible
from ..message.types import Received, task_id
from ..reasons import Reason
from .archive import ArchivedEvent, Revision
from .base import LENGTH, AuditRow, ChoiceField, Moment, PartialIndex, ReasonField


class ReplayBatch(models.Model):
    """Archived events that are replayed together in the background; see docs/batches.md.

    Only :mod:`django_amqp_events.archive.batches.batch_states` changes the state of rows.

    Attributes:
        title: which events, for people; ``None`` if they were selected one by one.
        group: the failure group whose events were selected, if it was one.
        backfill: which past events it gives to a handler, if it is a backfill
            (:mod:`django_amqp_events.archive.batches.backfill`). Its events are added while it
            reads the history.
        next_offset: of the history, where a backfill continues.
        backfill_left: how many past events were left out, by why.
        plan: the last preview (:mod:`django_amqp_events.archive.batches.preview`).
        rate: events per second at most.
        canary: events that are published first.
        trusted: the canary succeeded, or a person resumed the batch.
        threshold: percentage of failures among the last outcomes that pauses the batch.
        note: why it is paused, or what it is waiting for.
        version: counts changes of state; an action names the one that its page showed.
        resumed_at: earlier outcomes do not count for the threshold.
        runner, leased_until: the process that holds it, and the end of its lease.
        pending, queued, …: events by :class:`Replay.State` at *counted_at*.
    """

    #: Columns that only the page of a batch reads.
    LARGE: ClassVar = ("plan",)

    class State(models.TextChoices):
        DRAFT = "draft", _("not started")
        RUNNING = "running", _("running")
        PAUSED = "paused", _("paused")
        DONE = "done", _("done")
        CANCELLED = "cancelled", _("cancelled")

    id = models.UUIDField(primary_key=True, default=uuid4)
    service = models.CharField(max_length=LENGTH)
    state = ChoiceField(max_length=16, choices=State, default=State.DRAFT)
    title = ReasonField()
    group = models.UUIDField(null=True)
    plan = models.JSONField(null=True)
    backfill = models.JSONField(null=True)
    next_offset = models.BigIntegerField(default=0)
    backfill_left = models.JSONField(null=True)
    reason = models.TextField()
    rate = models.FloatField(null=True)
    canary = models.PositiveIntegerField(null=True)
    trusted = models.BooleanField(default=False)
    threshold = models.PositiveSmallIntegerField(null=True)
    note = ReasonField()
    version = models.PositiveIntegerField(default=0)
    created_at = Moment()
    created_by = models.CharField(max_length=LENGTH)
    started_at = Moment(null=True)
    started_by = models.CharField(max_length=LENGTH)
    resumed_at = Moment(null=True)
    finished_at = Moment(null=True)
    runner = models.UUIDField(null=True)
    leased_until = Moment(null=True)
    total = models.PositiveIntegerField(default=0)
    pending = models.PositiveIntegerField(default=0)
    queued = models.PositiveIntegerField(default=0)
    published = models.PositiveIntegerField(default=0)
    succeeded = models.PositiveIntegerField(default=0)
    failed = models.PositiveIntegerField(default=0)
    unconfirmed = models.PositiveIntegerField(default=0)
    returned = models.PositiveIntegerField(default=0)
    skipped = models.PositiveIntegerField(default=0)
    counted_at = Moment(null=True)

    class Meta:
        verbose_name = _("replay batch")
        verbose_name_plural = _("replay batches")
        ordering: ClassVar = ["-created_at", "-pk"]
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{visible(self.name.translated())} ({str(self.pk)[:8]})"

    @property
    def name(self) -> Reason:
        """Which events it has, for people."""
        return Reason.of(self.title or Reason("batch-selected", count=self.total))

    @property
    def percent_read(self) -> int | None:
        """How much of its range a backfill has read."""
        if self.backfill is None:
            return None
        begin, end = int(self.backfill["begin"]), int(self.backfill["end"])
        if self.next_offset > end:  # the range may be empty
            return 100
        return 100 * (self.next_offset - begin) // (end + 1 - begin)

    @property
    def left_out(self) -> list[tuple[int, Reason]]:
        """How many past events a backfill has left out, with the reasons."""
        return [(count, Reason(f"left-{why}")) for why, count in (self.backfill_left or {}).items()]

    @property
    def open(self) -> bool:
        """Return True if the batch may still publish."""
        return self.state in (self.State.RUNNING, self.State.PAUSED)

    @property
    def through(self) -> int:
        """Return the number of finished events, including deleted ones."""
        return self.total - self.pending - self.queued - self.published

    @property
    def deleted(self) -> int:
        """Return how many of its events were gone at *counted_at*: deleted, or in a later batch."""
        counts: list[int] = [getattr(self, state.value) for state in Replay.State]
        return self.total - sum(counts)


class ReplayBatchAction(AuditRow):
    """An action on a batch by a user, a command or (``by=""``) its runner."""

    class Action(models.TextChoices):
        FREEZE = "freeze", _("created")
        START = "start", _("started")
        PAUSE = "pause", _("paused")
        RESUME = "resume", _("resumed")
        CANCEL = "cancel", _("cancelled")
        FINISH = "finish", _("finished")

    id = models.BigAutoField(primary_key=True)
    batch = models.ForeignKey(ReplayBatch, models.CASCADE, related_name="action_set")
    action = ChoiceField(max_length=16, choices=Action)
    note = ReasonField()


class Replay(models.Model):
    """A replay of an archived event, or an event of a batch that may become one.

    Only :mod:`django_amqp_events.archive.states` and the batches change rows.

    Attributes:
        id: also in the published message.
        event: deleting it deletes its replays; the batch counts these as deleted.
        batch: the one that claimed it last, ``None`` for a replay of its own.
        version: the event is replayed only if it has this version.
        number: 1 for the first replay of the event; ``None`` if it is pending, skipped or was not
            published.
        revision: published in place of the event's own body, if set.
        forced: it may run although an earlier replay has not reported back.
        handler: the destination, which may be the new name of the event's handler.
        requested_by: a user's name, or a command's.
        published_at: time of the last confirm.
        finished_at: by the worker's clock.
        settled_at: when its outcome was mirrored, by the database's clock.
        publishes: attempts to publish it; the handler may have run as often.
        superseded: it succeeded without a run, since its handler has handled a newer event.
        error: why it was skipped, or not published.
    """

    class State(models.TextChoices):
        PENDING = "pending", _("pending")
        QUEUED = "queued", _("queued")
        PUBLISHED = "published", _("in progress")
        SUCCEEDED = "succeeded", _("succeeded")
        FAILED = "failed", _("failed again")
        UNCONFIRMED = "unconfirmed", _("not confirmed")
        RETURNED = "returned", _("not published")
        SKIPPED = "skipped", _("skipped")

    id = models.UUIDField(primary_key=True)
    # Its index is the one of the number.
    event = models.ForeignKey(
        ArchivedEvent, models.CASCADE, related_name="replay_set", db_index=False
    )
    batch = models.ForeignKey(
        ReplayBatch,
        models.DO_NOTHING,
        related_name="replay_set",
        null=True,
        db_index=False,
    )
    position = models.PositiveIntegerField(null=True)
    version = models.PositiveIntegerField(default=0)
    number = models.PositiveIntegerField(null=True)
    # Not SET_NULL: the event's own body would be published instead.
    revision = models.ForeignKey(Revision, models.RESTRICT, related_name="replay_set", null=True)
    forced = models.BooleanField(default=False)
    handler = models.CharField(max_length=LENGTH)
    state = ChoiceField(max_length=16, choices=State, default=State.QUEUED)
    requested_at = Moment()
    requested_by = models.CharField(max_length=LENGTH)
    reason = models.TextField()
    published_at = Moment(null=True)
    finished_at = Moment(null=True)
    settled_at = Moment(null=True)
    publishes = models.PositiveIntegerField(default=0)
    superseded = models.BooleanField(default=False)
    error = ReasonField()

    class Meta:
        ordering: ClassVar = ["number"]
        default_permissions = ()
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["event", "number"], name="amqp_replay_number"),
            models.UniqueConstraint(fields=["batch", "event"], name="amqp_replay_batch"),
        ]
        indexes: ClassVar = [
            models.Index(fields=["batch", "state", "position"], name="amqp_replay_state"),
            PartialIndex(
                fields=["batch", "-settled_at"],
                name="amqp_replay_settled",
                where={"settled_at__isnull": False},
            ),
        ]

    def __str__(self) -> str:
        return f"replay {self.number} of {self.event_id}"

    @property
    def received(self) -> Received:
        """The parts of the published message that a copy needs."""
        original = self.event.received
        return original if self.revision is None else self.revision.received(original)

    @property
    def task_id(self) -> str:
        """The id of its TaskResult."""
        return task_id(self.event.service, self.handler, self.event.event, str(self.pk))
