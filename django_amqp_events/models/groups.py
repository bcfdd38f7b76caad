"""Failure groups, and what people write about them."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _

from ..message.text import visible
from ..reasons import Reason
from .base import LENGTH, AuditRow, ChoiceField, Moment


class FailureGroup(models.Model):
    """Failures of one handler, with one exception, from one place in the project's code.

    How many of its events are open, and when the last one failed:
    :func:`django_amqp_events.archive.groups.group_counts.with_counts`.

    Attributes:
        id: derived from the next five
            (:func:`django_amqp_events.archive.groups.failure_groups.group_of`).
        exception: dotted name; ``""`` without an exception.
        frame: ``module in function`` of the innermost frame of the project's code, or of an
            installed package if there is no other; ``""`` if unknown.
        reason: the archive reason if there is no exception, else ``""``.
        first_seen: the time of its first failure.
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
    note = models.TextField()
    assignee = models.CharField(max_length=LENGTH)
    ticket = models.CharField(max_length=LENGTH)
    edits = models.PositiveIntegerField(default=0)

    class Meta:
        verbose_name = _("failure group")
        verbose_name_plural = _("failure groups")
        default_permissions = ("view",)
        permissions: ClassVar = [
            ("assign_failuregroup", "Can write note, assignee and ticket of failure groups"),
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
