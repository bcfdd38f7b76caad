"""Snapshots and alerts."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any, ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _

from .base import LENGTH, Moment
from .text import visible


class Snapshot(models.Model):
    """The statistics of a service at one moment; see :mod:`django_amqp_events.monitor.snapshots`.

    Attributes:
        seen: the broker answered; without it *document* has no queues.
        open: archived events that nobody has dealt with, counted to a cap.
        document: everything else, JSON (:func:`django_amqp_events.monitor.snapshots.take`).
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
        """The document; ``{}`` if it was changed by hand."""
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

    Rows are made and changed by :mod:`django_amqp_events.monitor.alerts` alone.

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
