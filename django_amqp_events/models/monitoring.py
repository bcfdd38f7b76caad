"""Snapshots and alerts."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _

from ..message.text import visible
from .base import LENGTH, Moment, ReasonField, read_document


class Snapshot(models.Model):
    """The statistics of a service at one time; see :mod:`django_amqp_events.monitor.snapshots`.

    Attributes:
        seen: RabbitMQ answered; otherwise *document* has no queues.
        open: archived events, counted up to a limit.
        document: everything else, JSON.
    """

    id = models.BigAutoField(primary_key=True)
    at = Moment()
    service = models.CharField(max_length=LENGTH)
    seen = models.BooleanField(default=False)
    open = models.PositiveIntegerField(default=0)
    document = models.TextField()

    class Meta:
        ordering: ClassVar = ["-pk"]
        default_permissions = ()
        indexes: ClassVar = [
            models.Index(fields=["service", "-at"], name="amqp_snapshots_at"),
            # The clock of a database may be set back, so the last one is not the newest.
            models.Index(fields=["service", "-id"], name="amqp_snapshots_id"),
        ]

    def __str__(self) -> str:
        return f"{self.service} at {self.at:%Y-%m-%d %H:%M:%S}"

    @cached_property
    def about(self) -> dict[str, Any]:
        """The decoded document; ``{}`` if it is invalid."""
        return read_document(self.document)


class Dashboard(Snapshot):
    """The dashboard's entry and permission in the admin; it has no table."""

    class Meta:
        proxy = True
        verbose_name = _("dashboard")
        verbose_name_plural = _("dashboard")
        default_permissions = ()
        permissions: ClassVar = [("view_dashboard", "Can view the dashboard")]


class Alert(models.Model):
    """A problem, from its beginning to its end; see :mod:`django_amqp_events.monitor.alerts`.

    Attributes:
        key: the subject, such as a queue; ``""`` if the kind has only one.
        since, last: when it was first and last seen.
        ended: ``None`` while it lasts.
        open: ``True`` while it lasts, then ``None``, which no constraint takes for equal.
        details: the problem and its remedy, as last seen.
    """

    id = models.BigAutoField(primary_key=True)
    service = models.CharField(max_length=LENGTH)
    kind = models.CharField(max_length=32)
    key = models.CharField(max_length=LENGTH)
    since = Moment()
    last = Moment()
    ended = Moment(null=True)
    # MySQL has no conditional constraints. Not a GeneratedField: projects that patch
    # Field.deconstruct() could no longer run makemigrations.
    open = models.BooleanField(null=True, default=True)
    details = ReasonField()

    class Meta:
        ordering: ClassVar = ["-since", "-pk"]
        default_permissions = ()
        constraints: ClassVar = [
            # One row per problem, however many processes see it.
            models.UniqueConstraint(
                fields=["service", "kind", "key", "open"], name="amqp_alert_open"
            ),
        ]

    def __str__(self) -> str:
        return visible(f"{self.kind} {self.key}".strip())
