"""Failure groups and their counts."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _

from ..message.text import visible
from ..reasons import Reason
from .base import LENGTH, AuditRow, ChoiceField, Moment


class FailureGroup(models.Model):
    """Failures of one handler, with one exception, from one place in the project's code.

    The numbers lack the :class:`GroupCountChange` rows that are not folded yet; see
    :mod:`django_amqp_events.archive.groups.group_counts`.

    Attributes:
        id: derived from the next five
            (:func:`django_amqp_events.archive.groups.fingerprint.fingerprint`).
        open: archived events.
        in_progress: queued and replaying events.
        resolved_at: when its last open event was settled; ``None`` after a restore.
        reopened_at: when it failed again after that.
        assignee: a user's name.
        ticket: a URL.
        edits: counts changes of note, assignee and ticket; a change names the one that it is about.
    """

    id = models.UUIDField(primary_key=True)
    service = models.CharField(max_length=LENGTH)
    handler = models.CharField(max_length=LENGTH)
    exception = models.CharField(max_length=LENGTH)
    frame = models.CharField(max_length=LENGTH)
    reason = models.CharField(max_length=32)
    first_seen = Moment()
    last_seen = Moment()
    # Signed: changes folded out of order may be negative for a moment.
    open = models.IntegerField(default=0)
    in_progress = models.IntegerField(default=0)
    resolved_at = Moment(null=True)
    reopened_at = Moment(null=True)
    note = models.TextField()
    assignee = models.CharField(max_length=LENGTH)
    ticket = models.CharField(max_length=LENGTH)
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
        ]

    def __str__(self) -> str:
        return self.title.translated()

    @property
    def title(self) -> Reason:
        """Its last exception or reason, and its handler."""
        what = (self.exception or self.reason).rpartition(".")[2]
        handler = visible(self.handler) or Reason("group-unknown")
        return Reason("group", what=visible(what), handler=handler)


class GroupAction(AuditRow):
    """A text that a person wrote about a group; decisions about its events are ArchiveActions."""

    class Action(models.TextChoices):
        NOTE = "note", _("note")
        ASSIGN = "assign", _("assigned")
        TICKET = "ticket", _("ticket")

    id = models.BigAutoField(primary_key=True)
    group = models.ForeignKey(FailureGroup, models.CASCADE, related_name="action_set")
    action = ChoiceField(max_length=16, choices=Action)
    text = models.TextField()

    def __str__(self) -> str:
        return f"{self.get_action_display()} by {self.by or 'unknown'}"


class GroupHour(models.Model):
    """The outcomes of a group's events within one hour in UTC.

    Attributes:
        archived: failures that archived an event or kept it archived, by the time of the failure.
        succeeded, discarded: events that changed to this state.
    """

    id = models.BigAutoField(primary_key=True)
    group_id = models.UUIDField()
    hour = Moment()
    archived = models.PositiveIntegerField(default=0)
    succeeded = models.PositiveIntegerField(default=0)
    discarded = models.PositiveIntegerField(default=0)

    class Meta:
        default_permissions = ()
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["group_id", "hour"], name="amqp_tally_hour"),
        ]
        indexes: ClassVar = [models.Index(fields=["hour"], name="amqp_tally_by_hour")]

    def __str__(self) -> str:
        return f"{self.archived} archived at {self.hour:%Y-%m-%d %H:00}"


class GroupCountChange(models.Model):
    """The count changes of one transaction, folded into its group soon after.

    Rows are only inserted, so that transactions on one group do not wait for each other.

    Attributes:
        hour, archived, succeeded, discarded: as in :class:`GroupHour`.
        open, in_progress: added to those of the group.
        first_at, last_at: of the failures among them.
    """

    id = models.BigAutoField(primary_key=True)
    # No constraint, since every transaction inserts rows; Django deletes them with their group.
    group = models.ForeignKey(
        FailureGroup, models.CASCADE, related_name="change_set", db_constraint=False, db_index=False
    )
    at = Moment()
    hour = Moment()
    open = models.IntegerField(default=0)
    in_progress = models.IntegerField(default=0)
    archived = models.PositiveIntegerField(default=0)
    succeeded = models.PositiveIntegerField(default=0)
    discarded = models.PositiveIntegerField(default=0)
    first_at = Moment(null=True)
    last_at = Moment(null=True)

    class Meta:
        default_permissions = ()
        indexes: ClassVar = [models.Index(fields=["group"], name="amqp_change_group")]

    def __str__(self) -> str:
        return f"{self.open:+} open at {self.at:%Y-%m-%d %H:%M:%S}"
