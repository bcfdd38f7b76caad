"""Replay batches."""

from __future__ import annotations

from typing import ClassVar
from uuid import uuid4

from django.db import models
from django.utils.translation import gettext_lazy as _

from .archive import ArchivedEvent, Replay
from .base import LENGTH, Moment
from .text import visible


class ReplayBatch(models.Model):
    """Archived events that are replayed together, in the background; see docs/batches.md.

    Rows change state only through :mod:`django_amqp_events.archive.batches.batch_states`, by
    conditional UPDATEs.

    Attributes:
        service: whose; runners of others leave it alone.
        title: what it is about, for people.
        criteria: the filter that found the events, as
            :meth:`~django_amqp_events.archive.selection.Selection.as_json` writes it; ``None`` if
            there is none.
        plan: what the dry run said (:mod:`django_amqp_events.archive.batches.preview`), ``None``
        before.
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
    """One event of a batch, as it was when the batch was created.

    Attributes:
        event: without a constraint: the report of a batch outlives the events in it.
        version: the event is replayed only while it has this one.
        state: changed in the transaction that changes the event's.
        why: it was skipped, or not published.
        replay: the one that came of it.
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
    """An action on a batch, by a person or its runner. Append-only.

    Attributes:
        by: user name, or the command's; ``""`` where the runner did it by itself.
        note: why.
    """

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
