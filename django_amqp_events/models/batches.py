"""Replay batches."""

from __future__ import annotations

from typing import ClassVar
from uuid import uuid4

from django.db import models
from django.utils.translation import gettext_lazy as _

from .archive import ArchivedEvent, Replay
from .base import LENGTH, AppendOnly, Moment, PartialIndex
from .text import visible


class ReplayBatch(models.Model):
    """Archived events that are replayed together in the background; see docs/batches.md.

    Only :mod:`django_amqp_events.archive.batches.batch_states` changes the state of rows.

    Attributes:
        title: the events, for people.
        criteria: a :class:`~django_amqp_events.archive.selection.Selection` as JSON; ``None`` if
            the events were selected otherwise.
        plan: the last preview (:mod:`django_amqp_events.archive.batches.preview`).
        reason: recorded in the history of each event.
        rate: events per second at most.
        canary: events that are published first.
        trusted: the canary succeeded, or a person resumed the batch.
        threshold: percentage of failures among the last outcomes that pauses the batch.
        note: why it is paused, or what it is waiting for.
        resumed_at: earlier outcomes do not count for the threshold.
        runner, leased_until: the process that holds it, and the end of its lease.
        total: events in the batch.
        waiting, queued, …: events by :class:`ReplayBatchEvent.State` at *counted_at*.
    """

    #: Columns that only the page of a batch reads.
    LARGE: ClassVar = ("plan", "criteria")

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
    created_at = Moment(_("created"))
    created_by = models.CharField(_("created by"), max_length=LENGTH, blank=True)
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
        return f"{visible(self.title) or _('replay batch')} ({str(self.pk)[:8]})"

    @property
    def open(self) -> bool:
        """Return True if the batch may still publish."""
        return self.state in (self.State.RUNNING, self.State.PAUSED)

    @property
    def through(self) -> int:
        """Return the number of finished events."""
        return self.succeeded + self.failed + self.unconfirmed + self.returned + self.skipped


class ReplayBatchEvent(models.Model):
    """One event of a batch.

    Attributes:
        event: without a constraint, so that the row outlives the event.
        version: the event is replayed only if it still has this version.
        state: changed in the transaction that changes the state of the event.
        why: it was skipped, or not published.
        settled_at: when its outcome was mirrored, by the database's clock.
    """

    class State(models.TextChoices):
        WAITING = "waiting", _("pending")
        QUEUED = "queued", _("queued")
        PUBLISHED = "published", _("in progress")
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
            PartialIndex(
                fields=["replay"],
                name="amqp_batch_event_replay",
                where={"replay__isnull": False},
            ),
            PartialIndex(
                fields=["batch", "-settled_at"],
                name="amqp_batch_event_settled",
                where={"settled_at__isnull": False},
            ),
        ]

    def __str__(self) -> str:
        return f"{self.event_id}: {self.state}"


class ReplayBatchAction(AppendOnly):
    """An action on a batch by a user, a command or (``by=""``) its runner."""

    class Action(models.TextChoices):
        FREEZE = "freeze", _("created")
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
